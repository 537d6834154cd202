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
    """A value that one rank returned or yielded, still encoded as `kubetorch.wire.codecs` does it.

    A generator's that `is_streamed` is what the rank returned after its last value.
    """

    rank: int
    codec: str
    segments: Sequence[Buffer]
    is_streamed: bool = False


def pack(entries: Iterable[Entry]) -> list[Buffer]:
    """The segments of a payload with these entries, in rank order."""
    ordered = sorted(entries, key=lambda entry: entry.rank)
    head = [[one.rank, one.codec, len(one.segments), one.is_streamed] for one in ordered]
    segments: list[Buffer] = [_encode(head).encode()]
    for one in ordered:
        segments.extend(one.segments)
    return segments


def unpack(segments: Sequence[Buffer]) -> list[Entry]:
    """The entries that `pack` was given."""
    try:
        head = json.loads(bytes(segments[0]))
        entries, at = [], 1
        for rank, codec, count, is_streamed in head:
            entries.append(
                Entry(int(rank), str(codec), segments[at : at + count], bool(is_streamed))
            )
            at += count
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a payload of ranks: {error}") from error
    if at != len(segments):
        raise ProtocolError(f"a payload of ranks with {len(segments)} segments instead of {at}")
    return entries
