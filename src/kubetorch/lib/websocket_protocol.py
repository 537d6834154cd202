"""WebSocket (RFC 6455) without I/O: the handshake of a client, frame headers, and a parser.

Why not the `websockets` package here: one message through its parser costs as much as our whole
relay, and it copies a payload four times. This parser gives the transport the very memory where a
large message belongs, so it arrives without a copy in user space. It supports what a stream of
binary messages needs: no extensions, no compression; fragments are put together.

A client's frames are masked, as the protocol demands, with the key 0: masking defends proxies
against scripts in browsers that choose what is sent, and the sender here is no browser. A server
accepts every key.
"""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from collections.abc import Iterable
from typing import Protocol

from kubetorch.lib.http1 import AnswerReader, BrokenError, encoded, request_head
from kubetorch.lib.tuning import LIMITS

_HEAD_BYTES = LIMITS.large_message_head_bytes
_LARGE_BYTES = LIMITS.large_message_bytes
_PEEK_BYTES = LIMITS.peeked_bytes
_SCRATCH_BYTES = LIMITS.longest_scratch_bytes
_ROOM_BYTES = LIMITS.scratch_room_bytes

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA

#: Close codes (RFC 6455, section 7.4.1).
NORMAL, GOING_AWAY, PROTOCOL_ERROR, POLICY_VIOLATION, TOO_BIG = 1000, 1001, 1002, 1008, 1009

_OPCODES = frozenset({CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG})

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_ZERO_KEY = b"\0\0\0\0"


class WebSocketError(Exception):
    """The peer broke the protocol."""

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


# ------------------------------------------------------------------------------------ handshake


def accept_key(key: str) -> str:
    """The `Sec-WebSocket-Accept` that answers a `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()


class UpgradeRefusedError(Exception):
    """The server answered an upgrade with an ordinary response."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the upgrade was answered with status {status}")
        self.status = status
        self.body = body


