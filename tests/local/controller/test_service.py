"""The whole local service with real agents: deploy, call, and every part killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import leaks
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.trees import Entry
from kubetorch.lib.http_client import HttpClient
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import (
    DeployEvent,
    DeployLog,
    Failed,
    Missing,
    Ready,
    WorkloadView,
)
from tests.local.service_harness import REAL, Service, deploy, in_background, is_ready

SOURCE = """
import os, subprocess, sys, time

def f(x=1):
    print("called with", x)
    return [VERSION, os.getpid(), x]

def slow(seconds):
    time.sleep(seconds)
    return "done"

def stray():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
"""


@pytest.fixture
def service(service_home: Path) -> Iterator[Service]:
    service = Service(service_home, REAL).start()
    yield service
    service.terminate()


def project(
    source: str, *, name: str = "f", callable: str = "f", **compute: object
) -> tuple[WorkloadSpec, list[bytes]]:
    """A workload whose project is one file, and its blobs."""
    data = source.encode()
    tree = trees.build([Entry("m.py", "file", len(data), digest_of(data))])
    ref = CallableRef("fn", callable, "m", callable, project="project", source_file="m.py")
    spec = WorkloadSpec(
        "default",
        name,
        ref,
        ComputeSpec(launch_timeout=60, **compute),  # type: ignore[arg-type]
        tree=tree.digest,
    )
    return spec, [tree.encoded, data]


def deployed(service: Service, version: int = 1, **kwargs: object) -> WorkloadView:
    event = outcome(service, SOURCE.replace("VERSION", str(version)), **kwargs)
    assert isinstance(event, Ready), event
    return event.workload


def outcome(service: Service, source: str, **kwargs: object) -> DeployEvent:
    spec, blobs = project(source, **kwargs)  # type: ignore[arg-type]
    return list(service.events(deploy(spec), blobs))[-1]


def call(view: WorkloadView, *args: object, token: str | None = None, path: str = "f") -> object:
    with HttpClient(view.url, view.token if token is None else token, timeout=60) as client:
        body = json.dumps({"args": args}).encode()
        headers = {"Content-Type": "application/json"}
        with client.request("POST", f"/{path}", body=body, headers=headers) as response:
            return (response.status, json.loads(response.read()))


def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_function_is_deployed_called_edited_and_torn_down(service: Service) -> None:
    view = deployed(service)
    status, (version, pid, value) = call(view, 7)  # type: ignore[misc]
    assert (status, version, value) == (200, 1, 7)
    view = deployed(service, version=2)
    _, (version, new_pid, _) = call(view, 7)  # type: ignore[misc]
    assert version == 2
    assert new_pid != pid
    assert service.delete("f") == 200
    # The service and its spare agent: nothing of the workload.
    remaining_pids = [process.pid for process in leaks.processes_of(service.home)]
    assert not {view.pods[0].pid, pid, new_pid} & set(remaining_pids)


def test_an_import_error_is_the_failure_of_the_deploy_and_old_code_goes_on(
    service: Service,
) -> None:
    deployed(service)
    event = outcome(service, "import nothing_of_that_name")
    assert isinstance(event, Failed)
    assert event.failure["error_type"] == "ModuleNotFoundError"
    assert "nothing_of_that_name" in event.failure["traceback"]
    assert call(service.get("f"))[0] == 200  # type: ignore[index]


@pytest.mark.faults
def test_fault_code_that_was_damaged_on_the_disk_is_asked_for_by_the_next_deploy(
    service: Service,
) -> None:
    workload, blobs = project(SOURCE.replace("VERSION", "1"))
    events = service.events(deploy(workload), blobs)
    assert isinstance(list(events)[-1], Ready)
    digest = digest_of(blobs[1])
    stored = service.home / "blobs" / digest[:2] / digest
    stored.write_bytes(blobs[1].replace(b"called", b"caught"))
    second_workload = replace(workload, name="g")
    failed = list(service.events(deploy(second_workload)))[-1]
    assert isinstance(failed, Failed), failed
    assert failed.failure["error_type"] == "DataStoreError"
    assert "deploy again" in str(failed.failure)
    assert list(service.events(deploy(second_workload))) == [Missing(blobs=(digest,))]
    assert isinstance(list(service.events(deploy(second_workload), blobs))[-1], Ready)
    assert call(service.get("g"), 7)[1][0] == 1  # type: ignore[index]


def test_lines_of_an_import_are_events_of_the_deploy(service: Service) -> None:
    spec, blobs = project("print('loading'); f = lambda: 1")
    events = list(service.events(deploy(spec), blobs))
    assert [event.text for event in events if isinstance(event, DeployLog)] == ["loading"]


def test_a_tokens_audience_and_another_user_are_checked_by_the_agent(service: Service) -> None:
    view = deployed(service)
    second_view = deployed(service, name="g")
    assert call(view, token=second_view.token)[0] == 401  # type: ignore[index]
    assert call(view, token="")[0] == 401  # type: ignore[index]
    assert call(view, token=service.token)[0] == 200  # type: ignore[index]


# ----------------------------------------------------------------------------------------- faults


@pytest.mark.faults
def test_fault_calls_go_on_while_the_service_is_dead(service: Service) -> None:
    view = deployed(service)
    with in_background(lambda: call(view, 1.0, path="f")) as result:
        service.kill()
    assert result[0][0] == 200  # type: ignore[index]
    assert call(view, 2)[0] == 200  # type: ignore[index]
    service.start()
    after = service.until("f", is_ready)
    assert after.pods == view.pods
    assert call(after, 3)[0] == 200  # type: ignore[index]


@pytest.mark.faults
def test_fault_a_killed_agent_is_back_with_its_code(service: Service) -> None:
    view = deployed(service)
    workers = [child.pid for child in psutil.Process(view.pods[0].pid).children(recursive=True)]
    os.kill(view.pods[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
    after = service.until("f", lambda view: view.pods[0].restarts == 1 and is_ready(view))
    assert call(after, 5)[0] == 200  # type: ignore[index]
    until(lambda: not any(_lives(pid) for pid in workers))


@pytest.mark.faults
def test_fault_service_and_agent_killed_together_come_back(service: Service) -> None:
    view = deployed(service)
    service.kill()
    os.kill(view.pods[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
    service.start()
    after = service.until("f", is_ready)
    assert call(after, 5)[0] == 200  # type: ignore[index]


@pytest.mark.faults
def test_fault_a_deploy_after_the_service_was_killed_uses_the_pod_that_lives(
    service: Service,
) -> None:
    before = deployed(service)
    service.kill()
    service.start()
    after = deployed(service, version=2)
    assert after.pods[0].pid == before.pods[0].pid
    assert call(after)[1][0] == 2  # type: ignore[index]


@pytest.mark.faults
def test_fault_programs_that_user_code_left_behind_end_with_the_pod(service: Service) -> None:
    view = deployed(service, callable="stray")
    status, pid = call(view, path="stray")  # type: ignore[misc]
    assert status == 200
    assert _lives(pid)
    service.delete("f")
    until(lambda: not _lives(pid))


def test_two_clients_that_deploy_different_code_at_once_end_in_one_generation(
    service: Service,
) -> None:
    deployed(service)
    threads = [
        threading.Thread(target=outcome, args=(service, SOURCE.replace("VERSION", str(number))))
        for number in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    view = service.until("f", lambda view: view.pods[0].generation == view.generation)
    assert view.generation == 3
    number_by_digest = {
        digest_of(SOURCE.replace("VERSION", str(number)).encode()): number for number in (2, 3)
    }
    tree = (service.home / "blobs" / view.spec.tree[:2] / view.spec.tree).read_bytes()  # type: ignore[index]
    (source,) = trees.decode(tree).digests()
    assert call(view)[1][0] == number_by_digest[source]  # type: ignore[index]


def test_a_running_call_holds_up_a_teardown_no_longer_than_its_grace(service: Service) -> None:
    view = deployed(service, callable="slow")
    with in_background(lambda: _try(lambda: call(view, 60, path="slow"))):
        until(lambda: service.get("f").pods[0].calls == 1)
        begun = time.monotonic()
        assert service.delete("f", grace=0.5) == 200
        assert time.monotonic() - begun < 30


def test_what_a_killed_service_left_of_a_deleted_volume_goes_at_the_next_start(
    service: Service,
) -> None:
    body = b'{"name": "kept", "size": "1Gi", "mount_path": "/kept"}'
    assert service.request("POST", routes.volumes("default"), body)[0] == 200
    volumes = service.home / "volumes"
    service.kill()
    deleted_volume = volumes / "default" / ".deleted-0123456789abcdef"
    deleted_volume.mkdir()
    (deleted_volume / "model").write_bytes(b"m")
    service.start()
    until(lambda: not deleted_volume.exists())
    assert [path.name for path in volumes.glob("*/[!.]*")] == ["kept"]


# ------------------------------------------------------------------------------------------ logs


def test_logs_are_followed_over_the_death_of_the_agent(service: Service) -> None:
    view = deployed(service)
    call(view, 1)
    path = routes.workload("default", "f", "logs") + "?follow=true&tail=1"
    with service.client() as client, client.request("GET", path) as response:
        lines = (messages.decode(DeployLog, line) for line in response.iter_lines())
        stdout = (line.text for line in lines if line.source == "stdout")
        assert next(stdout) == "called with 1"
        call(view, 2)
        assert next(stdout) == "called with 2"
        os.kill(view.pods[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
        after = service.until("f", lambda view: view.pods[0].restarts == 1 and is_ready(view))
        call(after, 3)
        assert next(stdout) == "called with 3"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _try(action: Callable[[], object]) -> object:
    try:
        return action()
    except ConnectionError as error:
        return error


@pytest.mark.faults
def test_a_service_that_can_open_no_more_files_ends_so_that_another_can_be_started(
    service: Service,
) -> None:
    spec, blobs = project(SOURCE.replace("VERSION", "1"))
    assert isinstance(list(service.events(deploy(spec), blobs))[-1], Ready)
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (4, 4))
    service.wait()
    assert "it may open 4 files" in service.log()
    service.start()
    assert isinstance(list(service.events(deploy(spec), blobs))[-1], Ready)
