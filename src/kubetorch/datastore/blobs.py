"""A store of blobs on disk: files named by the BLAKE3 digest of their content.

    <root>/ab/abcdef…   a blob, complete
    <root>/tmp/…        a blob that is being written

A writer checks digest and length of a blob before it renames the file to the blob's name, so a name
always stands for the whole content, also after `kill -9`. A blob alone is not synced to disk: a
crash of the machine may leave half of it. `read` and `stream` check the digest again and remove
such a file, so that the blob counts as missing and is sent again. What a key of the data store will
name is synced before the key is written (`sync`), by threads: one by one it takes four times as
long.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
from blake3 import blake3

from kubetorch.datastore.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError, StorageFullError, StoreUnavailableError

DIGEST_LENGTH = 64
#: Bytes that the smallest blob takes of a file system.
BLOCK = 4096

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_PIECE_BYTES = 1024 * 1024

#: A function from the digest of a blob to its length and its pieces.
Source = Callable[[str], tuple[int, Iterable[bytes]]]

_temporary_numbers = itertools.count()


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The BLAKE3 digest of some bytes, as 64 lower-case hex digits."""
    if len(data) >= LIMITS.blob_parallel_hash_bytes:
        return blake3(data, max_threads=blake3.AUTO).hexdigest()
    return blake3(data).hexdigest()


def is_digest(text: str) -> bool:
    """True if the text can name a blob."""
    return _DIGEST.fullmatch(text) is not None


def check_digest(digest: str) -> str:
    if not is_digest(digest):
        raise DataStoreError(f"{digest!r} is no digest; one has 64 lower-case hex digits")
    return digest


def poisoned(digest: str, fault: str) -> DataStoreError:
    """The error for content that does not have its digest."""
    return DataStoreError(f"the blob {digest} is poisoned: {fault}")


class Room(msgspec.Struct, frozen=True):
    """The disk space of a store.

    Attributes:
        owner: The name of the store in error messages; empty for a store of a laptop or pod.
        hint: The hint for the user when the space is used up.
        limit_bytes: The bytes that blobs may take; `None` for all that the disk has.
    """

    owner: str = ""
    hint: str = "make room there, then try again"
    limit_bytes: int | None = None


_UNLIMITED_ROOM = Room()


def storage_error(
    error: OSError, folder: Path, room: Room = _UNLIMITED_ROOM
) -> DataStoreError | None:
    """The error for a full disk or quota; `None` for any other fault."""
    if error.errno not in _FULL_DISK_ERRORS:
        return None
    try:
        file_stat = os.statvfs(folder)
        free = f"{file_stat.f_bavail * file_stat.f_frsize / 1024**2:.1f} MiB free"
    except OSError:
        free = "free space unknown"
    cause = "the disk quota is used up" if error.errno == errno.EDQUOT else "no space left"
    prefix = f"{room.owner} is full: " if room.owner else ""
    return StorageFullError(f"{prefix}{cause} in {folder} ({free})", hint=room.hint)


class BlobInfo(msgspec.Struct, frozen=True):
    """A blob in a store: digest, length in bytes, seconds since the epoch of its last put."""

    digest: str
    size: int
    mtime: float


