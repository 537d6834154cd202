import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch import errors
from kubetorch.wire import calls, codecs, exceptions, frames


def returned(codec: str, value: object, **more) -> calls.Returned:
    segments = codecs.encode(codec, value)
    payload = b"".join(codecs.join(segments))
    return calls.Returned(codec, tuple(len(s) for s in segments), payload, **more)


def test_call_ids_are_unique():
    ids = {calls.new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", call_id) for call_id in ids)


@pytest.mark.parametrize("codec", ["json", "pickle", "none"])
def test_a_value_survives_packing_and_unpacking(codec):
    outcome = returned(codec, {"loss": [1.5, None]}, streamed=True, generation=7)
    unpacked_outcome = calls.unpack_outcome(calls.pack_outcome(outcome))
    assert isinstance(unpacked_outcome, calls.Returned)
    assert (unpacked_outcome.codec, unpacked_outcome.streamed, unpacked_outcome.generation) == (
        codec,
        True,
        7,
    )
    assert calls.value_of(unpacked_outcome) == {"loss": [1.5, None]}


def test_the_payload_of_a_packed_outcome_is_aligned():
    blob = calls.pack_outcome(returned("pickle", bytearray(1000)))
    unpacked_outcome = calls.unpack_outcome(blob)
    assert isinstance(unpacked_outcome, calls.Returned)
    assert (len(blob) - len(unpacked_outcome.payload)) % codecs.ALIGNMENT == 0


def test_a_failure_survives_packing_and_is_raised_as_its_own_class():
    failure = exceptions.describe(KeyError("x"), pod_name="p-0")
    unpacked_outcome = calls.unpack_outcome(calls.pack_outcome(calls.Raised(failure)))
    with pytest.raises(KeyError) as caught:
        calls.value_of(unpacked_outcome)
    assert caught.value.pod_name == "p-0"


def test_a_value_whose_sizes_do_not_fit_is_a_serialization_error():
    with pytest.raises(errors.SerializationError):
        calls.value_of(calls.Returned("json", (5,), b"1"))


def test_a_result_frame_becomes_an_outcome():
    meta = frames.Result(frames.Body("json", (2,), 2), generation=3, streamed=True)
    outcome = calls.returned(meta, b"42")
    assert outcome == calls.Returned("json", (2,), b"42", streamed=True, generation=3)


@given(st.binary(max_size=400))
def test_any_bytes_of_an_error_frame_become_an_exception(data):
    with pytest.raises(Exception):  # noqa: B017  # whatever the bytes say
        calls.value_of(calls.raised(data))


@given(st.binary(max_size=400))
def test_bytes_that_are_no_outcome_are_a_protocol_error(data):
    with pytest.raises(errors.ProtocolError):
        calls.unpack_outcome(data)


def test_an_outcome_of_another_format_is_refused_though_it_is_whole():
    blob = calls.pack_outcome(returned("json", {"a": [1, 2]}))
    with pytest.raises(errors.ProtocolError, match="not a packed outcome"):
        calls.unpack_outcome(bytes([blob[0] ^ 1]) + blob[1:])


def test_an_outcome_whose_head_is_longer_than_itself_is_refused():
    blob = calls.pack_outcome(returned("json", {"a": [1, 2]}))
    with pytest.raises(errors.ProtocolError, match="not a packed outcome"):
        calls.unpack_outcome(blob[:20])


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_outcome_is_a_protocol_error_or_another_outcome(position, value):
    blob = bytearray(calls.pack_outcome(returned("json", {"a": [1, 2]})))
    blob[position % len(blob)] = value
    with contextlib.suppress(errors.ProtocolError):
        calls.unpack_outcome(blob)


@given(st.integers(0, 79))
def test_a_truncated_outcome_is_a_protocol_error(length):
    blob = calls.pack_outcome(returned("json", "a" * 20))
    with pytest.raises(errors.ProtocolError):
        calls.unpack_outcome(blob[:length])
