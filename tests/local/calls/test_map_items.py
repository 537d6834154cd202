"""Which items of a map run at one time, and where; what becomes of them when a process ends."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from tests.local.calling import InThread, until

MODULE = """
import asyncio, os, random, threading, time
import kubetorch as kt

lock = threading.Lock()
now = 0
peaks = {}

def seeded(i):
    random.seed(i)
    time.sleep(0.01)
    return random.random()

class Counter:
    def __init__(self):
        self.n = 0

    def add(self, k):
        n = self.n
        time.sleep(0.005)
        self.n = n + k
        return self.n

def busy(i, seconds=0.05):
    global now
    with lock:
        now += 1
        seen = now
    time.sleep(seconds)
    with lock:
        now -= 1
    return seen

def meet_beside(i, name, count):
    # Waits until `count` items of a map of that name are there, or have been.
    global now
    with lock:
        now += 1
        running_items = now
        peaks[name] = max(running_items, peaks.get(name, 0))
    end = time.monotonic() + 60
    while peaks[name] < count and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)
    with lock:
        now -= 1
    return running_items

class Brief:
    def busy(self, i):
        return busy(i, 0.0002)

async def wait():
    global now
    now += 1
    seen = now
    await asyncio.sleep(0.0002)
    now -= 1
    return seen

def brief(i):
    # No `async def` itself.
    return wait() if i % 2 else busy(i, 0.0002)

async def on_loop(folder, i):
    open(os.path.join(folder, str(i)), "w").close()
    while len(os.listdir(folder)) < 64:
        await asyncio.sleep(0.01)
    return i

def hold(folder, i, end):
    open(os.path.join(folder, f"{i}-{os.environ['POD_NAME']}"), "w").close()
    while not os.path.exists(end):
        time.sleep(0.01)
    return i

def last(folder, i, count):
    # The first item ends when all others have.
    while i == 0 and len(os.listdir(folder)) < count - 1:
        time.sleep(0.01)
    open(os.path.join(folder, str(i)), "w").close()
    return i

def late(folder, i, slow, count):
    # One item ends when all others have.
    while i == slow and len(os.listdir(folder)) < count - 1:
        time.sleep(0.01)
    open(os.path.join(folder, str(i)), "w").close()
    return i

def quick(folder, i, ends):
    with open(os.path.join(folder, str(i)), "a") as file:
        file.write("x")
    if i == ends:
        os._exit(3)
    return i

def deadly(i):
    time.sleep(0.02)
    if i == 7:
        os._exit(3)
    return i

def together(folder, i, how):
    open(os.path.join(folder, str(i)), "w").close()
    while len(os.listdir(folder)) < 4:
        time.sleep(0.01)
    if i == 2 and how == "exit":
        os._exit(3)
    elif i == 2:
        os.kill(os.getpid(), 9)
    time.sleep(60)

def nap(i):
    time.sleep(0.2)
    return i

def nest(depth, name):
    if depth == 0:
        return 1
    return sum(kt.fn(name=name).map([depth - 1] * 2, [name] * 2))

def meet(folder, i):
    # Ends when two pods run an item.
    open(os.path.join(folder, os.environ["POD_NAME"]), "w").close()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    return os.environ["POD_NAME"]