class BlobStore:
    """Blobs in a folder, which several threads and processes may use at once."""

    def __init__(self, root: Path, room: Room = _UNLIMITED_ROOM) -> None:
        self.root = root
        self.room = room
        self._folder = os.fspath(root)
        self._lock = threading.Lock()
        #: Bytes of all blobs, complete or being written; counted at the first `writer`.
        self._used_bytes: int | None = None
        #: Replaced when a damaged blob is removed: a memory of complete trees is then outdated.
        self.damage_mark = object()

    def path(self, digest: str) -> Path:
        """The path of a blob, whether it exists or not."""
        return Path(self._file(digest))

    def _file(self, digest: str) -> str:
        check_digest(digest)
        return f"{self._folder}/{digest[:2]}/{digest}"

    # ------------------------------------------------------------------------------------ reading

    def has(self, digest: str) -> bool:
        return self.is_on_disk(digest)

    def is_on_disk(self, digest: str) -> bool:
        return os.path.exists(self._file(digest))  # noqa: PTH110  # thousands at once

    def missing(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in dict.fromkeys(digests) if not self.has(digest)]

    def remove_damaged(self, digests: Iterable[str]) -> None:
        """Read blobs, and remove those that are not what their names say."""
        for digest in filter(self.has, digests):
            try:
                for _ in self.verify(digest):
                    pass
            except StoreUnavailableError:
                raise
            except DataStoreError:
                continue

    def open(self, digest: str) -> BinaryIO:
        """The file of a blob, unchecked."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError as error:
            raise DataStoreError(f"the blob {digest} is not in {self.root}") from error

    def kept_size(self, digest: str) -> int | None:
        """The length of a blob where it is kept for good; `None` if it is not there."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def size(self, digest: str) -> int:
        with self.open(digest) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, digest: str) -> bytes:
        """The bytes of a blob, checked."""
        with self.open(digest) as file:
            data = file.read()
        if digest_of(data) != digest:
            raise self._damage_error(digest)
        return data

    def stream(self, digest: str) -> tuple[int, Iterator[bytes]]:
        """Length and pieces of a blob; its digest is checked with the last piece."""
        file = self.open(digest)
        return os.fstat(file.fileno()).st_size, self._pieces(digest, file)

    def verify(self, digest: str) -> Iterator[bytes]:
        """The pieces of a blob from where it is kept for good, as `stream` checks them."""
        return self.stream(digest)[1]

    def fetch(self, digests: Iterable[str]) -> None:
        """Have blobs on disk that are elsewhere; in a store on disk there are none."""

    def _pieces(self, digest: str, file: BinaryIO) -> Iterator[bytes]:
        hasher = blake3()
        with file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
                yield piece
        if hasher.hexdigest() != digest:
            raise self._damage_error(digest)

    def _damage_error(self, digest: str) -> DataStoreError:
        self.delete(digest)
        self.damage_mark = object()
        return poisoned(digest, f"the file in {self.root} was damaged; it is removed")

    # ------------------------------------------------------------------------------------ writing

    def put(self, digest: str, data: bytes | bytearray | memoryview) -> None:
        with self.writer(digest, len(data)) as writer:
            writer.write(data)

    def add(self, data: bytes | memoryview, digest: str = "") -> str:
        """Store some bytes, or make their blob young; returns their digest.

        Args:
            data: The bytes, which do not change.
            digest: Their digest, if the caller has computed it.
        """
        digest = digest or digest_of(data)
        if self.has(digest):
            self.touch((digest,))
        else:
            with self.writer(digest, len(data), is_hashed=True) as writer:
                writer.write(data)
        return digest

    def writer(self, digest: str, length: int, *, is_hashed: bool = False) -> BlobWriter:
        """A context that receives the bytes of a blob and stores the blob at its end.

        With `is_hashed` the caller has computed the digest of these very bytes.
        """
        check_digest(digest)
        self._reserve(length)
        try:
            return BlobWriter(self, digest, length, self.room, is_hashed=is_hashed)
        except BaseException:  # these bytes are never stored
            self.release(length)
            raise

    def adopt(self, temporary: str, digest: str) -> bool:
        """Give a complete file the name of its blob; returns whether the blob is new here."""
        target = self._file(digest)
        with self._lock:
            is_new = not self.is_on_disk(digest)
            try:
                os.replace(temporary, target)  # noqa: PTH105  # names are text already
            except FileNotFoundError:
                Path(target).parent.mkdir(exist_ok=True, mode=0o700)
                os.replace(temporary, target)  # noqa: PTH105  # names are text already
        return is_new

    def delete(self, digest: str) -> bool:
        """Remove a blob; returns whether it existed."""
        path = self._file(digest)
        try:
            with self._lock:
                size = os.stat(path).st_size  # noqa: PTH116  # the name is text already
                os.unlink(path)  # noqa: PTH108  # the same
        except FileNotFoundError:
            return False
        self.release(size)
        return True

    def delete_all(self, digests: Iterable[str]) -> list[str]:
        """Remove blobs from all places that have them; returns those that existed."""
        return [digest for digest in digests if self.delete(digest)]

    def _reserve(self, length: int) -> None:
        """Reserve the bytes of a blob before it is written, or refuse them."""
        limit = self.room.limit_bytes
        if limit is None:
            return
        with self._lock:
            if self._used_bytes is None:
                self._used_bytes = sum(max(blob.size, BLOCK) for blob in self.iterate())
            if self._used_bytes + max(length, BLOCK) > limit:
                raise StorageFullError(
                    f"{self.room.owner or self.root} has no room left for namespace "
                    f"{self.root.name}: it has {self._used_bytes:,} of its {limit:,} bytes, and "
                    f"{length:,} more came",
                    hint=self.room.hint,
                )
            self._used_bytes += max(length, BLOCK)

    def make_room(self, length: int) -> None:
        """Remove copies of what is elsewhere; a store on disk has none."""

    def check_room(self, length: int) -> None:
        """Refuse so many bytes for which neither the store nor the disk has room."""
        if self.room.limit_bytes is not None:
            self._reserve(length)
            self.release(length)
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file_stat = os.statvfs(self.root)
        if file_stat.f_bavail * file_stat.f_frsize < length:
            error = storage_error(OSError(errno.ENOSPC, ""), self.root, self.room)
            assert error is not None
            error.message += f", and blobs of {length:,} bytes are to come"
            raise error

    def touch(self, digests: Iterable[str]) -> None:
        """Make blobs as young as those that were put just now, so that they are not collected."""
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._file(digest))

    def forget_used_bytes(self) -> None:
        """Count the bytes anew with the next blob: another process has written blobs."""
        with self._lock:
            self._used_bytes = None

    def save(self, digests: Iterable[str]) -> None:
        """Have blobs that came where they outlive the disk; a store on disk has no such place."""

    def sync(self, digests: Iterable[str]) -> None:
        """Have those of some blobs that are there on disk, whatever happens to the machine.

        Raises:
            DataStoreError: The disk does not take them.
        """
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  # for puts alone

        paths = [self._file(digest) for digest in digests]
        folders = {path.rpartition("/")[0] for path in paths}
        try:
            with ThreadPoolExecutor(LIMITS.sync_threads, "kubetorch-sync") as pool:
                for _ in pool.map(_sync, paths):
                    pass
                for _ in pool.map(_sync, folders):
                    pass
        except OSError as error:
            raise storage_error(error, self.root, self.room) or DataStoreError(
                f"blobs cannot be written to disk: {error.filename}: {error.strerror}",
                hint="put it again",
            ) from error

    def release(self, length: int) -> None:
        """Free the bytes of a blob that was removed, or was not stored."""
        with self._lock:
            if self._used_bytes is not None:
                self._used_bytes -= max(length, BLOCK)

    # ----------------------------------------------------------------------------------- the whole

    def iterate(self) -> Iterator[BlobInfo]:
        """All blobs, in no order."""
        for folder in _scandir(self._folder):
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            for entry in _scandir(folder.path):
                try:
                    file_stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if _DIGEST.fullmatch(entry.name):
                    yield BlobInfo(entry.name, file_stat.st_size, file_stat.st_mtime)

    def everywhere(self) -> list[BlobInfo]:
        """All blobs, also those that are not on disk."""
        return list(self.iterate())

    def sweep(self) -> None:
        """Remove half-written files of processes that died."""
        for entry in _scandir(f"{self._folder}/tmp"):
            try:
                if time.time() - entry.stat().st_mtime > TIMING.abandoned_file_seconds:
                    os.unlink(entry.path)  # noqa: PTH108  # a DirEntry has its path as text
            except FileNotFoundError:
                continue


