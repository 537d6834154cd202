"""When the window of a broadcast closes, and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.holders import Windows
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError
from kubetorch.wire.data import JoinWindow
from kubetorch.wire.transports import Offer


class Group:
    def __init__(self) -> None:
        self.windows = Windows()
        self.now = 0.0

    def is_closed_for(self, participant: str, **options: Any) -> bool:
        join = JoinWindow(group="g", participant=participant, **options)
        return self.windows.join("ns", join, self.now).is_closed


def test_the_first_condition_that_is_met_closes_the_window_for_all() -> None:
    group = Group()
    assert not group.is_closed_for("a", timeout=10.0, world_size=3)
    assert not group.is_closed_for("b", ips=("10.0.0.1", "10.0.0.2"), ip="10.0.0.1")
    assert group.is_closed_for("c", ips=("10.0.0.1",), ip="10.0.0.9")
    assert group.is_closed_for("a", timeout=10.0, world_size=3)
    assert group.is_closed_for("b", ips=("10.0.0.1", "10.0.0.2"), ip="10.0.0.1")


def test_a_number_of_participants_closes_the_window() -> None:
    group = Group()
    assert not group.is_closed_for("a", world_size=2)
    assert not group.is_closed_for("a", world_size=2)
    assert group.is_closed_for("b", timeout=99.0)
    assert group.is_closed_for("a", world_size=2)


def test_time_closes_the_window_for_those_that_are_there() -> None:
    group = Group()
    assert not group.is_closed_for("a", timeout=10.0)
    group.now = 9.9
    assert not group.is_closed_for("b", world_size=5)
    assert not group.is_closed_for("a", timeout=10.0)
    group.now = 10.0
    assert group.is_closed_for("b", world_size=5)


def test_who_comes_after_the_end_opens_the_next_window() -> None:
    group = Group()
    group.is_closed_for("a", world_size=2)
    assert group.is_closed_for("b", world_size=2)
    assert not group.is_closed_for("c", world_size=2)
    assert group.is_closed_for("a", world_size=2)
    assert group.is_closed_for("d", world_size=2)
    assert group.is_closed_for("c", world_size=2)


def test_a_participant_that_asks_no_more_does_not_count() -> None:
    group = Group()
    group.is_closed_for("a", world_size=2)
    group.now = TIMING.window_silence_seconds + 1
    assert not group.is_closed_for("b", world_size=2)


def test_a_group_has_so_many_participants_at_most() -> None:
    group = Group()
    for number in range(LIMITS.manifest_holders):
        group.is_closed_for(str(number), timeout=10.0)
    with pytest.raises(DataStoreError, match="participants"):
        group.is_closed_for("more", timeout=10.0)


def test_all_participants_of_a_closed_window_hear_the_same_offers() -> None:
    windows = Windows()

    def offers(participant: str, now: float, offer: Offer | None) -> dict[str, Offer]:
        join = JoinWindow(group="g", participant=participant, world_size=3, offer=offer)
        return windows.join("ns", join, now).offers

    putter, getter = Offer(key="k", manifest="m", token="t"), Offer(key="k", device="cuda")
    assert offers("a", 0.0, putter) == {}
    assert offers("b", 0.0, getter) == {}
    expected = {"a": putter, "b": getter}
    assert offers("c", 0.0, None) == expected
    assert offers("a", 1.0, putter) == expected
    # Also when others ask no more; who comes later has no part in it.
    assert offers("b", TIMING.window_silence_seconds - 1, getter) == expected
    assert offers("d", TIMING.window_silence_seconds, getter) == {}
    assert offers("b", TIMING.window_silence_seconds + 2, getter) == expected


def test_an_offer_has_a_largest_size() -> None:
    offer = Offer(key="k" * LIMITS.offer_bytes)
    with pytest.raises(DataStoreError, match="an offer has more than"):
        Windows().join("ns", JoinWindow(group="g", participant="a", offer=offer), 0.0)
