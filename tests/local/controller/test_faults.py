"""Faults of the process backend, injected for real: killed agents and services, strays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import leaks
from kubetorch.datastore.blobs import digest_of
from kubetorch.lib import processes
from kubetorch.wire.messages import Failed, PodView, Ready
from kubetorch.wire.podenv import MARK
from tests.local.service_harness import FAKE, Service, deploy, is_ready, reserve_port, spec

pytestmark = pytest.mark.faults


@pytest.fixture
def service(fake_service: Service) -> Service:
    return fake_service


@pytest.fixture
def own_service(service_home: Path) -> Iterator[Service]:
    """A service that the test kills."""
    reserve_port(service_home)
    service = Service(service_home, FAKE).start()
    yield service
    service.terminate()


def kill(pod: PodView) -> None:
    assert pod.pid is not None
    os.kill(pod.pid, signal.SIGKILL)


def marked(service: Service) -> set[int]:
    """The processes of all pods."""
    return {*processes.processes_with(MARK)} & {p.pid for p in leaks.processes_of(service.home)}


def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ----------------------------------------------------------------------------------- the agent


def test_fault_a_killed_agent_is_started_again_in_the_same_pod(service: Service) -> None:
    (before,) = service.deploy("f")[-1].workload.pods
    kill(before)
    view = service.until("f", lambda view: view.pods[0].restarts == 1 and is_ready(view))
    (after,) = view.pods
    assert (after.name, after.url, after.ordinal) == (before.name, before.url, before.ordinal)
    assert after.pid != before.pid


def test_fault_an_agent_that_is_killed_often_comes_back_each_time(service: Service) -> None:
    service.deploy("f")
    for restarts in range(1, 6):
        kill(service.get("f").pods[0])
        service.until("f", lambda view, n=restarts: view.pods[0].restarts == n and is_ready(view))


def test_fault_a_deploy_while_the_agent_is_dead_waits_for_it(service: Service) -> None:
    (pod,) = service.deploy("f")[-1].workload.pods
    kill(pod)
    service.until("f", lambda view: view.pods[0].restarts == 1)
    assert isinstance(service.deploy("f")[-1], Ready)
    assert is_ready(service.get("f"))


def test_fault_what_a_killed_agent_left_behind_is_ended(service: Service) -> None:
    (pod,) = service.deploy("f", env={"FAKE_CHILD": "1"})[-1].workload.pods
    before = marked(service) - {pod.pid}
    assert len(before) == 1
    kill(pod)
    until(lambda: not before & marked(service))
    # The next agent has a child of its own, which is to be there when everything is ended.
    service.until("f", is_ready)


def test_fault_a_stopped_agent_does_not_hold_up_a_delete(service: Service) -> None:
    (pod,) = service.deploy("f")[-1].workload.pods
    os.kill(pod.pid, signal.SIGSTOP)
    assert service.delete("f", grace=0) == 200
    assert not psutil.pid_exists(pod.pid)


# --------------------------------------------------------------------------------- the service


def test_fault_pods_outlive_a_killed_service_and_are_adopted(own_service: Service) -> None:
    before = own_service.deploy("f", replicas=2)[-1].workload
    own_service.kill()
    assert all(psutil.pid_exists(pod.pid) for pod in before.pods)
    own_service.start()
    after = own_service.until("f", is_ready)
    assert [(pod.name, pod.pid) for pod in after.pods] == [
        (pod.name, pod.pid) for pod in before.pods
    ]
    assert all(pod.generation == 1 for pod in after.pods)
    assert own_service.deploy("f", replicas=2)[0].changed is False


def test_fault_a_restarted_service_answers_at_the_same_address(own_service: Service) -> None:
    url = own_service.url
    own_service.kill()
    assert own_service.start().url == url


def test_fault_an_agent_that_died_with_the_service_is_started_again(own_service: Service) -> None:
    (pod,) = own_service.deploy("f")[-1].workload.pods
    own_service.kill()
    kill(pod)
    own_service.start()
    after = own_service.until("f", is_ready).pods[0]
    assert (after.name, after.restarts) == (pod.name, 1)


def test_fault_an_adopted_agent_that_dies_is_started_again(own_service: Service) -> None:
    (pod,) = own_service.deploy("f")[-1].workload.pods
    own_service.kill()
    own_service.start()
    own_service.until("f", is_ready)
    kill(pod)
    own_service.until("f", lambda view: view.pods[0].restarts == 1 and is_ready(view))


def test_fault_a_service_killed_in_a_deploy_goes_on_with_it(own_service: Service) -> None:
    own_service.deploy("f")
    blob = b"{}"
    workload = spec("f", init_args=digest_of(blob))
    events = own_service.events(deploy(workload), [blob])
    next(events)
    own_service.kill()
    events.close()
    own_service.start()
    view = own_service.until("f", lambda view: view.pods[0].generation == 2)
    assert view.failure is None


def test_fault_pods_that_nobody_knows_are_ended(own_service: Service) -> None:
    (pod,) = own_service.deploy("f", env={"FAKE_CHILD": "1"})[-1].workload.pods
    folder = own_service.home / "pods" / "default" / pod.name
    own_service.kill()
    for path in own_service.home.glob("state.sqlite*"):
        path.unlink()
    own_service.start()
    until(lambda: not marked(own_service) and not folder.exists())


def test_fault_a_half_deleted_workload_is_gone_after_a_restart(own_service: Service) -> None:
    (pod,) = own_service.deploy("f", env={"FAKE_STUBBORN": "1"})[-1].workload.pods
    with own_service.client() as client:
        client._timeout = 0.5  # the answer would come after the grace
        with pytest.raises(ConnectionError):
            client.request("DELETE", "/v1/workloads/default/f?grace=100").close()
    own_service.until("f", lambda view: view.status == "Terminating")
    own_service.kill()
    assert psutil.pid_exists(pod.pid)
    own_service.start()
    assert own_service.request("GET", "/v1/workloads/default/f")[0] == 404
    until(lambda: not marked(own_service))


def test_fault_a_terminated_service_leaves_its_pods(own_service: Service) -> None:
    (pod,) = own_service.deploy("f")[-1].workload.pods
    assert own_service.terminate() == 0
    assert psutil.pid_exists(pod.pid)
    own_service.start()
    assert own_service.until("f", is_ready).pods[0].pid == pod.pid


# -------------------------------------------------------------------------------------- ending


def test_a_deleted_workload_leaves_nothing_behind(service: Service) -> None:
    service.deploy("f", replicas=2, env={"FAKE_CHILD": "1"})
    assert service.delete("f") == 200
    assert marked(service) == set()
    assert list((service.home / "pods").iterdir()) == []
    assert service.delete("f") == 404


def test_a_stubborn_agent_is_killed_when_its_grace_is_over(service: Service) -> None:
    (pod,) = service.deploy("f", env={"FAKE_STUBBORN": "1"})[-1].workload.pods
    begun = time.monotonic()
    assert service.delete("f", grace=0.1) == 200
    assert time.monotonic() - begun < 30
    assert not psutil.pid_exists(pod.pid)


def test_deletes_at_once_end_the_workload_once(service: Service) -> None:
    service.deploy("f")
    statuses = []
    threads = [_thread(lambda: statuses.append(service.delete("f"))) for _ in range(4)]
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [200, 404, 404, 404]


def test_a_workload_that_is_deleted_in_its_deploy_ends_the_deploy(service: Service) -> None:
    events = service.events(deploy(spec("f", env={"FAKE_SLOW": "1"})))
    next(events)
    assert service.delete("f") == 200
    ended = list(events)[-1]
    assert isinstance(ended, Failed)
    assert ended.failure["error_type"] == "ServiceNotFoundError"


def test_a_stop_with_pods_brings_them_back_at_the_next_start(own_service: Service) -> None:
    (before,) = own_service.deploy("f")[-1].workload.pods
    status, _ = own_service.request("POST", "/v1/stop", b'{"pods": true}')
    assert status == 200
    assert own_service.wait() == 0
    assert marked(own_service) == set()
    own_service.start()
    after = own_service.until("f", is_ready).pods[0]
    assert (after.name, after.generation) == (before.name, 1)


def test_a_workload_is_torn_down_when_it_was_idle_for_its_ttl(service: Service) -> None:
    service.deploy("f", inactivity_ttl="1s")
    until(lambda: service.request("GET", "/v1/workloads/default/f")[0] == 404)
    until(lambda: not marked(service))


def test_a_service_with_nothing_deployed_stops_by_itself(service_home: Path) -> None:
    service = Service(service_home, FAKE).start()
    service.deploy("f")
    service.kill()
    service.start(KT_LOCAL_IDLE="2")
    time.sleep(3)
    assert service.request("GET", "/v1/status")[0] == 200, "it stays while something is deployed"
    service.delete("f")
    assert service.wait() == 0
    assert not (service_home / "service.json").exists()


def _thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread
