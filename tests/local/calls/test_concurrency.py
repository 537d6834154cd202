"""How many calls run at once: bounds, the line before them, chains of calls, through everything."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.cli import inspection
from kubetorch.cli.output import Output
from kubetorch.sdk import backend
from kubetorch.sdk.tuning import TIMING
from tests.local.calling import InThread, until, with_longer_timeouts
from tests.shared import WHOLE

MODULE = """
import contextvars, os, queue, threading, time
import kubetorch as kt

class Probe:
    def __init__(self):
        self.n = self.now = self.peak = 0
        self.lock = threading.Lock()
        self.ran = []

    def add(self, k):
        n = self.n
        time.sleep(0.005)
        self.n = n + k
        return self.n

    def work(self, seconds, name=None):
        with self.lock:
            self.now += 1
            self.peak = max(self.peak, self.now)
            self.ran.append(name)
        time.sleep(seconds)
        with self.lock:
            self.now -= 1
        return name

    def hold(self, path, end):
        open(path, "a").close()
        while not os.path.exists(end):
            time.sleep(0.01)
        return "held"

    def ask(self, service, how, folder):
        hold = kt.cls(name=service).hold_on
        if how == "call":
            hold(folder)
        elif how == "map":
            list(hold.map([folder] * 2))
        elif how == "result":
            hold.spawn(folder).result()
        elif how == "thread":
            context = contextvars.copy_context()
            thread = threading.Thread(target=lambda: context.run(hold, folder))
            thread.start()
            thread.join()

    def cross(self, service, folder, mine):
        open(os.path.join(folder, mine), "a").close()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        return kt.cls(name=service).add(1)

    async def ask_on_loop(self, service, how, folder):
        kt.cls(name=service).hold_on(folder)

    def hold_on(self, folder):
        open(os.path.join(folder, "began"), "a").close()
        try:
            while not os.path.exists(os.path.join(folder, "end")):
                time.sleep(0.01)
        finally:
            open(os.path.join(folder, "ended"), "a").close()

    def seen(self):
        return [self.peak, self.ran]

    def nest(self, depth, service, other=None):
        if depth == 0:
            return 0
        following, after = (other, service) if other else (service, None)
        return 1 + kt.cls(name=following).nest(depth - 1, following, after)

    def in_thread(self, service):
        values = []
        context = contextvars.copy_context()
        call = lambda: values.append(kt.cls(name=service).add.options(queue_timeout=60)(1))
        thread = threading.Thread(target=lambda: context.run(call))
        thread.start()
        thread.join()
        return values

    def in_bare_thread(self, service):
        thread = threading.Thread(target=lambda: kt.cls(name=service).add(1))
        thread.start()
        thread.join()

    def numbers(self):
        for number in range(10_000):
            yield "x" * 1_000_000

    def fan_out(self, service, count):
        add = kt.cls(name=service).add
        spawned = [add.spawn(1) for _ in range(count)]
        return max(each.result() for each in spawned)

    async def loop_work(self, seconds):
        import asyncio
        self.now += 1
        self.peak = max(self.peak, self.now)
        await asyncio.sleep(seconds)
        self.now -= 1

class Hub:
    def __init__(self):
        self.q = queue.Queue()
    def get(self):
        return self.q.get(timeout=120)
    def put(self, x):
        self.q.put(x)

def where(path, end):
    open(path, "a").close()
    if end == "exit":
        os._exit(3)
    while not os.path.exists(end):
        time.sleep(0.01)
    return {"pid": os.getpid(), "rank": os.environ.get("RANK")}

def meet(folder, name, inside=None):
    rank = os.environ["RANK"]
    open(os.path.join(folder, f"{name}-{rank}"), "w").close()
    while not all(os.path.exists(os.path.join(folder, f"{name}-{each}")) for each in "01"):
        time.sleep(0.002)
    return kt.fn(name=inside)(folder, f"inner-{rank}") if inside else rank

def tree(depth, service):
    if depth == 0:
        return 1
    me = kt.fn(name=service)
    left, right = me.spawn(depth - 1, service), me.spawn(depth - 1, service)
    return left.result() + right.result()
