"""Arrays, frames and plain values there and back through a function in a pod of this machine.

kubetorch_bulk PROJECT
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pandas
import polars
import pyarrow

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments

#: Rows of a frame: numbers, texts, moments and categories.
ROWS = 200_000
#: Dictionaries of the plain values: 10 MB of JSON.
OBJECTS = 100_000


def main() -> None:
    """Deploy, then answer."""
    [project] = arguments()
    sys.path.insert(0, project)
    allowed = ["json", "pickle"]
    service, streams = map(importlib.import_module, ("service", "arrow_streams"))
    echo = kt.fn(service.echo).to(kt.Compute(cpus="0.1", allowed_serialization=allowed))
    arrays = kt.cls(service.Arrays).to(kt.Compute(cpus="0.1", allowed_serialization=allowed))
    through_arrow = kt.fn(streams.echo, name="through-arrow").to(kt.Compute(cpus="0.1"))
    pickled = echo.options(serialization="pickle")
    strict = echo.options(serialization="none")

    def call_by(codec: str, kind: str, value: Any) -> Callable[[], object]:  # noqa: ANN401
        if codec == "arrow":
            return lambda: streams.read(kind, through_arrow(kind, streams.write(kind, value)))
        called = {"json": echo, "pickle": pickled, "strict": strict}[codec]
        return lambda: called(value)

    def median(codec: str, kind: str, value: Any, times: int) -> float:  # noqa: ANN401
        call = call_by(codec, kind, value)
        call()
        return driving.median(call, times)

    def bulk(size: int, times: int) -> dict[str, float]:
        array = numpy.ones(size, dtype=numpy.uint8)
        return {"seconds": median("json", "array", array, times)}

    def array(codec: str, size: int, times: int) -> dict[str, float]:
        return {"seconds": median(codec, "array", numpy.ones(size // 8), times)}

    def directions(codec: str, size: int, times: int) -> dict[str, float]:
        return _directions(arrays, codec, size, times)

    def loop(size: int, times: int) -> dict[str, float]:
        return _loop(arrays, size, times)

    def frame(codec: str, kind: str, times: int) -> dict[str, float]:
        return {"seconds": median(codec, kind, _frame(kind), times)}

    def tensor(codec: str, size: int, times: int) -> dict[str, float]:
        import torch  # noqa: PLC0415  # where it is measured

        return {"seconds": median(codec, "tensor", torch.ones(size // 4), times)}

    def plain(codec: str, times: int) -> dict[str, float]:
        return {"seconds": median(codec, "plain", _plain(), times)}

    answer(
        {
            "bulk": bulk,
            "array": array,
            "directions": directions,
            "loop": loop,
            "shared": functools.partial(_shared, arrays),
            "frame": frame,
            "tensor": tensor,
            "plain": plain,
        }
    )
    echo.teardown()
    arrays.teardown()
    through_arrow.teardown()


def _directions(arrays: Any, codec: str, size: int, times: int) -> dict[str, float]:  # noqa: ANN401
    """The times of an array as an argument, and as a result."""
    pull, push = arrays.pull, arrays.push
    if codec == "pickle":
        pull, push = (method.options(serialization="pickle") for method in (pull, push))
    array = numpy.ones(size // 8)
    push(array)
    pull()
    return {
        "argument": driving.median(lambda: push(array), times),
        "result": driving.median(pull, times),
    }


def _loop(arrays: Any, size: int, times: int) -> dict[str, float]:  # noqa: ANN401  # of kt.cls
    def step() -> None:
        arrays.push(arrays.pull() + 1)

    arrays.push(numpy.ones(size // 8))
    step()
    return {"seconds": driving.median(step, times)}


def _shared(
    arrays: Any,  # noqa: ANN401  # of kt.cls
    codec: str,
    size: int,
    calls: int,
    times: int,
) -> dict[str, float]:
    """The time of calls with one array."""
    array = numpy.ones(size // 8)

    def call_all() -> None:
        value = array if codec == "argument" else kt.ref(array)
        for _ in range(calls):
            arrays.touch(value)

    call_all()
    return {"seconds": driving.median(call_all, times)}


def _frame(kind: str) -> Any:  # noqa: ANN401  # of the library that is measured
    numbers = numpy.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "id": numpy.arange(ROWS),
            "x": numbers.random(ROWS),
            "name": [f"user{number}" for number in range(ROWS)],
            "when": pandas.date_range("2020", periods=ROWS, freq="s"),
            "kind": pandas.Categorical.from_codes(numbers.integers(0, 3, ROWS), ["a", "b", "c"]),
        }
    )
    if kind == "polars":
        return polars.from_pandas(frame)
    return pyarrow.Table.from_pandas(frame) if kind == "arrow" else frame


def _plain() -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "name": f"user{number}",
            "score": number / 7,
            "tags": ["a", "b", "c"],
            "is_on": True,
            "parent": None,
        }
        for number in range(OBJECTS)
    ]


if __name__ == "__main__":
    main()
