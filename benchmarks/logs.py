"""Lines: from `print` in a pod to the standard output of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import ours, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.rounds import OURS, Measure, Side, compare

PIPE = "pipe to a parent"

FIGURES = (
    Figure("print to caller, p50", "p50", "ms", {PIPE: None}, scale=1e3),
    Figure("print to caller, p99", "p99", "ms", {PIPE: Limit(100.0)}, scale=1e3),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    return compare(FIGURES, [Side(OURS, "ours", _ours), Side(PIPE, "floor", _pipe)], rounds)


@contextmanager
def _ours() -> Iterator[Measure]:
    with ours.program("kubetorch_logs") as client:
        yield _asking(client)


@contextmanager
def _pipe() -> Iterator[Measure]:
    with ours.project() as root, processes.program("pipe_lines", str(root)) as client:
        yield _asking(client)


def _asking(client: processes.Program) -> Measure:
    return lambda: client.ask("lines", count=500, interval=0.002)
