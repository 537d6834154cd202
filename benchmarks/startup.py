"""Starts and memory: the import, the CLI, the first result, and what stays in memory."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import ours, peers, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.programs import driving
from benchmarks.rounds import OURS, STATED, Measure, Side, compare, stated

BARE = "python -c pass"
ASYNCIO = "import asyncio"
TYPER = "import typer"
TIMES = 5

FIGURES = (
    Figure(
        "import kubetorch, above bare python",
        "import",
        "ms",
        {ASYNCIO: Limit(1.9), peers.EARLIER: Limit(0.067)},
        scale=1e3,
        difference=True,
    ),
    Figure("kt --help", "help", "ms", {TYPER: Limit(4.5), peers.EARLIER: None}, scale=1e3),
    Figure("cold start, first result", "cold", "ms", {BARE: Limit(45.0)}, scale=1e3),
    Figure("warm start, first result", "warm", "ms", {BARE: None}, scale=1e3),
    Figure(
        "memory of a pod (agent, zygote, worker)",
        "pod",
        "MB",
        {STATED: Limit(1.0), BARE: None},
        scale=1e-6,
    ),
    Figure(
        "memory of the local service",
        "service",
        "MB",
        {STATED: Limit(1.0), BARE: None},
        scale=1e-6,
    ),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [
        Side(OURS, "ours", _ours),
        Side(BARE, "floor", _bare),
        Side(ASYNCIO, "floor", _asyncio),
        Side(TYPER, "floor", _typer),
        # Bytes are the same on all machines, so these budgets are checked as they are written.
        stated({"pod": 60e6, "service": 80e6}),
        Side(peers.EARLIER, "peer", _earlier),
    ]
    return compare(FIGURES, sides, rounds)


@contextmanager
def _ours() -> Iterator[Measure]:
    with ours.project() as root:
        yield lambda: {
            "import": _import(sys.executable, "kubetorch"),
            "help": _ends([Path(sys.executable).with_name("kt"), "--help"]),
            **_first_results(root),
        }


@contextmanager
def _bare() -> Iterator[Measure]:
    def measure() -> dict[str, float]:
        seconds = _ends([sys.executable, "-c", "pass"])
        memory = _waiting_memory()
        return {"cold": seconds, "warm": seconds, "pod": memory, "service": memory}

    yield measure


@contextmanager
def _asyncio() -> Iterator[Measure]:
    yield lambda: {"import": _import(sys.executable, "asyncio")}


@contextmanager
def _typer() -> Iterator[Measure]:
    yield lambda: {"help": _ends([sys.executable, "-c", "import typer"])}


@contextmanager
def _earlier() -> Iterator[Measure]:
    python = peers.earlier_python()
    command: list[str | Path] = [python, "-c", "from kubetorch.cli import app; app()", "--help"]
    yield lambda: {"import": _import(python, "kubetorch"), "help": _ends(command)}


def _import(python: str | Path, module: str) -> float:
    """Seconds for an import, above an interpreter that imports nothing."""
    return _ends([python, "-c", f"import {module}"]) - _ends([python, "-c", "pass"])


def _ends(command: Sequence[str | Path]) -> float:
    """Seconds until a command has ended."""
    return driving.median(lambda: processes.run(command), TIMES)


def _first_results(project: Path) -> dict[str, float]:
    """Of a program that deploys and calls: without a local service, then run again with it."""
    with ours.home() as env:
        cold = _first_result(project, env)
        warm = statistics.median(_first_result(project, env) for _ in range(TIMES))
        pod, service = _memory(env)
    return {"cold": cold, "warm": warm, "pod": pod, "service": service}


def _first_result(project: Path, env: Mapping[str, str]) -> float:
    """Seconds from the start of a program until it has printed the first result."""
    begin = time.perf_counter()
    command = [sys.executable, "service.py"]
    with processes.speaking(command, "result 2", env=env, cwd=project):
        return time.perf_counter() - begin


def _memory(env: Mapping[str, str]) -> tuple[float, float]:
    """Bytes of the pod, and of the local service, of a home."""
    services, pod, service = ours.services(env), 0.0, 0.0
    for process in ours.of(env):
        with suppress(psutil.NoSuchProcess):
            if process in services:
                service += _proportional(process)
            else:
                pod += _proportional(process)
    return pod, service


def _waiting_memory() -> float:
    """Bytes of an interpreter that does nothing."""
    code = "print(flush=True); import time; time.sleep(600)"
    with processes.speaking([sys.executable, "-c", code]) as (_, process):
        memory_bytes = _proportional(psutil.Process(process.pid))
        process.terminate()
    return memory_bytes


def _proportional(process: psutil.Process) -> float:
    """Its memory, shared pages divided by how many share them; on macOS only what it shares not."""
    memory = process.memory_full_info()
    return float(getattr(memory, "pss", memory.uss))
