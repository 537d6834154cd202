"""From a project's folder to its tree.

    walk every folder, compare with the last scan ── limits ── read what changed ── tree

Every scan lists all folders and asks all files for their size and times; that is 15 ms for 5,000
files. Only what changed is read, hashed, and matched against ignore rules.

Regular files travel, with their executable bit. A link that leads to somewhere in the project stays
a link; one that leads out of it is followed if it is named: by a line `!follow PATH` of a
`.ktignore`, or by `Options.named`. Other links out of it, links that lead nowhere or in a circle,
sockets, pipes and devices do not travel; a warning names them. Empty folders travel.

Decisions of the last scan are used again for names that a folder had then, so that ignore rules are
matched for new names only. They are made anew below a folder whose ignore rules have changed.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH110, PTH116

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path

import msgspec
from blake3 import blake3

from kubetorch.datastore import scan_cache, trees
from kubetorch.datastore.ignore_rules import IGNORE_FILES, IgnoreRules
from kubetorch.datastore.scan_cache import FileRecord, FolderRecord, ListingCache
from kubetorch.datastore.spool import Spool
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.errors import DataStoreError, ProjectTooLargeError, SpecError

_MIB = 1024 * 1024
# Links that a warning names.
_LINKS_SHOWN = 10
_HINT = "list what the pods do not need in .ktignore"

#: Sizes in bytes and paths of files.
Sizes = list[tuple[int, str]]


@dataclass(frozen=True)
class Limits:
    total_bytes: int = trees.FILES_LIMIT
    files: int = trees.ENTRY_LIMIT
    warn_bytes: int = 50 * _MIB


@dataclass(frozen=True)
class Options:
    """The options of a scan.

    Attributes:
        only: The one file of the folder that travels.
        cache: Where the listings of scans are kept.
        filters: Patterns that replace all ignore rules.
        limits: How large the project may be.
        named: Files and folders outside of the project to which links may lead.
        own: Folders that never travel.
    """

    only: str | None = None
    cache: Path | None = None
    filters: tuple[str, ...] | None = None
    limits: Limits = field(default_factory=Limits)
    named: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


def too_large(root: str, sizes: Sizes, limits: Limits) -> ProjectTooLargeError:
    total = sum(size for size, _ in sizes)
    return ProjectTooLargeError(
        f"the project {root} has {_mib(total)} in {len(sizes)} files; "
        f"{_mib(limits.total_bytes)} are allowed. Its largest files:\n{_largest(sizes, 10)}",
        hint=_HINT,
    )


def too_many(root: str, sizes: Sizes, limits: Limits) -> ProjectTooLargeError:
    """The error for too many files, of which these were found before the walk ended."""
    counts: dict[str, int] = {}
    for _, path in sizes:
        top = path.partition("/")[0]
        counts[top] = counts.get(top, 0) + 1
    most = sorted(counts, key=lambda top: -counts[top])[:5]
    return ProjectTooLargeError(
        f"the project {root} has more than {limits.files} files, most of them in "
        f"{', '.join(most)}. The largest so far:\n{_largest(sizes, 10)}",
        hint=_HINT,
    )


def warning(root: str, sizes: Sizes) -> str:
    total = sum(size for size, _ in sizes)
    large = [item for item in sizes if item[0] * 100 >= total]
    files = f". Its largest files:\n{_largest(large, 3)}" if large else ""
    return f"the project {root} has {_mib(total)}{files}\nhint: {_HINT}"


def _largest(sizes: Sizes, count: int) -> str:
    ordered = sorted(sizes, key=lambda item: (-item[0], item[1]))[:count]
    return "\n".join(f"  {_mib(size):>12}  {path}" for size, path in ordered)


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"


@dataclass(frozen=True)
class Pending:
    """A file that has to be read; its record goes into `into`, a list of the folder's record."""

    name: str
    path: str
    folder: FolderRecord
    size: int
    into: list[FileRecord]


@dataclass
class _Visit:
    path: str
    disk: str
    is_fresh: bool = False
    followed: tuple[str, ...] = ()


