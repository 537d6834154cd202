"""The state and the election of controllers, with a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.conftest import Kubectl
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.controller.cluster.state import KubernetesState
from kubetorch.controller.state import Generation, Summary, WorkloadRecord
from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import EnvStep, ImageSpec, PipStep
from kubetorch.specs.workload import WorkloadSpec
from tools import crd

CANDIDATE = Path(__file__).parents[2] / "local/candidate.py"
#: Seconds that a lease lasts.
LEASE = 20.0


class Watcher:
    def __init__(self) -> None:
        self.deleted: list[tuple[str, str]] = []

    def summary(self, namespace: str, name: str) -> Summary:
        return Summary("Ready", "Deployment", 2, 2, True, "", "", "5m", time.time())

    def on_deleted_elsewhere(self, namespace: str, name: str) -> None:
        self.deleted.append((namespace, name))


@pytest.fixture
def namespace(kubectl: Kubectl, apart: str) -> Iterator[str]:
    """A namespace that the installed controller leaves alone: a test is the controller of it."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", manifests=[crd.definition()])
    kubectl("wait", "--for=condition=Established", "--timeout=80s", f"crd/{WORKLOADS}")
    name = f"state-{secrets.token_hex(3)}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def spec_in(namespace: str) -> WorkloadSpec:
    image = ImageSpec(steps=(PipStep("torch"), EnvStep("A", "1")))
    compute = ComputeSpec(replicas=2, inactivity_ttl="5m", image=image, env_vars=(("B", "2"),))
    called = CallableRef("fn", "f", "m", "f")
    return WorkloadSpec(namespace, "f", called, compute, tree="0" * 64, username="ann")


def run(body: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Client(kubeconfig.find()) as client:
            await body(client)

    asyncio.run(asyncio.wait_for(main(), 100))


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def opened(client: Client, watcher: Watcher) -> AsyncIterator[KubernetesState]:
    state = KubernetesState(client)
    await state.load()
    state.observe(watcher)
    try:
        yield state
    finally:
        await state.close()


@pytest.mark.alone
def test_a_workload_is_an_object_that_people_can_read_and_delete(
    kubectl: Kubectl, namespace: str
) -> None:
    def live_object() -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            kubectl("get", "ktworkload", "f", "-n", namespace, "-o", "json")
        )
        return answer

    async def body(client: Client) -> None:
        watcher, spec = Watcher(), spec_in(namespace)
        newer = changed(spec, tree="1" * 64)
        async with opened(client, watcher) as state:
            record = WorkloadRecord(namespace, "f", 1, created=time.time(), updated=time.time())
            state.put_workload(record, generation=Generation(1, spec), keep=[1])
            await state.flush(namespace, "f")
            assert live_object()["metadata"]["uid"] == state.uid(namespace, "f")
            record = replace(record, generation=2, good=1)
            state.put_workload(record, generation=Generation(2, newer), keep=[1, 2])
            await state.flush(namespace, "f")
            failed = replace(
                record, failure='{"error_type":"ImportError","message":"no","rank":null}'
            )
            state.put_workload(failed)
        head, row = kubectl("get", "ktworkloads", "-n", namespace).splitlines()[:2]
        names = ["NAME", "STATUS", "READY", "REASON", "KIND", "GENERATION", "TTL", "CREATOR"]
        assert head.split()[:8] == names
        shown = {name: row[head.index(name) :].split("  ")[0].strip() for name in names}
        values = ("f", "Ready", "2/2", "", "Deployment", "2", "5m", "ann")
        assert shown == dict(zip(names, values, strict=True))
        async with opened(client, watcher) as state:
            contents = state.contents()
            (record,) = [
                workload for workload in contents.workloads if workload.namespace == namespace
            ]
            assert (record.generation, record.good) == (2, 1)
            assert json.loads(record.failure) == {"error_type": "ImportError", "message": "no"}
            assert contents.generations[namespace, "f"] == (
                Generation(1, spec),
                Generation(2, newer),
            )
            patch = '{"spec":{"compute":{"replicas":9,"gpus":"1"}}}'
            kubectl("patch", "ktworkload", "f", "-n", namespace, "--type=merge", "-p", patch)
            await until(lambda: live_object()["spec"]["compute"]["replicas"] == 2)
            assert "gpus" not in live_object()["spec"]["compute"]
            kubectl("delete", "ktworkload", "f", "-n", namespace)
            await until(lambda: watcher.deleted == [(namespace, "f")])

    run(body)


@pytest.mark.alone
def test_a_namespace_that_is_not_there_is_named(kubectl: Kubectl, namespace: str) -> None:
    async def body(client: Client) -> None:
        missing = f"{namespace}-missing"
        async with opened(client, Watcher()) as state:
            record = WorkloadRecord(missing, "f", 1)
            state.put_workload(record, generation=Generation(1, spec_in(missing)), keep=[1])
            with pytest.raises(KubernetesNotFoundError, match=missing):
                await state.flush(missing, "f")

    run(body)


async def _start(namespace: str, candidate: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(CANDIDATE), "", namespace, candidate, str(LEASE)),
        stdout=asyncio.subprocess.PIPE,
    )


async def _says(process: asyncio.subprocess.Process, expected_word: str) -> float:
    assert process.stdout is not None
    word, moment = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
    assert word == expected_word
    return float(moment)


@pytest.mark.alone
def test_of_two_controllers_one_leads_and_is_followed(kubectl: Kubectl, namespace: str) -> None:
    async def body(_: Client) -> None:
        processes = [await _start(namespace, "a")]
        try:
            await _says(processes[0], "leads")
            processes.append(await _start(namespace, "b"))
            await asyncio.sleep(1.0)
            processes[0].terminate()
            stopped = await _says(processes[0], "stops")
            assert await _says(processes[1], "leads") - stopped < LEASE / 2
            processes.append(await _start(namespace, "c"))
            await asyncio.sleep(1.0)
            processes[1].kill()
            killed = time.time()
            assert await _says(processes[2], "leads") - killed < 3 * LEASE
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    run(body)
