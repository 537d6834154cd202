"""The values of several ranks as one payload, of the codec `ranks`.

The first segment is a JSON list of `[rank, codec, segments, is_streamed]`, one for each entry; the
segments of all entries follow in the same order. Agents put entries together without decoding them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kubetorch.errors import ProtocolError

#: The codec's name in `frames.Body`.
CODEC = "ranks"

Buffer = bytes | bytearray | memoryview

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Entry(NamedTuple):
    """A value that one rank returned or yielded, still encoded by `kubetorch.wire.codecs`.

    `is_streamed` marks the return value of a generator, which follows its last yielded value.
    """

    rank: int
    codec: str
    segments: Sequence[Buffer]
    is_streamed: bool = False


def pack(entries: Iterable[Entry]) -> list[Buffer]:
    """The segments of a payload with these entries, in rank order."""
    ordered_entries = sorted(entries, key=lambda entry: entry.rank)
    head = [
        [entry.rank, entry.codec, len(entry.segments), entry.is_streamed]
        for entry in ordered_entries
    ]
    segments: list[Buffer] = [_encode(head).encode()]
    for entry in ordered_entries:
        segments.extend(entry.segments)
    return segments


def unpack(segments: Sequence[Buffer]) -> list[Entry]:
    """The entries that `pack` made segments of."""
    try:
        head = json.loads(bytes(segments[0]))
        entries, position = [], 1
        for rank, codec, count, is_streamed in head:
            entries.append(
                Entry(
                    int(rank), str(codec), segments[position : position + count], bool(is_streamed)
                )
            )
            position += count
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a payload of ranks: {error}") from error
    if position != len(segments):
        raise ProtocolError(
            f"a payload of ranks with {len(segments)} segments instead of {position}"
        )
    return entries
