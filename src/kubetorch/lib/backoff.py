"""How long to wait before the next attempt: delays as plain iterators."""

from __future__ import annotations

import random
from collections.abc import Iterator


def exponential(*, first: float, factor: float = 2.0, limit: float) -> Iterator[float]:
    """Endless delays in seconds: `first`, then `factor` times the one before, up to `limit`."""
    delay = first
    while True:
        yield min(delay, limit)
        delay = min(delay * factor, limit)


def jittered(delays: Iterator[float]) -> Iterator[float]:
    """Each delay shortened by up to a half, so that many clients do not come at the same time."""
    for delay in delays:
        yield delay * random.uniform(0.5, 1.0)
