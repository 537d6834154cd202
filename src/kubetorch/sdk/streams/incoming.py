"""What arrives on a stream: frames, handed to the calls that they belong to."""

from __future__ import annotations

from typing import Any, Protocol

from kubetorch.errors import ProtocolError
from kubetorch.lib import websocket
from kubetorch.sdk.streams.frame import Frame, control, credit, message
from kubetorch.sdk.streams.pending import Event, PendingCall
from kubetorch.sdk.streams.sending import Sender
from kubetorch.wire import frames
from kubetorch.wire.channel import Inbox
from kubetorch.wire.frames import Kind

#: Longest message that is taken, in bytes.
LONGEST = frames.CHUNK + frames.META_LIMIT + frames.HEADER_BYTES

# As plain numbers: this runs for every frame.
_DATA, _LOG, _RESULT, _ERROR, _YIELD, _PROGRESS = (
    int(kind) for kind in (Kind.DATA, Kind.LOG, Kind.RESULT, Kind.ERROR, Kind.YIELD, Kind.PROGRESS)
)
_META_LIMIT = frames.META_LIMIT
_UNCOUNTED = frozenset(int(kind) for kind in frames.UNCOUNTED)


class Owner(Protocol):
    """What a stream is told that concerns more than one call."""

    def on_welcome(self, welcome: frames.Welcome) -> None:
        """The agent's first frame on a connection."""

    def on_goaway(self) -> None:
        """The agent takes no more calls; those that run go on."""

    def cancel(self, call: PendingCall, reason: str) -> None:
        """Give up a call."""


class Incoming:
    """The `kubetorch.lib.websocket.Handler` of a stream.

    Args:
        sender: The stream's writing end.
        stream: The stream.

    Attributes:
        calls: Those whose end has not arrived, by number.
        inbox: Counts frames.
    """

    def __init__(self, sender: Sender, stream: Owner) -> None:
        self.calls: dict[int, PendingCall] = {}
        self.inbox = Inbox()
        self._sender = sender
        self._stream = stream

    # ------------------------------------------------------------------------------- messages

    def on_message(self, opcode: int, payload: memoryview) -> None:  # noqa: D102  # Handler's
        size = len(payload)
        if opcode != websocket.BINARY or size < frames.HEADER_BYTES:
            raise ProtocolError(f"a message of {size} bytes that is no frame")
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(payload)
        end = frames.HEADER_BYTES + meta_length
        if end > size or meta_length > _META_LIMIT:
            raise ProtocolError(f"a frame of {size} bytes claims {meta_length} of meta")
        self._dispatch(kind, number, payload[frames.HEADER_BYTES : end], payload[end:])
        if kind not in _UNCOUNTED and self.inbox.count(size):
            self._acknowledge()

    def on_large(self, head: memoryview, length: int) -> memoryview | None:  # noqa: D102
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        call = self.calls.get(number)
        if kind != _DATA or meta_length or call is None:
            return None
        return call.place(length - len(head))

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # noqa: D102  # Handler's
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        if meta_length > (0 if kind == _DATA else min(len(rest), _META_LIMIT)):
            raise ProtocolError(f"a frame of {len(rest)} bytes claims {meta_length} of meta")
        call = self.calls.get(number)
        if kind != _DATA:
            self._dispatch(kind, number, rest[:meta_length], rest[meta_length:])
        elif call is not None:
            self._placed(call, len(rest))
        if kind not in _UNCOUNTED and self.inbox.count(len(head) + len(rest)):
            self._acknowledge()

    def on_control(self, opcode: int, payload: bytes) -> None:  # noqa: D102  # Handler's
        if opcode == websocket.PING:
            self._sender.submit(control(websocket.PONG, payload))
        elif opcode == websocket.CLOSE:
            code, reason = websocket.parse_close(payload)
            raise ConnectionResetError(f"the agent closed the connection ({code}): {reason}")

    # --------------------------------------------------------------------------------- frames

    def _dispatch(self, kind: int, number: int, meta: memoryview, payload: memoryview) -> None:
        call = self.calls.get(number)
        if call is None:
            self._control(kind, number, meta)
        elif kind in (_RESULT, _YIELD):
            self._value(call, kind, meta, payload)
        elif kind == _ERROR:
            if not call.is_abandoned:
                call.deliver(Event(call, kind, None, bytes(payload), 0))
            self._end(call)
        elif kind == _LOG:
            if not call.is_abandoned:
                call.deliver(Event(call, kind, frames.decode_meta(kind, meta), None, len(meta)))
        elif kind == _DATA:
            place = call.place(len(payload))
            if place is not None:
                place[:] = payload
                self._placed(call, len(payload))
        elif kind == _PROGRESS:
            report: Any = frames.decode_meta(kind, meta)
            call.report(report)
        else:
            self._control(kind, number, meta)

    def _value(self, call: PendingCall, kind: int, meta: memoryview, payload: memoryview) -> None:
        described: Any = frames.decode_meta(kind, meta)
        try:
            is_over = call.begin(kind, described, payload) and kind == _RESULT
        except MemoryError as error:
            call.lose(error)
            self._stream.cancel(call, "the caller has no memory for the value")
            is_over = kind == _RESULT
        if is_over:
            self._release(call)
            self._end(call)

    def _control(self, kind: int, number: int, meta: memoryview) -> None:
        decoded: Any = frames.decode_meta(kind, meta)
        if kind == Kind.CREDIT:
            self._sender.grant(number, decoded.bytes)
        elif kind == Kind.ACK:
            self._sender.acknowledge(decoded.frames)
        elif kind == Kind.GOAWAY:
            self._stream.on_goaway()
        elif kind == Kind.WELCOME:
            self._stream.on_welcome(decoded)
        elif kind not in frames.KINDS:
            raise ProtocolError(f"a frame of unknown kind {kind}")

    def _placed(self, call: PendingCall, size: int) -> None:
        is_whole, grant = call.placed(size)
        if is_whole and call.is_result:
            self._release(call)
            self._end(call)
            self._acknowledge()
        elif grant:
            self._sender.submit(credit(call.number, grant))

    def _release(self, call: PendingCall) -> None:
        if call.upload is not None:
            self._sender.release(call.upload)

    def _end(self, call: PendingCall) -> None:
        self.calls.pop(call.number, None)
        if call.upload is not None:
            # A call that was refused does not want the rest of its arguments.
            self._sender.drop_upload(call.number)

    def _acknowledge(self) -> None:
        meta = frames.Ack(self.inbox.acknowledged())
        self._sender.submit(Frame(message(frames.encode(Kind.ACK, 0, meta)), is_counted=False))
