"""One function, batched and not: it costs 10 ms, and 0.1 ms for each item."""

from __future__ import annotations

import time

import kubetorch as kt

CALL_SECONDS, ITEM_SECONDS = 0.01, 0.0001


def alone(number: int) -> int:
    """Double a number."""
    [doubled] = _double([number])
    return doubled


@kt.batched()
def batched(numbers: list[int]) -> list[int]:
    """Double numbers."""
    return _double(numbers)


def _double(numbers: list[int]) -> list[int]:
    """Hold the interpreter's lock for as long as it costs."""
    end = time.thread_time() + CALL_SECONDS + ITEM_SECONDS * len(numbers)
    while time.thread_time() < end:
        pass
    return [2 * number for number in numbers]
