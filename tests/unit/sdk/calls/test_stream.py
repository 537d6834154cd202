"""What a client makes of frames, those that make no sense among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.errors import ProtocolError
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib import websocket_protocol
from kubetorch.sdk.calls.stream import LONGEST, Incoming, Stream
from kubetorch.sdk.calls.stream_values import StreamFiles
from kubetorch.sdk.calls.stream_writer import LOST, Event, OutgoingFile, PendingCall, Sender
from kubetorch.sdk.tuning import LIMITS
from kubetorch.wire import codecs, frames
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Body, Kind, Log, Result


def incoming() -> tuple[Incoming, list[Event]]:
    """The reading end, where call 1 is under way, and what the call is told."""
    reader, events = Incoming(Sender(), Stream(lambda broken: None)), list[Event]()
    reader.calls[1] = PendingCall(1, events.append)
    return reader, events


def deliver(reader: Incoming, frame: bytes, *, in_fragments: bool = False) -> None:
    """Hand over a message as a connection does; one of fragments comes whole."""
    if len(frame) <= lib_tuning.LIMITS.large_message_bytes or in_fragments:
        reader.on_message(websocket_protocol.BINARY, memoryview(frame))
        return
    head, rest = frame[: frames.HEADER_BYTES], frame[frames.HEADER_BYTES :]
    memory = reader.on_large(memoryview(head), len(frame))
    memory = memoryview(bytearray(len(rest))) if memory is None else memory
    memory[:] = rest
    reader.on_placed(head, memory)


@pytest.mark.parametrize(
    "size", [0, 10, lib_tuning.LIMITS.large_message_bytes, wire_tuning.LIMITS.chunk_bytes]
)
def test_a_value_in_one_frame_reaches_its_call(size: int) -> None:
    reader, events = incoming()
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)

    deliver(reader, frames.encode(Kind.RESULT, 1, Result(Body("json", (size,), size))) + payload)

    assert [bytes(event.payload or b"") for event in events] == [payload]
    assert reader.calls == {}


def test_meta_may_be_as_long_as_the_protocol_says() -> None:
    reader, events = incoming()
    line = Log("x" * (wire_tuning.LIMITS.meta_bytes - 100), "pod")

    deliver(reader, frames.encode(Kind.LOG, 1, line))

    assert [event.meta.text for event in events] == [line.text]


@pytest.mark.parametrize("in_fragments", [False, True])
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"short",
        frames.pack_header(99, 1),
        frames.pack_header(Kind.RESULT, 1, 100) + b"x",
        frames.pack_header(Kind.RESULT, 1, 1) + b"\xc1",
        frames.pack_header(Kind.LOG, 1, 100_000) + bytes(90_000),
        frames.encode(Kind.LOG, 1, Log("x" * wire_tuning.LIMITS.meta_bytes, "pod")),
        frames.pack_header(Kind.DATA, 1, 5) + bytes(100_000),
        frames.encode(Kind.RESULT, 1, Result(Body("json", (5,), 5))) + b"xy",
    ],
    ids=range(9),
)
def test_a_frame_that_makes_no_sense_is_a_protocol_error(frame: bytes, in_fragments: bool) -> None:
    reader, events = incoming()
    assert len(frame) <= LONGEST

    with pytest.raises(ProtocolError):
        deliver(reader, frame, in_fragments=in_fragments)
    assert events == []


class UnwritableFiles(StreamFiles):
    """Memory files that cannot be written, for a reason that is none of the system's."""

    def can_send(self, size: int, calls: Mapping[int, PendingCall]) -> bool:
        return True

    def write(
        self, segments: Sequence[codecs.Segment], size: int, on_unsent: Callable[[], object]
    ) -> OutgoingFile | None:
        raise ValueError("the memory of an argument is gone")


def test_a_call_whose_arguments_cannot_be_written_in_a_thread_ends_with_the_error() -> None:
    stream, events = Stream(lambda broken: None), SimpleQueue[Event]()
    stream.files = UnwritableFiles()
    size = LIMITS.memory_file_at_once_bytes + wire_tuning.LIMITS.chunk_bytes
    call = stream.prepare(events.put)

    stream.start(call, frames.Open("id", "f", Body("values", (size,), size)))

    event = events.get(timeout=60)
    assert (event.kind, str(event.meta)) == (LOST, "the memory of an argument is gone")
    assert stream.calls == {}


@given(st.binary(max_size=300), st.integers(0, 40), st.integers(0, 300))
def test_any_bytes_are_a_frame_or_a_protocol_error(rest: bytes, kind: int, length: int) -> None:
    reader, _ = incoming()
    with contextlib.suppress(ProtocolError):
        deliver(reader, frames.pack_header(kind, 1, length) + rest)
