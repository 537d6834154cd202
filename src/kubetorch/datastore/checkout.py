"""Writes what a get fetches: first beside the destination, then, when all is there, into it.

    <root>/.kt-get-…/   new and changed files, while they come
    <root>/…            files that are as they should be stay as they are

A folder that is new appears as a whole; in an existing one file after file is replaced, each at
once. A process that has an old file open keeps it. A get that fails or is killed before that
changes no file of the destination; the next one removes what a killed one left.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH120, PTH103, PTH101, PTH102, PTH104, PTH105, PTH108, PTH115, PTH116, PTH211

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from msgspec.structs import replace

from kubetorch.datastore.blobs import Room, digest_of, poisoned, storage_error
from kubetorch.datastore.chunk_cache import ChunkCache
from kubetorch.datastore.chunks import cut
from kubetorch.datastore.manifests import Entry, Manifest
from kubetorch.datastore.snapshots import Extent
from kubetorch.datastore.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError, ProtocolError
from kubetorch.lib.files import FileLock, has_writer

_STAGE = ".kt-get-"
_WRITE_BITS, _FOLDER_MODE = 0o222, 0o755
#: Linux: a file gets the blocks of another one, which both keep until one is written to.
_FICLONE = 0x40049409
_ROOM = Room(hint="make room there, then get it again")


def write_error(error: OSError, folder: str) -> DataStoreError:
    return storage_error(error, Path(folder), _ROOM) or DataStoreError(
        f"{error.filename or folder} cannot be written: {error.strerror}"
    )


class _Staged:
    """A file that is written; `missing` counts the chunks that have not come yet."""

    __slots__ = ("disk_path", "entry", "missing")

    def __init__(self, disk_path: str, entry: Entry) -> None:
        self.disk_path = disk_path
        self.entry = entry
        self.missing = 0


class _Slice:
    """The part of a blob that belongs at an offset of a file."""

    __slots__ = ("begin", "file", "offset", "size")

    def __init__(self, file: _Staged, offset: int, begin: int, size: int) -> None:
        self.file = file
        self.offset = offset
        self.begin = begin
        self.size = size


class Checkout:
    """One get into a folder that exists.

    Args:
        root: The folder.
        is_forced: Whether to fetch also files that are as they should be.
        is_read_only: Whether files and folders get no write bits.
        former: An earlier version of what comes to the root, a file or folder, whose unchanged
            files are not fetched: read-only ones are shared by hard links, others copied.
    """

    def __init__(
        self,
        root: str,
        cache: ChunkCache,
        *,
        is_forced: bool = False,
        is_read_only: bool = False,
        former: str = "",
    ) -> None:
        self._root = root
        self._cache = cache
        self._is_forced = is_forced
        self._is_read_only = is_read_only
        self._former = former
        self._stage = f"{root}/{_STAGE}{uuid.uuid4().hex[:12]}"
        self._lock: FileLock | None = None
        self._mutex = threading.Lock()
        self._slices: dict[str, list[_Slice]] = {}
        self._files: list[_Staged] = []
        self._staged: set[str] = set()
        self._staged_folders: set[str] = set()
        self._folders: dict[str, int] = {}
        self._links: list[tuple[str, str]] = []
        #: Paths of files and folders that stay, with the modes that they get.
        self._modes: list[tuple[str, int]] = []
        #: For each folder, if the destination has it, and no link in its place.
        self._is_present: dict[str, bool] = {"": True}
        self._replaced_links: list[str] = []
        #: Digests of chunks of older files, by those of chunks in their places; and their bytes.
        self._bases: dict[str, str] = {}
        self._extents: dict[str, Extent] = {}
        #: Called with the digest of each blob that is whole in its files.
        self.on_written: Callable[[str], None] = lambda digest: None

    def __enter__(self) -> Checkout:
        _sweep(self._root)
        with suppress(OSError):  # a folder that we may not list
            _sweep(os.path.dirname(self._root))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._stage, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    # ----------------------------------------------------------------------------------- planning

    def add(self, path: str, entry: Entry, manifest: Manifest) -> None:
        """Add an entry, at a path below the root."""
        if self._is_read_only:
            entry = replace(entry, mode=entry.mode & ~_WRITE_BITS)
            parent = path
            while parent := parent.rpartition("/")[0]:
                self._folders.setdefault(parent, _FOLDER_MODE & ~_WRITE_BITS)
        if entry.kind == "folder":
            self._folders[path] = entry.mode
            self._find_folder(path)
            return
        file_stat = self._stat(path)
        if file_stat is not None and stat.S_ISDIR(file_stat.st_mode):
            raise DataStoreError(
                f"{self._root}/{path} is a folder; the key has a {entry.kind} there",
                hint="get the key into another folder, or move this one",
            )
        if entry.kind == "symlink":
            if file_stat is None or not self._has_link(path, entry.target, file_stat):
                self._links.append((path, entry.target))
        elif file_stat is None or self._is_forced or not self._has_file(path, entry, file_stat):
            self._stage_file(path, entry, manifest)
        elif stat.S_IMODE(file_stat.st_mode) != entry.mode:
            self._modes.append((path, entry.mode))

    def _stat(self, path: str) -> os.stat_result | None:
        if not self._find_folder(path.rpartition("/")[0]):
            return None
        try:
            return os.lstat(f"{self._root}/{path}")
        except FileNotFoundError:
            return None

    def _find_folder(self, path: str) -> bool:
        """True if the destination has a folder; a link in its place will be replaced."""
        is_present = self._is_present.get(path)
        if is_present is None:
            is_present = False
            if self._find_folder(path.rpartition("/")[0]):
                with suppress(FileNotFoundError):
                    mode = os.lstat(f"{self._root}/{path}").st_mode
                    is_present = stat.S_ISDIR(mode)
                    if stat.S_ISLNK(mode):
                        self._replaced_links.append(path)
                    elif not is_present:
                        raise DataStoreError(
                            f"{self._root}/{path} is a file; the key has a folder there",
                            hint="get the key into another folder, or move this file",
                        )
            self._is_present[path] = is_present
        return is_present

    def _has_link(self, path: str, target: str, file_stat: os.stat_result) -> bool:
        if not stat.S_ISLNK(file_stat.st_mode):
            return False
        return os.readlink(f"{self._root}/{path}") == target

    def _has_file(self, path: str, entry: Entry, file_stat: os.stat_result) -> bool:
        """True if a file has the content already."""
        if not stat.S_ISREG(file_stat.st_mode) or file_stat.st_size != entry.size:
            return False
        disk_path = f"{self._root}/{path}"
        entry_content = tuple((chunk.digest, chunk.size) for chunk in entry.chunks)
        if self._cache.content(disk_path, file_stat) == entry_content:
            return True
        read_ns = time.time_ns()
        try:
            if not _has_content(disk_path, entry_content):
                return False
            with FileIO(disk_path) as file:
                is_open = has_writer(file.fileno())
        except OSError:  # it cannot be read, or has changed
            return False
        if not is_open:
            self._cache.add(disk_path, file_stat, entry_content, read_ns)
        return True

    def _stage_file(self, path: str, entry: Entry, manifest: Manifest) -> None:
        file = _Staged(f"{self._stage}/{path}", entry)
        self._staged.add(path)
        self._find_folder(path.rpartition("/")[0])
        below = path.partition("/")[2]
        former_path = f"{self._former}/{below}" if below else self._former
        if self._former and self._reuse(former_path, file):
            return
        self._files.append(file)
        written: set[int] = set()
        if not self._is_forced:
            with suppress(OSError, EOFError):  # it is fetched whole
                is_there = self._stat(path) is not None
                old_path = f"{self._root}/{path}" if is_there else self._former and former_path
                if old_path:
                    self._take_chunks(old_path, file, written)
        offset = 0
        for chunk in entry.chunks:
            if chunk.digest and offset not in written:
                blob = manifest.blob_of(chunk)
                part = _Slice(file, offset, chunk.offset, chunk.size)
                self._slices.setdefault(blob, []).append(part)
                file.missing += 1
            offset += chunk.size

    def _reuse(self, former_path: str, file: _Staged) -> bool:
        """Take a file from the earlier version, if it has the content there."""
        entry, content = file.entry, tuple((c.digest, c.size) for c in file.entry.chunks)
        try:
            former_stat = os.lstat(former_path)
            if not stat.S_ISREG(former_stat.st_mode) or former_stat.st_size != entry.size:
                return False
            self._lock_stage()
            self._make_staged_folder(file)
            if self._is_read_only and stat.S_IMODE(former_stat.st_mode) == entry.mode:
                os.link(former_path, file.disk_path)
            else:
                _clone(former_path, file.disk_path)
            # Read last: a program that runs as root may write to files without write bits.
            if _has_content(file.disk_path, content):
                os.chmod(file.disk_path, entry.mode)
                return True
            os.unlink(file.disk_path)
        except OSError:  # another file system, or files that cannot be read
            with suppress(OSError):
                os.unlink(file.disk_path)
        return False

    def _take_chunks(self, old_path: str, file: _Staged, written: set[int]) -> None:
        """Take the chunks from an older file that it has, and note the bases of others.

        The offsets of chunks that are taken are added to `written`.
        """
        wanted: dict[str, list[int]] = {}
        places: dict[tuple[int, int], str] = {}
        offset = 0
        for chunk in file.entry.chunks:
            if chunk.digest and chunk.pack is None:
                wanted.setdefault(chunk.digest, []).append(offset)
                places[file.entry.size - offset, chunk.size] = chunk.digest
            offset += chunk.size
        if not wanted or not stat.S_ISREG(os.lstat(old_path).st_mode):
            return
        with FileIO(os.open(old_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as old:
            size = os.fstat(old.fileno()).st_size
            for piece in cut(old.fileno(), size):
                if piece.data is None:
                    continue
                digest = digest_of(piece.data)
                for offset in wanted.pop(digest, ()):
                    self._lock_stage()
                    self.write(_Slice(file, offset, 0, piece.size), piece.data, 0)
                    written.add(offset)
                changed_digest = places.get((size - piece.offset, piece.size), digest)
                if piece.is_tensor and changed_digest != digest:
                    self._bases[changed_digest] = digest
                    self._extents[digest] = Extent(old_path, piece.offset, piece.size)

    def base_of(self, digest: str) -> str:
        """The digest of a chunk in the place of another one, for which a delta may come."""
        return self._bases.get(digest, "")

    def open(self, digest: str) -> BinaryIO:
        """The bytes of such a chunk, which may have changed meanwhile."""
        path, offset, size = self._extents[digest]
        try:
            with FileIO(path) as file:
                return io.BytesIO(os.pread(file.fileno(), size, offset))
        except OSError as error:
            raise poisoned(digest, f"{path} cannot be read any more") from error

    @property
    def sizes(self) -> dict[str, int]:
        """The blobs to fetch, with the bytes of files that each brings."""
        return {digest: sum(part.size for part in parts) for digest, parts in self._slices.items()}

    def begin(self) -> None:
        """Make the folder in which files come, if there is room for them.

        Raises:
            StorageFullError: There is not.
        """
        try:
            file_stat = os.statvfs(self._root)
            size = sum(self.sizes.values())
            if file_stat.f_bavail * file_stat.f_frsize < size:
                raise OSError(errno.ENOSPC, f"{size:,} bytes are to come")
            self._lock_stage()
            for file in self._files:
                if not file.missing:
                    os.close(self._open(file))
        except OSError as error:
            raise write_error(error, self._root) from error

    def _lock_stage(self) -> None:
        if self._lock is None:
            os.mkdir(self._stage, 0o700)
            self._lock = FileLock(Path(self._stage))
            self._lock.get_at_once()

    # ------------------------------------------------------------------------------------ writing

    def writer(self, digest: str, length: int) -> BlobSlices:
        """Receives a blob, as `transfer.Receiver` needs it."""
        parts = self._slices.get(digest)
        if parts is None:
            raise ProtocolError(f"the blob {digest} came unasked")
        return BlobSlices(self, digest, length, parts)

    def is_written(self, digest: str) -> bool:
        return digest not in self._slices

    def write(self, part: _Slice, data: memoryview, begin: int) -> None:
        """Write the bytes of a blob from `begin` on, as far as they belong to a part of a file."""
        start, end = max(begin, part.begin), min(begin + len(data), part.begin + part.size)
        if start >= end:
            return
        descriptor = self._open(part.file)
        try:
            offset = part.offset + start - part.begin
            unwritten = data[start - begin : end - begin]
            while unwritten:
                count = os.pwrite(descriptor, unwritten, offset)
                offset, unwritten = offset + count, unwritten[count:]
        except OSError as error:
            raise write_error(error, self._root) from error
        finally:
            os.close(descriptor)

    def keep(self, digest: str) -> None:
        """A blob is whole in all files that have it."""
        with self._mutex:
            for part in self._slices.pop(digest, ()):
                part.file.missing -= 1
        self.on_written(digest)

    def disk_path(self, path: str) -> str:
        """Where a file is now: beside the destination while it comes."""
        return f"{self._stage}/{path}" if path in self._staged else f"{self._root}/{path}"

    def _open(self, file: _Staged) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._make_staged_folder(file)
        return os.open(file.disk_path, flags, 0o600)

    def _make_staged_folder(self, file: _Staged) -> None:
        folder = file.disk_path.rpartition("/")[0]
        if folder not in self._staged_folders:
            os.makedirs(folder, exist_ok=True)
            self._staged_folders.add(folder)

    # --------------------------------------------------------------------------------- installing

    def install(self) -> None:
        """Bring all that came to its path."""
        assert not self._slices
        try:
            self._complete_stage()
            for path in self._replaced_links:
                os.unlink(f"{self._root}/{path}")
            for path, mode in self._folders.items():
                if self._is_present.get(path):
                    _make_writable(f"{self._root}/{path}")
                    self._modes.append((path, mode))
            _merge(self._stage, self._root)
            # Lower folders first: an upper one may be closed to us then.
            for path, mode in sorted(self._modes, reverse=True):
                os.chmod(f"{self._root}/{path}", mode)
        except OSError as error:
            raise write_error(error, self._root) from error
        self._cache.save()

    def _complete_stage(self) -> None:
        for file in self._files:
            if any(not chunk.digest for chunk in file.entry.chunks):
                os.truncate(file.disk_path, file.entry.size)
            os.chmod(file.disk_path, file.entry.mode)
        for path, mode in self._folders.items():
            if not self._is_present.get(path):
                folder = f"{self._stage}/{path}"
                os.makedirs(folder, exist_ok=True)
                # A folder that nobody may write to cannot be moved.
                os.chmod(folder, mode | stat.S_IRWXU)
                if mode & stat.S_IRWXU != stat.S_IRWXU:
                    self._modes.append((path, mode))
        for path, target in self._links:
            os.makedirs(f"{self._stage}/{path}".rpartition("/")[0], exist_ok=True)
            os.symlink(target, f"{self._stage}/{path}")


class BlobSlices:
    """Writes a blob into the files that have parts of it, a few MiB at a time."""

    def __init__(
        self, checkout: Checkout, digest: str, length: int, parts: Sequence[_Slice]
    ) -> None:
        self._checkout = checkout
        self._digest = digest
        self._length = length
        self._parts = parts
        self._hasher = blake3()
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._written = 0

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        self._hasher.update(piece)
        self._pending.append(bytes(piece))
        self._pending_bytes += len(piece)
        if self._pending_bytes >= LIMITS.largest_chunk_bytes:
            self._flush()

    def _flush(self) -> None:
        data = memoryview(b"".join(self._pending))
        for part in self._parts:
            self._checkout.write(part, data, self._written)
        self._written += len(data)
        self._pending, self._pending_bytes = [], 0

    def finish(self) -> None:
        if self._hasher.hexdigest() != self._digest:
            raise poisoned(self._digest, "what came has another digest")
        if any(part.begin + part.size > self._length for part in self._parts):
            raise poisoned(self._digest, f"it has {self._length} bytes, less than its files need")
        self._flush()
        self._checkout.keep(self._digest)

    def drop(self) -> None:
        """What was written is overwritten by the next attempt, or removed with the stage."""


def _has_content(path: str, content: Iterable[tuple[str, int]]) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset = 0
        for digest, size in content:
            if digest:
                if _digest(descriptor, offset, size) != digest:
                    return False
            elif not _is_hole(descriptor, offset, size):
                return False
            offset += size
    finally:
        os.close(descriptor)
    return True


def _clone(source: str, target: str) -> None:
    """Copy a file; a file system that can shares the blocks."""
    with FileIO(source) as reader, FileIO(target, "x") as writer:
        try:
            fcntl.ioctl(writer, _FICLONE, reader.fileno())
        except OSError:
            shutil.copyfileobj(reader, writer, LIMITS.largest_chunk_bytes)


def _digest(descriptor: int, offset: int, size: int) -> str:
    hasher = blake3()
    end = offset + size
    while piece := os.pread(descriptor, min(end - offset, LIMITS.largest_chunk_bytes), offset):
        hasher.update(piece)
        offset += len(piece)
    return hasher.hexdigest()


def _is_hole(descriptor: int, offset: int, size: int) -> bool:
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) >= offset + size
    except OSError as error:
        return error.errno == errno.ENXIO


def _merge(stage: str, root: str) -> None:
    """Move what is in one folder into another one, with as few steps as possible."""
    with os.scandir(stage) as entries:
        listing = list(entries)
    for entry in listing:
        path = f"{root}/{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            os.replace(entry.path, path)
        elif _is_folder(path):
            _merge(entry.path, path)
        else:
            os.rename(entry.path, path)


def _is_folder(path: str) -> bool:
    """True for a folder, False if nothing is there.

    Raises:
        DataStoreError: A link is there, which was not when the get began: it may lead anywhere.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        raise DataStoreError(
            f"{path} has become a link during the get; the key has a folder there",
            hint="get it again when no program changes the folder",
        )
    return stat.S_ISDIR(mode)


def _make_writable(folder: str) -> None:
    mode = stat.S_IMODE(os.lstat(folder).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(folder, mode | stat.S_IRWXU)


def _sweep(root: str) -> None:
    """Remove what gets left here that were killed."""
    with os.scandir(root) as entries:
        stages = [entry.path for entry in entries if entry.name.startswith(_STAGE)]
    for stage in stages:
        with suppress(OSError):
            # A new one gets its lock only after it was made.
            if time.time() - os.stat(stage).st_mtime < TIMING.young_stage_seconds:
                continue
            lock = FileLock(Path(stage))
            if lock.get_at_once():
                shutil.rmtree(stage, ignore_errors=True)
            lock.close()