class Walk:
    def __init__(
        self, root: str, rules: IgnoreRules, last: Iterable[FolderRecord], options: Options
    ) -> None:
        self._root = root
        self._rules = rules
        self._last = {folder.path: folder for folder in last}
        self._limits = options.limits
        self._named = tuple(map(os.path.realpath, options.named))
        self._own = frozenset(map(os.path.realpath, options.own))
        self._left_out: list[str] = []
        self._stack: list[_Visit] = []
        self._count = 0
        self._is_single = False
        self.folders: list[FolderRecord] = []
        self.pending: list[Pending] = []
        self.warnings: list[str] = []

    def run(self) -> None:
        self._stack.append(_Visit("", self._root))
        while self._stack:
            visit = self._stack.pop()
            listing = self._list(visit)
            if listing is not None:
                self._visit(visit, listing)
                if self._count > self._limits.files:
                    raise too_many(self._root, self._sizes(), self._limits)
        if self._left_out:
            self.warnings.append(_left_out(self._left_out))
        self._check_size()

    def run_single(self, name: str) -> None:
        """Take one file of the folder only, whatever the rules say and wherever a link leads."""
        self._is_single = True
        self._visit(_Visit("", self._root, is_fresh=True), [name])
        self._check_size()

    # ------------------------------------------------------------------------------- one folder

    def _list(self, visit: _Visit) -> list[str] | None:
        listing = []
        try:
            with os.scandir(visit.disk) as entries:
                for entry in entries:
                    name = entry.name
                    if not name.isascii() and not _is_text(name):
                        self.warnings.append(
                            f"{visit.path or '.'}/{name!a} does not travel: its name is not UTF-8"
                        )
                    elif entry.is_dir(follow_symlinks=False):
                        if f"{visit.disk}/{name}" in self._own:
                            continue
                        listing.append(f"{name}/")
                    else:
                        listing.append(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(visit.disk, error) from error
        return listing

    def _visit(self, visit: _Visit, listing: list[str]) -> None:
        old = self._last.get(visit.path)
        found = FolderRecord(visit.path, listing.copy())
        if self._read_rules(visit, listing, old, found):
            visit.is_fresh = True
        if old is not None and not visit.is_fresh and old.listing == listing:
            self._look_again(visit, old, found)
        else:
            names = listing if self._is_single else self._travelling(visit, listing, old)
            records = {file.name: file for file in old.files} if old else {}
            for name in names:
                if name.endswith("/"):
                    found.folders.append(name[:-1])
                else:
                    self._look(visit, name, records.get(name), old, found)
        for name in found.folders:
            path = f"{visit.path}/{name}" if visit.path else name
            disk = f"{visit.disk}/{name}"
            self._stack.append(_Visit(path, disk, visit.is_fresh, visit.followed))
        self._count += len(found.files) + len(found.links) + len(found.followed) + found.is_empty
        self.folders.append(found)

    def _read_rules(
        self, visit: _Visit, listing: list[str], old: FolderRecord | None, found: FolderRecord
    ) -> bool:
        """Read the rules in this folder; true if they differ from those of the last scan."""
        for name in IGNORE_FILES:
            if name in listing:
                try:
                    facts = os.stat(f"{visit.disk}/{name}")
                except OSError:  # a link to nowhere: it has no rules
                    continue
                found.rules.append(scan_cache.record(name, facts, "", read_ns=time.time_ns()))
        known = old.rules if old else []
        return found.rules != known or any(rule.ctime_ns < 0 for rule in known)

    def _travelling(self, visit: _Visit, listing: list[str], old: FolderRecord | None) -> list[str]:
        known: set[str] = set()
        travelled: set[str] = set()
        if old is not None and not visit.is_fresh:
            known.update(old.listing)
            travelled.update(file.name for file in old.files)
            travelled.update(old.odd)
            travelled.update(f"{name}/" for name in old.folders)
        return [
            name
            for name in listing
            if (
                name in travelled
                if name in known
                else not self._rules.is_ignored(
                    visit.path, name.rstrip("/"), is_folder=name.endswith("/")
                )
            )
        ]

    def _look_again(self, visit: _Visit, old: FolderRecord, found: FolderRecord) -> None:
        """Look at a folder whose names are those of the last scan."""
        found.folders.extend(old.folders)
        for file in old.files:
            self._look(visit, file.name, file, old, found)
        for name in old.odd:
            self._look(visit, name, None, old, found)

    def _look(
        self,
        visit: _Visit,
        name: str,
        known: FileRecord | None,
        old: FolderRecord | None,
        found: FolderRecord,
    ) -> None:
        try:
            facts = os.lstat(f"{visit.disk}/{name}")
        except FileNotFoundError:
            # Decisions are not to be used again for a name that was there only in between.
            found.listing.clear()
            return
        if known is not None and known.matches(facts):
            found.files.append(known)
        else:
            self._take(visit, name, facts, old, found)

    def _take(
        self,
        visit: _Visit,
        name: str,
        facts: os.stat_result,
        old: FolderRecord | None,
        found: FolderRecord,
    ) -> None:
        """Take a file that is new or changed, or something that is no file."""
        disk = f"{visit.disk}/{name}"
        if stat.S_ISREG(facts.st_mode):
            self._count += 1
            self.pending.append(Pending(name, disk, found, facts.st_size, found.files))
            return
        if stat.S_ISDIR(facts.st_mode):  # it took a file's name a moment ago
            found.listing.clear()
            return
        found.odd.append(name)
        path = f"{visit.path}/{name}" if visit.path else name
        if stat.S_ISLNK(facts.st_mode):
            self._take_link(visit, name, path, old, found)
        else:
            self.warnings.append(f"{path} does not travel: it is no file, folder or link")

    def _take_link(
        self, visit: _Visit, name: str, path: str, old: FolderRecord | None, found: FolderRecord
    ) -> None:
        disk = f"{visit.disk}/{name}"
        real = os.path.realpath(disk)
        try:
            facts = os.stat(real)
        except OSError:
            self.warnings.append(f"{path} does not travel: it is a link to nowhere")
            return
        if _is_within(real, self._root) and not self._is_single:
            inside = os.path.relpath(real, self._root)
            target = os.path.relpath(inside, visit.path or ".")
            found.links.append(Entry(path, "symlink", target=target))
        elif not self._is_named(visit, name, real):
            self._left_out.append(f"{path} -> {real}")
        elif stat.S_ISDIR(facts.st_mode):
            if _is_within(self._root, real) or any(
                _is_within(other, real) for other in visit.followed
            ):
                self.warnings.append(f"{path} does not travel: following this link has no end")
                return
            if os.path.exists(f"{real}/pyvenv.cfg"):
                self.warnings.append(f"{path} does not travel: it leads to a virtual environment")
                return
            self._stack.append(_Visit(path, real, visit.is_fresh, (*visit.followed, real)))
        elif stat.S_ISREG(facts.st_mode):
            known = (
                next((file for file in old.followed if file.name == name), None) if old else None
            )
            if known is not None and known.matches(facts):
                found.followed.append(known)
            else:
                self._count += 1
                self.pending.append(Pending(name, real, found, facts.st_size, found.followed))
        else:
            self.warnings.append(f"{path} does not travel: it leads to no file or folder")

    def _is_named(self, visit: _Visit, name: str, real: str) -> bool:
        """True if the target of a link out of the project travels."""
        if self._is_single or any(_is_within(real, one) for one in (*visit.followed, *self._named)):
            return True
        return self._rules.is_followed(visit.path, name)

    # ----------------------------------------------------------------------------------- limits

    def _sizes(self) -> list[tuple[int, str]]:
        sizes = [
            (file.size, f"{folder.path}/{file.name}".lstrip("/"))
            for folder in self.folders
            for file in (*folder.files, *folder.followed)
        ]
        for item in self.pending:
            sizes.append((item.size, f"{item.folder.path}/{item.name}".lstrip("/")))
        return sizes

    def _check_size(self) -> None:
        total = sum(
            file.size for folder in self.folders for file in (*folder.files, *folder.followed)
        ) + sum(item.size for item in self.pending)
        if total > self._limits.total_bytes:
            raise too_large(self._root, self._sizes(), self._limits)
        if total > self._limits.warn_bytes:
            self.warnings.append(warning(self._root, self._sizes()))


def _left_out(links: list[str]) -> str:
    which = ", ".join(sorted(links)[:_LINKS_SHOWN])
    more = len(links) - _LINKS_SHOWN
    return (
        f"links that lead out of the project do not travel: {which}"
        + (f" and {more} more" if more > 0 else "")
        + '; name one that is to travel in a line "!follow PATH" of .ktignore, or copy its target '
        "with Image.copy()"
    )


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable(path: str, error: OSError) -> SpecError:
    return SpecError(
        f"{path} cannot be read: {error.strerror}",
        hint="make it readable, or list it in .ktignore",
    )


_READ_BYTES = 1024 * 1024
#: From here on more than one thread pays off, in bytes.
_PARALLEL_BYTES = 16 * 1024 * 1024
_ATTEMPTS = 3


class FileChangedError(DataStoreError):
    """A file is not what it was when the project was scanned: scan again."""


@dataclass(eq=False)
class Scan:
    """A project as it was when it was scanned."""

    root: str
    folders: list[FolderRecord]
    digest: str
    warnings: tuple[str, ...]
    fresh: tuple[str, ...] = ()
    #: Copies of files that may have changed since.
    spool: Spool = field(default_factory=Spool)

    @cached_property
    def tree(self) -> Tree:
        return _tree(self.folders)

    @cached_property
    def _files(self) -> dict[str, tuple[str, int]]:
        return {
            file.digest: ("/".join(filter(None, (self.root, folder.path, file.name))), file.size)
            for folder in self.folders
            for file in (*folder.files, *folder.followed)
        }

    def has(self, digest: str) -> bool:
        """True if the digest is that of the tree or of a file in it."""
        return digest == self.digest or digest in self._files

    def stream(self, digest: str) -> tuple[int, Iterator[bytes]]:
        """Length and pieces of a file, or of the tree itself; the source of an upload."""
        if digest == self.digest:
            return len(self.tree.encoded), iter((self.tree.encoded,))
        if digest not in self._files:
            raise DataStoreError(f"no file in {self.root} has the digest {digest}")
        path, size = self._files[digest]
        return size, self.spool.pieces(digest) or _checked(path, size, digest)


def scan(root: Path, options: Options | None = None) -> Scan:
    options = options or Options()
    base = os.path.realpath(root)
    rules = IgnoreRules(base, options.filters)
    signature = rules.signature()
    cache = ListingCache(options.cache, f"{base}\0{options.only or ''}")
    last = cache.load()
    if last is not None and (last.root != base or last.signature != signature):
        last = None
    walk = Walk(base, rules, last.folders if last else (), options)
    if options.only is None:
        walk.run()
    else:
        walk.run_single(options.only)
    spool = read_all(walk)
    if options.only is not None and not _digests(walk.folders):
        raise SpecError(f"{base}/{options.only} is no file that can be read")
    warnings = tuple(walk.warnings)
    if last is not None and walk.folders == last.folders:
        return Scan(base, last.folders, last.tree, warnings, spool=spool)
    tree = _tree(walk.folders)
    found = Scan(base, walk.folders, tree.digest, warnings, spool=spool)
    found.__dict__["tree"] = tree
    if last is not None and tree.digest != last.tree:
        known = _digests(last.folders)
        found.fresh = (tree.digest, *(item for item in tree.digests() if item not in known))
    version = scan_cache.VERSION
    cache.save(scan_cache.Listings(version, base, signature, tree.digest, walk.folders))
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
        if folder.is_empty and folder.path:
            entries.append(Entry(folder.path, "folder"))
    return trees.build(entries)


# ---------------------------------------------------------------------------------------- reading


def read_all(walk: Walk) -> Spool:
    """Read the files that are new or changed; returns copies of those that may change again."""
    spool = Spool()
    for item in walk.pending:
        found = _read(item, spool)
        if found is not None:
            item.into.append(found)
        else:  # vanished: the next scan must not take the decision on its name from this one
            item.folder.listing.clear()
    return spool


def _read(item: Pending, spool: Spool) -> FileRecord | None:
    """The record of a file; `None` if it has vanished.

    Exactly as many bytes are read as the file had when it was opened, so one that something appends
    to has a content at any time. One that changes while it is read is read twice: what was the same
    both times is a state that it had. A file that changed a moment ago may change again before it
    is sent, so its content is copied.
    """
    for _ in range(_ATTEMPTS):
        now = time.time_ns()
        try:
            with FileIO(item.path) as file:
                facts = os.fstat(file.fileno())
                found = scan_cache.record(item.name, facts, "", read_ns=now)
                copy = spool if found.is_racy else None
                content = _hash(file, facts.st_size, copy)
                is_whole = content[1] == facts.st_size
                if is_whole and os.fstat(file.fileno()).st_ctime_ns != facts.st_ctime_ns:
                    copy = spool
                    file.seek(0)
                    is_whole = content == _hash(file, facts.st_size, copy)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise unreadable(item.path, error) from error
        if is_whole:
            if copy is not None:
                copy.keep(content[0])
            return msgspec.structs.replace(found, digest=content[0])
    raise _changing(item.path, f"changed while it was read, {_ATTEMPTS} times in a row")


def _changing(path: str, what: str) -> FileChangedError:
    return FileChangedError(
        f"{path} {what}",
        hint="deploy when nothing writes to it, or list it in .ktignore",
    )


def _hash(file: FileIO, size: int, copy: Spool | None) -> tuple[str, int]:
    """Digest of the first `size` bytes of a file, which are copied, and how many there were."""
    hasher = blake3(max_threads=blake3.AUTO if size >= _PARALLEL_BYTES else 1)
    length = 0
    if copy is not None:
        copy.begin()
    for piece in _pieces(file, size):
        hasher.update(piece)
        length += len(piece)
        if copy is not None:
            copy.write(piece)
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
        raise _changing(path, f"cannot be read any more: {error.strerror}") from error
    if hasher.hexdigest() != digest:
        raise _changing(path, "changed after the project was scanned")
