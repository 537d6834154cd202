"""How texts of the command line become values."""

import pytest

from kubetorch.cli import args
from kubetorch.errors import SpecError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("900", 900),
        ("45s", 45),
        ("30m", 1800),
        ("1h30m", 5400),
        ("2d", 172800),
        ("1d1h1m1s", 90061),
    ],
)
def test_a_duration_is_seconds_or_a_sum_of_units(text, seconds):
    assert args.duration(text, "--ttl") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "h", "1x", "1m1h", "-5", "1.5h", "1 h"])
def test_what_is_no_duration_is_refused_with_the_value_and_an_example(text):
    with pytest.raises(SpecError, match=rf"--ttl is {text!r}") as caught:
        args.duration(text, "--ttl")
    assert "1h30m" in str(caught.value)


def test_json_options_give_their_value():
    assert args.json_value('[1, "a", null]', "--args", list) == [1, "a", None]
    assert args.json_value('{"lr": 0.5}', "--kwargs", dict) == {"lr": 0.5}


def test_json_options_that_are_not_given_are_empty():
    assert args.json_value(None, "--args", list) == []
    assert args.json_value(None, "--kwargs", dict) == {}


def test_a_json_value_of_the_wrong_type_is_refused():
    with pytest.raises(SpecError, match=r"--args must be a JSON array"):
        args.json_value('{"a": 1}', "--args", list)
    with pytest.raises(SpecError, match=r"--kwargs must be a JSON object"):
        args.json_value("[1]", "--kwargs", dict)


def test_what_is_not_json_is_refused_with_an_example_that_is():
    with pytest.raises(SpecError, match=r"--kwargs must be a JSON object") as caught:
        args.json_value("{lr: 1}", "--kwargs", dict)
    assert """--kwargs '{"key": 1}'""" in str(caught.value)
