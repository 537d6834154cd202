"""Looking at many pods once for many changes."""

from __future__ import annotations

from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Debounce
from manual_clock import ManualClock


def test_few_pods_are_looked_at_at_once_and_many_for_many_changes_together() -> None:
    clock, looks = ManualClock(), []
    gathering = Debounce(clock, lambda: (looks.append(clock.time()), gathering.close()))
    gathering.changed(LIMITS.debounced_pods - 1)
    assert len(looks) == 1
    for _ in range(10):
        gathering.changed(5000)
    assert len(looks) == 1
    clock.advance(5000 * TIMING.pod_change_delay_seconds)
    assert len(looks) == 2
    gathering.changed(5000)
    clock.advance(5000 * TIMING.pod_change_delay_seconds)
    assert len(looks) == 3


def test_one_that_is_closed_looks_no_more() -> None:
    clock, looks = ManualClock(), []
    gathering = Debounce(clock, lambda: looks.append(1))
    gathering.changed(5000)
    gathering.close()
    clock.advance(10.0)
    assert looks == []
