"""Time as a parameter: what decides by time takes a clock, so that its tests need not wait."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> None:
        """Do not run it; nothing happens if it ran."""


class Clock(Protocol):
    """The time of day, and callbacks later."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Run `callback` after so many seconds."""


class SystemClock:
    """The machine's clock and the running event loop's timers."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Run `callback` in the running loop after so many seconds."""
        return asyncio.get_running_loop().call_later(max(0.0, delay), callback)


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
