"""Transfer of blobs: a zstd stream of the records of `kubetorch.wire.blobs`, in and out.

Neither end holds more than a few pieces in memory, whatever the size of the blobs. A receiver
counts decompressed bytes and refuses a stream with more than its limit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import zstandard

from kubetorch.datastore.blobs import BlobStore, BlobWriter, Source
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError, ProtocolError
from kubetorch.wire import blobs as records

# Source code compresses well at any level; this one never slows a local network down.
_LEVEL = 1
_PIECE = 256 * 1024


def compressed(digests: Iterable[str], source: Source) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    compressed_pieces: list[bytes] = []
    size = 0
    for digest in digests:
        for piece in _record(digest, source):
            compressed_piece = compressor.compress(piece)
            if compressed_piece:
                compressed_pieces.append(compressed_piece)
                size += len(compressed_piece)
            if size >= _PIECE:
                yield b"".join(compressed_pieces)
                compressed_pieces, size = [], 0
    compressed_pieces.append(compressor.flush())
    yield b"".join(compressed_pieces)


def _record(digest: str, source: Source) -> Iterator[bytes]:
    length, pieces = source(digest)
    yield records.pack(digest, length)
    sent = 0
    for piece in pieces:
        sent += len(piece)
        yield piece
    if sent != length:
        raise DataStoreError(f"the blob {digest} has {sent} bytes, not {length}")


class Receiver:
    """Stores the blobs of a stream; each blob is stored as soon as it is complete.

    Close it in any case: `close` drops a blob that is half-written.
    """

    def __init__(
        self,
        store: BlobStore,
        *,
        limit_bytes: int = LIMITS.stream_bytes,
        limit_blobs: int = LIMITS.stream_blobs,
    ) -> None:
        self._store = store
        self._remaining_bytes = limit_bytes
        self._remaining_blobs = limit_blobs
        self._limits = f"{limit_blobs} blobs and {limit_bytes} bytes are allowed"
        self._unpacker = records.Unpacker()
        self._decompressor = zstandard.ZstdDecompressor(
            max_window_size=LIMITS.stream_window_bytes
        ).stream_writer(
            # No reference back: the collector does not see through objects of this library, so
            # each receiver would stay for good, with the window of its decompressor.
            _Sink(weakref.proxy(self)),  # type: ignore[arg-type]  # only its write() is used
            write_size=_PIECE,
            closefd=False,
        )
        self._writer: BlobWriter | None = None
        self._expected_bytes = 0
        self.received: list[str] = []

    def feed(self, data: bytes) -> None:
        try:
            self._decompressor.write(data)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"the stream of blobs cannot be decompressed: {error}") from error

    def finish(self) -> list[str]:
        """End the stream; returns the digests of its blobs."""
        self._unpacker.close()
        return self.received

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.drop()

    def _store_records(self, data: bytes) -> None:
        for digest, length, piece in self._unpacker.feed(data):
            if length is not None:
                self._begin(digest, length)
            elif self._writer is not None:
                self._writer.write(piece)
                self._expected_bytes -= len(piece)
            if self._expected_bytes == 0 and self._writer is not None:
                writer, self._writer = self._writer, None
                writer.finish()
                self.received.append(digest)

    def _begin(self, digest: str, length: int) -> None:
        self._remaining_bytes -= length
        self._remaining_blobs -= 1
        if self._remaining_bytes < 0 or self._remaining_blobs < 0:
            raise ProtocolError(f"the stream of blobs brings too much: {self._limits}")
        self._writer = self._store.writer(digest, length)
        self._expected_bytes = length


class _Sink:
    """Receives the decompressor's output piece by piece: a bomb never lies in memory as a whole."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def write(self, data: bytes) -> int:
        self._receiver._store_records(bytes(data))
        return len(data)
