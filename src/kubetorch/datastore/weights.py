"""Tensors in a store of blobs: where their bytes lie in chunks, and how they get out verified."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from blake3 import blake3

from kubetorch.datastore import safetensors
from kubetorch.datastore.blobs import BlobStore, digest_of, poisoned
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.safetensors import Header, Tensor
from kubetorch.datastore.tensors import Contents, Destination, TensorFile
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError

_T = TypeVar("_T")
_R = TypeVar("_R")


def manifest_of(file: TensorFile, digests: Iterable[str]) -> Manifest:
    """The manifest of a file whose chunks behind the header have these digests."""
    header = Chunk(digest_of(file.encoded_header), len(file.encoded_header))
    chunks = (
        Chunk(digest, cut.end - cut.begin)
        for digest, cut in zip(digests, file.header.cuts, strict=True)
    )
    return Manifest("tensors", (Entry("", chunks=(header, *chunks)),))


#: Where a chunk lies, whatever its bytes are: name of its first tensor, begin in it, size.
Place = tuple[str, int, int]


def places_in(manifest: Manifest) -> dict[Place, str]:
    """The chunks of files that have blobs of their own, by path, bytes to the end, and size.

    Counted from the end of a file of safetensors, tensors stay in place when its header grows.
    """
    places: dict[Place, str] = {}
    for entry in manifest.entries:
        rest = entry.size
        for chunk in entry.chunks:
            if chunk.digest and chunk.pack is None:
                places[entry.path, rest, chunk.size] = chunk.digest
            rest -= chunk.size
    return places


def _start(manifest: Manifest, read: Callable[[str], bytes]) -> bytes:
    """The first bytes of a file, with its header and little more."""
    (entry,) = manifest.entries
    start = bytearray()
    length = safetensors.LONGEST_HEADER_BYTES
    for chunk in entry.chunks:
        size = min(chunk.size, length - len(start))
        if chunk.digest:
            start += read(manifest.blob_of(chunk))[chunk.offset : chunk.offset + size]
        else:
            start += bytes(size)
        length = safetensors.header_length(start, entry.size)
        if len(start) >= length:
            break
    return bytes(start)


class _Piece(NamedTuple):
    """Bytes of a blob, and the memory where they are to be; without a digest they are zeros."""

    digest: str
    offset: int
    target: memoryview


class StoredTensors:
    """A file of safetensors as a manifest has it, cut at borders of tensors or elsewhere.

    Args:
        read: Gives the bytes of a blob: those with the header are read at once.
    """

    def __init__(self, manifest: Manifest, read: Callable[[str], bytes]) -> None:
        if manifest.is_folder:
            raise DataStoreError(
                "the key holds a folder, not tensors",
                hint="get the folder, or one file of it: kt.get(key, dest='folder/')",
            )
        self._manifest = manifest
        (entry,) = manifest.entries
        self._chunks = entry.chunks
        self._begins = [0]
        for chunk in entry.chunks:
            self._begins.append(self._begins[-1] + chunk.size)
        self.header: Header = safetensors.parse(_start(manifest, read), entry.size)
        self._data_begin = entry.size - self.header.size

    def blob_sizes(self, tensors: Iterable[Tensor]) -> dict[str, int]:
        """The blobs that have some tensors, in the order of the file, with their lengths.

        Of a blob that has other files too it is what these tensors need at least.
        """
        numbers = {number for tensor in tensors for number, *_ in self._pieces(tensor)}
        chunks = (self._chunks[number] for number in sorted(numbers))
        return {
            self._manifest.blob_of(chunk): chunk.offset + chunk.size
            for chunk in chunks
            if chunk.digest
        }

    def places(self) -> dict[Place, str]:
        """The chunks with tensors, by their places."""
        tensors = [t for t in self.header.tensors.values() if t.begin < t.end]
        begins = [tensor.begin for tensor in tensors]
        places: dict[Place, str] = {}
        for begin, chunk in zip(self._begins, self._chunks, strict=False):
            position = begin - self._data_begin
            if position >= 0 and chunk.digest and chunk.pack is None:
                tensor = tensors[bisect_right(begins, position) - 1]
                places[tensor.name, position - tensor.begin, chunk.size] = chunk.digest
        return places

    def data_chunks(self) -> Iterator[tuple[str, int, int]]:
        """Digest, begin and end behind the header of each chunk that has tensors.

        Raises:
            DataStoreError: The file was not cut at the borders of tensors.
        """
        for begin, chunk in zip(self._begins, self._chunks, strict=False):
            if begin or chunk.size != self._data_begin:
                position = begin - self._data_begin
                if position < 0 or not chunk.digest or chunk.pack is not None:
                    raise DataStoreError("the version is a file that was not put as tensors")
                yield chunk.digest, position, position + chunk.size

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, int, int, int]]:
        """Parts of a tensor: number of the chunk, begin in it; begin and end in the tensor."""
        start, end = self._data_begin + tensor.begin, self._data_begin + tensor.end
        position = start
        while position < end:
            number = bisect_right(self._begins, position) - 1
            piece_end = min(self._begins[number + 1], end)
            yield number, position - self._begins[number], position - start, piece_end - start
            position = piece_end

    def fill(self, destination: Destination, contents: Contents, store: BlobStore) -> None:
        """Read tensors from verified blobs into their memory."""
        direct = [tensor for tensor in contents.tensors if destination.is_direct(tensor.name)]
        buffers = ((tensor, destination.buffer(tensor.name)[0]) for tensor in direct)
        pieces = (piece for pair in buffers for piece in self._targets(*pair))
        _run_all(lambda piece: _read(store, piece), pieces)
        for tensor in contents.tensors:  # one copy in memory at a time
            if not destination.is_direct(tensor.name):
                buffer, array = destination.buffer(tensor.name)
                _run_all(lambda piece: _read(store, piece), self._targets(tensor, buffer))
                destination.finish(tensor.name, array)
        destination.set_values()

    def _targets(self, tensor: Tensor, buffer: memoryview) -> Iterator[_Piece]:
        for number, offset, begin, end in self._pieces(tensor):
            chunk = self._chunks[number]
            digest = self._manifest.blob_of(chunk) if chunk.digest else ""
            yield _Piece(digest, chunk.offset + offset, buffer[begin:end])


def _read(store: BlobStore, piece: _Piece) -> None:
    digest, offset, target = piece
    if not digest:
        for begin in range(0, len(target), LIMITS.tensor_chunk_bytes):
            piece_target = target[begin : begin + LIMITS.tensor_chunk_bytes]
            piece_target[:] = bytes(len(piece_target))
        return
    with store.open(digest) as file:
        while target:
            size = os.preadv(file.fileno(), [target], offset)
            if not size:
                raise poisoned(digest, "its file ends too early")
            target, offset = target[size:], offset + size


def damaged(store: BlobStore, digests: Iterable[str]) -> list[str]:
    """The blobs among these that are not what their names say; they are removed from the store."""

    def check(digest: str) -> str | None:
        try:
            actual = blake3().update_mmap(store.path(digest)).hexdigest()
        except OSError as error:
            raise DataStoreError(f"the blob {digest} cannot be read: {error}") from error
        if actual == digest:
            return None
        store.delete(digest)
        return digest

    return [digest for digest in in_threads(check, digests) if digest is not None]


def _run_all(work: Callable[[_T], None], items: Iterable[_T]) -> None:
    for _ in in_threads(work, items):
        pass


def in_threads(work: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """The results in order; few items wait at a time, however many there are."""
    with ThreadPoolExecutor(LIMITS.tensor_threads, "kubetorch-tensors") as threads:
        pending: deque[Future[_R]] = deque()
        for item in items:
            pending.append(threads.submit(work, item))
            if len(pending) > LIMITS.tensor_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
