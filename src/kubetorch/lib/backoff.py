"""The time until the next attempt: delays as plain iterators, and the moment to give up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


def exponential(*, first: float, factor: float = 2.0, limit: float) -> Iterator[float]:
    """Endless delays in seconds: `first`, then `factor` times the one before, up to `limit`."""
    delay = first
    while True:
        yield min(delay, limit)
        delay = min(delay * factor, limit)


def jittered(*, first: float, limit: float) -> Iterator[float]:
    """The same delays, each shortened by up to a half: many clients come at different times."""
    import random  # noqa: PLC0415  # takes 3 ms, and many programs never wait

    for delay in exponential(first=first, limit=limit):
        yield delay * random.uniform(0.5, 1.0)


class Patience:
    """The time for which a failing operation is tried again. Progress renews it.

    The time begins with the first failure after progress, so an operation that went well for hours
    and then breaks has all of it.
    """

    def __init__(
        self,
        seconds: float,
        *,
        first: float,
        limit: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._first, self._limit = first, limit
        self._now = now
        self.renew()

    def renew(self) -> None:
        self._failing_since: float | None = None
        self._pauses = exponential(first=self._first, limit=self._limit)

    def pause(self) -> float | None:
        """After a failure: seconds to wait before the next attempt, `None` to give up."""
        now, pause = self._now(), next(self._pauses)
        if self._failing_since is None:
            self._failing_since = now
        return pause if now + pause - self._failing_since <= self._seconds else None
