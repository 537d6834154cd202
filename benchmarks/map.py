"""Maps: many items of nothing, that wait, that compute and with arrays, over 1 to 16 processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from benchmarks import ours, peers, processes
from benchmarks.figures import Budget, Figure, Limit, Row
from benchmarks.programs.items import COUNTS, SHAPES
from benchmarks.rounds import OURS, Measure, Side, compare

POOL = "ProcessPoolExecutor"
RAY = "Ray"
LOOP = "plain loop"
#: What a figure is called, its unit, and what it may be beside a pool and Ray over 4 processes.
KINDS: dict[str, tuple[str, str, Budget | None, Budget | None]] = {
    "nothing": ("2,000 items of nothing", "ms", Limit(2.0), Limit(0.6)),
    "sleep": ("80 sleeps of 20 ms", "ms", None, None),
    "compute": ("CPU-bound items per second", "/s", Limit(0.8, at_least=True), None),
    "array": ("16 arrays of 4 MB there and back", "ms", None, None),
}


def _figure(kind: str, replicas: int, num_proc: int) -> Figure:
    name, unit, beside_pool, beside_ray = KINDS[kind]
    has_budget = replicas * num_proc == 4
    pods = f"{replicas} pod{'s' if replicas > 1 else ''}"
    return Figure(
        f"{name}, {pods} of {num_proc}",
        f"{kind} {replicas}x{num_proc}",
        unit,
        {
            POOL: beside_pool if has_budget else None,
            RAY: beside_ray if has_budget else None,
            LOOP: None,
        },
        scale=1e3 if unit == "ms" else 1.0,
    )


FIGURES = tuple(_figure(kind, *shape) for kind in KINDS for shape in SHAPES)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [
        Side(OURS, "ours", lambda: _asking(ours.program("kubetorch_map"))),
        Side(POOL, "peer", lambda: _asking(processes.program("pool_map", "pool"))),
        Side(RAY, "peer", lambda: _asking(peers.ray("ray_map"))),
        Side(LOOP, "floor", lambda: _asking(processes.program("pool_map", "loop"))),
    ]
    return compare(FIGURES, sides, rounds)


@contextmanager
def _asking(started: AbstractContextManager[processes.Program]) -> Iterator[Measure]:
    with started as client:
        yield lambda: _measured(client.ask)


def _measured(ask: Callable[..., dict[str, float]]) -> dict[str, float]:
    paces = {}
    for replicas, num_proc in SHAPES:
        for kind, (_, unit, *_) in KINDS.items():
            seconds = ask("map", kind=kind, replicas=replicas, num_proc=num_proc)["seconds"]
            value = seconds if unit == "ms" else COUNTS[kind] / seconds
            paces[f"{kind} {replicas}x{num_proc}"] = value
    return paces
