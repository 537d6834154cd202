"""From a project's folder to its tree.

    walk every folder, compare with the last scan ── limits ── read changed files ── tree

Every scan lists all folders and reads size and times of all files; that is 15 ms for 5,000 files.
Only new and changed files are read, hashed, and matched against ignore rules.

Regular files travel, with their executable bit. A link to a path in the project stays a link. A
link out of the project is followed if a line `!follow PATH` of a `.ktignore` names the link, or
`Options.link_targets` names its target. Other links out of the project, links that lead nowhere or
in a circle, sockets, pipes and devices do not travel; a warning names them. Empty folders travel.

Decisions of the last scan are used again for names that a folder had then, so that ignore rules are
matched for new names only. They are made anew below a folder whose ignore rules have changed.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH110, PTH116

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
import weakref
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
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError, ProjectTooLargeError, SpecError
from kubetorch.lib.files import has_writer
from kubetorch.lib.frozen_values import FrozenValue

_MIB = 1024 * 1024
_HINT = "list what the pods do not need in .ktignore"

#: Sizes in bytes and paths of files.
Sizes = list[tuple[int, str]]


class Limits(FrozenValue):
    total_bytes: int = LIMITS.tree_files_bytes
    files: int = LIMITS.tree_entries
    warn_bytes: int = LIMITS.project_warning_bytes


class Options(FrozenValue):
    """The options of a scan.

    Attributes:
        only: The single file of the folder that travels; `None` for all files.
        cache: The folder in which listings of scans are kept.
        filters: Patterns that replace all ignore rules.
        limits: How large the project may be.
        link_targets: Files and folders outside of the project to which links may lead.
        excluded_folders: Folders that never travel.
    """

    only: str | None = None
    cache: Path | None = None
    filters: tuple[str, ...] | None = None
    limits: Limits = field(default_factory=Limits)
    link_targets: tuple[str, ...] = ()
    excluded_folders: tuple[str, ...] = ()


def too_large(root: str, sizes: Sizes, limits: Limits) -> ProjectTooLargeError:
    total = sum(size for size, _ in sizes)
    return ProjectTooLargeError(
        f"the project {root} has {_mebibytes(total)} in {len(sizes)} files; "
        f"{_mebibytes(limits.total_bytes)} are allowed. Its largest files:\n{_largest(sizes, 10)}",
        hint=_HINT,
    )


def too_many(root: str, sizes: Sizes, limits: Limits) -> ProjectTooLargeError:
    """The error for too many files; `sizes` has the files of the walk until then."""
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
    large_files = [(size, path) for size, path in sizes if size * 100 >= total]
    files = f". Its largest files:\n{_largest(large_files, 3)}" if large_files else ""
    return f"the project {root} has {_mebibytes(total)}{files}\nhint: {_HINT}"


def _largest(sizes: Sizes, count: int) -> str:
    ordered = sorted(sizes, key=lambda size_and_path: (-size_and_path[0], size_and_path[1]))[:count]
    return "\n".join(f"  {_mebibytes(size):>12}  {path}" for size, path in ordered)


def _mebibytes(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"


class Pending(msgspec.Struct, frozen=True):
    """A file that has to be read."""

    name: str
    path: str
    folder: FolderRecord
    size: int
    #: The list of the folder's record that gets the file's record.
    records: list[FileRecord]


class _Visit(msgspec.Struct):
    """A folder that the walk enters."""

    #: The path in the tree.
    path: str
    #: The path on disk, which differs below a link that is followed.
    disk_path: str
    #: True if rules changed above: the last scan's decisions do not hold.
    is_fresh: bool = False
    #: The targets of links that the walk followed to get here.
    followed: tuple[str, ...] = ()


class Walk:
    """Lists the folders of a project and compares them with the last scan.

    Attributes:
        folders: A record of each folder.
        pending: Files that are new or changed, which `read_all` reads.
        warnings: Messages about entries that do not travel, and about the project's size.
    """

    def __init__(
        self, root: str, rules: IgnoreRules, last: Iterable[FolderRecord], options: Options
    ) -> None:
        self._root = root
        self._rules = rules
        self._last_folders = {folder.path: folder for folder in last}
        self._limits = options.limits
        self._link_targets = tuple(map(os.path.realpath, options.link_targets))
        self._excluded_folders = frozenset(map(os.path.realpath, options.excluded_folders))
        self._outside_links: list[str] = []
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
            listing = self._list_names(visit)
            if listing is not None:
                self._visit(visit, listing)
                if self._count > self._limits.files:
                    raise too_many(self._root, self._sizes(), self._limits)
        if self._outside_links:
            self.warnings.append(_outside_links_warning(self._outside_links))
        self._check_size()

    def run_single(self, name: str) -> None:
        """Add only one file of the folder, even if rules ignore it or it is a link elsewhere."""
        self._is_single = True
        self._visit(_Visit("", self._root, is_fresh=True), [name])
        self._check_size()

    # ------------------------------------------------------------------------------- one folder

    def _list_names(self, visit: _Visit) -> list[str] | None:
        listing = []
        try:
            with os.scandir(visit.disk_path) as entries:
                for entry in entries:
                    name = entry.name
                    if not name.isascii() and not trees.is_text(name):
                        self.warnings.append(
                            f"{visit.path or '.'}/{name!a} does not travel: its name is not UTF-8"
                        )
                    elif entry.is_dir(follow_symlinks=False):
                        if f"{visit.disk_path}/{name}" in self._excluded_folders:
                            continue
                        listing.append(f"{name}/")
                    else:
                        listing.append(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(visit.disk_path, error) from error
        return listing

    def _visit(self, visit: _Visit, listing: list[str]) -> None:
        last_folder = self._last_folders.get(visit.path)
        folder = FolderRecord(visit.path, listing.copy())
        if self._read_rules(visit, listing, last_folder, folder):
            visit.is_fresh = True
        if last_folder is not None and not visit.is_fresh and last_folder.listing == listing:
            self._visit_unchanged_listing(visit, last_folder, folder)
        else:
            names = (
                listing if self._is_single else self._travelling_names(visit, listing, last_folder)
            )
            records = {file.name: file for file in last_folder.files} if last_folder else {}
            for name in names:
                if name.endswith("/"):
                    folder.folders.append(name[:-1])
                else:
                    self._visit_name(visit, name, records.get(name), last_folder, folder)
        for name in folder.folders:
            path = f"{visit.path}/{name}" if visit.path else name
            disk_path = f"{visit.disk_path}/{name}"
            self._stack.append(_Visit(path, disk_path, visit.is_fresh, visit.followed))
        self._count += (
            len(folder.files) + len(folder.links) + len(folder.followed) + folder.is_empty
        )
        self.folders.append(folder)

    def _read_rules(
        self,
        visit: _Visit,
        listing: list[str],
        last_folder: FolderRecord | None,
        folder: FolderRecord,
    ) -> bool:
        """Record the ignore files of a folder; true if they differ from those of the last scan."""
        for name in IGNORE_FILES:
            if name in listing:
                try:
                    file_stat = os.stat(f"{visit.disk_path}/{name}")
                except OSError:  # a link to nowhere: it has no rules
                    continue
                folder.rules.append(scan_cache.record(name, file_stat, "", read_ns=time.time_ns()))
        last_rules = last_folder.rules if last_folder else []
        return folder.rules != last_rules or any(rule.ctime_ns < 0 for rule in last_rules)

    def _travelling_names(
        self, visit: _Visit, listing: list[str], last_folder: FolderRecord | None
    ) -> list[str]:
        last_names: set[str] = set()
        travelled_names: set[str] = set()
        if last_folder is not None and not visit.is_fresh:
            last_names.update(last_folder.listing)
            travelled_names.update(file.name for file in last_folder.files)
            travelled_names.update(last_folder.irregular)
            travelled_names.update(f"{name}/" for name in last_folder.folders)
        return [
            name
            for name in listing
            if (
                name in travelled_names
                if name in last_names
                else not self._rules.is_ignored(
                    visit.path, name.rstrip("/"), is_folder=name.endswith("/")
                )
            )
        ]

    def _visit_unchanged_listing(
        self, visit: _Visit, last_folder: FolderRecord, folder: FolderRecord
    ) -> None:
        """Visit a folder whose names are those of the last scan."""
        folder.folders.extend(last_folder.folders)
        for file in last_folder.files:
            self._visit_name(visit, file.name, file, last_folder, folder)
        for name in last_folder.irregular:
            self._visit_name(visit, name, None, last_folder, folder)

    def _visit_name(
        self,
        visit: _Visit,
        name: str,
        last_record: FileRecord | None,
        last_folder: FolderRecord | None,
        folder: FolderRecord,
    ) -> None:
        try:
            file_stat = os.lstat(f"{visit.disk_path}/{name}")
        except FileNotFoundError:
            # The name has vanished: the next scan must decide on it anew if it comes back.
            folder.listing.clear()
            return
        if last_record is not None and last_record.matches(file_stat):
            folder.files.append(last_record)
        else:
            self._add_changed(visit, name, file_stat, last_folder, folder)

    def _add_changed(
        self,
        visit: _Visit,
        name: str,
        file_stat: os.stat_result,
        last_folder: FolderRecord | None,
        folder: FolderRecord,
    ) -> None:
        """Add a file that is new or changed, or an entry that is no regular file."""
        disk_path = f"{visit.disk_path}/{name}"
        if stat.S_ISREG(file_stat.st_mode):
            self._count += 1
            self.pending.append(Pending(name, disk_path, folder, file_stat.st_size, folder.files))
            return
        if stat.S_ISDIR(file_stat.st_mode):  # a folder has replaced the file since the listing
            folder.listing.clear()
            return
        folder.irregular.append(name)
        path = f"{visit.path}/{name}" if visit.path else name
        if stat.S_ISLNK(file_stat.st_mode):
            self._add_link(visit, name, path, last_folder, folder)
        else:
            self.warnings.append(f"{path} does not travel: it is no file, folder or link")

    def _add_link(
        self,
        visit: _Visit,
        name: str,
        path: str,
        last_folder: FolderRecord | None,
        folder: FolderRecord,
    ) -> None:
        disk_path = f"{visit.disk_path}/{name}"
        real = os.path.realpath(disk_path)
        try:
            file_stat = os.stat(real)
        except OSError:
            self.warnings.append(f"{path} does not travel: it is a link to nowhere")
            return
        if _is_within(real, self._root) and not self._is_single:
            inside = os.path.relpath(real, self._root)
            target = os.path.relpath(inside, visit.path or ".")
            folder.links.append(Entry(path, "symlink", target=target))
        elif not self._is_allowed_target(visit, name, real):
            self._outside_links.append(f"{path} -> {real}")
        elif stat.S_ISDIR(file_stat.st_mode):
            if _is_within(self._root, real) or any(
                _is_within(followed_folder, real) for followed_folder in visit.followed
            ):
                self.warnings.append(f"{path} does not travel: following this link has no end")
                return
            if os.path.exists(f"{real}/pyvenv.cfg"):
                self.warnings.append(f"{path} does not travel: it leads to a virtual environment")
                return
            self._stack.append(_Visit(path, real, visit.is_fresh, (*visit.followed, real)))
        elif stat.S_ISREG(file_stat.st_mode):
            last_record = (
                next((file for file in last_folder.followed if file.name == name), None)
                if last_folder
                else None
            )
            if last_record is not None and last_record.matches(file_stat):
                folder.followed.append(last_record)
            else:
                self._count += 1
                self.pending.append(Pending(name, real, folder, file_stat.st_size, folder.followed))
        else:
            self.warnings.append(f"{path} does not travel: it leads to no file or folder")

    def _is_allowed_target(self, visit: _Visit, name: str, real: str) -> bool:
        """True if an option or an ignore file lets the target of a link out of the project in."""
        if self._is_single or any(
            _is_within(real, target) for target in (*visit.followed, *self._link_targets)
        ):
            return True
        return self._rules.is_followed(visit.path, name)

    # ----------------------------------------------------------------------------------- limits

    def _sizes(self) -> list[tuple[int, str]]:
        sizes = [
            (file.size, f"{folder.path}/{file.name}".lstrip("/"))
            for folder in self.folders
            for file in (*folder.files, *folder.followed)
        ]
        for file in self.pending:
            sizes.append((file.size, f"{file.folder.path}/{file.name}".lstrip("/")))
        return sizes

    def _check_size(self) -> None:
        total = sum(
            file.size for folder in self.folders for file in (*folder.files, *folder.followed)
        ) + sum(file.size for file in self.pending)
        if total > self._limits.total_bytes:
            raise too_large(self._root, self._sizes(), self._limits)
        if total > self._limits.warn_bytes:
            self.warnings.append(warning(self._root, self._sizes()))


def _outside_links_warning(links: list[str]) -> str:
    which = ", ".join(sorted(links)[: LIMITS.named_links])
    more = len(links) - LIMITS.named_links
    return (
        f"links that lead out of the project do not travel: {which}"
        + (f" and {more} more" if more > 0 else "")
        + '; name one that is to travel in a line "!follow PATH" of .ktignore, or copy its target '
        "with Image.copy()"
    )


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def unreadable(path: str, error: OSError) -> SpecError:
    return SpecError(
        f"{path} cannot be read: {error.strerror}",
        hint="make it readable, or list it in .ktignore",
    )


_READ_BYTES = 1024 * 1024


class FileChangedError(DataStoreError):
    """A file is not what it was when the project was scanned: scan again."""


class Spool:
    """Copies of files that may change between the scan that reads them and the upload.

    They lie one behind the other in one temporary file.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(LIMITS.spool_memory_bytes)  # noqa: SIM115  # as long as it
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()
        #: Offset and length of each copy in the file, by digest.
        self._extents: dict[str, tuple[int, int]] = {}
        #: Where the next copy begins.
        self._end_offset = 0
        #: Bytes of the copy that is being written.
        self._written_bytes = 0
        #: True once the disk was full: later files are not copied.
        self._is_full = False

    def begin(self) -> None:
        """Begin a copy; it overwrites the copy before it, unless that was kept."""
        self._written_bytes = 0
        self._file.seek(self._end_offset)

    def write(self, piece: bytes) -> None:
        try:
            self._file.write(piece)
        except OSError:  # no disk space: the upload sends the file itself, if it has not changed
            self._is_full = True
        self._written_bytes += len(piece)

    def keep(self, digest: str) -> None:
        """Keep the copy, which is complete."""
        if not self._is_full and digest not in self._extents:
            self._extents[digest] = (self._end_offset, self._written_bytes)
            self._end_offset += self._written_bytes

    def pieces(self, digest: str) -> Iterator[bytes] | None:
        """The pieces of a copy; `None` if there is no copy with this digest."""
        extent = self._extents.get(digest)
        return None if extent is None else self._pieces(*extent)

    def _pieces(self, begin: int, size: int) -> Iterator[bytes]:
        end = begin + size
        while begin < end:
            with self._lock:
                self._file.seek(begin)
                piece = self._file.read(min(end - begin, _MIB))
            begin += len(piece)
            yield piece


