"""Lines of logs without a gap and without repetition, over connections that break. Pure."""

from __future__ import annotations

from collections import Counter, deque

from kubetorch.wire.messages import DeployLog

#: Seconds by which a line may be stamped earlier than one before it: several processes write.
_DISORDER = 5.0
#: Lines of a pod that are remembered.
_MEMORY = 10_000

_Key = tuple[float, str, str]


class Known:
    """Which lines of which pods are known already.

    After `begin_again` the lines come once more from somewhere before the break; `is_new` is then
    false for those that came before, and for those that are older than all that came.

    Args:
        started: When following began, in seconds since the epoch.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._is_first_time = True
        self._recent: dict[str, deque[_Key]] = {}
        self._expected: dict[str, Counter[_Key]] = {}
        self._first: dict[str, float] = {}
        self._newest: dict[str, float] = {}

    @property
    def count(self) -> int:
        """How many lines are remembered: so many have to come again to be told apart."""
        return sum(len(keys) for keys in self._recent.values())

    def begin_again(self) -> None:
        """Lines that came before may come once more."""
        self._is_first_time = False
        self._expected = {pod: Counter(keys) for pod, keys in self._recent.items()}

    def is_new(self, line: DeployLog) -> bool:
        """Whether a line did not come before; if so it is known from now on."""
        pod, key = line.pod, (line.time, line.source, line.text)
        if not self._is_first_time:
            # Lines of one burst may have the same time, so also the first one's has an end.
            if line.time <= self._first.get(pod, self._started):
                return False
            if line.time < self._newest.get(pod, self._started) - _DISORDER:
                return False
            expected = self._expected.get(pod)
            if expected is not None and expected[key] > 0:
                expected[key] -= 1
                return False
        self._recent.setdefault(pod, deque(maxlen=_MEMORY)).append(key)
        self._first.setdefault(pod, line.time)
        self._newest[pod] = max(line.time, self._newest.get(pod, line.time))
        return True
