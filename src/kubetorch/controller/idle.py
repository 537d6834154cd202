"""When a workload is idle, by the activity that its pods report.

Idle is a workload whose pods all say that no call runs, and have said so for the whole time. A pod
that is not heard of may be busy: as long as one is away, the workload is not idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from kubetorch.lib.clock import Clock, Timer
from kubetorch.specs import quantity
from kubetorch.wire.messages import Activity

#: Seconds that the news of a call may take to get here; a service is given them beyond its time.
REPORTING = 1.0
#: Seconds: how exactly the time of the last call is kept.
STEP = 1.0


def patience(ttl: str) -> float:
    """Seconds after which a workload with this `inactivity_ttl` is torn down."""
    return quantity.seconds(ttl) + REPORTING


def active_until(activities: Iterable[Activity | None], *, since: float) -> float | None:
    """When the last call ended; `None` when one runs, or may run.

    Args:
        activities: What each pod said last; `None` for one that is away.
        since: What counts as activity where there was no call yet: the last deploy.
    """
    last = since
    for activity in activities:
        if activity is None or activity.calls > 0:
            return None
        last = max(last, activity.last)
    return last


def seconds_left(
    activities: Iterable[Activity | None], *, ttl: float, since: float, now: float
) -> float | None:
    """How long until the workload is torn down if nothing happens; `None` when it is not idle.

    A clock that was set back makes it wait at most one `ttl` longer.
    """
    last = active_until(activities, since=since)
    if last is None:
        return None
    return max(0.0, min(ttl, last + ttl - now))


class Activities:
    """What the pods of a workload said last of how busy they are, however many they are."""

    def __init__(self) -> None:
        self._pods: Set[str] = frozenset()
        self._quiet: set[str] = set()
        self._last = 0.0

    def keep(self, pods: Set[str]) -> None:
        """These are the pods now."""
        self._pods = pods
        self._quiet &= pods

    def heard(self, pod: str, activity: Activity | None) -> None:
        """What a pod says; `None` when it is away."""
        if activity is not None:
            self._last = max(self._last, activity.last)
        if activity is None or activity.calls > 0:
            self._quiet.discard(pod)
        elif pod in self._pods:
            self._quiet.add(pod)

    def seconds_left(self, *, ttl: float, since: float, now: float) -> float | None:
        """As the function above."""
        busy = [None] if len(self._quiet) < len(self._pods) else []
        return seconds_left(busy, ttl=ttl, since=max(since, self._last), now=now)


class IdleWatch:
    """Notices that a workload has been idle for too long.

    Args:
        clock: For the time, and to look again.
        seconds_left: As the function above; asked again whenever it may have changed.
        on_idle: Called when nothing is left.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        seconds_left: Callable[[], float | None],
        on_idle: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._seconds_left = seconds_left
        self._on_idle = on_idle
        self._timer: Timer | None = None

    def update(self) -> None:
        """Something happened."""
        self.close()
        left = self._seconds_left()
        if left is not None:
            self._timer = self._clock.call_later(left, self._check)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._seconds_left() == 0.0:
            self._on_idle()
        else:
            self.update()