@dataclass(eq=False)
class Scan:
    """A project as it was when it was scanned."""

    root: str
    folders: list[FolderRecord]
    digest: str
    warnings: tuple[str, ...]
    #: Digests of the tree and its files that the last scan did not have.
    fresh: tuple[str, ...] = ()
    #: Copies of files that may have changed since the scan.
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
        """Length and pieces of a file, or of the encoded tree; the source of an upload."""
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
    last_listings = cache.load()
    if last_listings is not None and (
        last_listings.root != base or last_listings.signature != signature
    ):
        last_listings = None
    walk = Walk(base, rules, last_listings.folders if last_listings else (), options)
    if options.only is None:
        walk.run()
    else:
        walk.run_single(options.only)
    spool = read_all(walk)
    if options.only is not None and not _digests(walk.folders):
        raise SpecError(f"{base}/{options.only} is no file that can be read")
    warnings = tuple(walk.warnings)
    if last_listings is not None and walk.folders == last_listings.folders:
        return Scan(base, last_listings.folders, last_listings.tree, warnings, spool=spool)
    tree = _tree(walk.folders)
    new_scan = Scan(base, walk.folders, tree.digest, warnings, spool=spool)
    new_scan.__dict__["tree"] = tree
    if last_listings is not None and tree.digest != last_listings.tree:
        last_digests = _digests(last_listings.folders)
        new_digests = [digest for digest in tree.digests() if digest not in last_digests]
        new_scan.fresh = (tree.digest, *new_digests)
    version = scan_cache.VERSION
    cache.save(scan_cache.Listings(version, base, signature, tree.digest, walk.folders))
    return new_scan


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
    for pending_file in walk.pending:
        record = _read(pending_file, spool)
        if record is not None:
            pending_file.records.append(record)
        else:  # vanished: the next scan must decide on its name anew
            pending_file.folder.listing.clear()
    return spool


