"""The chunks of files as they were read last: a file that did not change is not read again.

As in `kubetorch.datastore.scan_cache`, the change time decides, and a file that changed shortly
before it was read is read again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.tuning import TIMING
from kubetorch.lib.files import write_atomically

_VERSION = 1

#: Digest and size of each chunk of a file.
ChunkList = tuple[tuple[str, int], ...]


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file, with its `stat` result from before it was read."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    chunks: ChunkList


class _Records(msgspec.Struct, frozen=True, array_like=True):
    version: int
    root: str
    files: dict[str, _Record]
    packs: dict[str, str]


_decoder = msgspec.msgpack.Decoder(_Records)
_encoder = msgspec.msgpack.Encoder()


class ChunkCache:
    """The files below one folder, by their paths on disk, and the digests of their packs.

    Files that are neither looked up nor added are left out when the cache is saved.
    """

    def __init__(self, folder: Path, root: str) -> None:
        self._root = root
        self._path = folder / f"{digest_of(os.fsencode(root))[:32]}.chunks"
        self._used: dict[str, _Record] = {}
        self._packs: dict[str, str] = {}
        self._is_changed = False
        self._loaded = self._load()

    def _load(self) -> _Records:
        try:
            records = _decoder.decode(self._path.read_bytes())
            with contextlib.suppress(OSError):  # a file of another user
                os.utime(self._path)  # `_sweep` removes caches that are not used
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return _Records(_VERSION, self._root, {}, {})
        is_usable = records.version == _VERSION and records.root == self._root
        return records if is_usable else _Records(_VERSION, self._root, {}, {})

    def clear(self) -> None:
        """Have all files read again."""
        self._loaded = _Records(_VERSION, self._root, {}, {})

    def content(self, path: str, file_stat: os.stat_result) -> ChunkList | None:
        """The chunks of a file; `None` if it changed since it was read."""
        record = self._loaded.files.get(path)
        if record is None or not (
            record.ctime_ns == file_stat.st_ctime_ns
            and record.mtime_ns == file_stat.st_mtime_ns
            and record.size == file_stat.st_size
            and record.inode == file_stat.st_ino
        ):
            return None
        self._used[path] = record
        return record.chunks

    def add(
        self, path: str, file_stat: os.stat_result, content: Iterable[tuple[str, int]], read_ns: int
    ) -> None:
        """Remember a file that was read at `read_ns` (as of `time.time_ns`)."""
        if file_stat.st_ctime_ns <= read_ns - TIMING.racy_file_seconds * 1e9:
            self._is_changed = True
            self._used[path] = _Record(
                file_stat.st_size,
                file_stat.st_mtime_ns,
                file_stat.st_ctime_ns,
                file_stat.st_ino,
                tuple(content),
            )

    def pack(self, members_digest: str) -> str | None:
        """The digest of the blob of these members, if they were packed before."""
        digest = self._loaded.packs.get(members_digest)
        if digest is not None:
            self._packs[members_digest] = digest
        return digest

    def add_pack(self, members_digest: str, digest: str) -> None:
        self._is_changed = True
        self._packs[members_digest] = digest

    def save(self) -> None:
        """Keep the records; a cache that cannot be written only slows the next run."""
        if not self._is_changed and len(self._used) == len(self._loaded.files):
            return
        try:
            if not self._path.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _sweep(self._path.parent)
            records = _Records(_VERSION, self._root, self._used, self._packs)
            write_atomically(self._path, _encoder.encode(records))
        except (OSError, UnicodeEncodeError):  # a name of bytes that are no UTF-8
            return


def _sweep(folder: Path) -> None:
    """Remove caches that have not been used for long."""
    for path in folder.glob("*.chunks"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if time.time() - path.stat().st_mtime > TIMING.unused_listing_seconds:
                path.unlink()
