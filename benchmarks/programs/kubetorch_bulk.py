"""Arrays, frames and plain values there and back through a function in a pod of this machine.

kubetorch_bulk PROJECT
"""

from __future__ import annotations

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

    def frame(codec: str, kind: str, times: int) -> dict[str, float]:
        return {"seconds": median(codec, kind, _frame(kind), times)}

    def tensor(codec: str, size: int, times: int) -> dict[str, float]:
        import torch  # noqa: PLC0415  # where it is measured

        return {"seconds": median(codec, "tensor", torch.ones(size // 4), times)}

    def plain(codec: str, times: int) -> dict[str, float]:
        return {"seconds": median(codec, "plain", _plain(), times)}

    answer({"bulk": bulk, "array": array, "frame": frame, "tensor": tensor, "plain": plain})
    echo.teardown()
    through_arrow.teardown()


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
