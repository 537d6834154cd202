from __future__ import annotations

from kubetorch.lib.backoff import Patience


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


def fail_to_the_end(patience: Patience, clock: Clock) -> list[float]:
    """The pauses, each of which passes, until there is to be no other attempt."""
    pauses = []
    while (pause := patience.pause()) is not None:
        pauses.append(pause)
        clock.time += pause
    return pauses


def test_attempts_have_longer_pauses_until_the_patience_is_over() -> None:
    clock = Clock()
    patience = Patience(10.0, first=1.0, limit=4.0, now=clock.now)
    assert fail_to_the_end(patience, clock) == [1.0, 2.0, 4.0]


def test_what_goes_well_for_hours_and_then_fails_has_all_of_the_patience() -> None:
    clock = Clock()
    patience = Patience(10.0, first=1.0, limit=4.0, now=clock.now)
    clock.time += 3600
    assert fail_to_the_end(patience, clock) == [1.0, 2.0, 4.0]


def test_progress_renews_patience_and_pauses() -> None:
    clock = Clock()
    patience = Patience(10.0, first=1.0, limit=4.0, now=clock.now)
    fail_to_the_end(patience, clock)
    patience.renew()
    assert fail_to_the_end(patience, clock) == [1.0, 2.0, 4.0]


def test_without_patience_nothing_is_tried_again() -> None:
    assert Patience(0.0, first=0.1, limit=1.0).pause() is None