"""


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


@pytest.fixture(scope="module")
def module(shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("items")
    (folder / "pyproject.toml").touch()
    (folder / "items_module.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("items_module")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def deploy(module: Any) -> Iterator[Callable[..., Any]]:
    deployed: list[Any] = []

    def deploy(callable_name: str, **resources: Any) -> Any:
        function = getattr(module, callable_name)
        name = f"items-{callable_name.lower().replace('_', '-')}"
        handle = (
            kt.cls(function, name=name)
            if isinstance(function, type)
            else kt.fn(function, name=name)
        )
        deployed.append(handle.to(kt.Compute(cpus="0.1", **resources)))
        return deployed[-1]

    yield deploy
    for handle in deployed:
        handle.teardown()


@pytest.mark.parametrize("resources", [{"replicas": 2}, {"num_proc": 2}], ids=["pods", "processes"])
def test_items_that_change_what_a_process_shares_give_what_a_loop_gives(
    deploy: Any, module: Any, resources: dict[str, int]
) -> None:
    seeded = deploy("seeded", **resources)
    expected = [module.seeded(i) for i in range(24)]
    assert list(seeded.map(range(24))) == expected
    assert list(seeded.starmap((i,) for i in range(24))) == expected
    assert list(kt.fn(name="items-seeded").map(range(24))) == expected


def test_an_instance_that_is_mapped_loses_no_update(deploy: Any) -> None:
    assert list(deploy("Counter").add.map([1] * 40)) == list(range(1, 41))


def test_a_window_or_a_declared_concurrency_lets_items_run_side_by_side(deploy: Any) -> None:
    assert max(deploy("busy").map(range(12))) == 1
    meet_beside = deploy("meet_beside")
    assert max(meet_beside.map(range(24), ["open"] * 24, [6] * 24, window=6)) == 6
    bounded = deploy("meet_beside", concurrency=3)
    assert max(bounded.map(range(24), ["bounded"] * 24, [3] * 24)) == 3
    assert max(bounded.map(range(24), ["wide"] * 24, [3] * 24, window=12)) == 3


def test_quick_items_run_one_at_a_time_though_they_are_in_their_process_before(deploy: Any) -> None:
    assert set(deploy("Brief").busy.map(range(200))) == {1}
    assert set(deploy("brief").map(range(200))) == {1}


@pytest.mark.parametrize("resources", [{"replicas": 2}, {"num_proc": 2}], ids=["pods", "processes"])
def test_quick_items_behind_one_that_takes_long_run_elsewhere(
    deploy: Any, tmp_path: Path, resources: dict[str, int]
) -> None:
    late, count = deploy("late", **resources), 200
    # As many as a map makes at most while the result of one is awaited.
    items = ((str(tmp_path), i, count - 60, count) for i in range(count))
    assert list(late.starmap(items)) == list(range(count))


def test_quick_items_behind_one_that_ends_their_process_run_once_in_the_next(
    deploy: Any, tmp_path: Path
) -> None:
    items = ((str(tmp_path), i, 120) for i in range(200))
    results = list(deploy("quick", num_proc=2).starmap(items, return_exceptions=True))
    assert [i for i in range(200) if results[i] != i] == [120]
    assert {file.read_text() for file in tmp_path.iterdir()} == {"x"}


def test_items_of_an_async_function_run_64_side_by_side(deploy: Any, tmp_path: Path) -> None:
    on_loop = deploy("on_loop")
    assert list(on_loop.map([str(tmp_path)] * 64, range(64))) == list(range(64))


def test_two_maps_wait_for_one_another_and_a_direct_call_for_none(
    deploy: Any, tmp_path: Path
) -> None:
    hold, end = deploy("hold"), str(tmp_path / "end")
    folder = tmp_path / "begun"
    folder.mkdir()
    first_map = InThread(lambda: list(hold.map([str(folder)] * 2, "ab", [end] * 2)))
    second_map = InThread(lambda: list(hold.map([str(folder)] * 2, "cd", [end] * 2)))
    until(lambda: len(names(folder)) == 1)
    direct = InThread(hold, str(folder), "direct", end)
    until(lambda: len(names(folder)) == 2)
    (tmp_path / "end").touch()
    assert direct.join().value == "direct"
    assert (first_map.join().value, second_map.join().value) == (["a", "b"], ["c", "d"])


def test_items_behind_a_long_one_run_in_a_pod_that_is_free(deploy: Any, tmp_path: Path) -> None:
    last = deploy("last", replicas=2)
    assert list(last.map([str(tmp_path)] * 12, range(12), [12] * 12)) == list(range(12))


def test_a_pod_that_comes_takes_part(deploy: Any, tmp_path: Path) -> None:
    meet = deploy("meet")
    items = InThread(lambda: list(meet.map([str(tmp_path)] * 20, range(20))))
    until(lambda: len(names(tmp_path)) == 1)
    deploy("meet", replicas=2)
    assert len(set(items.join().value)) == 2


@pytest.mark.parametrize(
    ("resources", "count"), [({}, 1), ({"concurrency": 1}, 0)], ids=["not declared", "declared"]
)
def test_a_line_says_once_that_items_which_mostly_wait_can_run_side_by_side(
    deploy: Any, resources: dict[str, int], count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    nap = deploy("nap", replicas=2, **resources)
    assert list(nap.map(range(80))) == list(range(80))
    assert capfd.readouterr().err.count("kt.Compute(concurrency=N)") == count


def test_an_item_that_makes_items_of_its_own_function_ends_well(deploy: Any) -> None:
    nest = deploy("nest", num_proc=2)
    assert list(nest.map([4] * 3, ["items-nest"] * 3)) == [16] * 3


@pytest.mark.parametrize(
    ("resources", "retries"),
    [({}, 0), ({}, 3), ({"concurrency": 8}, 3)],
    ids=["one at a time", "one at a time, made again", "several, made again"],
)
def test_an_item_that_ends_its_process_takes_no_other_along(
    deploy: Any, resources: dict[str, int], retries: int
) -> None:
    deadly = deploy("deadly", **resources).options(retries=retries)
    results = list(deadly.map(range(40), return_exceptions=True))
    assert [i for i in range(40) if results[i] != i] == [7]
    assert isinstance(results[7], kt.WorkerDiedError)
    assert results[7].exit_code == 3
    assert "item 7 of the map" in str(getattr(results[7], "__notes__", results[7]))


def test_items_that_end_with_a_process_are_told_whose_code_ended_it(
    deploy: Any, tmp_path: Path
) -> None:
    together = deploy("together")
    for how, text in (
        ("exit", "item 2 of a map of together, which ran beside this call, called os._exit"),
        ("signal", "with all calls that ran in it: item 0 of a map of together, item 1 of a map"),
    ):
        folder = tmp_path / how
        folder.mkdir()
        items = zip([str(folder)] * 4, range(4), [how] * 4, strict=True)
        errors = list(together.starmap(items, window=4, return_exceptions=True))
        assert all(isinstance(error, kt.WorkerDiedError) for error in errors)
        assert [text in error.message for error in errors] == [True, True, how != "exit", True]


def test_items_that_wait_in_a_pod_that_ends_run_in_another_one(deploy: Any, tmp_path: Path) -> None:
    hold, end = deploy("hold", replicas=2), str(tmp_path / "end")
    folder = tmp_path / "begun"
    folder.mkdir()
    mapped = hold.map([str(folder)] * 12, range(12), [end] * 12, return_exceptions=True)
    items = InThread(lambda: list(mapped))
    until(lambda: len(names(folder)) == 2)
    number, _, name = names(folder)[0].partition("-")
    service_key = ("default", "items-hold")
    view = backend.session().ask(lambda session: session.get_workload(*service_key))
    [pod] = [pod for pod in view.pods if pod.name == name]
    assert pod.pid is not None
    os.kill(pod.pid, signal.SIGKILL)
    (tmp_path / "end").touch()
    results = items.join().value
    assert [i for i in range(12) if results[i] != i] == [int(number)]


def test_ctrl_c_in_a_map_cancels_the_items_that_run_and_those_that_wait(
    deploy: Any, tmp_path: Path
) -> None:
    deploy("hold", num_proc=2)
    folder, end = tmp_path / "begun", tmp_path / "end"
    folder.mkdir()

    def calls() -> int:
        view = backend.session().ask(lambda session: session.get_workload("default", "items-hold"))
        return sum(pod.calls for pod in view.pods)

    items = f"[{str(folder)!r}] * 60, range(60), [{str(end)!r}] * 60"
    source = f"import kubetorch as kt\nlist(kt.fn(name='items-hold').map({items}))"
    program = subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True)
    until(lambda: len(names(folder)) == 2 and calls() > 2)
    program.send_signal(signal.SIGINT)
    assert "calls that run are cancelled" in program.communicate(timeout=60)[1]
    until(lambda: calls() == 0)
    assert len(names(folder)) == 2
