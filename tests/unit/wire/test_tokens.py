"""What a token says, and when it may be used."""

from __future__ import annotations

import pytest

from kubetorch.errors import UnauthorizedError
from kubetorch.wire import tokens
from kubetorch.wire.tokens import SKEW, Claims

KEY = tokens.workload_key(b"secret", "ns/f")
NOW = 1_000_000.0
HOUR = 3600.0


def issued(at: float) -> str:
    """A token for an hour, by a clock that says `at`."""
    return tokens.sign(KEY, Claims("ns/f", at + HOUR, issued=at))


def check(token: str, *, now: float = NOW) -> Claims:
    return tokens.verify(KEY, token, audience="ns/f", now=now)


def test_a_token_is_read_as_it_was_written() -> None:
    claims = Claims("ns/f", NOW + HOUR, "ann", ("exec", "logs"), NOW)
    assert check(tokens.sign(KEY, claims)) == claims


@pytest.mark.parametrize("ahead", [-HOUR - SKEW + 1, -SKEW, 0.0, SKEW])
def test_clocks_may_differ_a_little(ahead: float) -> None:
    assert check(issued(NOW + ahead)).issued == NOW + ahead


def test_a_token_of_the_future_is_not_valid_yet() -> None:
    with pytest.raises(UnauthorizedError, match="not valid yet: it was issued 61 s in the future"):
        check(issued(NOW + SKEW + 1))


def test_a_token_that_has_ended_says_that_it_may_be_the_clocks() -> None:
    with pytest.raises(UnauthorizedError, match="expired 60 s ago") as refused:
        check(issued(NOW - HOUR - SKEW))
    assert "NTP" in str(refused.value.hint)


def test_who_has_one_clock_need_not_say_when() -> None:
    token = tokens.sign(KEY, Claims("ns/f", NOW))
    assert check(token, now=NOW - 1).issued == 0.0
    with pytest.raises(UnauthorizedError, match="expired") as refused:
        check(token)
    assert "NTP" not in str(refused.value.hint)
