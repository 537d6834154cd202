"""An array there and back through a function in a pod of this machine.

kubetorch_bulk PROJECT
"""

from __future__ import annotations

import importlib
import sys

import numpy

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Deploy, then answer."""
    [project] = arguments()
    sys.path.insert(0, project)
    compute = kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"])
    service = kt.fn(importlib.import_module("service").echo).to(compute)
    echo = service.options(serialization="pickle")

    def bulk(size: int, times: int) -> dict[str, float]:
        array = numpy.ones(size, dtype=numpy.uint8)
        return {"seconds": driving.median(lambda: echo(array), times)}

    answer({"bulk": bulk})
    service.teardown()


if __name__ == "__main__":
    main()
