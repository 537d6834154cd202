"""`kt.metric`: what it takes."""

import math

import pytest

import kubetorch as kt
from kubetorch.errors import SpecError


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", 1, "1 to 63 letters"),
        ("a" * 64, 1, "1 to 63 letters"),
        ("queue length", 1, "'queue length'"),
        ("län", 1, "1 to 63 letters"),
        (7, 1, "a metric is named 7"),
        ("rps", 1, "measures itself"),
        ("CPU", 1, "measures itself"),
        ("queue", math.nan, "is nan; it must be a finite number"),
        ("queue", math.inf, "is inf"),
        ("queue", 10**400, "must be a finite number"),
        ("queue", "5", "is '5'"),
        ("queue", None, "is None"),
        ("queue", True, "is True"),
        ("queue", 1j, "must be a finite number"),
    ],
)
def test_names_and_values_are_checked_anywhere(name, value, message):
    with pytest.raises(SpecError, match=message):
        kt.metric(name, value)


def test_outside_of_a_pod_it_does_nothing():
    kt.metric("queue", 1)
