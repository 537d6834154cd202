"""Time as a parameter: code that decides by time takes a clock, so that its tests need not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> None:
        """Do not run the callback; no effect if it has run."""


class Clock(Protocol):
    """The time of day, and callbacks later."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Run `callback` after so many seconds."""


class SystemClock:
    """The machine's clock and the running event loop's timers."""

    def time(self) -> float:
        return time.time()

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, delay), callback)
