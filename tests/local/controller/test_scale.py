"""Services whose number of pods the load decides on, on this machine: `.autoscale()`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

import kubetorch as kt
from kubetorch.controller.tuning import LIMITS
from kubetorch.errors import AutoScalingError, KubetorchError
from kubetorch.sdk import backend
from kubetorch.wire.messages import PodView
from tests.local.calling import InThread, until
from tests.local.commands import kt as kt_command
from tests.local.user_project import UserProject

SOURCE = """
import os, time
import kubetorch as kt

gate = os.environ.get("CLOSED_GATE", "")
while os.path.exists(gate):
    try:
        os.unlink(f"{gate}-ticket")
        break
    except FileNotFoundError:
        time.sleep(0.02)

def work(seconds=0.0, folder="", pods=0):
    # Begins once so many pods run such a call.
    if folder:
        open(os.path.join(folder, os.environ["POD_NAME"]), "w").close()
        while len(os.listdir(folder)) < pods:
            time.sleep(0.02)
    time.sleep(seconds)
    return os.environ["POD_NAME"]

def count(n, seconds):
    for number in range(n):
        time.sleep(seconds)
        yield number

def hold(path):
    while not os.path.exists(path):
        time.sleep(0.02)
    return os.environ["POD_NAME"]

def hold_number(folder, number):
    # Writes which pod it is in, and ends once the file `end-NUMBER` is there.
    written = os.path.join(folder, f"begun-{number}")
    with open(written + ".part", "w") as file:
        file.write(os.environ["POD_NAME"])
    os.rename(written + ".part", written)
    return hold(os.path.join(folder, f"end-{number}"))

def enqueue(count):
    kt.metric("queue", count)
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> UserProject:
    return UserProject(tmp_path_factory.mktemp("scale") / "shop")


@pytest.fixture(scope="module")
def jobs(project: UserProject) -> Any:
    return project.module(SOURCE)


def quick(gate: Path | None = None, **settings: Any) -> kt.Compute:
    """A compute that scales down as soon as its rules allow.

    While the file `gate` exists no pod loads its code, but for one that takes the file beside it
    whose name ends in `-ticket`.
    """
    env_vars = {"CLOSED_GATE": str(gate)} if gate else None
    return kt.Compute(cpus="0.01", env_vars=env_vars).autoscale(
        **{
            "window": "6s",
            "scale_down_delay": "0s",
            "scale_to_zero_pod_retention_period": "0s",
            **settings,
        }
    )


@pytest.fixture(scope="module")
def resting(jobs: Any) -> Iterator[Any]:
    """A service without pods until it is called."""
    handle = kt.fn(jobs.work, name="resting").to(quick(min_scale=0, max_scale=3, concurrency=1))
    until(lambda: not handle.stats().pods, seconds=60)
    yield handle
    handle.teardown()


def kill_service(home: Path) -> None:
    os.kill(json.loads((home / "service.json").read_text())["pid"], signal.SIGKILL)


def pods_of(name: str) -> list[PodView]:
    """The pods of a service by ordinal."""
    view = backend.session().ask(lambda controller: controller.get_workload("default", name))
    return sorted(view.pods, key=lambda pod: pod.ordinal)


class HeldCalls:
    """Calls of `hold_number`, spread over the pods of a service, which end one by one."""

    def __init__(self, handle: Any, folder: Path, count: int) -> None:
        self._folder = folder
        self._calls = [InThread(handle, str(folder), number) for number in range(count)]
        until(lambda: len([*folder.glob("begun-?")]) == count)
        self._pods = [(folder / f"begun-{number}").read_text() for number in range(count)]

    def end_all_but(self, count: int, pod: str) -> None:
        """Leave so many calls in a pod, and wait for the others in it."""
        numbers = [number for number, name in enumerate(self._pods) if name == pod]
        assert len(numbers) >= count
        for number in numbers[count:]:
            (self._folder / f"end-{number}").touch()
            assert self._calls[number].join().value == pod

    def end(self) -> None:
        """End all calls; each returns the pod in which it began."""
        for number, pod in enumerate(self._pods):
            (self._folder / f"end-{number}").touch()
            assert self._calls[number].join().value == pod


