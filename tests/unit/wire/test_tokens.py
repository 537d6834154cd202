"""What a token says, and when it may be used."""

from __future__ import annotations

import pytest

from kubetorch.errors import UnauthorizedError
from kubetorch.wire import tokens
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.tokens import Claims

KEY = tokens.workload_key(b"secret", "ns/f")
NOW = 1_000_000.0
HOUR = 3600.0


def issued(issue_time: float) -> str:
    """A token for an hour, by a clock that says `at`."""
    return tokens.sign(KEY, Claims("ns/f", issue_time + HOUR, issued=issue_time))


def check(token: str, *, now: float = NOW) -> Claims:
    return tokens.verify(KEY, token, audience="ns/f", now=now)


def test_a_token_is_read_as_it_was_written() -> None:
    claims = Claims("ns/f", NOW + HOUR, "ann", ("exec", "logs"), NOW)
    assert check(tokens.sign(KEY, claims)) == claims


@pytest.mark.parametrize(
    "ahead",
    [
        -HOUR - wire_tuning.TIMING.clock_skew_seconds + 1,
        -wire_tuning.TIMING.clock_skew_seconds,
        0.0,
        wire_tuning.TIMING.clock_skew_seconds,
    ],
)
def test_clocks_may_differ_a_little(ahead: float) -> None:
    assert check(issued(NOW + ahead)).issued == NOW + ahead


def test_a_token_of_the_future_is_not_valid_yet() -> None:
    with pytest.raises(UnauthorizedError, match="not valid yet: it was issued 61 s in the future"):
        check(issued(NOW + wire_tuning.TIMING.clock_skew_seconds + 1))


def test_a_token_that_has_ended_says_that_it_may_be_the_clocks() -> None:
    with pytest.raises(UnauthorizedError, match="expired 60 s ago") as refused:
        check(issued(NOW - HOUR - wire_tuning.TIMING.clock_skew_seconds))
    assert "NTP" in str(refused.value.hint)


def test_who_has_one_clock_need_not_say_when() -> None:
    token = tokens.sign(KEY, Claims("ns/f", NOW))
    assert check(token, now=NOW - 1).issued == 0.0
    with pytest.raises(UnauthorizedError, match="expired") as refused:
        check(token)
    assert "NTP" not in str(refused.value.hint)


def inspect(headers, query=b"", **more):
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    return tokens.inspect(pairs, query, is_ours=lambda token: token in ("good", "bad"), **more)


EVERYWHERE = [
    ("authorization", "Bearer {}"),
    ("cookie", "a=1; kubetorch-app-x={}; b=2"),
    ("x-kubetorch-token", "{}"),
    ("accept", "*/*"),
]


def test_a_token_of_ours_is_taken_out_wherever_it_is() -> None:
    headers = [(name, value.format("good")) for name, value in EVERYWHERE]
    inspected_request = inspect(headers, b"x=1&kubetorch_token=good&y=2")
    assert inspected_request.headers == [(b"cookie", b"a=1; b=2"), (b"accept", b"*/*")]
    assert inspected_request.query == b"x=1&y=2"
    assert inspected_request.query_token == "good"
    assert inspected_request.tokens == ("good",) * 4


def test_only_tokens_that_open_what_is_behind_are_passed_on() -> None:
    is_passed = "good".__eq__
    good, bad = (
        inspect(
            [(name, value.format(token)) for name, value in EVERYWHERE],
            f"kubetorch_token={token}".encode(),
            is_passed=is_passed,
        )
        for token in ("good", "bad")
    )
    assert len(good.headers) == len(EVERYWHERE)
    assert good.query == b"kubetorch_token=good"
    assert bad.headers == [(b"cookie", b"a=1; b=2"), (b"accept", b"*/*")]
    assert bad.query == b""
    mixed = inspect([("cookie", "kubetorch-app-a=bad; kubetorch-app-b=good")], is_passed=is_passed)
    assert mixed.headers == [(b"cookie", b"kubetorch-app-b=good")]


@pytest.mark.parametrize(
    ("query", "rest"),
    [
        (b"kubetorch_token=good", b""),
        (b"kubetorch_token=good&a=1", b"a=1"),
        (b"a=1&kubetorch_token=good", b"a=1"),
        (b"not_kubetorch_token=good", b"not_kubetorch_token=good"),
    ],
)
def test_the_rest_of_the_query_stays(query: bytes, rest: bytes) -> None:
    assert inspect([], query).query == rest


def test_what_is_no_token_of_ours_is_the_apps_own() -> None:
    inspected_request = inspect([("authorization", "Bearer other"), ("authorization", "Basic abc")])
    assert len(inspected_request.headers) == 2
    assert inspected_request.tokens == ()
