from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.errors import SpecError
from kubetorch.specs import quantity


@pytest.mark.parametrize(
    ("given_value", "text"),
    [
        ("0.5", "0.5"),
        (0.5, "0.5"),
        (1, "1"),
        (1.0, "1"),
        ("2", "2"),
        ("500m", "500m"),
        ("1.", "1."),
        (".5", ".5"),
        (0.1, "0.1"),
        (0.001, "0.001"),
        ("1e1", "1e1"),
        ("2k", "2k"),
    ],
)
def test_amounts_of_cpus(given_value: object, text: str) -> None:
    assert quantity.cpus(given_value) == text
    assert quantity.cpus(text) == text


@pytest.mark.parametrize(
    ("given_value", "text"),
    [
        ("2Gi", "2Gi"),
        ("1G", "1G"),
        ("512Mi", "512Mi"),
        ("1.5Gi", "1.5Gi"),
        ("1k", "1k"),
        ("1Ki", "1Ki"),
        (12, "12"),
        (12.0, "12"),
        ("12e6", "12e6"),
        ("12E6", "12E6"),
        ("1E", "1E"),
        ("1000m", "1000m"),
        (2**62, str(2**62)),
    ],
)
def test_amounts_of_memory(given_value: object, text: str) -> None:
    assert quantity.memory(given_value) == text
    assert quantity.memory(text) == text


@pytest.mark.parametrize("size", ["1K", "1M", "1G", "1T", "1.5K"])
def test_decimal_units_are_capitals_as_people_write_them(size: str) -> None:
    text = size.replace("K", "k")  # the one of them that Kubernetes writes small

    assert quantity.memory(size) == quantity.memory(text) == text
    assert quantity.parse(text) == quantity.size_bytes(text)


WORDS = ("", " ", "x", "2x", "-1", "+1", "4 GB", "1 ", " 1", "1,5", "1.5.2", "Mi", "m", "٣", "½")
NUMERALS = ("1e", "1e999", "1e1000", "0x10", "inf", "nan", "1\n", "1_000", "9" * 30, "0", "0m")
NUMBERS = (-1, 0, 0.0, float("nan"), float("inf"), float("-inf"), True, False, None, [], b"1", 1j)


@pytest.mark.parametrize("bad", [*WORDS, *NUMERALS, *NUMBERS], ids=repr)
@pytest.mark.parametrize("parse", [quantity.cpus, quantity.memory])
def test_what_is_no_amount_is_refused_with_parameter_value_and_what_would_be_right(
    parse: object, bad: object
) -> None:
    assert callable(parse)
    with pytest.raises(SpecError) as caught:
        parse(bad)
    assert str(caught.value).startswith(f"{parse.__name__} is {bad!r}")
    assert caught.value.hint is not None


@pytest.mark.parametrize("bad", ["0.0005", 0.0005, "1u", "0.5m", 1e-9])
def test_less_than_a_thousandth_of_a_core_is_refused(bad: object) -> None:
    with pytest.raises(SpecError, match="thousandths"):
        quantity.cpus(bad)


@pytest.mark.parametrize("bad", ["0.5", 0.5, "500m", "1.0001k"])
def test_a_fraction_of_a_byte_is_refused(bad: object) -> None:
    with pytest.raises(SpecError, match="whole number of bytes"):
        quantity.memory(bad)


@pytest.mark.parametrize(
    ("bad", "meant"),
    [
        ("4 GB", "4G"),
        ("4gb", "4G"),
        ("2gi", "2Gi"),
        ("2 GiB", "2Gi"),
        ("1 KB", "1k"),
        ("1.5 g", "1.5G"),
    ],
)
def test_near_misses_are_named(bad: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean {meant}"):
        quantity.memory(bad)
    assert quantity.memory(meant) == meant


def test_the_parameter_can_have_another_name() -> None:
    with pytest.raises(SpecError, match=r"^disk_size is 'x'"):
        quantity.memory("x", parameter="disk_size")


@given(st.integers(1, 10**6))
def test_every_number_of_thousandths_of_a_core_is_an_amount(thousandths: int) -> None:
    number = thousandths / 1000
    assert float(quantity.cpus(number)) == number
    assert quantity.cpus(f"{thousandths}m") == f"{thousandths}m"


@given(st.text(max_size=8))
def test_any_text_is_an_amount_or_a_spec_error(text: str) -> None:
    for parse in (quantity.cpus, quantity.memory):
        try:
            assert parse(text) == text
        except SpecError:
            continue


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1), ("30m", 1800), ("2h", 7200), ("7d", 604_800), ("007s", 7)]
)
def test_durations(text: str, seconds: int) -> None:
    assert quantity.seconds(text) == seconds


@pytest.mark.parametrize(
    "bad", ["", "30", "m", "-1m", "1.5h", "1h30m", "0s", "1w", "٣m", "1m\n", " 1m", 5, None, True]
)
def test_what_is_no_duration_is_refused(bad: object) -> None:
    with pytest.raises(SpecError, match=r"^ttl is") as caught:
        quantity.seconds(bad, parameter="ttl")
    assert repr(bad) in str(caught.value)
    assert '"30m"' in str(caught.value)
