"""Looking at many pods once for many changes of them."""

from __future__ import annotations

from collections.abc import Callable

from kubetorch.lib.clock import Clock, Timer

#: From so many pods on changes are gathered, for so many seconds for each pod.
MANY, DELAY = 100, 20e-6


class Gathering:
    """Does something at once where there are few pods, else for many changes together.

    Args:
        clock: For the delay.
        look: What is done.
    """

    def __init__(self, clock: Clock, look: Callable[[], None]) -> None:
        self._clock = clock
        self._look = look
        self._timer: Timer | None = None

    def changed(self, pods: int) -> None:
        """One of so many pods is different."""
        if pods < MANY:
            self._look()
        elif self._timer is None:
            self._timer = self._clock.call_later(pods * DELAY, self._look)

    def close(self) -> None:
        """What was waited for is done, or of no use any more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
