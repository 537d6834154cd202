"""What a user of the benchmarks would deploy."""

from __future__ import annotations

import os
import time
from typing import Any


def add(number: int) -> int:
    """Add one."""
    return number + 1


def echo(array: Any) -> Any:  # noqa: ANN401  # whatever it is
    """Give the argument back."""
    return array


def size(data: bytes) -> int:
    """How long the argument is."""
    return len(data)


class Arrays:
    """Keeps one array."""

    def __init__(self) -> None:
        self.array: Any = None

    def pull(self) -> Any:  # noqa: ANN401  # an array
        """Give the array."""
        return self.array

    def push(self, array: Any) -> None:  # noqa: ANN401  # an array
        """Keep another array instead."""
        self.array = array

    def touch(self, array: Any) -> float:  # noqa: ANN401  # an array
        """Read one number of each page of an array."""
        return float(array[::512].sum())


def item(kind: str, value: Any) -> Any:  # noqa: ANN401  # whatever it is
    """Do what an item of a map does: nothing, wait, compute, or take an array and give it back."""
    if kind == "sleep":
        time.sleep(0.02)
    elif kind == "compute":
        return sum(number * number for number in range(100_000))
    return value


def tick(count: int, interval: float) -> None:
    """Print the time, again and again."""
    for _ in range(count):
        time.sleep(interval)
        print("tick", time.monotonic())


def hold() -> None:
    """Do not end."""
    print("holding", os.getpid())
    time.sleep(600)


def main() -> None:
    """Deploy `add`, and print its first result."""
    import kubetorch as kt  # noqa: PLC0415  # the floors run this file without it

    remote = kt.fn(add).to(kt.Compute(cpus="0.1"))
    print("result", remote(1), flush=True)


if __name__ == "__main__":
    main()