def _sync(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _begin_writing_to_disk(descriptor: int) -> None:
    """Have the disk take what was written while more is: a sync that follows waits less.

    Linux writes out what it is told to forget; what is not on disk yet stays in memory.
    """
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _scandir(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


class BlobWriter:
    """Writes one blob to its store.

    As a context it stores the blob at the end, and drops it when the context ends by an exception.
    """

    def __init__(
        self, store: BlobStore, digest: str, length: int, room: Room, *, is_hashed: bool = False
    ) -> None:
        self._is_hashed = is_hashed
        self._store = store
        self._root = root = store.root
        self.room = room
        self._digest = digest
        self._length = length
        self._is_reserved = True
        self._written = 0
        threads = blake3.AUTO if length >= LIMITS.blob_parallel_hash_bytes else 1
        self._hasher = blake3(max_threads=threads)
        self._temporary = f"{root}/tmp/{os.getpid()}-{next(_temporary_numbers)}-{digest[:16]}"
        try:
            self._file = self._open()
        except OSError as error:
            raise self._failure(error) from error

    def _open(self) -> FileIO:
        # Unbuffered: pieces are large, and the write that fills the disk reports it.
        try:
            return FileIO(self._temporary, "x")
        except FileNotFoundError:
            (self._root / "tmp").mkdir(parents=True, exist_ok=True, mode=0o700)
            return FileIO(self._temporary, "x")

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.drop()

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        """Append the next bytes."""
        self._written += len(piece)
        if self._written > self._length:
            raise poisoned(self._digest, f"more than its {self._length} bytes came")
        if not self._is_hashed:
            self._hasher.update(piece)
        unwritten = memoryview(piece)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise self._failure(error) from error

    def finish(self) -> None:
        """Check and store the blob, whose bytes are all written."""
        try:
            self._check()
            if self._length >= _PIECE_BYTES:
                _begin_writing_to_disk(self._file.fileno())
            self._file.close()
            self._is_reserved = not self._store.adopt(self._temporary, self._digest)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self.drop()

    def drop(self) -> None:
        """Remove the bytes that were written, unless the blob was stored."""
        self._file.close()
        Path(self._temporary).unlink(missing_ok=True)
        if self._is_reserved:
            self._is_reserved = False
            self._store.release(self._length)

    def _check(self) -> None:
        if self._written != self._length:
            raise poisoned(self._digest, f"{self._written} of its {self._length} bytes came")
        if self._is_hashed:
            return
        received_digest = self._hasher.hexdigest()
        if received_digest != self._digest:
            raise poisoned(self._digest, f"what came has the digest {received_digest}")

    def _failure(self, error: OSError) -> DataStoreError:
        return storage_error(error, self._root, self.room) or DataStoreError(
            f"cannot write the blob {self._digest} to {self._root}: {error}"
        )
