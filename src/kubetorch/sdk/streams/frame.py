"""One frame on its way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kubetorch.lib import websocket
from kubetorch.wire import frames

if TYPE_CHECKING:
    from kubetorch.sdk.streams.pending import PendingCall

Buffer = bytes | bytearray | memoryview

#: A message up to so many bytes is copied into one buffer.
JOINED = 64 * 1024


class Frame:
    """One frame to send.

    Attributes:
        parts: Its bytes, WebSocket header included.
        is_counted: Whether it is kept until the other end has it.
        call: The call that it opens.
    """

    __slots__ = ("call", "is_counted", "parts")

    def __init__(
        self, parts: Sequence[Buffer], *, is_counted: bool = True, call: PendingCall | None = None
    ) -> None:
        self.parts = parts
        self.is_counted = is_counted
        self.call = call


def message(head: bytes, pieces: Sequence[Buffer] = (), size: int = 0) -> Sequence[Buffer]:
    """The buffers of a binary message: a frame's header and meta, and `size` bytes of payload."""
    size += len(head)
    start = websocket.frame_header(websocket.BINARY, size, masked=True) + head
    if not pieces:
        return (start,)
    return (b"".join((start, *pieces)),) if size <= JOINED else (start, *pieces)


def control(opcode: int, payload: bytes = b"") -> Frame:
    """A PING, PONG or CLOSE frame of the WebSocket itself."""
    header = websocket.frame_header(opcode, len(payload), masked=True)
    return Frame((header + payload,), is_counted=False)


def credit(call: int, size: int) -> Frame:
    """Room for so many more bytes of payload of a call."""
    return Frame(message(frames.encode(frames.Kind.CREDIT, call, frames.Credit(size))))