def _read(pending_file: Pending, spool: Spool) -> FileRecord | None:
    """The record of a file; `None` if it has vanished.

    Exactly as many bytes are read as the file had when it was opened, so a log to which a program
    appends can be read at any time. A file that changes while it is read is read twice: if both
    contents are equal, the file had this content at some moment. A file that changed shortly before
    the scan may change again before it is sent, so its content is copied.
    """
    for _ in range(LIMITS.read_attempts):
        now = time.time_ns()
        try:
            with FileIO(pending_file.path) as file:
                file_stat = os.fstat(file.fileno())
                is_open = has_writer(file.fileno())
                record = scan_cache.record(
                    pending_file.name, file_stat, "", read_ns=now, is_open=is_open
                )
                copy = spool if record.is_racy else None
                content = _hash(file, file_stat.st_size, copy)
                is_whole = content[1] == file_stat.st_size
                if is_whole and os.fstat(file.fileno()).st_ctime_ns != file_stat.st_ctime_ns:
                    copy = spool
                    file.seek(0)
                    is_whole = content == _hash(file, file_stat.st_size, copy)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise unreadable(pending_file.path, error) from error
        if is_whole:
            if copy is not None:
                copy.keep(content[0])
            return msgspec.structs.replace(record, digest=content[0])
    raise _changed_error(
        pending_file.path, f"changed while it was read, {LIMITS.read_attempts} times in a row"
    )


def _changed_error(path: str, change: str) -> FileChangedError:
    return FileChangedError(
        f"{path} {change}",
        hint="deploy when nothing writes to it, or list it in .ktignore",
    )


def _hash(file: FileIO, size: int, copy: Spool | None) -> tuple[str, int]:
    """Copy the first `size` bytes of a file; returns their digest and their number."""
    hasher = blake3(max_threads=blake3.AUTO if size >= LIMITS.scan_parallel_hash_bytes else 1)
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
    remaining_bytes = size
    while remaining_bytes and (piece := file.read(min(remaining_bytes, _READ_BYTES))):
        remaining_bytes -= len(piece)
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
        raise _changed_error(path, f"cannot be read any more: {error.strerror}") from error
    if hasher.hexdigest() != digest:
        raise _changed_error(path, "changed after the project was scanned")
