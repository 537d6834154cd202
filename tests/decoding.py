"""Frames as tests see them, who stand at the other end of those that the product reads."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kubetorch.wire import frames
from kubetorch.wire.frames import Kind


class Seen(NamedTuple):
    """A whole frame; the payload is a view of it."""

    kind: Kind
    call: int
    meta: msgspec.Struct | None
    payload: memoryview


def decode(frame: bytes | bytearray | memoryview) -> Seen:
    """What a frame says."""
    kind, _, _, meta_length, call = frames.HEADER.unpack_from(frame)
    rest = memoryview(frame)[frames.HEADER_BYTES :]
    meta = frames.decode_meta(kind, rest[:meta_length])
    return Seen(Kind(kind), call, meta, rest[meta_length:])
