"""Transfer of blobs: zstd frames with the records of `kubetorch.wire.blobs`, in and out.

Neither end holds more than a few pieces in memory, whatever the size of the blobs. A receiver
counts decompressed bytes and refuses a stream with more than its limit.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple, Protocol

import zstandard

from kubetorch.datastore.blobs import Source
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError, ProtocolError
from kubetorch.wire import blobs as records

# Source code compresses well at any level; this one never slows a local network down.
_LEVEL = 1
_PIECE = 256 * 1024


#: Blobs from this size on are compressed only if a sample of them shrinks.
_SAMPLED_BYTES, _SAMPLE_BYTES, _WORTHWHILE = 64 * 1024, 16 * 1024, 0.9
#: Places of a delta that a sample is taken from. It is sent if it is smaller than what a blob
#: itself is compressed to, which is four fifths for weights.
_DELTA_SAMPLES, _WORTHWHILE_DELTA = 8, 0.6
#: The interpreter does nothing else while it computes with a number.
_XOR_BYTES = 64 * 1024
# A frame of zstd without compression: magic number, no options, a window of 128 KiB; then blocks of
# 3 bytes of head (size and kind 0, "raw") and their content; then an empty last block.
_STORED_HEAD, _STORED_END = b"\x28\xb5\x2f\xfd\x00\x38", b"\x01\x00\x00"
_STORED_BLOCK = 128 * 1024


def compressed(
    digests: Iterable[str], source: Source, delta_of: DeltaOf | None = None
) -> Iterator[bytes]:
    """The stream of some blobs; those that compression would not make smaller are stored.

    Where `delta_of` gives a delta to a blob that the receiver has, the delta is sent.
    """
    frames = _Frames()
    for digest in digests:
        difference = None if delta_of is None else delta_of(digest)
        if difference is not None:
            frames.begin(is_stored=False)
            frames.add(records.pack(digest, len(difference.content), difference.base))
            frames.add(difference.content)
            yield frames.take()
            continue
        length, pieces = source(digest)
        sent = 0
        for piece in filter(len, pieces):
            if not sent:
                frames.begin(is_stored=length >= _SAMPLED_BYTES and not _shrinks(piece))
                frames.add(records.pack(digest, length))
            sent += len(piece)
            frames.add(piece)
            if frames.size >= _PIECE:
                yield frames.take()
        if not length:
            frames.begin(is_stored=False)
            frames.add(records.pack(digest, length))
        if sent != length:
            raise DataStoreError(f"the blob {digest} has {sent} bytes, not {length}")
    frames.end()
    yield frames.take()


class Delta(NamedTuple):
    """The exclusive or of a blob and its base."""

    base: str
    content: bytes | memoryview


#: A function from the digest of a blob to its delta; `None` if the blob is to be sent whole.
DeltaOf = Callable[[str], Delta | None]


def delta(content: bytes | memoryview, base_digest: str, base: bytes | memoryview) -> Delta | None:
    """The delta between two blobs of one length; `None` if it would hardly be smaller."""
    difference = exclusive_or(content, base)
    step = max(1, len(difference) // _DELTA_SAMPLES)
    sample = b"".join(
        difference[begin : begin + _SAMPLE_BYTES // _DELTA_SAMPLES]
        for begin in range(0, len(difference), step)
    )
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(sample)
    if len(packed) >= _WORTHWHILE_DELTA * len(sample):
        return None
    return Delta(base_digest, difference)


def exclusive_or(one_bytes: bytes | memoryview, other_bytes: bytes | memoryview) -> memoryview:
    """Byte by byte; by NumPy where it is installed, without it at a hundredth of the speed."""
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        parts = []
        for begin in range(0, len(one_bytes), _XOR_BYTES):
            part = one_bytes[begin : begin + _XOR_BYTES]
            number = int.from_bytes(part, "little")
            number ^= int.from_bytes(other_bytes[begin : begin + len(part)], "little")
            parts.append(number.to_bytes(len(part), "little"))
        return memoryview(b"".join(parts))
    arrays = (numpy.frombuffer(data, numpy.uint8) for data in (one_bytes, other_bytes))
    return memoryview(numpy.bitwise_xor(*arrays))


def _shrinks(piece: bytes | memoryview) -> bool:
    """True if a sample from the middle of a piece shrinks."""
    middle = max(0, len(piece) - _SAMPLE_BYTES) // 2
    sample = piece[middle : middle + _SAMPLE_BYTES]
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(sample)
    return len(packed) < _WORTHWHILE * len(sample)


class _Frames:
    """Frames of zstd, some of which have their content as it is."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        #: The frame that is being compressed; `None` in a stored frame, and before the first.
        self._frame: zstandard.ZstdCompressionObj | None = None
        self._is_stored = False
        self._pieces: list[bytes | memoryview] = []
        self.size = 0

    def begin(self, *, is_stored: bool) -> None:
        """Go on with a frame of this kind."""
        is_begun = self._is_stored or self._frame is not None
        if is_begun and is_stored == self._is_stored:
            return
        self.end(is_last=False)
        self._is_stored = is_stored
        if is_stored:
            self._append(_STORED_HEAD)
        else:
            self._frame = self._compressor.compressobj()

    def add(self, piece: bytes | memoryview) -> None:
        if self._frame is not None:
            self._append(self._frame.compress(piece))
            return
        view = memoryview(piece)
        for begin in range(0, len(view), _STORED_BLOCK):
            block = view[begin : begin + _STORED_BLOCK]
            self._append((len(block) << 3).to_bytes(3, "little"))
            self._append(block)

    def end(self, *, is_last: bool = True) -> None:
        if self._frame is not None:
            self._append(self._frame.flush())
        elif self._is_stored:
            self._append(_STORED_END)
        elif is_last:  # no blob at all
            self._append(self._compressor.compress(b""))
        self._frame, self._is_stored = None, False

    def take(self) -> bytes:
        taken, self._pieces, self.size = b"".join(self._pieces), [], 0
        return taken

    def _append(self, piece: bytes | memoryview) -> None:
        if piece:
            self._pieces.append(piece)
            self.size += len(piece)


