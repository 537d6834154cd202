"""The last scan of a project, kept on disk: names, decisions, sizes, times, digests.

A file with the same size, times and inode has the same content, unless it was changed again within
the granularity of the file system's clock. So a record whose file changed less than
`racy_file_seconds` before it was read is *racy*: it never matches, and the next scan reads the file
again. The change time decides, because no program can set it as it can set the modification time.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.trees import Entry
from kubetorch.datastore.tuning import TIMING
from kubetorch.lib.files import write_atomically

VERSION = 2
_RACY = -1


class FileRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file with its `stat` result from before its digest was computed; `ctime_ns` -1 is racy."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    is_executable: bool
    digest: str

    @property
    def is_racy(self) -> bool:
        return self.ctime_ns == _RACY

    def matches(self, file_stat: os.stat_result) -> bool:
        return (
            file_stat.st_ctime_ns == self.ctime_ns
            and file_stat.st_mtime_ns == self.mtime_ns
            and file_stat.st_size == self.size
            and file_stat.st_ino == self.inode
        )


class FolderRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A folder of a scan, with the decisions on the names in it."""

    path: str
    #: All names in the folder; names of folders end in `/`.
    listing: list[str]
    #: Regular files that travel.
    files: list[FileRecord] = []
    #: Names of folders that travel.
    folders: list[str] = []
    #: Names of links and special files that the rules do not ignore.
    irregular: list[str] = []
    #: Links that travel as links.
    links: list[Entry] = []
    #: Files outside of the project that travel in place of links.
    followed: list[FileRecord] = []
    #: The ignore files in the folder.
    rules: list[FileRecord] = []

    @property
    def is_empty(self) -> bool:
        """True if the folder has no entries, not even such that do not travel."""
        return not (
            self.listing
            or self.files
            or self.folders
            or self.irregular
            or self.links
            or self.followed
        )


class Listings(msgspec.Struct, frozen=True, array_like=True):
    version: int
    root: str
    signature: list[str]
    tree: str
    folders: list[FolderRecord]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Listings)


def record(
    name: str, file_stat: os.stat_result, digest: str, *, read_ns: int, is_open: bool = False
) -> FileRecord:
    """The record of a file that was read at `read_ns` (as of `time.time_ns`).

    A file that a program has open for writing (`is_open`) may change without a sign of it.
    """
    is_racy = is_open or file_stat.st_ctime_ns > read_ns - TIMING.racy_file_seconds * 1e9
    return FileRecord(
        name=name,
        size=file_stat.st_size,
        mtime_ns=file_stat.st_mtime_ns,
        ctime_ns=_RACY if is_racy else file_stat.st_ctime_ns,
        inode=file_stat.st_ino,
        is_executable=bool(file_stat.st_mode & 0o100),
        digest=digest,
    )


class ListingCache:
    """The stored listings of one project; several processes may use them at once."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self._path = folder and folder / f"{digest_of(os.fsencode(key))[:32]}.listing"

    def load(self) -> Listings | None:
        """The listings of the last scan; `None` if they are missing or unreadable."""
        if self._path is None:
            return None
        try:
            listings = _decoder.decode(self._path.read_bytes())
            with suppress(OSError):  # a file of another user
                os.utime(self._path)  # `save` removes listings that are not used
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return listings if listings.version == VERSION else None

    def save(self, listings: Listings) -> None:
        """Keep the listings of a scan; a cache that cannot be written only slows the next scan."""
        if self._path is None:
            return
        with suppress(OSError, UnicodeEncodeError):  # a name of bytes that are no UTF-8
            if not self._path.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                for path in self._path.parent.iterdir():
                    with suppress(FileNotFoundError):  # another process has removed it
                        if time.time() - path.stat().st_mtime > TIMING.unused_listing_seconds:
                            path.unlink()
            write_atomically(self._path, _encoder.encode(listings))
