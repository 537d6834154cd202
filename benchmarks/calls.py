"""Small calls: latency of one caller, throughput of 32, and what spawning one takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import ours, peers, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.rounds import OURS, Measure, Side, compare

ECHO = "HTTP echo"
CALL = "a call"
SECONDS = 1.0
CALLERS = 32
# 60 bytes, as a call has: `{"args": [1], "kwargs": {}}` and room for a name.
BODY = '{"args": [1], "kwargs": {}}'.ljust(60)

FIGURES = (
    Figure(
        "call, p50",
        "p50",
        "ms",
        {ECHO: Limit(1.45), peers.RAY: Limit(0.3), peers.EARLIER: None},
        scale=1e3,
    ),
    Figure("call, p99", "p99", "ms", {ECHO: None, peers.RAY: None, peers.EARLIER: None}, scale=1e3),
    Figure("spawn, p50", "spawn", "ms", {CALL: Limit(2.5)}, scale=1e3),
    Figure(
        "calls per second, 32 threads",
        "threads",
        "/s",
        {
            ECHO: None,
            peers.RAY: Limit(3.5, at_least=True),
            peers.EARLIER: Limit(20.0, at_least=True),
        },
    ),
    Figure(
        "calls per second, 32 asyncio tasks",
        "tasks",
        "/s",
        {
            ECHO: None,
            peers.RAY: Limit(1.0, at_least=True),
            peers.EARLIER: Limit(10.0, at_least=True),
        },
    ),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [
        Side(OURS, "ours", _ours),
        Side(ECHO, "floor", _echo),
        Side(CALL, "floor", _call),
        Side(peers.RAY, "peer", _ray),
        Side(peers.EARLIER, "peer", _earlier),
    ]
    return compare(FIGURES, sides, rounds)


@contextmanager
def _ours() -> Iterator[Measure]:
    with ours.program("kubetorch_calls") as client:
        yield _asking(client)


@contextmanager
def _call() -> Iterator[Measure]:
    with ours.program("kubetorch_calls") as client:
        yield lambda: {"spawn": client.ask("latency", seconds=SECONDS)["p50"]}


@contextmanager
def _echo() -> Iterator[Measure]:
    command = [sys.executable, "-m", "uvicorn", "benchmarks.programs.echo_app:app", "--fd", "{fd}"]
    options = ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--lifespan", "off"]
    options += processes.KEEP_ALIVE
    with ExitStack() as stack:
        port = stack.enter_context(processes.server([*command, *options]))
        yield _asking(stack.enter_context(processes.program("http_calls", str(port), "/", BODY)))


@contextmanager
def _ray() -> Iterator[Measure]:
    with peers.ray() as driver:
        yield _asking(driver)


@contextmanager
def _earlier() -> Iterator[Measure]:
    with ExitStack() as stack:
        project = stack.enter_context(ours.project())
        port = stack.enter_context(peers.earlier_server(project, "add"))
        yield _asking(stack.enter_context(processes.program("http_calls", str(port), "/add", BODY)))


def _asking(client: processes.Program) -> Measure:
    return lambda: client.ask("calls", seconds=SECONDS, callers=CALLERS)
