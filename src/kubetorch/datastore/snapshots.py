"""Reads the files of a put: their chunks, and the manifest that names these.

    sources ── small files ── packs ─┐
       └────── large files ── chunks ┴─ a sink, which stores what the store lacks ── manifest

A file that is as it was when it was read last is not read again. A file that changes while it is
read is read again; a file to which a program appends is stored with the size that it had first.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from io import FileIO
from typing import NamedTuple, Protocol

from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.chunk_cache import ChunkCache, ChunkList
from kubetorch.datastore.chunks import cut
from kubetorch.datastore.manifests import Chunk, ContentKind, Entry, Manifest
from kubetorch.datastore.scan import FileChangedError
from kubetorch.datastore.sources import Source, unreadable
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import KubetorchError
from kubetorch.lib.files import has_writer


class Extent(NamedTuple):
    """Bytes of a file on disk."""

    path: str
    offset: int
    size: int


class Piece:
    """Bytes that become a blob; a sink computes the digest, and lets go of the data.

    A chunk of tensors has a `place`, as `weights.places_in` has it.
    """

    __slots__ = ("data", "digest", "extents", "place", "size")

    def __init__(
        self,
        size: int,
        extents: tuple[Extent, ...] = (),
        *,
        data: bytes | memoryview | None = None,
        digest: str = "",
        place: tuple[str, int, int] | None = None,
    ) -> None:
        self.size = size
        self.place = place
        self.extents = extents
        self.data = data
        self.digest = digest


class Sink(Protocol):
    """Takes pieces: those with data, or with the digest that they had when they were read last."""

    def add(self, piece: Piece) -> None: ...

    def flush(self) -> None:
        """Wait until each piece has its digest."""


def read_extents(extents: Sequence[Extent], digest: str) -> bytes:
    """The bytes of a blob, from disk.

    Raises:
        FileChangedError: They are not what they were.
    """
    parts = []
    for path, offset, size in extents:
        try:
            with FileIO(path) as file:
                parts.append(os.pread(file.fileno(), size, offset))
        except OSError as error:
            raise _changed(path, f"cannot be read any more: {error.strerror}") from error
    data = b"".join(parts)
    if digest_of(data) != digest:
        raise _changed(extents[0].path, "changed while it was put")
    return data


def _changed(path: str, change: str) -> FileChangedError:
    return FileChangedError(f"{path} {change}", hint="put it when nothing writes to it")


@dataclass
class _File:
    """A file that is read, with its pieces, or with its only chunk in a pack."""

    source: Source
    pieces: list[Piece] = field(default_factory=list)
    chunk: Chunk | None = None
    #: The `stat` result from before it was read; `None` if it was not read.
    read_stat: os.stat_result | None = None
    read_ns: int = 0

    def chunks(self) -> tuple[Chunk, ...]:
        if self.chunk is not None:
            return (self.chunk,)
        return tuple(Chunk(piece.digest, piece.size) for piece in self.pieces)


class _Member(NamedTuple):
    """A small file in a pack; `data` is `None` if it was not read."""

    file: _File
    digest: str
    size: int
    data: bytes | None


class Snapshot:
    """The content of a put, as it is read."""

    def __init__(self, cache: ChunkCache, sink: Sink) -> None:
        self._cache = cache
        self._sink = sink
        self._entries: list[_File | Entry] = []
        self._members: list[_Member] = []
        self._member_bytes = 0
        self._packs: list[tuple[str, Piece]] = []
        #: The chunks in packs by their digests: files of equal content share one.
        self._packed: dict[str, Chunk] = {}

    def read(self, sources: Sequence[Source], contents: Sequence[ChunkList | None]) -> None:
        """Read sources, in the order of their paths; `contents` has those that are as they were."""
        for source, content in zip(sources, contents, strict=True):
            mode = stat.S_IMODE(source.file_stat.st_mode) & 0o777
            if source.kind != "file":
                mode = 0o777 if source.kind == "symlink" else mode
                self._entries.append(Entry(source.path, source.kind, mode, target=source.target))
                continue
            file = self._read(source) if content is None else self._unread(source, content)
            if file is not None:
                self._entries.append(file)

    def finish(self, kind: ContentKind) -> Manifest:
        """The manifest, after all pieces have their digests; the cache is saved."""
        self._close_pack()
        self._sink.flush()
        entries = []
        for item in self._entries:
            if isinstance(item, Entry):
                entries.append(item)
                continue
            chunks = item.chunks()
            if item.read_stat is not None:
                content = ((chunk.digest, chunk.size) for chunk in chunks)
                self._cache.add(item.source.disk_path, item.read_stat, content, item.read_ns)
            mode = stat.S_IMODE(item.source.file_stat.st_mode) & 0o777
            entries.append(Entry(item.source.path, "file", mode, chunks))
        for members, piece in self._packs:
            if self._cache.pack(members) is None:
                self._cache.add_pack(members, piece.digest)
        self._cache.save()
        return Manifest(kind, tuple(entries), tuple(piece.digest for _, piece in self._packs))

    # -------------------------------------------------------------------------------------- files

    def _unread(self, source: Source, content: ChunkList) -> _File:
        """A file that is as it was when it was read last."""
        file = _File(source)
        if len(content) == 1 and 0 < content[0][1] <= LIMITS.packed_file_bytes and content[0][0]:
            self._pack(_Member(file, *content[0], None))
            return file
        offset = 0
        for digest, size in content:
            piece = Piece(size, (Extent(source.disk_path, offset, size),), digest=digest)
            file.pieces.append(piece)
            if digest:
                self._sink.add(piece)
            offset += size
        return file

    def _read(self, source: Source) -> _File | None:
        """Read a file; `None` if it has vanished."""
        last: list[tuple[str, int]] = []
        size: int | None = None
        for _ in range(LIMITS.read_attempts):
            read_ns = time.time_ns()
            try:
                with closing(FileIO(source.disk_path)) as opened:
                    descriptor = opened.fileno()
                    before = os.fstat(descriptor)
                    size = before.st_size if size is None else size
                    file = _File(source, read_stat=before, read_ns=read_ns)
                    data = self._read_content(file, descriptor, size)
                    after = os.fstat(descriptor)
                    is_open = has_writer(descriptor)
            except EOFError:
                size = None
                continue
            except FileNotFoundError:
                return None
            except OSError as error:
                if isinstance(error, KubetorchError):  # of the sink
                    raise
                raise unreadable(source.disk_path, error) from error
            is_unchanged = after.st_ctime_ns == before.st_ctime_ns and after.st_size == size
            if is_unchanged and not is_open:
                self._keep(file, data)
                return file
            if data is None:
                self._sink.flush()
                content = [(piece.digest, piece.size) for piece in file.pieces]
            else:
                content = [(digest_of(data), len(data))]
            if content == last:
                file.read_stat = None  # the size in it is another one
                self._keep(file, data)
                return file
            last = content
        changes = f"changed while it was read, {LIMITS.read_attempts} times in a row"
        raise _changed(source.disk_path, changes)

    def _read_content(self, file: _File, descriptor: int, size: int) -> bytes | None:
        """The bytes of a small file; the pieces of a large one go to the sink."""
        if size <= LIMITS.packed_file_bytes:
            data = os.read(descriptor, size)
            if len(data) != size:
                raise EOFError
            return data
        path = file.source.disk_path
        for offset, length, view, is_tensor in cut(descriptor, size):
            place = (file.source.path, size - offset, length) if is_tensor else None
            piece = Piece(length, (Extent(path, offset, length),), data=view, place=place)
            file.pieces.append(piece)
            if view is not None:
                self._sink.add(piece)
        return None

    def _keep(self, file: _File, data: bytes | None) -> None:
        if data:
            self._pack(_Member(file, digest_of(data), len(data), data))

    # -------------------------------------------------------------------------------------- packs

    def _pack(self, member: _Member) -> None:
        """Add a small file to the pack that is being filled.

        A pack ends behind a file whose digest is low: so it ends there though files before it are
        new or gone.
        """
        chunk = self._packed.get(member.digest)
        if chunk is not None:
            member.file.chunk = chunk
            return
        pack, offset = len(self._packs), self._member_bytes
        chunk = Chunk(member.digest, member.size, pack, offset)
        member.file.chunk = self._packed[member.digest] = chunk
        self._members.append(member)
        self._member_bytes += member.size
        is_border = int(member.digest[:8], 16) * LIMITS.pack_bytes < member.size * 2**32
        if is_border or self._member_bytes >= 4 * LIMITS.pack_bytes:
            self._close_pack()

    def _close_pack(self) -> None:
        members, self._members, self._member_bytes = self._members, [], 0
        if not members:
            return
        extents = tuple(Extent(member.file.source.disk_path, 0, member.size) for member in members)
        size = sum(member.size for member in members)
        names = digest_of("".join(member.digest for member in members).encode())
        piece = Piece(size, extents, digest=self._cache.pack(names) or "")
        if not piece.digest:
            piece.data = b"".join(
                read_extents((extent,), member.digest) if member.data is None else member.data
                for member, extent in zip(members, extents, strict=True)
            )
        self._packs.append((names, piece))
        self._sink.add(piece)
