"""Blobs on their way: a zstd stream of the records of `kubetorch.wire.blobs`, in and out.

Neither end holds more than a few pieces in memory, whatever the size of the blobs, and a receiver
takes no more than its limit, however well it was compressed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import zstandard

from kubetorch.datastore.blobs import BlobStore, BlobWriter, Source
from kubetorch.errors import DataStoreError, ProtocolError
from kubetorch.wire import blobs as records

#: Most bytes, and most blobs, that one stream may bring.
STREAM_BYTES = 64 * 1024**3
STREAM_BLOBS = 1_000_000

# Source code compresses well at any level; this one never slows a local network down.
_LEVEL = 1
_PIECE = 256 * 1024
# A stream that asks for more memory than this to be read is refused (level 1 needs 512 KiB).
_WINDOW_BYTES = 8 * 1024**2


def compressed(digests: Iterable[str], source: Source) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    ready: list[bytes] = []
    size = 0
    for digest in digests:
        for piece in _record(digest, source):
            out = compressor.compress(piece)
            if out:
                ready.append(out)
                size += len(out)
            if size >= _PIECE:
                yield b"".join(ready)
                ready, size = [], 0
    ready.append(compressor.flush())
    yield b"".join(ready)


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
    """Takes a stream and stores the blobs in it; each is stored as soon as it is complete.

    Close it in any case: it drops what is half-written.
    """

    def __init__(
        self,
        store: BlobStore,
        *,
        limit_bytes: int = STREAM_BYTES,
        limit_blobs: int = STREAM_BLOBS,
    ) -> None:
        self._store = store
        self._left_bytes = limit_bytes
        self._left_blobs = limit_blobs
        self._limits = f"{limit_blobs} blobs and {limit_bytes} bytes are allowed"
        self._unpacker = records.Unpacker()
        self._decompressor = zstandard.ZstdDecompressor(
            max_window_size=_WINDOW_BYTES
        ).stream_writer(
            # No reference back: the collector does not see through objects of this library, so
            # each receiver would stay for good, with the window of its decompressor.
            _Sink(weakref.proxy(self)),  # type: ignore[arg-type]  # only its write() is used
            write_size=_PIECE,
            closefd=False,
        )
        self._writer: BlobWriter | None = None
        self._expected = 0
        self.received: list[str] = []

    def feed(self, data: bytes) -> None:
        try:
            self._decompressor.write(data)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"the stream of blobs cannot be decompressed: {error}") from error

    def finish(self) -> list[str]:
        """The stream has ended: the digests of the blobs that it brought."""
        self._unpacker.close()
        return self.received

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.drop()

    def _take(self, data: bytes) -> None:
        for digest, length, piece in self._unpacker.feed(data):
            if length is not None:
                self._begin(digest, length)
            elif self._writer is not None:
                self._writer.write(piece)
                self._expected -= len(piece)
            if self._expected == 0 and self._writer is not None:
                writer, self._writer = self._writer, None
                writer.finish()
                self.received.append(digest)

    def _begin(self, digest: str, length: int) -> None:
        self._left_bytes -= length
        self._left_blobs -= 1
        if self._left_bytes < 0 or self._left_blobs < 0:
            raise ProtocolError(f"the stream of blobs brings too much: {self._limits}")
        self._writer = self._store.writer(digest, length)
        self._expected = length


class _Sink:
    """Takes the decompressor's output piece by piece, so that a bomb never lies in memory."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def write(self, data: bytes) -> int:
        self._receiver._take(bytes(data))
        return len(data)
