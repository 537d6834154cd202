"""Failures: exceptions as they arrive at the other end."""

import pickle

import pytest

from kubetorch import errors
from kubetorch.errors import ServiceHealthError
from kubetorch.wire import exceptions
from kubetorch.wire import tuning as wire_tuning


def test_an_error_that_was_never_raised_brings_no_traceback():
    described = exceptions.describe(ServiceHealthError("pod x cannot start", hint="kt logs x"))

    arrived = exceptions.rebuild(exceptions.parse(described.to_dict()))

    assert described.traceback == ""
    assert arrived.__cause__ is None
    assert str(arrived) == "pod x cannot start\nhint: kt logs x"


def test_an_error_that_was_raised_brings_its_traceback():
    try:
        raise ServiceHealthError("pod x cannot start")
    except ServiceHealthError as error:
        described = exceptions.describe(error)

    assert "raise ServiceHealthError" in described.traceback
    assert exceptions.rebuild(described).__cause__ is not None


@pytest.mark.parametrize("cls", sorted(errors.BY_CODE.values(), key=lambda cls: cls.__name__))
def test_every_error_of_our_own_arrives_as_its_class(cls):
    error = cls() if cls is errors.WorkerMembershipChanged else cls.from_state("the message", {})
    rebuilt = exceptions.rebuild(exceptions.describe(error, pod_name="demo-0"))
    assert type(rebuilt) is cls
    assert rebuilt.pod_name == "demo-0"
    assert type(pickle.loads(pickle.dumps(error))) is cls


def test_an_error_that_is_its_own_cause_is_told_once() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    failure = exceptions.describe(first)
    assert failure.cause is not None
    assert (failure.cause["message"], failure.cause["cause"]) == ("second", None)
    first.__cause__ = first
    assert exceptions.describe(first).cause is None


def test_a_long_chain_of_causes_is_cut() -> None:
    error = ValueError("0")
    for number in range(5000):
        above = ValueError(str(number))
        above.__cause__ = error
        error = above
    depth, cause = 0, exceptions.describe(error).to_dict()
    while cause["cause"] is not None:
        depth, cause = depth + 1, cause["cause"]
    assert depth == wire_tuning.LIMITS.failure_causes - 1


def test_a_chain_of_long_texts_fits_into_one_frame() -> None:
    error = ValueError("0")
    for _ in range(15):
        above = ValueError("\x00" * 250_000)
        above.__cause__ = error
        error = above
    described_json = exceptions.describe(error).to_json()

    assert len(described_json) <= wire_tuning.LIMITS.chunk_bytes + wire_tuning.LIMITS.meta_bytes
    arrived = exceptions.rebuild(exceptions.parse_json(described_json))
    assert (type(arrived), str(arrived)) == (ValueError, str(error))


@pytest.mark.parametrize("error", [ValueError("bad"), errors.WorkerDiedError("gone")])
def test_an_error_without_others_has_an_empty_tuple_of_them(error):
    assert exceptions.rebuild(exceptions.describe(error)).other_errors == ()
