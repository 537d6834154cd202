"""Sessions: a deploy that reloads 5,000 pods, and what a controller has in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.rounds import OURS, STATED, Measure, Side, compare, stated

BROADCAST = "WebSocket broadcast"

#: Bytes that a controller may have in memory: with 5,000 sessions, and with 100 workloads.
MANY, FEW = float(2**30), 120e6

FIGURES = (
    Figure("5,000 pods, all told to reload", "told", "ms", {BROADCAST: Limit(10.0)}, scale=1e3),
    Figure("5,000 pods, deploy ready", "ready", "ms", {BROADCAST: None}, scale=1e3),
    Figure("memory, 5,000 sessions", "many", "MB", {STATED: Limit(1.0)}, scale=1e-6),
    Figure("memory, 100 workloads", "few", "MB", {STATED: Limit(1.0)}, scale=1e-6),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [
        Side(OURS, "ours", _ours),
        Side(BROADCAST, "floor", _broadcast),
        stated({"many": MANY, "few": FEW}),
    ]
    return compare(FIGURES, sides, rounds)


@contextmanager
def _ours() -> Iterator[Measure]:
    with processes.program("kubetorch_sessions") as client:
        yield lambda: client.ask("sessions")


@contextmanager
def _broadcast() -> Iterator[Measure]:
    with processes.program("broadcast") as client:
        yield lambda: client.ask("sessions")
