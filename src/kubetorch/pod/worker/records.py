"""Records in the pipe of output: what tells a call's print from bytes that anything else wrote.

     0        16      17       18          20         24       28          36        44
    +--------+-------+--------+-----------+----------+--------+-----------+---------+------+
    | nonce  | source| flags  | level len | text len | writer | call      | time    | …
    | 16 B   | u8    | u8     | u16       | u32      | u32    | u64       | f64     |
    +--------+-------+--------+-----------+----------+--------+-----------+---------+------+

Then the name of the level and the text, which is a piece of a stream, not a line: lines are put
together by the reader, for each writer (process), call and source. A record has at most `PIPE_BUF`
bytes and is written at once, so the records of several processes never mix. The nonce is the
worker's own, random: output that happens to look like a record of another worker is text.
"""

from __future__ import annotations

import select
import struct
from typing import Final, NamedTuple

NONCE_BYTES: Final = 16
_HEADER: Final = struct.Struct("<16sBBHIIQd")
HEADER_BYTES: Final = _HEADER.size

#: Bytes of a record, header included.
RECORD_LIMIT: Final = min(select.PIPE_BUF, 4096)

STDOUT: Final = 1
STDERR: Final = 2
LOGGER: Final = 3
SOURCES: Final = {STDOUT: "stdout", STDERR: "stderr", LOGGER: "logger"}

#: The last piece: what the stream has of an unfinished line is to be delivered.
END: Final = 0x01


class Origin(NamedTuple):
    """What a text comes from.

    Attributes:
        nonce: The worker.
        writer: The process: the worker or one that it forked.
        call: Number of the call; 0 is none.
        source: `STDOUT`, `STDERR` or `LOGGER`.
        level: Level of a logger's message.
    """

    nonce: bytes
    writer: int
    call: int
    source: int
    level: bytes = b""


def pack(origin: Origin, text: bytes | memoryview, *, time: float, flags: int = 0) -> bytes:
    """One record."""
    nonce, writer, call, source, level = origin
    head = _HEADER.pack(nonce, source, flags, len(level), len(text), writer, call, time)
    return b"".join((head, level, text))


def unpack(data: bytes | bytearray, offset: int) -> tuple[int, int, int, int, int, int, float]:
    """Source, flags, level length, text length, writer, call, time of the record at `offset`."""
    return _HEADER.unpack_from(data, offset)[1:]