"""


@pytest.fixture(scope="module")
def module(shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("slots")
    (folder / "pyproject.toml").touch()
    (folder / "slots_module.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("slots_module")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def deploy(module: Any) -> Iterator[Callable[..., Any]]:
    deployed: list[Any] = []

    def deploy(name: str, callable_name: str = "Probe", **resources: Any) -> Any:
        function = getattr(module, callable_name)
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


def test_a_process_runs_as_many_calls_as_are_declared_and_the_others_wait(deploy: Any) -> None:
    probe = deploy("two", concurrency=2)
    assert len(list(probe.work.map([0.05] * 12))) == 12
    assert probe.seen()[0] == 2
    list(probe.loop_work.map([0.02] * 12))
    assert probe.seen()[0] == 2


def test_a_bound_of_an_autoscaled_service_is_kept_without_knative(deploy: Any, module: Any) -> None:
    compute = kt.Compute(cpus="0.1").autoscale(min_scale=1, concurrency=1)
    probe = kt.cls(module.Probe, name="scaled").to(compute)
    try:
        assert len(list(probe.work.map([0.02] * 8))) == 8
        assert probe.seen()[0] == 1
    finally:
        probe.teardown()


def test_with_one_call_at_a_time_no_update_of_a_class_is_lost(deploy: Any) -> None:
    probe = deploy("adds", concurrency=1)
    assert max(probe.add.map([1] * 40)) == 40
    # Those that a call of its own makes take turns, too, inside that call.
    assert probe.fan_out("adds", 10) == 50


def test_a_chain_of_calls_holds_one_slot_also_by_way_of_another_service(deploy: Any) -> None:
    probe = deploy("chained", concurrency=1)
    deploy("beyond", concurrency=1)
    depth = 200 if WHOLE else 30
    assert probe.nest.options(timeout=300)(depth, "chained") == depth
    assert probe.nest.options(timeout=300)(depth, "chained", "beyond") == depth
    assert probe.in_thread("chained") == [1]


@pytest.mark.parametrize("bound", [{"concurrency": 1}, {}], ids=["one", "any"])
def test_a_tree_of_calls_ends_well(deploy: Any, bound: dict[str, int]) -> None:
    depth = 10 if WHOLE else 6
    tree = deploy("tree", "tree", **bound)
    assert tree.options(timeout=500)(depth, "tree") == 2**depth


def test_unrelated_calls_that_wait_do_not_keep_others_from_running(deploy: Any) -> None:
    hub = deploy("hub", "Hub")
    waiting = [hub.get.spawn() for _ in range(45)]
    for number in range(45):
        hub.put.options(timeout=60)(number)
    assert sorted(call.result() for call in waiting) == list(range(45))


def test_a_timeout_counts_from_the_begin_of_the_run_and_queue_timeout_bounds_the_wait(
    deploy: Any, tmp_path: Path
) -> None:
    probe = deploy("timed", concurrency=1)

    def attempt(timeout: float) -> bool:
        began, end = tmp_path / f"began {timeout}", tmp_path / f"end {timeout}"
        first = InThread(probe.hold, str(began), str(end))
        until(began.exists)
        refusal = r"did not begin within its queue_timeout of 0.2"
        with pytest.raises(kt.CallTimeoutError, match=refusal):
            probe.work.options(queue_timeout=0.2)(0, "impatient")
        waits = InThread(probe.work.options(timeout=timeout), 0, "patient")
        # Longer than its timeout, and what this end adds to it.
        time.sleep(timeout + TIMING.call_timeout_grace_seconds + 1)
        end.touch()
        assert first.join().value == "held"
        return waits.join().value == "patient"

    with_longer_timeouts(attempt)
    assert set(probe.seen()[1]) == {"patient"}
    with pytest.raises(kt.CallTimeoutError, match="did not end"):
        probe.work.options(timeout=0.2)(60, "long")


def test_a_call_that_waits_can_be_cancelled_and_never_runs(deploy: Any, tmp_path: Path) -> None:
    probe = deploy("cancelled", concurrency=1)
    first = InThread(probe.hold, str(tmp_path / "began"), str(tmp_path / "end"))
    until((tmp_path / "began").exists)
    waiting = probe.work.spawn(0, "cancelled")
    waiting.cancel()
    with pytest.raises(kt.CallCancelledError):
        waiting.result()
    (tmp_path / "end").touch()
    assert first.join().value == "held"
    assert probe.seen()[1] == []


def test_a_call_that_waits_for_another_service_is_cancelled_alone(
    deploy: Any, tmp_path: Path
) -> None:
    outer = deploy("outer", concurrency=4)
    deploy("inner", concurrency=2)
    beside = InThread(outer.hold, str(tmp_path / "beside"), str(tmp_path / "over"))
    until((tmp_path / "beside").exists)
    for how in ("call", "map", "result", "thread", "loop"):
        folder = tmp_path / how
        folder.mkdir()
        method = outer.ask_on_loop if how == "loop" else outer.ask
        asking = method.spawn("inner", how, str(folder))
        until((folder / "began").exists)
        asking.cancel()
        with pytest.raises(kt.CallCancelledError):
            asking.result()
        if how == "result":  # what was spawned goes on
            (folder / "end").touch()
        until((folder / "ended").exists)
    (tmp_path / "over").touch()
    assert beside.join().value == "held"


def test_what_a_handle_asks_about_names_takes_no_slot(deploy: Any, tmp_path: Path) -> None:
    probe = deploy("asked", concurrency=1)
    first = InThread(probe.hold, str(tmp_path / "began"), str(tmp_path / "end"))
    until((tmp_path / "began").exists)
    with pytest.raises(AttributeError):
        kt.cls(name=probe.service_name).nothing  # noqa: B018
    assert first.value is None
    (tmp_path / "end").touch()
    assert first.join().value == "held"


def test_more_calls_than_may_wait_are_refused(deploy: Any, tmp_path: Path) -> None:
    probe = deploy("full", concurrency=1, max_queue=2)
    first = InThread(probe.hold, str(tmp_path / "began"), str(tmp_path / "end"))
    until((tmp_path / "began").exists)
    waiting = [probe.work.spawn(0, number) for number in range(2)]
    with pytest.raises(kt.QueueFullError, match="2 calls wait already") as caught:
        probe.work(0, "refused")
    assert caught.value.status == 429
    until(lambda: [call.status() for call in waiting] == ["waiting", "waiting"])
    assert not any(call.done() for call in waiting)
    # Items of a map wait in their program while they may not in the pod.
    items = InThread(
        lambda: list(probe.work.map([0] * 8, [f"item {number}" for number in range(8)]))
    )
    with pytest.raises(kt.QueueFullError):
        list(probe.work.options(queue_timeout=0.1).map([0], ["impatient"]))
    (tmp_path / "end").touch()
    assert [call.result() for call in waiting] == [0, 1]
    assert first.join().value == "held"
    assert items.join().value == [f"item {number}" for number in range(8)]
    assert not {"refused", "impatient"} & set(probe.seen()[1])


def test_a_line_where_nobody_waits_is_refused(deploy: Any) -> None:
    with pytest.raises(kt.SpecError, match="max_queue is 3, and nothing bounds"):
        deploy("lineless", max_queue=3)


def test_callers_take_turns(deploy: Any, tmp_path: Path) -> None:
    probe = deploy("fair", concurrency=1)
    first = InThread(probe.hold, str(tmp_path / "began"), str(tmp_path / "end"))
    until((tmp_path / "began").exists)
    many = [probe.work.spawn(0, f"many {number}") for number in range(20)]
    alone = threading.Thread(target=_post, args=(probe, "alone"))
    alone.start()
    until(lambda: (queue := view(probe).pods[0].queue) and queue.waiting == 21)
    (tmp_path / "end").touch()
    alone.join()
    assert [call.result() for call in many]
    assert first.join().value == "held"
    assert probe.seen()[1].index("alone") <= 1


def _post(probe: Any, name: str) -> None:
    """Another caller: by plain HTTP."""
    request = urllib.request.Request(
        probe.endpoint("work"),
        json.dumps({"args": [0, name]}).encode(),
        probe.request_headers,
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


# --------------------------------------------------------------------------- processes of a pod


def test_calls_go_to_the_least_busy_process_of_a_pod(deploy: Any, tmp_path: Path) -> None:
    where = deploy("spread", "where", num_proc=3)
    ends = [tmp_path / f"end {number}" for number in range(3)]
    pids = [InThread(where, str(tmp_path / f"began {n}"), str(ends[n])) for n in range(3)]
    for number in range(3):
        until((tmp_path / f"began {number}").exists)
    (tmp_path / "now").touch()
    ends[1].touch()
    free = pids[1].join().value["pid"]
    assert where(str(tmp_path / "more"), str(tmp_path / "now"))["pid"] == free
    for end in ends:
        end.touch()
    processes = [call.join().value for call in pids]
    assert len({process["pid"] for process in processes}) == 3
    assert {process["rank"] for process in processes} == {processes[0]["rank"]}


def test_a_bound_holds_for_each_process(deploy: Any) -> None:
    probe = deploy("bounded", num_proc=2, concurrency=1)
    assert len(list(probe.work.map([0.05] * 8))) == 8
    assert probe.seen()[0] == 1


def test_a_process_that_ends_takes_nobody_along_and_another_one_comes(
    deploy: Any, tmp_path: Path
) -> None:
    where = deploy("dying", "where", num_proc=2, concurrency=1)
    first_call = InThread(where, str(tmp_path / "began"), str(tmp_path / "end"))
    until((tmp_path / "began").exists)
    with pytest.raises(kt.WorkerDiedError):
        where(str(tmp_path / "other"), "exit")
    (tmp_path / "now").touch()
    first = where(str(tmp_path / "third"), str(tmp_path / "now"))["pid"]
    (tmp_path / "end").touch()
    second = first_call.join().value["pid"]
    assert first != second


def test_auto_is_as_many_processes_as_the_pod_has_cpus_or_gpus(
    deploy: Any, module: Any, tmp_path: Path
) -> None:
    handle = kt.fn(module.where, name="auto").to(kt.Compute(cpus="3", num_proc="auto"))
    try:
        pids = [
            InThread(handle, str(tmp_path / f"began {n}"), str(tmp_path / "end")) for n in range(3)
        ]
        for number in range(3):
            until((tmp_path / f"began {number}").exists)
        (tmp_path / "end").touch()
        assert len({call.join().value["pid"] for call in pids}) == 3
    finally:
        handle.teardown()
    with pytest.raises(kt.SpecError, match="unknown number of instances"):
        deploy("instances", num_proc="auto")


# ----------------------------------------------------------------------------- what holds them


def test_what_runs_and_waits_and_holds_the_slots_is_shown(
    deploy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = deploy("watched", concurrency=2)
    values = probe.numbers()
    next(values)
    held_call = InThread(probe.hold, str(tmp_path / "began"), str(tmp_path / "end"))
    until((tmp_path / "began").exists)
    waiting = [probe.work.spawn(0, number) for number in range(3)]

    def shown() -> str:
        inspection.show(view(probe), Output())
        return capsys.readouterr().out

    text = ""
    deadline = time.monotonic() + 60
    while "its reader takes no values" not in text or "3 calls wait" not in text:
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
        text = shown()
    assert "2 calls running, 3 waiting" in text
    assert "slots taken: all, 3 calls wait, the first for" in text
    assert "Probe.hold runs for" in text
    assert "Probe.numbers runs for" in text
    values.close()
    (tmp_path / "end").touch()
    assert held_call.join().value == "held"
    assert [call.result() for call in waiting] == [0, 1, 2]


def test_two_chains_that_lock_each_other_are_shown(
    deploy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left_handle, right_handle = deploy("left", concurrency=1), deploy("right", concurrency=1)
    crossing = [
        left_handle.cross.spawn("right", str(tmp_path), "from-left"),
        right_handle.cross.spawn("left", str(tmp_path), "from-right"),
    ]
    text = ""
    deadline = time.monotonic() + 60
    while "all slots wait for other calls" not in text:
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
        inspection.show(view(left_handle), Output())
        text = capsys.readouterr().out
    assert "Probe.cross runs for" in text
    assert "it waits for Probe.add of right" in text
    for call in crossing:
        call.cancel()
    for call in crossing:
        assert call.wait(60)
    # The end of one chain may let the call that waited for it run, so the sums are 1 or 2.
    assert left_handle.add(1) in (1, 2)
    assert right_handle.add(1) in (1, 2)


def test_calls_of_a_thread_that_lost_its_context_are_shown_to_wait_for_their_caller(
    deploy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = deploy("strays", concurrency=1)
    blocked = probe.in_bare_thread.spawn("strays")
    text = ""
    deadline = time.monotonic() + 60
    while "contextvars.copy_context()" not in text:
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
        inspection.show(view(probe), Output())
        text = capsys.readouterr().out
    blocked.cancel()


def view(probe: Any) -> Any:
    service_key = ("default", probe.service_name)
    return backend.session().ask(lambda session: session.get_workload(*service_key))


# ----------------------------------------------------------------------------- calls of all pods


def test_calls_to_all_pods_take_their_slots_in_one_order(deploy: Any, tmp_path: Path) -> None:
    meet = deploy("pods", "meet", replicas=2, concurrency=1)
    calls_per_program = 60 if WHOLE else 12

    def program(name: str) -> list[Any]:
        return [
            meet.options(timeout=120)(str(tmp_path), f"{name}-{number}")
            for number in range(calls_per_program)
        ]

    programs = [InThread(program, name) for name in "abc"]
    for program_thread in programs:
        assert program_thread.join(500).value == [["0", "1"]] * calls_per_program


def test_a_call_to_all_pods_that_each_pod_makes_inside_one_runs_in_its_slots(
    deploy: Any, tmp_path: Path
) -> None:
    meet = deploy("inside", "meet", replicas=2, concurrency=1)
    assert meet.options(timeout=120)(str(tmp_path), "outer", "inside") == [["0", "1"]] * 2


def test_another_bound_restarts_no_pod(deploy: Any, module: Any) -> None:
    probe = deploy("bounds", concurrency=1)
    pod = view(probe).pods[0]
    probe.compute.concurrency = 3
    probe.to(probe.compute)
    after = view(probe).pods[0]
    assert (after.name, after.pid) == (pod.name, pod.pid)
    list(probe.work.map([0.1] * 12))
    assert probe.seen()[0] == 3
