"""Large arguments and results: arrays, frames and plain values there and back."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from benchmarks import ours, peers, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.rounds import OURS, Measure, Side, compare

TCP = "loopback TCP"
PICKLE = "pickle 5"
ARROW = "Arrow IPC"
JSON = "strict JSON"
ARGUMENT = "as an argument"
SIZE = 100_000_000

#: Bytes of arrays of numbers, and how often one travels for a measurement.
ARRAYS = {
    "1 KB": (1_000, 300),
    "1 MB": (1_000_000, 30),
    "100 MB": (SIZE, 3),
    "1 GB": (1_000_000_000, 1),
}
#: Arrays that travel in one direction, and bytes of the one that a loop changes.
DIRECTIONS = ("1 KB", "1 MB", "100 MB")
LOOP_SIZE, LOOP_TIMES = 4_000_000, 30
#: An array that many calls take, as a reference.
SHARED = {"size": 32_000_000, "calls": 20, "times": 3}
#: Kinds of frames, and how often one travels.
FRAMES = {"pandas": "frame of pandas", "polars": "frame of polars", "arrow": "table of Arrow"}
FRAME_TIMES, PLAIN_TIMES, TENSOR_TIMES = 10, 3, 3
HAS_TORCH = importlib.util.find_spec("torch") is not None
#: No slower than what it was before, but for what two measurements of the same differ; what Arrow
#: says of its buffers is validated.
_NO_SLOWER, _VALIDATED = Limit(1.1), Limit(1.25)

FIGURES = (
    Figure(
        "100 MB there and back",
        "rate",
        "MB/s",
        {
            TCP: Limit(0.8, at_least=True),
            peers.RAY: Limit(0.5, at_least=True),
            peers.EARLIER: None,
        },
        scale=1e-6,
    ),
    Figure("4 MB pulled, added to, pushed", "loop", "ms", {peers.RAY: Limit(1.0)}, scale=1e3),
    Figure(
        "32 MB, by kt.ref to 20 calls",
        "shared",
        "ms",
        {peers.RAY: Limit(1.5), ARGUMENT: Limit(0.3)},
        scale=1e3,
    ),
    *(
        Figure(f"array of {size}", size, "ms", {PICKLE: _NO_SLOWER, ARROW: None}, scale=1e3)
        for size in ARRAYS
    ),
    *(
        Figure(f"{size} as {name}", f"{name} of {size}", "ms", {PICKLE: _NO_SLOWER}, scale=1e3)
        for size in DIRECTIONS
        for name in ("argument", "result")
    ),
    *([Figure("tensor of 100 MB", "tensor", "ms", {PICKLE: _NO_SLOWER}, scale=1e3)] * HAS_TORCH),
    *(
        Figure(
            f"{name}, 8 MB",
            kind,
            "ms",
            {PICKLE: _VALIDATED if kind == "arrow" else _NO_SLOWER, ARROW: None},
            scale=1e3,
        )
        for kind, name in FRAMES.items()
    ),
    Figure("plain values, 10 MB of JSON", "plain", "ms", {JSON: Limit(1.8)}, scale=1e3),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [
        Side(OURS, "ours", _ours("json")),
        Side(TCP, "floor", _tcp),
        Side(PICKLE, "peer", _ours("pickle")),
        Side(ARROW, "peer", _ours("arrow")),
        Side(JSON, "floor", _ours("strict")),
        Side(ARGUMENT, "peer", _arguments),
        Side(peers.RAY, "peer", _ray),
        Side(peers.EARLIER, "peer", _earlier),
    ]
    return compare(FIGURES, sides, rounds)


def _ours(codec: str) -> Callable[[], AbstractContextManager[Measure]]:
    """A program of its own for each codec: none finds memory that another one has used."""

    @contextmanager
    def start() -> Iterator[Measure]:
        with ours.program("kubetorch_bulk", modules=["arrow_streams.py"]) as client:
            yield lambda: _measured(client, codec)

    return start


def _measured(client: processes.Program, codec: str) -> dict[str, float]:
    def seconds(question: str, **parameters: object) -> float:
        return client.ask(question, codec=codec, **parameters)["seconds"]

    seconds_by_name: dict[str, float] = {}
    if codec == "json":
        seconds_by_name |= {**_asking(client)(), **_sharing(client, codec)}
        seconds_by_name |= _looping(client)
    if codec in ("json", "strict"):
        seconds_by_name["plain"] = seconds("plain", times=PLAIN_TIMES)
    if codec != "strict":
        for name, (size, times) in ARRAYS.items():
            seconds_by_name[name] = seconds("array", size=size, times=times)
    if codec in ("json", "pickle"):
        for name in DIRECTIONS:
            size, times = ARRAYS[name]
            answer = client.ask("directions", codec=codec, size=size, times=times)
            seconds_by_name |= {f"{key} of {name}": taken for key, taken in answer.items()}
    if codec != "strict":
        for kind in FRAMES:
            seconds_by_name[kind] = seconds("frame", kind=kind, times=FRAME_TIMES)
    if HAS_TORCH and codec in ("json", "pickle"):
        seconds_by_name["tensor"] = seconds("tensor", size=SIZE, times=TENSOR_TIMES)
    return seconds_by_name


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
        yield lambda: {**_asking(driver)(), **_looping(driver), **_sharing(driver)}


@contextmanager
def _earlier() -> Iterator[Measure]:
    with ExitStack() as stack:
        project = stack.enter_context(ours.project())
        port = str(stack.enter_context(peers.earlier_server(project, "echo")))
        python = peers.earlier_python()
        client = processes.program("http_bulk", port, "/echo", python=python)
        # Once: it takes seconds.
        yield _asking(stack.enter_context(client), times=1)


@contextmanager
def _arguments() -> Iterator[Measure]:
    with ours.program("kubetorch_bulk", modules=["arrow_streams.py"]) as client:
        yield lambda: _sharing(client, "argument")


def _sharing(client: processes.Program, *codec: str) -> dict[str, float]:
    parameters: dict[str, Any] = {"codec": codec[0]} if codec else {}
    return {"shared": client.ask("shared", **parameters, **SHARED)["seconds"]}


def _looping(client: processes.Program) -> dict[str, float]:
    return {"loop": client.ask("loop", size=LOOP_SIZE, times=LOOP_TIMES)["seconds"]}


def _asking(client: processes.Program, times: int = 5) -> Measure:
    def measure() -> dict[str, float]:
        seconds = client.ask("bulk", size=SIZE, times=times)["seconds"]
        return {"rate": 2 * SIZE / seconds}

    return measure
