"""Large arguments and results: an array of 100 MB there and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import ours, peers, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.rounds import OURS, Measure, Side, compare

TCP = "loopback TCP"
SIZE = 100_000_000

FIGURES = (
    Figure(
        "100 MB there and back",
        "rate",
        "MB/s",
        {TCP: Limit(0.8, at_least=True), peers.RAY: None, peers.EARLIER: None},
        scale=1e-6,
    ),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [
        Side(OURS, "ours", _ours),
        Side(TCP, "floor", _tcp),
        Side(peers.RAY, "peer", _ray),
        Side(peers.EARLIER, "peer", _earlier),
    ]
    return compare(FIGURES, sides, rounds)


@contextmanager
def _ours() -> Iterator[Measure]:
    with ours.program("kubetorch_bulk") as client:
        yield _asking(client)


@contextmanager
def _tcp() -> Iterator[Measure]:
    command = [sys.executable, "-m", "benchmarks.programs.tcp_echo", "{fd}"]
    with (
        processes.server(command) as port,
        processes.program("tcp_bulk", str(port)) as client,
    ):
        yield _asking(client)


@contextmanager
def _ray() -> Iterator[Measure]:
    with peers.ray() as driver:
        yield _asking(driver)


@contextmanager
def _earlier() -> Iterator[Measure]:
    with ExitStack() as stack:
        project = stack.enter_context(ours.project())
        port = str(stack.enter_context(peers.earlier_server(project, "echo")))
        python = peers.earlier_python()
        client = processes.program("http_bulk", port, "/echo", python=python)
        # Once: it takes seconds.
        yield _asking(stack.enter_context(client), times=1)


def _asking(client: processes.Program, times: int = 5) -> Measure:
    def measure() -> dict[str, float]:
        seconds = client.ask("bulk", size=SIZE, times=times)["seconds"]
        return {"rate": 2 * SIZE / seconds}

    return measure
