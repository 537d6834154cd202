"""Faults: from `kill -9` in the middle of a call to the typed error at its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import ours, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.rounds import OURS, Measure, Side, compare

WAITPID = "waitpid"

FIGURES = (
    Figure("worker killed, typed error", "worker", "ms", {WAITPID: Limit(200.0)}, scale=1e3),
    Figure("agent killed, typed error", "agent", "ms", {WAITPID: Limit(200.0)}, scale=1e3),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [Side(OURS, "ours", _ours), Side(WAITPID, "floor", _waitpid)]
    return compare(FIGURES, sides, rounds)


@contextmanager
def _ours() -> Iterator[Measure]:
    with ours.program("kubetorch_faults") as client:
        yield lambda: client.ask("faults")


@contextmanager
def _waitpid() -> Iterator[Measure]:
    with processes.program("killed_child") as client:
        yield lambda: client.ask("faults")