class ClientHandshake:
    """A client's request for a WebSocket, and the answer as its bytes come."""

    def __init__(self, host: str, target: str, headers: Iterable[tuple[str, str]]) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        sent = [
            ("Host", host),
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Key", key),
            ("Sec-WebSocket-Version", "13"),
            *headers,
        ]
        self.request = request_head("GET", target, encoded(sent))
        self._accept = accept_key(key)
        self._answer = AnswerReader(may_upgrade=True)
        self._refusal = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take bytes of the answer, none at the end of the connection; true once it is a WebSocket.

        Raises `UpgradeRefusedError`, `WebSocketError` for an answer that is none, and `OSError` for
        a connection that ended before the answer.
        """
        answer = self._answer
        try:
            answer.feed(data)
        except BrokenError as error:
            if data:
                raise WebSocketError(f"the answer to the upgrade: {error}") from error
            if not answer.has_head:
                raise
        if not answer.has_head:
            return False
        if answer.is_upgraded:
            if answer.headers.get("sec-websocket-accept") != self._accept:
                raise WebSocketError("the answer to the upgrade has a wrong Sec-WebSocket-Accept")
            return True
        if answer.status == 101:
            raise WebSocketError("the answer to the upgrade does not say what it changes to")
        self._refusal += answer.take()
        is_whole = answer.is_complete or answer.ends_with_connection or not data
        if is_whole or len(self._refusal) >= LIMITS.refused_upgrade_bytes:
            raise UpgradeRefusedError(
                answer.status, bytes(self._refusal[: LIMITS.refused_upgrade_bytes])
            )
        return False

    @property
    def is_refused(self) -> bool:
        """True if an ordinary answer came instead of the upgrade."""
        return self._answer.has_head and not self._answer.is_upgraded

    @property
    def subprotocol(self) -> str | None:
        """The subprotocol that the server chose."""
        return self._answer.headers.get("sec-websocket-protocol")

    @property
    def rest(self) -> bytes:
        """The bytes of the WebSocket that came together with the answer."""
        return self._answer.rest


# --------------------------------------------------------------------------------------- frames


def frame_header(opcode: int, length: int, *, masked: bool) -> bytes:
    """The header of an unfragmented frame; a mask has the key 0, so the data follows unchanged."""
    mask = 0x80 if masked else 0
    if length < 126:
        header = struct.pack("!BB", 0x80 | opcode, mask | length)
    elif length < 65536:
        header = struct.pack("!BBH", 0x80 | opcode, mask | 126, length)
    else:
        header = struct.pack("!BBQ", 0x80 | opcode, mask | 127, length)
    return header + _ZERO_KEY if masked else header


def close_payload(code: int, reason: str = "") -> bytes:
    """The payload of a CLOSE frame; the reason is cut to the longest that a frame may have."""
    return struct.pack("!H", code) + reason.encode()[:123]


def parse_close(payload: bytes) -> tuple[int, str]:
    if len(payload) < 2:
        return NORMAL, ""
    return struct.unpack_from("!H", payload)[0], payload[2:].decode(errors="replace")


class Handler(Protocol):
    """Receives messages of a parser. Views are valid only during the call; placed memory stays."""

    def on_message(self, opcode: int, payload: memoryview) -> None:
        """A whole text or binary message."""

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        """A message of `length` bytes begins with `head`; the memory for the rest of it.

        Returns writable memory of `length - len(head)` bytes, or `None` to have it allocated.
        """

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        """A large message is complete; `rest` is the memory that `on_large` gave."""

    def on_control(self, opcode: int, payload: bytes) -> None:
        """A PING, PONG or CLOSE frame."""


class Parser:
    """Bytes in, messages out.

    Read into `get_buffer()`, then say with `advance(n)` how many bytes came.
    """

    def __init__(self, handler: Handler, *, masked: bool, max_message: int) -> None:
        self._handler = handler
        self._masked = masked
        self._max_message = max_message
        self._scratch = bytearray(LIMITS.first_scratch_bytes)
        self._view = memoryview(self._scratch)
        self._start = 0
        self._end = 0
        self._follows_large = False
        self._was_full = False
        # A large frame on its way into its own memory.
        self._large_first = 0
        self._head = b""
        self._rest: memoryview | None = None
        self._filled = 0
        self._key = _ZERO_KEY
        # Fragments of a message that has not ended.
        self._fragments = bytearray()
        self._fragments_opcode = 0

    def limit(self, max_message: int) -> None:
        """Take messages of so many bytes from now on."""
        self._max_message = max_message

    def close(self) -> None:
        """Release all memory: no more bytes come."""
        self._rest = None
        self._fragments = self._scratch = bytearray()
        self._view = memoryview(b"")

    def get_buffer(self) -> memoryview:
        """The memory for the next bytes from the peer."""
        if self._rest is not None:
            return self._rest[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
            if self._follows_large:
                return self._view[:_PEEK_BYTES]
            if self._was_full:
                self._move(b"")
        elif self._end > len(self._scratch) - _ROOM_BYTES:
            self._move(bytes(self._view[self._start : self._end]))
        return self._view[self._end :]

    def _move(self, pending: bytes) -> None:
        """Move the pending bytes to the start of the scratch memory, which grows if it was full."""
        size, most = len(self._scratch), LIMITS.longest_scratch_bytes
        if size < most and (self._was_full or len(pending) > size - _ROOM_BYTES):
            self._scratch = bytearray(min(4 * size, most))
            self._view = memoryview(self._scratch)
        self._was_full = False
        self._view[: len(pending)] = pending
        self._start, self._end = 0, len(pending)

    def advance(self, count: int) -> None:
        """`count` bytes were read into the last buffer."""
        if self._rest is None:
            self._end += count
            self._was_full = self._was_full or self._end == len(self._scratch) < _SCRATCH_BYTES
        else:
            self._filled += count
            if self._filled < len(self._rest):
                return
            self._finish_large()
        while self._parse():
            pass

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes that were read elsewhere."""
        view = memoryview(data)
        while view:
            buffer = self.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def _parse(self) -> bool:
        """Take one frame from the scratch memory; return whether there may be another."""
        available = self._end - self._start
        if available < 2:
            return False
        first, second = self._scratch[self._start], self._scratch[self._start + 1]
        length = second & 0x7F
        header = 2
        if length == 126:
            header = 4
            if available < header:
                return False
            (length,) = struct.unpack_from("!H", self._scratch, self._start + 2)
        elif length == 127:
            header = 10
            if available < header:
                return False
            (length,) = struct.unpack_from("!Q", self._scratch, self._start + 2)
        self._check(first, second, length)
        if second & 0x80:
            header += 4
        if available >= header + length:
            self._follows_large = False
            self._take(first, header, length, masked=bool(second & 0x80))
            return True
        if length > _LARGE_BYTES and available >= header + _HEAD_BYTES:
            self._begin_large(first, header, length, masked=bool(second & 0x80))
        return False

    def _check(self, first: int, second: int, length: int) -> None:
        opcode = first & 0x0F
        if first & 0x70 or opcode not in _OPCODES:
            raise WebSocketError(f"a frame that begins with byte {first:#04x}")
        if bool(second & 0x80) != self._masked:
            raise WebSocketError("a masked frame" if second & 0x80 else "a frame without a mask")
        if opcode >= CLOSE:
            if length > 125 or not first & 0x80:
                raise WebSocketError("a control frame that is long or fragmented")
        elif bool(opcode) == bool(self._fragments_opcode):
            raise WebSocketError("fragments out of order")
        elif length + len(self._fragments) > self._max_message:
            raise WebSocketError(
                f"a message of {length + len(self._fragments)} bytes; "
                f"{self._max_message} are allowed",
                TOO_BIG,
            )

    def _take(self, first: int, header: int, length: int, *, masked: bool) -> None:
        begin = self._start + header
        payload = self._view[begin : begin + length]
        self._start = begin + length
        if masked:
            _unmask(bytes(self._view[begin - 4 : begin]), payload)
        opcode = first & 0x0F
        if opcode >= CLOSE:
            self._handler.on_control(opcode, bytes(payload))
        elif first & 0x80 and opcode:
            self._handler.on_message(opcode, payload)
        else:
            self._take_fragment(opcode, payload, is_last=bool(first & 0x80))

    def _take_fragment(self, opcode: int, payload: memoryview, *, is_last: bool) -> None:
        self._fragments_opcode = self._fragments_opcode or opcode
        self._fragments += payload
        if is_last:
            whole, opcode = self._fragments, self._fragments_opcode
            self._fragments, self._fragments_opcode = bytearray(), 0
            self._handler.on_message(opcode, memoryview(whole))

    def _begin_large(self, first: int, header: int, length: int, *, masked: bool) -> None:
        begin = self._start + header
        self._key = bytes(self._view[begin - 4 : begin]) if masked else _ZERO_KEY
        head = self._view[begin : begin + _HEAD_BYTES]
        _unmask(self._key, head)
        self._large_first = first
        self._head = bytes(head)
        # Only whole binary messages are placed by the handler.
        rest = self._handler.on_large(head, length) if first == 0x80 | BINARY else None
        self._rest = memoryview(bytearray(length - _HEAD_BYTES)) if rest is None else rest
        arrived = self._view[begin + _HEAD_BYTES : self._end]
        self._rest[: len(arrived)] = arrived
        self._filled = len(arrived)
        self._start = self._end = 0

    def _finish_large(self) -> None:
        rest, self._rest = self._rest, None
        assert rest is not None
        self._follows_large = True
        _unmask(self._key, rest)  # the head has a multiple of 4 bytes, so the key is not rotated
        first = self._large_first
        if first == 0x80 | BINARY:
            self._handler.on_placed(self._head, rest)
            return
        whole = memoryview(self._head + rest)
        if first & 0x80 and first & 0x0F:
            self._handler.on_message(first & 0x0F, whole)
        else:
            self._take_fragment(first & 0x0F, whole, is_last=bool(first & 0x80))


def _unmask(key: bytes, payload: memoryview) -> None:
    if key == _ZERO_KEY or not payload:
        return
    count = len(payload)
    pattern = key * (count // 4 + 1)
    mixed = int.from_bytes(payload, "big") ^ int.from_bytes(pattern[:count], "big")
    payload[:] = mixed.to_bytes(count, "big")
