"""Blobs on the wire: a sequence of records, which the sender compresses as one zstd stream.

 0                    32             40
+--------------------+--------------+-------------------+
| BLAKE3 digest      | length (u64) | bytes of the blob | …
+--------------------+--------------+-------------------+

A blob that is almost equal to a blob of its length that the receiver has, its base, may come as a
delta: the highest bit of the length is set, the digest of the base follows it, and each byte is the
exclusive or of both. Most of these are zeros, of which compression leaves next to nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kubetorch.errors import ProtocolError
from kubetorch.wire.tuning import LIMITS

_RECORD = struct.Struct("!32sQ")
RECORD_BYTES = _RECORD.size
_DELTA = 1 << 63
_DIGEST_BYTES = 32

CONTENT_TYPE = "application/vnd.kubetorch.blobs+zstd"


def pack(digest: str, length: int, base: str = "") -> bytes:
    """The record in front of the bytes of a blob, or of its delta to a base."""
    if base:
        return _RECORD.pack(bytes.fromhex(digest), length | _DELTA) + bytes.fromhex(base)
    return _RECORD.pack(bytes.fromhex(digest), length)


class Unpacker:
    """Decompressed bytes in, pieces of blobs out."""

    def __init__(self) -> None:
        self._pending = b""
        self._digest = ""
        self._remaining_bytes = 0
        #: The base of the blob that is unpacked; empty if the blob comes whole.
        self.base = ""

    def feed(self, data: bytes) -> Iterator[tuple[str, int | None, bytes]]:
        """For each piece: the blob's digest, its length (first piece) or `None`, and the bytes."""
        pending = memoryview(self._pending + data if self._pending else data)
        begin, self._pending = 0, b""
        while True:
            if self._remaining_bytes == 0:
                if len(pending) - begin < RECORD_BYTES:
                    self._pending = bytes(pending[begin:])
                    return
                raw, length = _RECORD.unpack_from(pending, begin)
                end = begin + RECORD_BYTES
                base_end = end + (_DIGEST_BYTES if length & _DELTA else 0)
                if len(pending) < base_end:
                    self._pending = bytes(pending[begin:])
                    return
                length &= ~_DELTA
                if length > LIMITS.blob_bytes:
                    raise ProtocolError(
                        f"a blob claims {length} bytes; {LIMITS.blob_bytes} are allowed"
                    )
                self._digest, self._remaining_bytes = raw.hex(), length
                self.base = bytes(pending[end:base_end]).hex()
                begin = base_end
                yield self._digest, length, b""
            if begin == len(pending):
                return
            piece = bytes(pending[begin : begin + self._remaining_bytes])
            begin += len(piece)
            self._remaining_bytes -= len(piece)
            if piece:
                yield self._digest, None, piece

    def close(self) -> None:
        """Check that the last blob is complete."""
        if self._pending or self._remaining_bytes:
            raise ProtocolError("the stream of blobs is truncated")
