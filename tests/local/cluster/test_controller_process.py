"""The controller of a cluster as the process that it is, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kubetorch.controller.cluster import leader
from kubetorch.controller.cluster.leader import PODS_OF_CONTROLLER
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.controller.cluster.service import NAME
from kubetorch.lib.http_client import HttpClient
from kubetorch.manifests import labels
from kubetorch.wire import routes
from local.fake_apiserver import Exchange, FakeApiServer
from local.object_server import ObjectServer
from tests.free_ports import free_port
from tests.local.key_store import KeyStore
from tests.local.object_storage import SECRET, Objects, serving

LEASES = "apis/coordination.k8s.io/v1/leases/kubetorch"
PODS = "api/v1/pods/kubetorch"
KINDS = (
    (leader.LEASES.api_version, leader.LEASES.plural, leader.LEASES.kind),
    (WORKLOADS.api_version, WORKLOADS.plural, WORKLOADS.kind),
    ("v1", "pods", "Pod"),
    ("v1", "secrets", "Secret"),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    ("authentication.k8s.io/v1", "tokenreviews", "TokenReview"),
    ("authorization.k8s.io/v1", "subjectaccessreviews", "SubjectAccessReview"),
)
ANN = {"authenticated": True, "allowed": True, "user": {"username": "ann"}}


class Cluster:
    """An API server that answers for workloads only when a test lets it; all may do everything."""

    def __init__(self) -> None:
        self.objects = ObjectServer(*KINDS)
        self.was_asked, self.answers = asyncio.Event(), asyncio.Event()
        self.paths: list[str] = []
        for pod in ("here-0", "there-0"):
            named = dict(label.split("=") for label in PODS_OF_CONTROLLER.split(","))
            metadata = {"name": pod, "namespace": "kubetorch", "labels": named}
            self.objects.put(PODS, {"kind": "Pod", "apiVersion": "v1", "metadata": metadata})

    async def __call__(self, exchange: Exchange) -> None:
        self.paths.append(path := exchange.request.path)
        if path.endswith(f"/{WORKLOADS.plural}"):
            self.was_asked.set()
            await self.answers.wait()
        if path.endswith("reviews"):
            exchange.answer(201, {**exchange.request.json, "status": ANN})
        else:
            await self.objects(exchange)

    @property
    def holder(self) -> str:
        return str(self.objects.objects[LEASES, NAME]["spec"]["holderIdentity"])

    @property
    def marked(self) -> list[str]:
        """The pods that are said to lead."""
        metadata_of_pods = [
            stored["metadata"]
            for (collection, _), stored in self.objects.objects.items()
            if collection == PODS
        ]
        return [
            metadata["name"]
            for metadata in metadata_of_pods
            if metadata["labels"].get(labels.LEADS) == "true"
        ]

    def mark(self, *pods: str) -> None:
        """Somebody else says that these lead."""
        for (collection, name), pod in list(self.objects.objects.items()):
            if collection == PODS:
                tags = {**pod["metadata"]["labels"], labels.LEADS: "true"}
                if name not in pods:
                    del tags[labels.LEADS]
                self.objects.put(
                    collection, {**pod, "metadata": {**pod["metadata"], "labels": tags}}
                )

    def give_lead_to(self, pod: str) -> None:
        lease = self.objects.objects[LEASES, NAME]
        self.objects.put(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": pod}})


class Process:
    """The controller in the pod `here-0`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def answers(self, path: str, token: str = "") -> tuple[int, Any]:
        """Status and body of the answer to a GET."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
            lines += [f"Authorization: Bearer {token}"] if token else []
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = head.partition("content-length: ")[2].split()[0]
            return int(head.split()[1]), json.loads(await reader.readexactly(int(length)))
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def controller(url: str, folder: Path, **more: str) -> AsyncIterator[Process]:
    named = {"name": "here"}
    config = {
        "current-context": "here",
        "contexts": [{**named, "context": {"cluster": "here", "user": "here"}}],
        "clusters": [{**named, "cluster": {"server": url}}],
        "users": [{**named, "user": {}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    port = free_port()
    variables = {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "POD_NAME": "here-0",
        "KT_LISTEN_HOST": "127.0.0.1",
        "KT_LISTEN_PORT": str(port),
        "KT_BLOBS_DIR": str(folder / "blobs"),
        "KT_RUNTIME_IMAGE": "runtime",
        "KT_DEFAULT_IMAGE": "python",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kubetorch.controller"),
        env={**os.environ, **variables, **more},
    )
    try:
        yield Process(process, port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def run(
    folder: Path, body: Callable[[Cluster, Process], Awaitable[None]], **variables: str
) -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeApiServer(cluster) as server,
            controller(server.url, folder, **variables) as process,
        ):
            await cluster.was_asked.wait()  # it leads, and has begun to take up what there is
            await body(cluster, process)

    asyncio.run(asyncio.wait_for(main(), 110))


async def until(condition: Callable[[], object], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


def test_one_that_takes_long_to_start_answers_that_it_lives(tmp_path: Path) -> None:
    async def body(cluster: Cluster, controller: Process) -> None:
        status, health = await asyncio.wait_for(controller.answers(routes.HEALTH), 40)
        assert (status, health["status"]) == (200, "standby")
        assert (await controller.answers(routes.STATUS))[0] == 503
        cluster.answers.set()
        await until(lambda: cluster.marked)
        assert cluster.marked == ["here-0"]
        assert (await controller.answers(routes.HEALTH))[0] == 200
        assert (await controller.answers(routes.STATUS))[0] == 401

    run(tmp_path, body)


def test_one_that_loses_the_lead_while_it_starts_ends_unmarked(tmp_path: Path) -> None:
    async def body(cluster: Cluster, controller: Process) -> None:
        cluster.mark("there-0")
        cluster.give_lead_to("there-0_1234")
        assert await asyncio.wait_for(controller.process.wait(), 40) == 1
        assert (cluster.marked, cluster.holder) == (["there-0"], "there-0_1234")

    run(tmp_path, body)


def test_one_that_is_stopped_while_it_starts_gives_the_lead_away(tmp_path: Path) -> None:
    async def body(cluster: Cluster, controller: Process) -> None:
        assert cluster.holder.startswith("here-0_")
        controller.process.terminate()
        assert await asyncio.wait_for(controller.process.wait(), 40) == 0
        assert (cluster.marked, cluster.holder) == ([], "")

    run(tmp_path, body)


def test_the_mark_that_another_one_takes_from_the_leader_comes_back(tmp_path: Path) -> None:
    async def body(cluster: Cluster, controller: Process) -> None:
        cluster.answers.set()
        await until(lambda: cluster.marked == ["here-0"])
        cluster.mark("there-0")
        await until(lambda: cluster.marked == ["here-0"])
        controller.process.terminate()
        assert await asyncio.wait_for(controller.process.wait(), 40) == 0
        assert (cluster.marked, cluster.holder) == (["here-0"], "")

    run(tmp_path, body)


def test_one_for_some_namespaces_lists_secrets_and_volumes_of_those_alone(tmp_path: Path) -> None:
    async def body(cluster: Cluster, controller: Process) -> None:
        cluster.answers.set()
        await until(lambda: cluster.marked)
        for path in (routes.SECRETS, routes.VOLUMES):
            assert await controller.answers(path, "ann's") == (200, [])
        namespaced_paths = [
            path for path in cluster.paths if path.startswith("/api/v1/namespaces/")
        ]
        for plural in ("secrets", "persistentvolumeclaims"):
            assert f"/api/v1/{plural}" not in cluster.paths
            assert f"/api/v1/namespaces/team/{plural}" in namespaced_paths
            assert f"/api/v1/namespaces/side/{plural}" in namespaced_paths

    run(tmp_path, body, KT_WATCH_NAMESPACES="team,side")


def test_one_with_a_new_disk_has_what_the_bucket_of_the_store_keeps(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    files = {"a": b"1", "x/b": b"2"}

    def put(store: KeyStore) -> None:
        store.put("models/base", files)

    def get(store: KeyStore) -> None:
        assert store.get("models/base") == files

    objects = Objects()
    with serving(objects.handler()) as url:
        bucket = {"KT_STORE_BUCKET": "s3://bucket/kt", "KT_STORE_ENDPOINT": url, **SECRET}
        for work in (put, get):

            def use(port: int, work: Callable[[KeyStore], None] = work) -> None:
                with HttpClient(f"http://127.0.0.1:{port}", "ann's", timeout=60.0) as client:
                    work(KeyStore(client, tmp_path / "copies" / work.__name__, "team"))

            async def body(
                cluster: Cluster, controller: Process, use: Callable[[int], None] = use
            ) -> None:
                cluster.answers.set()
                await until(lambda: cluster.marked)
                await asyncio.to_thread(use, controller.port)

            folder = tmp_path / work.__name__
            folder.mkdir()
            run(folder, body, **bucket)
    assert {path.rpartition("/")[0] for path in objects.content} == {
        "kt/blobs/team",
        "kt/keys/team",
    }
