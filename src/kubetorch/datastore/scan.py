"""From a project's folder to its tree.

    walk every folder, compare with the last scan ── limits ── read what changed ── tree

Every scan lists all folders and asks all files for their size and times; that is 15 ms for 5,000
files. Only what changed is read, hashed, and matched against ignore rules.

Regular files travel, with their executable bit. A link that leads to somewhere in the project stays
a link; one that leads out of it is followed. Links that lead nowhere or in a circle, sockets, pipes
and devices do not travel; a warning names them. Empty folders do not travel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from io import FileIO
from pathlib import Path

import msgspec
from blake3 import blake3

from kubetorch.datastore import listings, trees
from kubetorch.datastore.ignoring import IgnoreRules
from kubetorch.datastore.limits import Limits
from kubetorch.datastore.listings import FileRecord, FolderRecord, ListingCache
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.datastore.walking import Pending, Walk, unreadable
from kubetorch.errors import DataStoreError, SpecError
from kubetorch.lib.records import record

_READ_BYTES = 1024 * 1024
#: From here on more than one thread pays off, in bytes.
_PARALLEL_BYTES = 16 * 1024 * 1024
_ATTEMPTS = 3


class FileChangedError(DataStoreError):
    """A file is not what it was when the project was scanned: scan again."""


@record
class Options:
    """How a project is scanned.

    Attributes:
        only: The one file of the folder that is the project; `None` is all of the folder.
        cache: Folder for what is kept between scans; `None` keeps nothing.
        filters: Instead of all ignore rules, see `kubetorch.datastore.ignoring.parse_filters`.
        limits: How large a project may be.
    """

    only: str | None = None
    cache: Path | None = None
    filters: tuple[str, ...] | None = None
    limits: Limits = field(default_factory=Limits)


class Scan:
    """A project as it was when it was scanned.

    Attributes:
        root: The folder.
        digest: The tree digest.
        fresh: Digests of the tree and of files that the last scan did not have; empty when nothing
            changed, or when there was no scan before, so that nobody knows what is new.
        warnings: Sentences for the user: what does not travel, and that much travels.
    """

    def __init__(
        self, root: str, folders: list[FolderRecord], digest: str, warnings: list[str]
    ) -> None:
        self.root = root
        self.digest = digest
        self.warnings = tuple(warnings)
        self.fresh: tuple[str, ...] = ()
        self._folders = folders

    @cached_property
    def tree(self) -> Tree:
        """The tree."""
        return _tree(self._folders)

    @cached_property
    def _files(self) -> dict[str, tuple[str, int]]:
        return {
            file.digest: (f"{self.root}/{folder.path}/{file.name}", file.size)
            for folder in self._folders
            for file in (*folder.files, *folder.followed)
        }

    def has(self, digest: str) -> bool:
        """Whether it is the tree, or a file of it."""
        return digest == self.digest or digest in self._files

    def stream(self, digest: str) -> tuple[int, Iterator[bytes]]:
        """Length and pieces of a file, or of the tree itself; the source of an upload.

        Raises:
            FileChangedError: The file has another content by now.
            DataStoreError: No file of the project has this digest.
        """
        if digest == self.digest:
            return len(self.tree.encoded), iter((self.tree.encoded,))
        if digest not in self._files:
            raise DataStoreError(f"no file in {self.root} has the digest {digest}")
        path, size = self._files[digest]
        return size, _checked(path, size, digest)


def scan(root: Path, options: Options | None = None) -> Scan:
    """The tree of a project.

    Raises:
        ProjectTooLargeError: It is above the limits; nothing was read then.
        SpecError: A file or folder cannot be read; the message names it.
    """
    options = options or Options()
    base = os.path.realpath(root)
    rules = IgnoreRules(base, options.filters)
    signature = rules.signature()
    cache = ListingCache(options.cache, f"{base}\0{options.only or ''}")
    last = cache.load()
    if last is not None and (last.root != base or last.signature != signature):
        last = None
    walk = Walk(base, rules, last.folders if last else (), options.limits)
    if options.only is None:
        walk.run()
    else:
        walk.run_single(options.only)
    read_all(walk)
    if options.only is not None and not _digests(walk.folders):
        raise SpecError(f"{base}/{options.only} is no file that can be read")
    if last is not None and walk.folders == last.folders:
        return Scan(base, last.folders, last.tree, walk.warnings)
    tree = _tree(walk.folders)
    found = Scan(base, walk.folders, tree.digest, walk.warnings)
    found.__dict__["tree"] = tree
    if last is not None and tree.digest != last.tree:
        known = _digests(last.folders)
        found.fresh = (tree.digest, *(item for item in tree.digests() if item not in known))
    cache.save(listings.new(base, signature, tree.digest, walk.folders))
    return found


def _digests(folders: list[FolderRecord]) -> set[str]:
    return {file.digest for folder in folders for file in (*folder.files, *folder.followed)}


def _tree(folders: list[FolderRecord]) -> Tree:
    entries = []
    for folder in folders:
        prefix = f"{folder.path}/" if folder.path else ""
        for file in (*folder.files, *folder.followed):
            mode: trees.Mode = "executable" if file.is_executable else "file"
            entries.append(Entry(prefix + file.name, mode, file.size, file.digest))
        entries.extend(folder.links)
    return trees.build(entries)


# ---------------------------------------------------------------------------------------- reading


def read_all(walk: Walk) -> None:
    """Read the files that a walk found new or changed.

    Raises:
        SpecError: One cannot be read; the message names it.
    """
    for item in walk.pending:
        found = _read(item)
        if found is not None:
            item.into.append(found)
        else:  # vanished: the next scan must not take the decision on its name from this one
            walk.folders[item.folder].listing.clear()


def _read(item: Pending) -> FileRecord | None:
    """The record of a file; `None` if it has vanished.

    Exactly as many bytes are read as the file had when it was opened, so one that something appends
    to has a content at any time. One that is written while it is read is read again; after a few
    attempts it is taken as it was seen, and if it never was like that, the upload finds out.
    """
    found = None
    for _ in range(_ATTEMPTS):
        now = time.time_ns()
        try:
            with FileIO(item.path) as file:
                facts = os.fstat(file.fileno())
                digest, length = _hash(file, facts.st_size)
                after = os.fstat(file.fileno())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise unreadable(item.path, error) from error
        found = listings.record(item.name, facts, digest, read_ns=now)
        if length == facts.st_size and facts.st_ctime_ns == after.st_ctime_ns:
            return found
        found = msgspec.structs.replace(found, size=length)
    return found


def _hash(file: FileIO, size: int) -> tuple[str, int]:
    """Digest of the first `size` bytes of a file, and how many there were."""
    if size <= _READ_BYTES:
        data = file.read(size)
        return blake3(data).hexdigest(), len(data)
    hasher = blake3(max_threads=blake3.AUTO if size >= _PARALLEL_BYTES else 1)
    length = 0
    for piece in _pieces(file, size):
        hasher.update(piece)
        length += len(piece)
    return hasher.hexdigest(), length


def _pieces(file: FileIO, size: int) -> Iterator[bytes]:
    left = size
    while left and (piece := file.read(min(left, _READ_BYTES))):
        left -= len(piece)
        yield piece


def _checked(path: str, size: int, digest: str) -> Iterator[bytes]:
    """The first `size` bytes of a file, if they have this digest."""
    hasher = blake3()
    try:
        with FileIO(path) as file:
            for piece in _pieces(file, size):
                hasher.update(piece)
                # A file of one piece is checked before any of it travels.
                if len(piece) == size and hasher.hexdigest() != digest:
                    break
                yield piece
    except OSError as error:
        raise FileChangedError(f"{path} cannot be read any more: {error.strerror}") from error
    if hasher.hexdigest() != digest:
        raise FileChangedError(f"{path} changed after the project was scanned")
