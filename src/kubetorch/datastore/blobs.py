"""A store of blobs on disk: files named by the BLAKE3 digest of what is in them.

    <root>/ab/abcdef…   a blob, complete
    <root>/tmp/…        one that is being written

A blob gets its name by a rename after its digest and length were found right, so a name always
stood for the whole content, also after `kill -9`. There is no fsync: a store can be filled again
from where its blobs came from, and a sync of each of 5,000 files costs seconds. What a crash of the
machine may have left half on disk is found by `read` and `stream`, which check the digest again;
they remove such a file, so that it counts as missing and is sent again.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from blake3 import blake3

from kubetorch.errors import DataStoreError, StorageFullError

DIGEST_LENGTH = 64
#: Bytes that a blob takes of a file system, however small.
BLOCK = 4096
#: Temporary files that are older were left by a process that died, in seconds.
ABANDONED_AFTER = 3600.0

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE = 1024 * 1024
#: From here on more than one thread pays off, in bytes.
_PARALLEL_BYTES = 8 * 1024 * 1024

#: Where the bytes of a blob come from: given its digest, its length and its pieces.
Source = Callable[[str], tuple[int, Iterable[bytes]]]

_sequence = itertools.count()


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The digest of some bytes: BLAKE3, 64 lower-case hex digits."""
    if len(data) >= _PARALLEL_BYTES:
        return blake3(data, max_threads=blake3.AUTO).hexdigest()
    return blake3(data).hexdigest()


def is_digest(text: str) -> bool:
    """True if the text can name a blob."""
    return _DIGEST.fullmatch(text) is not None


def check_digest(digest: str) -> str:
    if not is_digest(digest):
        raise DataStoreError(f"{digest!r} is no digest; one has 64 lower-case hex digits")
    return digest


def poisoned(digest: str, what: str) -> DataStoreError:
    """The error for content that is not what its digest says."""
    return DataStoreError(f"the blob {digest} is poisoned: {what}")


@dataclass(frozen=True)
class Room:
    """The bytes that a store may have, and the hint for a store without room."""

    whose: str = ""
    hint: str = "make room there, then deploy again"
    limit_bytes: int | None = None


_HERE = Room()


def storage_error(error: OSError, folder: Path, room: Room = _HERE) -> DataStoreError | None:
    if error.errno not in _FULL:
        return None
    try:
        facts = os.statvfs(folder)
        free = f"{facts.f_bavail * facts.f_frsize / 1024**2:.1f} MiB free"
    except OSError:
        free = "free space unknown"
    what = "the disk quota is used up" if error.errno == errno.EDQUOT else "no space left"
    whose = f"{room.whose} is full: " if room.whose else ""
    return StorageFullError(f"{whose}{what} in {folder} ({free})", hint=room.hint)


@dataclass(frozen=True)
class BlobInfo:
    """A blob in a store: digest, length in bytes, seconds since the epoch of its last put."""

    digest: str
    size: int
    mtime: float