def post(handle: Any, body: object) -> Any:
    request = urllib.request.Request(
        handle.endpoint(), json.dumps(body).encode(), dict(handle.request_headers)
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_service_at_zero_starts_a_pod_for_a_call_and_ends_it_afterwards(
    resting: Any, tmp_path: Path
) -> None:
    call = InThread(resting, 0.0, str(tmp_path), 2)
    until(lambda: resting.stats().pods and any(tmp_path.iterdir()), seconds=60)
    (tmp_path / "another").touch()
    assert call.join().value
    until(lambda: not resting.stats().pods, seconds=60)
    assert resting.stats().reason


def test_many_calls_at_zero_start_several_pods_and_all_of_them_end(
    resting: Any, tmp_path: Path
) -> None:
    pods = set(resting.map([1.0] * 12, [str(tmp_path)] * 12, [2] * 12))
    assert 2 <= len(pods) <= 3
    decisions = resting.stats().decisions
    assert max(decision.after for decision in decisions) == 3
    assert all(decision.reason for decision in decisions)


def test_a_request_of_plain_http_waits_for_the_first_pod(resting: Any) -> None:
    until(lambda: not resting.stats().pods, seconds=60)
    assert post(resting, {"args": [0.0]})


def test_a_request_whose_client_has_gone_waits_no_more(jobs: Any, tmp_path: Path) -> None:
    handle = kt.fn(jobs.hold, name="full").to(quick(min_scale=1, max_scale=1, concurrency=1))
    call = InThread(handle, str(tmp_path / "end"))
    until(lambda: handle.stats().calls_running == 1)
    url = urlsplit(handle.endpoint())
    connections = [http.client.HTTPConnection(url.netloc, timeout=60) for _ in range(3)]
    for connection in connections:
        body = json.dumps({"args": [str(tmp_path / "never")]})
        connection.request("POST", url.path, body, dict(handle.request_headers))
    until(lambda: handle.stats().calls_waiting == 3)
    for connection in connections:
        connection.close()
    until(lambda: not handle.stats().calls_waiting)
    (tmp_path / "end").touch()
    assert call.join().value
    handle.teardown()


def test_three_calls_of_one_second_take_three_seconds_on_one_pod_of_concurrency_one(
    jobs: Any,
) -> None:
    handle = kt.fn(jobs.work, name="narrow").to(quick(min_scale=1, max_scale=1, concurrency=1))
    begin = time.monotonic()
    calls = [InThread(handle, 1.0) for _ in range(3)]
    assert len({call.join().value for call in calls}) == 1
    assert time.monotonic() - begin >= 3.0
    handle.teardown()


def test_calls_that_wait_go_to_a_pod_that_came_later(jobs: Any, tmp_path: Path) -> None:
    handle = kt.fn(jobs.work, name="growing").to(quick(min_scale=1, max_scale=2, concurrency=1))
    calls = [InThread(handle, 0.0, str(tmp_path), 2) for _ in range(6)]
    assert len({call.join().value for call in calls}) == 2
    handle.teardown()


def test_a_metric_of_the_users_code_adds_a_pod(jobs: Any) -> None:
    compute = quick(min_scale=1, max_scale=2, metric="queue", target=10)
    handle = kt.fn(jobs.enqueue, name="queue").to(compute)
    handle(20)
    until(lambda: handle.stats().pods_ready == 2, seconds=60)
    handle.teardown()


def test_a_pod_that_leaves_finishes_its_calls(jobs: Any, tmp_path: Path) -> None:
    end = tmp_path / "end"
    handle = kt.fn(jobs.hold, name="leaving").to(quick(min_scale=2, max_scale=2))
    calls = [InThread(handle, str(end)) for _ in range(2)]
    until(lambda: handle.stats().calls_running == 2)
    handle.autoscale(min_scale=1, max_scale=1)
    until(lambda: handle.stats().pods_wanted == 1)
    end.touch()
    assert len({call.join().value for call in calls}) == 2
    until(lambda: handle.stats().pods == 1, seconds=60)
    handle.teardown()


def test_a_live_change_holds_until_a_deploy_declares_other_numbers(
    jobs: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    handle = kt.fn(jobs.work, name="live").to(quick(min_scale=1, max_scale=2))
    state = handle.autoscale(min_scale=2, max_scale=3)
    assert (state.min_scale, state.max_scale) == (2, 3)
    until(lambda: handle.stats().pods_ready == 2, seconds=60)
    handle.to(quick(min_scale=1, max_scale=2))
    assert handle.stats().min_scale == 2  # only the code is new
    same_numbers = quick(min_scale=1, max_scale=2)
    same_numbers.launch_timeout = 1200
    handle.to(same_numbers)
    assert handle.stats().min_scale == 2
    capfd.readouterr()
    handle.to(quick(min_scale=1, max_scale=4))
    assert "min_scale=2" in capfd.readouterr().err
    assert (handle.stats().min_scale, handle.stats().max_scale) == (1, 4)
    handle.teardown()


def test_impossible_live_changes_are_refused_and_change_nothing(resting: Any) -> None:
    before = resting.stats().max_scale
    for wrong in ({"min_scale": 9}, {"max_scale": -1}, {"concurrency": 3}, {"windw": "6s"}):
        with pytest.raises(AutoScalingError):
            resting.autoscale(**wrong)
    assert resting.stats().max_scale == before


def test_a_service_without_max_scale_has_no_more_pods_than_this_machine_has_memory_for(
    resting: Any,
) -> None:
    agents = psutil.virtual_memory().total // LIMITS.agent_least_bytes
    assert 0 < resting.autoscale(max_scale=0).max_scale < agents
    assert resting.autoscale(max_scale=None).max_scale == 3


def test_kt_scale_replaces_a_schedule_with_a_time_zone_and_resets_it(resting: Any) -> None:
    resting.autoscale(min_scale={"0 8 * * *": 0}, timezone="Europe/Berlin", max_scale=2)
    changed = kt_command("scale", "resting", "--min", "0")
    assert changed.returncode == 0, changed.stderr
    assert "changed since the deploy: max_scale=2, min_scale=0" in changed.stdout
    reset = kt_command("scale", "resting", "--reset", "--max", "4")
    assert reset.returncode == 0, reset.stderr
    assert "changed since the deploy: max_scale=4" in reset.stdout
    assert "changed" not in kt_command("scale", "resting", "--reset").stdout
    refused = kt_command("scale", "resting", "--min", "9")
    assert refused.returncode == 1
    assert "min_scale cannot be greater than max_scale: 9 > 3" in refused.stderr


def test_a_service_at_zero_is_found_by_a_controller_that_starts_anew(
    resting: Any, service: Path
) -> None:
    until(lambda: not resting.stats().pods, seconds=60)
    answer = InThread(resting)
    kill_service(service)
    assert answer.join().value


def test_new_code_for_a_service_at_zero_starts_no_pod(
    project: UserProject, jobs: Any, resting: Any
) -> None:
    until(lambda: not resting.stats().pods, seconds=60)
    resting.to(quick(min_scale=0, max_scale=3, concurrency=1))
    assert not resting.stats().pods
    assert resting()


def test_a_burst_of_callers_ends_once_each(resting: Any) -> None:
    results: list[str] = []
    lock = threading.Lock()

    def one_call() -> None:
        result = resting(0.01)
        with lock:
            results.append(result)

    threads = [threading.Thread(target=one_call) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 200


def test_calls_of_a_pod_that_is_killed_end_with_a_typed_error_or_run_again(
    jobs: Any, tmp_path: Path
) -> None:
    handle = kt.fn(jobs.hold, name="killed").to(quick(min_scale=2, max_scale=2))
    calls = [InThread(handle, str(tmp_path / "end")) for _ in range(4)]
    until(lambda: handle.stats().calls_running == 4)
    os.kill(next(pod.pid for pod in pods_of("killed") if pod.pid is not None), signal.SIGKILL)
    (tmp_path / "end").touch()
    joined = [call.join() for call in calls]
    assert all(call.value or isinstance(call.error, KubetorchError) for call in joined)
    handle.teardown()


def test_a_pod_that_leaves_does_not_come_back_when_the_service_dies_meanwhile(
    jobs: Any, service: Path, tmp_path: Path
) -> None:
    handle = kt.fn(jobs.hold_number, name="leaving-on").to(quick(min_scale=2, max_scale=2))
    until(lambda: handle.stats().pods_ready == 2)
    calls = HeldCalls(handle, tmp_path, 4)
    leaving, staying = pods_of("leaving-on")
    calls.end_all_but(1, leaving.name)  # with as few calls the newer one would leave
    until(lambda: [pod.calls for pod in pods_of("leaving-on")] == [1, 2])
    handle.autoscale(min_scale=1, max_scale=1)
    until(lambda: [pod.phase for pod in pods_of("leaving-on")] == ["Terminating", "Running"])
    kill_service(service)
    until(lambda: [pod.is_ready for pod in pods_of("leaving-on")] == [False, True])
    assert [pod.phase for pod in pods_of("leaving-on")] == ["Terminating", "Running"]
    (tmp_path / "end-9").touch()
    assert handle(str(tmp_path), 9) == staying.name
    calls.end()
    until(lambda: [pod.name for pod in pods_of("leaving-on")] == [staying.name])
    handle.teardown()


def test_a_pod_whose_agent_stops_takes_no_call_and_is_the_one_that_leaves(
    jobs: Any, tmp_path: Path
) -> None:
    handle = kt.fn(jobs.hold_number, name="stopping").to(quick(min_scale=2, max_scale=2))
    until(lambda: handle.stats().pods_ready == 2)
    calls = HeldCalls(handle, tmp_path, 4)
    stopping, staying = pods_of("stopping")
    assert stopping.pid is not None
    os.kill(stopping.pid, signal.SIGTERM)
    until(lambda: handle.stats().pods_ready == 1)
    (tmp_path / "end-9").touch()
    assert handle(str(tmp_path), 9) == staying.name
    handle.autoscale(min_scale=1, max_scale=1)
    until(lambda: [pod.phase for pod in pods_of("stopping")] == ["Terminating", "Running"])
    calls.end()
    handle.teardown()


def test_idle_pods_leave_before_busy_ones_while_others_start(jobs: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    handle = kt.fn(jobs.hold_number, name="idle-first").to(quick(gate, min_scale=3, max_scale=9))
    until(lambda: handle.stats().pods_ready == 3)
    calls = HeldCalls(handle, tmp_path, 3)
    *idle, busy = pods_of("idle-first")  # without a reason the newest leaves
    for pod in idle:
        calls.end_all_but(0, pod.name)
    until(lambda: [pod.calls for pod in pods_of("idle-first")] == [0, 0, 1])
    gate.touch()
    handle.autoscale(min_scale=5)
    until(lambda: handle.stats().pods == 5)
    handle.autoscale(min_scale=2, max_scale=2)
    until(lambda: sum(pod.phase == "Running" for pod in pods_of("idle-first")) == 2)
    ready_pods = [pod.name for pod in pods_of("idle-first") if pod.is_ready]
    assert len(ready_pods) == 2
    assert busy.name in ready_pods
    gate.unlink()
    calls.end()
    handle.teardown()


def test_a_deploy_of_other_pods_takes_none_from_the_load_before_they_are_ready(
    jobs: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    bounds = {"min_scale": 1, "max_scale": 3, "concurrency": 1}
    handle = kt.fn(jobs.hold_number, name="rolling").to(quick(**bounds))
    calls = HeldCalls(handle, tmp_path, 3)
    old_names = {pod.name for pod in pods_of("rolling")}
    assert len(old_names) == 3
    gate.touch()
    deploy = InThread(kt.fn(jobs.hold_number, name="rolling").to, quick(gate, **bounds))
    until(lambda: len(pods_of("rolling")) == 6)
    assert handle.stats().pods_wanted == 3
    (tmp_path / "gate-ticket").touch()
    until(lambda: sum(pod.is_ready for pod in pods_of("rolling")) == 4)
    assert old_names <= {pod.name for pod in pods_of("rolling") if pod.is_ready}
    gate.unlink()
    assert deploy.join().error is None
    assert old_names.isdisjoint(pod.name for pod in pods_of("rolling") if pod.is_ready)
    calls.end()
    handle.teardown()
