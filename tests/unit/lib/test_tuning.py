"""Tables of times and limits: their defaults, other values of a test, and what they refuse."""

from __future__ import annotations

import pytest

from kubetorch.lib.tuning import TIMING, Table, Timing


class Pauses(Table):
    first_seconds: float = 1.0
    longest_seconds: float = 4 * first_seconds

    def __post_init__(self) -> None:
        assert self.first_seconds <= self.longest_seconds, "pauses grow"


def test_a_table_has_the_values_that_its_maker_names_and_defaults_otherwise() -> None:
    assert (Pauses().first_seconds, Pauses().longest_seconds) == (1.0, 4.0)
    pauses = Pauses(first_seconds=2.0)
    assert (pauses.first_seconds, pauses.longest_seconds) == (2.0, 4.0)
    assert Pauses().first_seconds == 1.0


def test_a_table_does_not_change() -> None:
    with pytest.raises(AttributeError, match="websocket_ping_seconds of Timing does not change"):
        TIMING.websocket_ping_seconds = 1.0  # type: ignore[misc]


def test_a_table_refuses_a_name_that_it_does_not_have() -> None:
    with pytest.raises(TypeError, match="Timing has no websocket_ping"):
        Timing(websocket_ping=1.0)  # type: ignore[call-arg]


def test_a_table_refuses_numbers_that_contradict_each_other() -> None:
    with pytest.raises(AssertionError, match="pauses grow"):
        Pauses(first_seconds=5.0)
