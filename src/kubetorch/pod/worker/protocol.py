"""Frames between an agent and its worker, on a Unix stream socket.

     0      1       2          4             8           12            20                28
    +------+-------+----------+-------------+-----------+-------------+-----------------+---
    | kind | flags | reserved | meta length | argument  | call number | payload length  | …
    | u8   | u8    | u16      | u32         | u32       | u64         | u64             |
    +------+-------+----------+-------------+-----------+-------------+-----------------+---

Then meta and payload; little-endian. Agent and worker are of one version (the worker is run from
the agent's own files), so nothing here is negotiated.

    agent   LOAD           (CALL | CANCEL | GRANT | RELEASE | TRIM)*          STOP
    worker         LOADED | FAILED     (YIELD | PROGRESS | RESULT | ERROR | RELEASE | FORGET)*

A payload up to `INLINE` bytes follows its frame. A longer one lies in a *memory file*, known to
both ends by a number (`argument`, chosen by the end that made the file); its descriptor comes with
the first frame that names it (`DESCRIPTOR`). RELEASE says that this end does not look at a memory
file any more, so its owner may use it again; FORGET that it will never be used again.

Codec and sizes of a payload's segments (`kubetorch.wire.codecs`) are in `flags` and, when there is
more than one segment, at the beginning of meta. The rest of a CALL's meta is the length of the
method's name (u32, 0xffffffff for none), the name, and the identity of the request, in UTF-8.
"""

from __future__ import annotations

import array
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

Buffer = bytes | bytearray | memoryview

#: Longest payload that is sent in the stream, in bytes.
INLINE: Final = 256 * 1024
#: Values that a generator may send before the first GRANT.
FIRST_GRANT: Final = 16

LOAD: Final = 1
CALL: Final = 2
CANCEL: Final = 3
GRANT: Final = 4
STOP: Final = 5
#: Give the memory of unused memory files back to the system.
TRIM: Final = 6
RELEASE: Final = 7
FORGET: Final = 8
LOADED: Final = 16
FAILED: Final = 17
RESULT: Final = 18
ERROR: Final = 19
YIELD: Final = 20
PROGRESS: Final = 21

_CODECS: Final = ("json", "pickle", "none")
_CODEC_NUMBERS: Final = {codec: number for number, codec in enumerate(_CODECS)}
_CODEC_BITS: Final = 0x03
#: Meta begins with the sizes of the segments; else there is one segment.
_SIZES: Final = 0x04
#: The payload lies in the memory file with the number `argument`.
FILE: Final = 0x08
#: A descriptor comes with this frame.
DESCRIPTOR: Final = 0x10
#: RESULT: the call was a generator.
STREAMED: Final = 0x20
#: CANCEL: because its time is over.
TIMED_OUT: Final = 0x40
#: RELEASE: the memory file must not be used again.
SPENT: Final = 0x80

_HEADER: Final = struct.Struct("<BBxxIIQQ")
HEADER_BYTES: Final = _HEADER.size
_COUNT: Final = struct.Struct("<I")
_NAME: Final = struct.Struct("<I")
_NO_METHOD: Final = _NAME.pack(0xFFFFFFFF)


class Frame(NamedTuple):
    """One frame.

    Attributes:
        kind, flags, argument, call: See the module.
        meta: Its meta.
        length: Bytes of its payload, wherever that lies.
        payload: An inline payload, in memory of its own; empty when it lies in a memory file.
        descriptor: The descriptor that came with it, to be closed by the receiver; `None` also
            when this process had no room for one.
    """

    kind: int
    flags: int
    argument: int
    call: int
    meta: bytes
    length: int
    payload: bytearray
    descriptor: int | None


# ------------------------------------------------------------------------------- codec and sizes


def pack_sizes(codec: str, sizes: Sequence[int]) -> tuple[int, bytes]:
    """Flags, and what goes before the rest of meta."""
    flags = _CODEC_NUMBERS[codec]
    if len(sizes) == 1:
        return flags, b""
    return flags | _SIZES, struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)


def unpack_sizes(frame: Frame) -> tuple[str, tuple[int, ...], bytes]:
    """Codec, sizes of the segments, rest of meta."""
    codec = _CODECS[frame.flags & _CODEC_BITS]
    if not frame.flags & _SIZES:
        return codec, (frame.length,), frame.meta
    (count,) = _COUNT.unpack_from(frame.meta)
    end = _COUNT.size + 8 * count
    sizes = struct.unpack_from(f"<{count}Q", frame.meta, _COUNT.size)
    return codec, sizes, frame.meta[end:]


