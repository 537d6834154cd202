"""Distributed calls: beside a single call, a plain copy of the argument, and `torchrun`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import ours, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.processes import ROOT
from benchmarks.rounds import OURS, Measure, Side, compare, stated
from benchmarks.venvs import Environment

SINGLE = "a single call"
ECHO = "bare processes"
COPY = "copies of it"
TORCHRUN = "torchrun"
#: Seconds that the news of a fault, and a reload, may take.
STATED = {"killed": 1.0, "frozen": 3.0, "reload": 0.6}

CALLS = (
    Figure("call on 8 ranks in 2 pods, p50", "8", "µs", {SINGLE: Limit(3), ECHO: None}, 1e6),
    Figure("call on 64 ranks in 8 pods, p50", "64", "µs", {SINGLE: Limit(15), ECHO: None}, 1e6),
    Figure("10 MB argument to 8 ranks of one pod", "10MB", "ms", {COPY: None}, scale=1e3),
)
FAULTS = (
    Figure("pod killed, typed error", "killed", "ms", {"as stated": Limit(1.0)}, scale=1e3),
    Figure("pod frozen, typed error", "frozen", "ms", {"as stated": Limit(1.0)}, scale=1e3),
)
TORCH = (
    Figure("all-reduce of 64 MB, gloo, 2 ranks", "reduce", "ms", {TORCHRUN: Limit(1.15)}, 1e3),
    Figure("reload of 4 torch workers", "reload", "ms", {"as stated": Limit(1.0)}, scale=1e3),
)


def run(rounds: int) -> list[Row]:
    """Measure, each group by itself."""
    calls = [
        Side(OURS, "ours", lambda: _ours("ranks")),
        Side(SINGLE, "floor", lambda: _ours("single")),
        Side(ECHO, "floor", _echo),
        Side(COPY, "floor", lambda: _ours("copies")),
    ]
    faults = [Side(OURS, "ours", lambda: _ours("faults")), stated(STATED)]
    return [
        *compare(CALLS, calls, rounds),
        *compare(FAULTS, faults, rounds),
        *_torch(max(rounds, 9)),
    ]


def _torch(rounds: int) -> list[Row]:
    version = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
    stamp = (ROOT / "pyproject.toml").read_text()
    torch = Environment("torch", (version, "numpy>=1.26", "-e", str(ROOT)), stamp)
    sides = [
        Side(OURS, "ours", lambda: _ours("torch", torch.python())),
        Side(TORCHRUN, "peer", lambda: _torchrun(torch.python())),
        stated(STATED),
    ]
    return compare(TORCH, sides, rounds)


@contextmanager
def _ours(measurement: str, python: Path = Path(sys.executable)) -> Iterator[Measure]:
    with ours.program("kubetorch_ranks", measurement, python=python) as client:
        yield lambda: client.ask(measurement)


@contextmanager
def _echo() -> Iterator[Measure]:
    with processes.program("ranks_echo") as client:
        yield lambda: client.ask("ranks")


@contextmanager
def _torchrun(python: Path) -> Iterator[Measure]:
    with processes.program("torchrun_reduce", python=python) as client:
        yield lambda: client.ask("torch")