class BlobStore:
    """Blobs in a folder, which several threads and processes may use at once."""

    def __init__(self, root: Path, room: Room = _HERE) -> None:
        self.root = root
        self._room = room
        self._folder = os.fspath(root)
        self._lock = threading.Lock()
        # Bytes of all blobs, those included that are being written; counted when first asked for.
        self._used: int | None = None
        #: Another object since a blob was found broken: what is remembered to be here may not be.
        self.mark = object()

    def path(self, digest: str) -> Path:
        """The path of a blob, which need not exist."""
        return Path(self._file(digest))

    def _file(self, digest: str) -> str:
        check_digest(digest)
        return f"{self._folder}/{digest[:2]}/{digest}"

    # ------------------------------------------------------------------------------------ reading

    def has(self, digest: str) -> bool:
        return os.path.exists(self._file(digest))  # noqa: PTH110  # thousands at once

    def missing(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in dict.fromkeys(digests) if not self.has(digest)]

    def open(self, digest: str) -> BinaryIO:
        """The file of a blob, unchecked."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError as error:
            raise DataStoreError(f"the blob {digest} is not in {self.root}") from error

    def size(self, digest: str) -> int:
        with self.open(digest) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, digest: str) -> bytes:
        """The bytes of a blob, checked."""
        with self.open(digest) as file:
            data = file.read()
        if digest_of(data) != digest:
            raise self._broken(digest)
        return data

    def stream(self, digest: str) -> tuple[int, Iterator[bytes]]:
        """Length and pieces of a blob; its digest is checked with the last piece."""
        file = self.open(digest)
        return os.fstat(file.fileno()).st_size, self._pieces(digest, file)

    def _pieces(self, digest: str, file: BinaryIO) -> Iterator[bytes]:
        hasher = blake3()
        with file:
            while piece := file.read(_PIECE):
                hasher.update(piece)
                yield piece
        if hasher.hexdigest() != digest:
            raise self._broken(digest)

    def _broken(self, digest: str) -> DataStoreError:
        self.delete(digest)
        self.mark = object()
        return poisoned(digest, f"the file in {self.root} was damaged; it is removed")

    # ------------------------------------------------------------------------------------ writing

    def put(self, digest: str, data: bytes | bytearray | memoryview) -> None:
        with self.writer(digest, len(data)) as writer:
            writer.write(data)

    def writer(self, digest: str, length: int) -> BlobWriter:
        """Context manager that takes the bytes of a blob and stores it at its end."""
        check_digest(digest)
        self._claim(length)
        try:
            return BlobWriter(self, digest, length, self._room)
        except BaseException:  # whatever it is, these bytes are not stored
            self.release(length)
            raise

    def adopt(self, temporary: str, digest: str) -> bool:
        """Give a complete file the name of its blob; whether the blob was not here before."""
        target = self._file(digest)
        with self._lock:
            is_new = not self.has(digest)
            try:
                os.replace(temporary, target)  # noqa: PTH105  # names are text already
            except FileNotFoundError:
                Path(target).parent.mkdir(exist_ok=True, mode=0o700)
                os.replace(temporary, target)  # noqa: PTH105  # names are text already
        return is_new

    def delete(self, digest: str) -> bool:
        """Remove a blob; whether it was here."""
        path = self._file(digest)
        try:
            with self._lock:
                size = os.stat(path).st_size  # noqa: PTH116  # the name is text already
                os.unlink(path)  # noqa: PTH108  # the same
        except FileNotFoundError:
            return False
        self.release(size)
        return True

    def _claim(self, length: int) -> None:
        """Count the bytes of a blob that begins, if the store may have them."""
        limit = self._room.limit_bytes
        if limit is None:
            return
        with self._lock:
            if self._used is None:
                self._used = sum(max(blob.size, BLOCK) for blob in self.iterate())
            if self._used + max(length, BLOCK) > limit:
                raise StorageFullError(
                    f"{self._room.whose or self.root} has no room left for namespace "
                    f"{self.root.name}: it has {self._used:,} of its {limit:,} bytes, and a blob "
                    f"of {length:,} came",
                    hint=self._room.hint,
                )
            self._used += max(length, BLOCK)

    def release(self, length: int) -> None:
        """A blob is not here any more, or did not come."""
        with self._lock:
            if self._used is not None:
                self._used -= max(length, BLOCK)

    # ----------------------------------------------------------------------------------- the whole

    def iterate(self) -> Iterator[BlobInfo]:
        """All blobs, in no order."""
        for folder in _scandir(self._folder):
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            for entry in _scandir(folder.path):
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if _DIGEST.fullmatch(entry.name):
                    yield BlobInfo(entry.name, facts.st_size, facts.st_mtime)

    def sweep(self) -> None:
        """Remove what processes that died have left half-written."""
        for entry in _scandir(f"{self._folder}/tmp"):
            try:
                if time.time() - entry.stat().st_mtime > ABANDONED_AFTER:
                    os.unlink(entry.path)  # noqa: PTH108  # a DirEntry has its path as text
            except FileNotFoundError:
                continue


def _scandir(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


class BlobWriter:
    """Takes the bytes of one blob.

    As a context it stores the blob when it is left, and drops it when an exception leaves it.
    """

    def __init__(self, store: BlobStore, digest: str, length: int, room: Room) -> None:
        self._store = store
        self._root = root = store.root
        self._room = room
        self._digest = digest
        self._length = length
        self._is_claimed = True
        self._written = 0
        threads = blake3.AUTO if length >= _PARALLEL_BYTES else 1
        self._hasher = blake3(max_threads=threads)
        self._temporary = f"{root}/tmp/{os.getpid()}-{next(_sequence)}-{digest[:16]}"
        try:
            self._file = self._open()
        except OSError as error:
            raise self._failure(error) from error

    def _open(self) -> FileIO:
        # Unbuffered: pieces are large, and a full disk is met by the write that fills it.
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
        """The next bytes."""
        self._written += len(piece)
        if self._written > self._length:
            raise poisoned(self._digest, f"more than its {self._length} bytes came")
        self._hasher.update(piece)
        left = memoryview(piece)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._failure(error) from error

    def finish(self) -> None:
        """All bytes have come: store the blob."""
        try:
            self._check()
            self._file.close()
            self._is_claimed = not self._store.adopt(self._temporary, self._digest)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget what was written, unless it was stored."""
        self._file.close()
        Path(self._temporary).unlink(missing_ok=True)
        if self._is_claimed:
            self._is_claimed = False
            self._store.release(self._length)

    def _check(self) -> None:
        if self._written != self._length:
            raise poisoned(self._digest, f"{self._written} of its {self._length} bytes came")
        found = self._hasher.hexdigest()
        if found != self._digest:
            raise poisoned(self._digest, f"what came has the digest {found}")

    def _failure(self, error: OSError) -> DataStoreError:
        return storage_error(error, self._root, self._room) or DataStoreError(
            f"cannot write the blob {self._digest} to {self._root}: {error}"
        )