def pack(
    kind: int,
    call: int = 0,
    *,
    flags: int = 0,
    argument: int = 0,
    meta: bytes = b"",
    length: int = 0,
) -> bytes:
    """Header and meta of a frame."""
    return _HEADER.pack(kind, flags, len(meta), argument, call, length) + meta


def pack_call(method: str | None, request_id: str) -> bytes:
    """What is called and for whom: not as JSON, which would take longer than the system call."""
    if method is None:
        return _NO_METHOD + request_id.encode(errors="surrogatepass")
    name = method.encode(errors="surrogatepass")
    return _NAME.pack(len(name)) + name + request_id.encode(errors="surrogatepass")


def unpack_call(meta: bytes) -> tuple[str | None, str]:
    """Method and identity of the request."""
    begin = end = _NAME.size
    method = None
    if not meta.startswith(_NO_METHOD):
        end = begin + _NAME.unpack_from(meta)[0]
        method = meta[begin:end].decode(errors="surrogatepass")
    return method, meta[end:].decode(errors="surrogatepass")


# ------------------------------------------------------------------------------------- receiving

_CHUNK: Final = 64 * 1024
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize
_ANCILLARY: Final = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
# Plain numbers: operations on the enumerations of `socket` cost as much as a system call.
_CLOSE_ON_EXEC: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED: Final = int(socket.MSG_CTRUNC)


class Receiver:
    """Frames out of a socket. One thread at a time may use it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(_CHUNK)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        self._descriptors: deque[int | None] = deque()
        # A frame that is longer than the buffer, of which `_filled` bytes are there.
        self._long: bytearray | None = None
        self._filled = 0

    def receive(self) -> bool:
        """Take what the socket has; waits if it blocks. False at its end.

        Raises:
            BlockingIOError: The socket does not block and has nothing.
            OSError: The socket is broken.
        """
        if self._long is not None:
            room = memoryview(self._long)[self._filled :]
        else:
            if self._begin:
                rest = self._end - self._begin
                self._buffer[:rest] = self._buffer[self._begin : self._end]
                self._begin, self._end = 0, rest
            room = self._view[self._end :]
        count, ancillary, flags, _ = self._socket.recvmsg_into([room], _ANCILLARY, _CLOSE_ON_EXEC)
        if ancillary or flags & _TRUNCATED:
            self._take(ancillary)
        if self._long is not None:
            self._filled += count
        else:
            self._end += count
        return count > 0

    def next(self) -> Frame | None:
        """The next whole frame of what was received."""
        if self._long is not None:
            return self._next_long(self._long)
        begin = self._begin
        available = self._end - begin
        if available < HEADER_BYTES:
            return None
        kind, flags, meta_length, argument, call, length = _HEADER.unpack_from(self._buffer, begin)
        inline = 0 if flags & FILE else length
        total = HEADER_BYTES + meta_length + inline
        if available < total:
            if total > _CHUNK:
                self._long = bytearray(total)
                self._long[:available] = self._view[begin : self._end]
                self._filled = available
                self._begin = self._end = 0
            return None
        self._begin = begin + total
        if self._begin == self._end:
            self._begin = self._end = 0
        middle = begin + HEADER_BYTES + meta_length
        meta = bytes(self._buffer[begin + HEADER_BYTES : middle]) if meta_length else b""
        payload = self._buffer[middle : middle + inline]
        descriptor = self._descriptors.popleft() if flags & DESCRIPTOR else None
        return Frame(kind, flags, argument, call, meta, length, payload, descriptor)

    def close(self) -> None:
        """Close descriptors that belong to no frame."""
        for descriptor in self._descriptors:
            if descriptor is not None:
                socket.close(descriptor)
        self._descriptors.clear()

    def _next_long(self, frame: bytearray) -> Frame | None:
        if self._filled < len(frame):
            return None
        self._long = None
        kind, flags, meta_length, argument, call, length = _HEADER.unpack_from(frame)
        middle = HEADER_BYTES + meta_length
        meta = bytes(frame[HEADER_BYTES:middle])
        del frame[:middle]
        descriptor = self._descriptors.popleft() if flags & DESCRIPTOR else None
        return Frame(kind, flags, argument, call, meta, length, frame, descriptor)

    def _take(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        found = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
        # Each frame brings at most one descriptor; one that is announced and not there was lost
        # because this process may not open another.
        self._descriptors.extend(found or (None,))


def rights(descriptor: int) -> list[tuple[int, int, array.array[int]]]:
    """Ancillary data that sends a descriptor."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
