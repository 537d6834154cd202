"""A clock for tests that need not wait."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kubetorch.lib.clock import Timer


class ManualClock:
    """A clock that stands still until it is told how far to go on."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._timers: list[tuple[float, int, _ManualTimer]] = []

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._now

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Run `callback` when the clock has been moved so far."""
        timer = _ManualTimer(callback)
        heapq.heappush(self._timers, (self._now + max(0.0, delay), next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Go on, and run what is due on the way, in order."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._timers)
            timer.run()
        self._now = end


class _ManualTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
