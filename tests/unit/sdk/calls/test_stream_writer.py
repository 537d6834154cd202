"""Putting values together, and granting room for more of them."""

from __future__ import annotations

import random

import pytest

from kubetorch.errors import ProtocolError
from kubetorch.sdk.calls.stream_writer import GRANT, Event, PendingCall, Upload
from kubetorch.wire import codecs, frames
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Kind

HALF = wire_tuning.LIMITS.window_bytes // 2


def begun(kind: Kind, total: int) -> tuple[PendingCall, list[Event]]:
    events: list[Event] = []
    call = PendingCall(1, events.append)
    body = frames.Body("pickle", (total,), total)
    meta = frames.Result(body) if kind is Kind.RESULT else frames.Yield(body)
    assert call.begin(kind, meta, memoryview(b"")) is False
    return call, events


def feed(call: PendingCall, total: int) -> int:
    """Hand over `total` bytes in chunks; what was granted meanwhile."""
    granted = done = 0
    while done < total:
        size = min(wire_tuning.LIMITS.chunk_bytes, total - done)
        memory = call.next_memory(size)
        assert memory is not None
        memory[:] = bytes([done // wire_tuning.LIMITS.chunk_bytes % 251]) * size
        is_whole, grant = call.note_received(size)
        granted += grant
        done += size
        assert is_whole == (done == total)
    return granted


def test_a_value_in_one_frame_is_delivered_as_it_is() -> None:
    events: list[Event] = []
    call = PendingCall(1, events.append)
    meta = frames.Result(frames.Body("json", (3,), 3))
    assert call.begin(Kind.RESULT, meta, memoryview(b"[1]"))
    assert [(event.kind, event.meta, event.payload) for event in events] == [
        (Kind.RESULT, meta, b"[1]")
    ]


def test_a_long_value_is_put_together_in_memory_of_its_own() -> None:
    total = 3 * wire_tuning.LIMITS.chunk_bytes + 17
    call, events = begun(Kind.RESULT, total)
    feed(call, total)
    (event,) = events
    assert event.payload is not None
    assert len(event.payload) == total
    assert (
        bytes(event.payload[wire_tuning.LIMITS.chunk_bytes : wire_tuning.LIMITS.chunk_bytes + 3])
        == b"\1\1\1"
    )
    assert not memoryview(event.payload).readonly


def test_room_for_a_result_is_granted_as_it_arrives() -> None:
    call, _ = begun(Kind.RESULT, 4 * wire_tuning.LIMITS.window_bytes)
    granted = feed(call, 4 * wire_tuning.LIMITS.window_bytes)
    assert 4 * wire_tuning.LIMITS.window_bytes - granted < GRANT


def test_room_for_a_yielded_value_is_granted_when_the_program_takes_it() -> None:
    call, events = begun(Kind.YIELD, HALF)
    assert feed(call, HALF) == 0
    (event,) = events
    assert call.note_taken(event.weight) == HALF


def test_a_value_larger_than_the_window_arrives_all_the_same() -> None:
    total = 3 * wire_tuning.LIMITS.window_bytes
    call, events = begun(Kind.YIELD, total)
    granted = feed(call, total)
    # What the agent may have sent without a grant never exceeds its window.
    assert total - granted <= wire_tuning.LIMITS.window_bytes
    taken = call.note_taken(events[0].weight)
    assert total - granted - taken < GRANT


@pytest.mark.parametrize(("size", "total"), [(10, 20), (5, -1), (1, 0)])
def test_a_frame_with_part_of_a_payload_breaks_the_protocol(size: int, total: int) -> None:
    call = PendingCall(1, lambda event: None)
    meta = frames.Result(frames.Body("json", (total,), total))
    with pytest.raises(ProtocolError):
        call.begin(Kind.RESULT, meta, memoryview(bytes(size)))


def test_payload_beyond_the_value_or_without_one_breaks_the_protocol() -> None:
    call, _ = begun(Kind.RESULT, 100)
    with pytest.raises(ProtocolError):
        call.next_memory(101)
    with pytest.raises(ProtocolError):
        PendingCall(1, lambda event: None).next_memory(1)


def test_an_abandoned_call_is_told_nothing() -> None:
    call, events = begun(Kind.RESULT, 1000)
    call.is_abandoned = True
    feed(call, 1000)
    call.report(frames.Progress(1))
    call.lose(RuntimeError())
    assert events == []


def test_reports_that_nobody_takes_stay_bounded_and_the_latest_stays() -> None:
    events: list[Event] = []
    call = PendingCall(1, events.append)
    for step in range(10_000):
        call.report(frames.Progress(step))
    assert call.reports is not None
    assert len(call.reports) == len(events) <= 1000
    assert call.reports[-1].current == 9999


def upload(segments: list[bytes]) -> tuple[Upload, bytes]:
    total = codecs.layout(map(len, segments))[1]
    return Upload(7, segments, total), b"".join(codecs.join(segments))


def test_chunks_are_full_and_together_the_payload() -> None:
    numbers = random.Random(1)
    segments = [numbers.randbytes(numbers.randrange(400_000)) for _ in range(20)]
    segments.insert(3, b"")
    item, payload = upload(segments)
    chunks = []
    while not item.is_done:
        assert item.can_send
        chunks.append(b"".join(item.take_chunk()))
        item.grant(len(chunks[-1]))
    assert b"".join(chunks) == payload
    assert {len(chunk) for chunk in chunks[:-1]} == {wire_tuning.LIMITS.chunk_bytes}
    assert not item.can_send


def test_nothing_is_sent_beyond_what_was_granted() -> None:
    item, _ = upload([bytes(3 * wire_tuning.LIMITS.window_bytes)])
    sent = 0
    while item.can_send:
        sent += sum(map(len, item.take_chunk()))
    assert sent == wire_tuning.LIMITS.window_bytes
    item.grant(wire_tuning.LIMITS.chunk_bytes - 1)
    assert not item.can_send
    item.grant(1)
    assert item.can_send


def test_the_last_chunk_needs_only_its_own_room() -> None:
    item, _ = upload([bytes(wire_tuning.LIMITS.window_bytes + 10)])
    while item.can_send:
        item.take_chunk()
    item.grant(9)
    assert not item.can_send
    item.grant(1)
    assert sum(map(len, item.take_chunk())) == 10
    assert item.is_done


def test_rewinding_begins_again_with_a_whole_window() -> None:
    item, payload = upload([b"a" * 300_000, b"b" * 300_000])
    first = b"".join(item.take_chunk())
    item.rewind()
    assert b"".join(item.take_chunk()) == first
    rest = []
    while not item.is_done:
        rest.append(b"".join(item.take_chunk()))
    assert first + b"".join(rest) == payload


def test_a_chunk_of_many_small_pieces_is_put_together() -> None:
    item, payload = upload([b"x" * 65] * 5000)
    parts = item.take_chunk()
    assert len(parts) == 1
    assert bytes(parts[0]) == payload[: wire_tuning.LIMITS.chunk_bytes]
