"""Outcomes of calls that somebody may ask for again: bounded in time and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kubetorch.wire.calls import Outcome, Raised, Returned

#: Seconds that an outcome is kept.
KEEP_SECONDS = 600.0
#: Bytes of all outcomes together.
LIMIT_BYTES = 64 * 1024 * 1024
#: What one outcome takes beside its payload, in bytes.
_OVERHEAD = 1024


class Outcomes:
    """Outcomes by key, the oldest first out.

    Args:
        clock: Seconds, from any beginning.
        keep_seconds: How long an outcome is kept.
        limit_bytes: Bytes of all of them together; a larger one is not kept at all.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        keep_seconds: float = KEEP_SECONDS,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[object, tuple[float, int, Outcome]] = OrderedDict()
        self._bytes = 0

    def put(self, key: object, outcome: Outcome) -> None:
        """Keep an outcome, whose payload must not be memory of somebody else."""
        self._drop(key)
        size = _OVERHEAD + _size(outcome)
        if size > self._limit_bytes:
            return
        self._kept[key] = (self._clock() + self._keep_seconds, size, outcome)
        self._bytes += size
        self._expire()

    def get(self, key: object) -> Outcome | None:
        """The outcome with this key, if it is still kept."""
        self._expire()
        found = self._kept.get(key)
        return found[2] if found else None

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            key, (expires, _, _) = next(iter(self._kept.items()))
            if expires > now and self._bytes <= self._limit_bytes:
                return
            self._drop(key)

    def _drop(self, key: object) -> None:
        found = self._kept.pop(key, None)
        if found:
            self._bytes -= found[1]


def _size(outcome: Outcome) -> int:
    match outcome:
        case Returned():
            return len(outcome.payload)
        case Raised():
            return len(outcome.failure.message) + len(outcome.failure.traceback)
