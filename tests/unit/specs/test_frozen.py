"""Dictionaries as text."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given

from kubetorch.errors import SpecError
from kubetorch.specs.compute import freeze, thaw
from unit.specs.strategies import OBJECTS


@given(OBJECTS)
def test_thawing_gives_back_what_was_frozen(value: dict[str, object]) -> None:
    assert thaw(freeze(value, parameter="x")) == value


def test_equal_dictionaries_have_the_same_text() -> None:
    assert freeze({"a": 1, "b": (2,)}, parameter="x") == freeze({"b": [2], "a": 1}, parameter="x")


def test_each_thawed_dictionary_is_a_new_one() -> None:
    text = freeze({"a": {}}, parameter="x")
    thaw(text)["a"]["b"] = 1
    assert thaw(text) == {"a": {}}


def test_dates_become_text_again() -> None:
    moment = datetime.datetime(2024, 5, 1, 10, 30, tzinfo=datetime.timezone.utc)
    assert thaw(freeze({"at": moment, "on": moment.date()}, parameter="x")) == {
        "at": "2024-05-01T10:30:00Z",
        "on": "2024-05-01",
    }


def test_a_time_is_that_of_utc_and_another_zone_is_converted() -> None:
    naive = datetime.datetime(2024, 5, 1, 10, 30)
    east = datetime.timezone(datetime.timedelta(hours=2))
    times = thaw(freeze({"utc": naive, "east": naive.replace(tzinfo=east)}, parameter="x"))
    assert times == {"utc": "2024-05-01T10:30:00Z", "east": "2024-05-01T08:30:00Z"}


def test_what_json_cannot_carry_is_named_with_its_path() -> None:
    for value, path in (
        ({"spec": {"a": [1, {2}]}}, "service_template.spec.a.1"),
        ({"spec": {1: "a"}}, "service_template.spec"),
        ({"spec": float("nan")}, "service_template.spec"),
        ([1], "service_template"),
        (None, "service_template"),
    ):
        with pytest.raises(SpecError, match=path):
            freeze(value, parameter="service_template")


def test_a_dictionary_that_holds_itself_is_refused() -> None:
    value: dict[str, object] = {}
    value["self"] = value
    with pytest.raises(SpecError, match="too deeply"):
        freeze(value, parameter="service_template")
