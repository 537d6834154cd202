"""Services whose pods follow the load: wakes, steps, warm calls, maps, batches, the controller.

Each group of figures is measured by itself: a pod that starts would be part of a call's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

from benchmarks import ours, processes
from benchmarks.figures import Budget, Figure, Limit, Margin, Row, measured
from benchmarks.programs import driving
from benchmarks.rounds import OURS, STATED, Measure, Side, compare, stated
from benchmarks.simulation import scaling
from benchmarks.simulation.servers import resident

START, STARTS, FIXED = "start of a pod", "start of 8 pods", "a fixed service"
THREADS, ALONE = "4 threads that sleep", "without @kt.batched"
#: Seconds of calls of a measurement.
SECONDS = 1.0
#: Warm calls differ by little: both sides have many short turns instead of few long ones.
WARM_TURNS = 5
ITEMS, ITEM_SECONDS, PODS = 1000, 0.01, 4
CALLERS = 64
SERVICES, PODS_PER_SERVICE = 1000, 20
#: What a controller may have in memory, and its CPU seconds per second of load.
MEMORY_BYTES, DECISION_SECONDS = 150e6, 0.05

WAKE = Figure("from zero to the first answer", "seconds", "s", {START: Margin(0.5)})
WARM = Figure("warm call, service that scales, p50", "p50", "ms", {FIXED: Limit(1.15)}, scale=1e3)
MAP = Figure("1,000 sleeps of 10 ms, 4 pods of 1", "seconds", "s", {THREADS: Limit(1.1)})
BATCHES = Figure("calls per second, @kt.batched", "pace", "/s", {ALONE: Limit(8.0, at_least=True)})
DECISIONS = tuple(
    Figure(f"1,000 services of 20 pods, {trace}", trace, "ms", {STATED: Limit(1.0)}, scale=1e3)
    for trace in scaling.TRACES
)
MEMORY = Figure("memory, 1,000 services at zero", "bytes", "MB", {STATED: Limit(1.0)}, scale=1e-6)


def run(rounds: int) -> list[Row]:
    """Measure each group, whatever becomes of the others.

    Raises:
        GroupsFailedError: Some could not be measured; it has the rows of the others.
    """
    return measured(
        {
            "wakes": lambda: _wakes(rounds),
            "steps": lambda: steps(rounds),
            "warm calls": lambda: _warm_calls(rounds),
            "maps": lambda: _maps(rounds),
            "batches": lambda: _batches(rounds),
            # Once: processor time of the same events each time, and a thousand deploys.
            "decisions": _decisions,
            "memory": _memory,
        }
    )


def _program() -> AbstractContextManager[processes.Program]:
    return ours.program("kubetorch_scale", modules=["naps.py"])


def steps(
    rounds: int,
    start: Callable[[], AbstractContextManager[processes.Program]] = _program,
    *peers: Side,
    has_ledger: bool = True,
) -> list[Row]:
    """The step of load, of the services that `start` deploys: on this machine, or a cluster's.

    Peers have the metric `seconds`, and ours may not be slower. Raises `ProgramError` unless every
    call ends once; pods on this machine have a ledger, which says that it ran once.
    """
    budgets: dict[str, Budget | None] = {STARTS: None}
    budgets |= {peer.name: Limit(1.0) for peer in peers}
    figure = Figure("step of 1 to 200 callers, all 8 pods ready", "seconds", "s", budgets)
    with start() as client:
        sides = [
            _side(OURS, lambda: client.ask("step", has_ledger=has_ledger)),
            _side(STARTS, lambda: client.ask("start", pods=8)),
            *peers,
        ]
        return compare([figure], sides, rounds)


def _wakes(rounds: int) -> list[Row]:
    with _program() as client:
        client.ask("sleep", count=rounds)
        sides = [
            _side(OURS, lambda: client.ask("wake")),
            _side(START, lambda: client.ask("start", pods=1)),
        ]
        return compare([WAKE], sides, rounds)


def _warm_calls(rounds: int) -> list[Row]:
    with _program() as client:
        sides = [
            _side(OURS, lambda: client.ask("scaled", seconds=SECONDS / WARM_TURNS)),
            _side(FIXED, lambda: client.ask("fixed", seconds=SECONDS / WARM_TURNS)),
        ]
        return compare([WARM], sides, WARM_TURNS * rounds)


def _maps(rounds: int) -> list[Row]:
    with _program() as client, ThreadPoolExecutor(PODS) as threads:

        def over_pods() -> dict[str, float]:
            return client.ask("map", pods=PODS, items=ITEMS, seconds=ITEM_SECONDS)

        def over_threads() -> dict[str, float]:
            naps = [ITEM_SECONDS] * ITEMS
            return {"seconds": driving.clock(lambda: list(threads.map(time.sleep, naps)))}

        return compare([MAP], [_side(OURS, over_pods), _side(THREADS, over_threads)], rounds)


def _batches(rounds: int) -> list[Row]:
    with ours.program("kubetorch_batched", modules=["batches.py"]) as client:
        sides = [
            _side(OURS, lambda: client.ask("batched", callers=CALLERS, seconds=SECONDS)),
            _side(ALONE, lambda: client.ask("alone", callers=CALLERS, seconds=SECONDS)),
        ]
        return compare([BATCHES], sides, rounds)


def _decisions() -> list[Row]:
    def simulate() -> dict[str, float]:
        return {trace: scaling.cost(trace, SERVICES, PODS_PER_SERVICE) for trace in scaling.TRACES}

    budgets = stated(dict.fromkeys(scaling.TRACES, DECISION_SECONDS))
    return compare(DECISIONS, [_side(OURS, simulate), budgets], 1)


def _memory() -> list[Row]:
    @contextmanager
    def controller() -> Iterator[Measure]:
        with (
            ours.project(["naps.py"]) as root,
            ours.home() as env,
            processes.program("kubetorch_scale", str(root), env=env) as client,
        ):
            client.ask("many", count=SERVICES)
            yield lambda: {"bytes": sum(map(resident, ours.services(env)))}

    return compare([MEMORY], [Side(OURS, "ours", controller), stated({"bytes": MEMORY_BYTES})], 1)


def _side(name: str, measure: Measure) -> Side:
    """Ours, or a floor, that runs already."""
    return Side(name, "ours" if name == OURS else "floor", lambda: nullcontext(measure))
