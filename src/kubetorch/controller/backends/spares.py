"""Spare agents at hand, for pods that will be needed in a moment.

An agent needs a tenth of a second to import what it needs. That time passes while a client still
reads its project, if an agent is started when the controller is, or when the first request for
a new workload comes. There is at most one, and one that nobody took for a minute is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from kubetorch.controller.backends.spare import Spare
from kubetorch.lib import processes
from kubetorch.lib.clock import Clock, Timer

#: Seconds that a spare waits to be taken.
LIFETIME = 60.0


class Spares:
    """The spare, if there is one.

    Args:
        start: Starts one; `None` where there are to be none.
        clock: Says when it has waited too long.
        first: One that waits already.
    """

    def __init__(
        self, start: Callable[[], Spare] | None, *, clock: Clock, first: Spare | None = None
    ) -> None:
        self._start = start
        self._clock = clock
        self._spare: Spare | None = None
        self._expiry: Timer | None = None
        if first is not None:
            self._keep(first)

    @property
    def marks(self) -> frozenset[str]:
        """The marks of spares that wait."""
        return frozenset() if self._spare is None else frozenset({self._spare.mark})

    def prepare(self) -> None:
        """Have one at hand."""
        if self._spare is None and self._start is not None:
            try:
                self._keep(self._start())
            except OSError:
                return  # whoever needs an agent starts one, and meets the error

    def take(self) -> Spare | None:
        """The spare; it belongs to the caller now."""
        spare, self._spare = self._spare, None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return spare

    def close(self) -> None:
        """Drop what waits."""
        spare = self.take()
        if spare is not None:
            spare.drop()
            processes.reap(spare.pid)

    def _keep(self, spare: Spare) -> None:
        self._spare = spare
        self._expiry = self._clock.call_later(LIFETIME, self.close)
