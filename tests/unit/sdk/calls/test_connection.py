"""When a caller stays awake for an answer, and what it finds."""

from __future__ import annotations

import socket

import pytest

from kubetorch.sdk import tuning as sdk_tuning
from kubetorch.sdk.calls.stream import Poller, SpinHistory


def test_a_caller_stays_awake_as_long_as_that_is_worth_it() -> None:
    experience = SpinHistory()
    for _ in range(10):
        assert experience.is_favourable()
        experience.learn(was_in_vain=False)


def test_each_vain_attempt_doubles_the_waits_that_sleep_at_once() -> None:
    experience = SpinHistory()
    assert [_attempts_until_favourable(experience) for _ in range(5)] == [0, 1, 3, 7, 15]
    for _ in range(20):
        most = _attempts_until_favourable(experience)
    assert most == sdk_tuning.LIMITS.sleeping_waits


def test_success_is_believed_at_once_but_failures_are_forgotten_slowly() -> None:
    experience = SpinHistory()
    for _ in range(5):
        _attempts_until_favourable(experience)
    while not experience.is_favourable():
        pass
    experience.learn(was_in_vain=False)
    assert experience.is_favourable()
    experience.learn(was_in_vain=True)
    assert _attempts_until_favourable(experience) == 31


@pytest.mark.parametrize("may_stay_awake", [True, False])
def test_a_wait_says_whether_something_came(may_stay_awake: bool) -> None:
    near, far = socket.socketpair()
    with near, far:
        poller = Poller(near)
        assert not poller.wait(0.001, may_stay_awake=may_stay_awake)
        far.send(b"x")
        assert poller.wait(10.0, may_stay_awake=may_stay_awake)
        far.close()
        near.recv(1)
        assert poller.wait(10.0, may_stay_awake=may_stay_awake), "an end is something to read"


def _attempts_until_favourable(experience: SpinHistory) -> int:
    """How many waits sleep at once before the next attempt, which is in vain again."""
    attempts = 0
    while not experience.is_favourable():
        attempts += 1
    experience.learn(was_in_vain=True)
    return attempts
