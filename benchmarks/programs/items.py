"""The items that all sides of `benchmarks.map` run, and over how many processes."""

from __future__ import annotations

from typing import Any

import numpy

#: Pods, and processes in each.
SHAPES = ((1, 1), (1, 4), (4, 1), (4, 4))
#: Items of a measurement.
COUNTS = {"nothing": 2000, "sleep": 80, "compute": 160, "array": 16}
#: Numbers of 8 bytes in an array.
ARRAY = 500_000


def arguments(kind: str) -> tuple[list[str], list[Any]]:
    """What `item` of the project is called with: its first arguments, and its second ones."""
    count = COUNTS[kind]
    values = [numpy.ones(ARRAY)] * count if kind == "array" else list(range(count))
    return [kind] * count, values