class Writer(Protocol):
    """Receives the bytes of a blob, which are checked and stored at the end."""

    def write(self, piece: bytes) -> None: ...

    def finish(self) -> None: ...

    def drop(self) -> None: ...


class Destination(Protocol):
    """A `BlobStore`, or what takes blobs in its place."""

    def writer(self, digest: str, length: int) -> Writer: ...


class Bases(Protocol):
    """A `BlobStore`, or what has the bases of deltas in its place."""

    def open(self, digest: str) -> BinaryIO:
        """The bytes of a blob, unchecked: what a delta to others gives has another digest."""


class Receiver:
    """Stores the blobs of a stream; each blob is stored as soon as it is complete.

    Close it in any case: `close` drops a blob that is half-written.

    Args:
        bases: Where the bases of deltas are; without it no delta may come.
    """

    def __init__(
        self,
        store: Destination,
        *,
        bases: Bases | None = None,
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
        self._writer: Writer | None = None
        self._expected_bytes = 0
        self._bases = bases
        self._base: BinaryIO | None = None
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
        self._close_base()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.drop()

    def _store_records(self, data: bytes) -> None:
        for digest, length, piece in self._unpacker.feed(data):
            if length is not None:
                self._begin(digest, length)
            elif self._writer is not None:
                base = b"" if self._base is None else self._base.read(len(piece))
                # A view does as well, and only a `BlobStore` gets deltas.
                self._writer.write(exclusive_or(piece, base) if base else piece)  # type: ignore[arg-type]
                self._expected_bytes -= len(piece)
            if self._expected_bytes == 0 and self._writer is not None:
                self._close_base()
                writer, self._writer = self._writer, None
                writer.finish()
                self.received.append(digest)

    def _begin(self, digest: str, length: int) -> None:
        self._remaining_bytes -= length
        self._remaining_blobs -= 1
        if self._remaining_bytes < 0 or self._remaining_blobs < 0:
            raise ProtocolError(f"the stream of blobs brings too much: {self._limits}")
        self._base = self._open_base(digest, length)
        self._writer = self._store.writer(digest, length)
        self._expected_bytes = length

    def _open_base(self, digest: str, length: int) -> BinaryIO | None:
        base = self._unpacker.base
        if not base:
            return None
        if self._bases is None:
            raise ProtocolError(f"the blob {digest} came as a delta, which nothing asked for")
        file = self._bases.open(base)
        if file.seek(0, os.SEEK_END) != length:
            file.close()
            raise DataStoreError(f"{base} is no base of the blob {digest}: it has another length")
        file.seek(0)
        return file

    def _close_base(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            base.close()


class _Sink:
    """Receives the decompressor's output piece by piece: a bomb never lies in memory as a whole."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def write(self, data: bytes) -> int:
        self._receiver._store_records(bytes(data))
        return len(data)
