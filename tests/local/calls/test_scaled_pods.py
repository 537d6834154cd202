"""Services that the controller scales, as programs call them: from no pod to several and back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from tests.local.calling import InThread, until
from tests.local.user_project import UserProject

SOURCE = """
import os, time
import kubetorch as kt

def where():
    return os.environ["POD_NAME"]

def hold(folder, seconds=0):
    open(os.path.join(folder, f"{where()}-{time.time()}"), "w").close()
    while not os.path.exists(os.path.join(folder, "end")):
        time.sleep(0.01)
    return where()

def held_values(folder):
    yield hold(folder)

def work(name, *args):
    return globals()[name](*args)

def factorial(n, names):
    first, *other_names = names
    return 1 if n <= 1 else n * kt.fn(name=first)(n - 1, [*other_names, first])

class Counter:
    def stats(self):
        return "its own"

    def where(self):
        return where()
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return UserProject(tmp_path_factory.mktemp("scaled") / "shop").module(SOURCE)


@pytest.fixture(scope="module")
def work(jobs: Any) -> Iterator[Any]:
    handle = kt.fn(jobs.work, name="scaled-pods")
    compute = kt.Compute(cpus="0.01").autoscale(
        min_scale=0, max_scale=3, initial_scale=0, concurrency=1, window="6s"
    )
    yield handle.to(compute)
    handle.teardown()


def pods(handle: Any) -> dict[str, int]:
    """The process of each ready pod."""
    view = backend.session().get_workload("default", handle.service_name)
    return {pod.name: pod.pid or 0 for pod in view.pods if pod.is_ready}


def test_calls_of_a_service_without_pods_wait_for_the_first_one(work: Any) -> None:
    assert work.stats().pods == 0
    calls = [InThread(work, "where") for _ in range(3)]
    spawned = work.spawn("where", async_=True)
    names = {call.join().value for call in calls} | {spawned.result(timeout=60)}
    assert names and names <= {name for name in names if name.startswith("scaled-pods-")}


def test_calls_that_wait_in_a_pod_run_in_pods_that_come(work: Any, tmp_path: Path) -> None:
    async def awaited() -> object:
        return await work("hold", str(tmp_path), async_=True)

    calls = [
        InThread(work, "hold", str(tmp_path)),
        InThread(lambda: asyncio.run(awaited())),
        InThread(lambda: list(work("held_values", str(tmp_path))).pop()),
    ]
    until(lambda: len([*tmp_path.iterdir()]) == 3, 60)
    stats = work.stats()
    assert (stats.pods_ready, stats.pods_wanted, stats.max_scale) == (3, 3, 3)
    assert stats.decisions[-1].after == 3
    (tmp_path / "end").touch()
    assert len({call.join().value for call in calls}) == 3


def test_a_call_whose_pod_is_killed_ends_with_an_error_or_runs_again(
    work: Any, tmp_path: Path
) -> None:
    for retries in (0, 1):
        folder = tmp_path / str(retries)
        folder.mkdir()
        call = InThread(work.options(retries=retries), "hold", str(folder))
        until(lambda folder=folder: [*folder.iterdir()], 60)
        [name] = [path.name.rpartition("-")[0] for path in folder.iterdir()]
        os.kill(pods(work)[name], signal.SIGKILL)
        if retries:
            until(lambda folder=folder: len([*folder.iterdir()]) == 2, 60)
            (folder / "end").touch()
            assert call.join().value in pods(work)
        else:
            error = call.join().error
            assert isinstance(error, (kt.PodTerminatedError, kt.AgentDiedError, kt.CallLostError))


def test_the_scaling_of_a_service_changes_while_it_runs(work: Any) -> None:
    state = work.autoscale(max_scale=2, min_scale=1)
    assert (state.min_scale, state.max_scale) == (1, 2)
    assert state.settings == {"max_scale": 2, "min_scale": 1}
    state = asyncio.run(work.autoscale_async(max_scale=None, min_scale=None))
    assert (state.min_scale, state.max_scale, state.settings) == (0, 3, {})
    assert asyncio.run(work.stats_async()).max_scale == 3
    for keywords, message in (
        ({"max_scal": 3}, "has no 'max_scal'"),
        ({"max_scale": -1}, "must be a whole number"),
        ({"min_scale": 9}, "cannot be greater than max_scale"),
        ({"concurrency": 2}, "cannot be changed while the service runs"),
        ({}, "nothing to change"),
    ):
        with pytest.raises(kt.AutoScalingError, match=message):
            work.autoscale(**keywords)


def test_a_service_with_a_fixed_number_of_pods_has_stats_and_no_scaling(jobs: Any) -> None:
    handle: Any = kt.cls(jobs.Counter)
    with pytest.raises(kt.ServiceNotFoundError, match="there is no service"):
        kt.service(handle).stats()
    handle.to(kt.Compute(cpus="0.01"))
    for counter in (handle, kt.cls(name="Counter")):
        assert counter.stats() == "its own"
        stats = kt.service(counter).stats()
        assert (stats.engine, stats.pods_wanted, stats.pods_ready) == ("fixed", 1, 1)
        assert stats.calls_running == stats.calls_waiting == 0
        with pytest.raises(kt.SpecError, match="a fixed number of pods"):
            counter.autoscale(max_scale=2)
    assert "1 of 1 pods ready, their number is fixed" in repr(stats)
    handle.teardown()


def test_chains_of_calls_do_not_wait_for_themselves_at_the_largest_scale(jobs: Any) -> None:
    handles: list[Any] = [kt.fn(jobs.factorial, name=name) for name in ("rising", "falling")]
    for handle in handles:
        handle.to(kt.Compute(cpus="0.01").autoscale(min_scale=0, max_scale=2, concurrency=1))
    call = handles[0].options(timeout=120)
    calls = [InThread(call, 6, names) for names in (["rising"], ["falling", "rising"]) * 3]
    assert [call.join(120).value for call in calls] == [720] * 6
    for handle in handles:
        handle.teardown()
