"""Blobs on the wire: a sequence of records, which the sender compresses as one zstd stream.

 0                    32             40
+--------------------+--------------+-------------------+
| BLAKE3 digest      | length (u64) | bytes of the blob | …
+--------------------+--------------+-------------------+
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kubetorch.errors import ProtocolError
from kubetorch.wire.tuning import LIMITS

_RECORD = struct.Struct("!32sQ")
RECORD_BYTES = _RECORD.size

CONTENT_TYPE = "application/vnd.kubetorch.blobs+zstd"


def pack(digest: str, length: int) -> bytes:
    """The record in front of the bytes of a blob."""
    return _RECORD.pack(bytes.fromhex(digest), length)


class Unpacker:
    """Decompressed bytes in, pieces of blobs out."""

    def __init__(self) -> None:
        self._pending = b""
        self._digest = ""
        self._remaining_bytes = 0

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
                if length > LIMITS.blob_bytes:
                    raise ProtocolError(
                        f"a blob claims {length} bytes; {LIMITS.blob_bytes} are allowed"
                    )
                self._digest, self._remaining_bytes = raw.hex(), length
                begin += RECORD_BYTES
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
