"""The walk over a project's folders: what travels, and which files have to be read.

Decisions of the last scan are used again for names that a folder had then, so that ignore rules are
matched for new names only. They are made anew below a folder whose ignore rules have changed.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH110, PTH116

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kubetorch.datastore import limits
from kubetorch.datastore.ignoring import IGNORE_FILES, IgnoreRules
from kubetorch.datastore.limits import Limits
from kubetorch.datastore.listings import FileRecord, FolderRecord, record
from kubetorch.datastore.trees import Entry
from kubetorch.errors import SpecError


@dataclass(frozen=True)
class Pending:
    """A file that has to be read; its record goes into `into`."""

    name: str
    path: str
    folder: int
    size: int
    into: list[FileRecord]


@dataclass
class _Visit:
    """A folder to look into.

    Attributes:
        path: In the project.
        disk: On the disk.
        is_fresh: Whether its rules, or those above it, have changed.
        followed: Real paths of the links that led here.
    """

    path: str
    disk: str
    is_fresh: bool = False
    followed: tuple[str, ...] = ()


@dataclass
class _Found:
    """What a visit finds, see `FolderRecord`."""

    files: list[FileRecord] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    links: list[Entry] = field(default_factory=list)
    followed: list[FileRecord] = field(default_factory=list)
    rules: list[FileRecord] = field(default_factory=list)
    has_vanished: bool = False


class Walk:
    """One walk.

    Args:
        root: The project's folder, a real path.
        rules: What does not travel.
        last: Folders as the last scan saw them.
        allowed: How large the project may be.
    """

    def __init__(
        self, root: str, rules: IgnoreRules, last: Iterable[FolderRecord], allowed: Limits
    ) -> None:
        self._root = root
        self._rules = rules
        self._last = {folder.path: folder for folder in last}
        self._limits = allowed
        self._stack: list[_Visit] = []
        self._count = 0
        self._is_single = False
        self.folders: list[FolderRecord] = []
        self.pending: list[Pending] = []
        self.warnings: list[str] = []

    def run(self) -> None:
        """Walk all folders.

        Raises:
            ProjectTooLargeError: What travels is above the limits.
            SpecError: A folder cannot be read.
        """
        self._stack.append(_Visit("", self._root))
        while self._stack:
            visit = self._stack.pop()
            listing = self._list(visit)
            if listing is not None:
                self._visit(visit, listing)
                if self._count > self._limits.files:
                    raise limits.too_many(self._root, self._sizes(), self._limits)
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
        found = _Found()
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
        self._count += len(found.files) + len(found.links) + len(found.followed)
        self.folders.append(
            FolderRecord(
                path=visit.path,
                # Decisions are not to be used again for a name that was there only in between.
                listing=[] if found.has_vanished else listing,
                files=found.files,
                folders=found.folders,
                odd=found.odd,
                links=found.links,
                followed=found.followed,
                rules=found.rules,
            )
        )

    def _read_rules(
        self, visit: _Visit, listing: list[str], old: FolderRecord | None, found: _Found
    ) -> bool:
        """Whether the rules in this folder are others than at the last scan."""
        for name in IGNORE_FILES:
            if name in listing:
                try:
                    facts = os.stat(f"{visit.disk}/{name}")
                except OSError:  # a link to nowhere: it has no rules
                    continue
                found.rules.append(record(name, facts, "", read_ns=time.time_ns()))
        known = old.rules if old else []
        return found.rules != known or any(rule.ctime_ns < 0 for rule in known)

    def _travelling(self, visit: _Visit, listing: list[str], old: FolderRecord | None) -> list[str]:
        """The names of a listing that travel."""
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

    def _look_again(self, visit: _Visit, old: FolderRecord, found: _Found) -> None:
        """Look at a folder whose names are those of the last scan."""
        found.folders.extend(old.folders)
        lstat = os.lstat
        prefix = f"{visit.disk}/"
        for file in old.files:
            try:
                facts = lstat(prefix + file.name)
            except FileNotFoundError:
                found.has_vanished = True
                continue
            # As FileRecord.matches, without the call: this is the loop over all files.
            if (
                facts.st_ctime_ns == file.ctime_ns
                and facts.st_mtime_ns == file.mtime_ns
                and facts.st_size == file.size
                and facts.st_ino == file.inode
            ):
                found.files.append(file)
            else:
                self._take(visit, file.name, facts, old, found)
        for name in old.odd:
            self._look(visit, name, None, old, found)

    def _look(
        self,
        visit: _Visit,
        name: str,
        known: FileRecord | None,
        old: FolderRecord | None,
        found: _Found,
    ) -> None:
        try:
            facts = os.lstat(f"{visit.disk}/{name}")
        except FileNotFoundError:
            found.has_vanished = True
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
        found: _Found,
    ) -> None:
        """Take a file that is new or changed, or something that is no file."""
        disk = f"{visit.disk}/{name}"
        if stat.S_ISREG(facts.st_mode):
            self._count += 1
            self._later(name, disk, facts, found.files)
            return
        if stat.S_ISDIR(facts.st_mode):  # it took a file's name a moment ago
            found.has_vanished = True
            return
        found.odd.append(name)
        path = f"{visit.path}/{name}" if visit.path else name
        if stat.S_ISLNK(facts.st_mode):
            self._take_link(visit, name, path, old, found)
        else:
            self.warnings.append(f"{path} does not travel: it is no file, folder or link")

    def _later(self, name: str, disk: str, facts: os.stat_result, into: list[FileRecord]) -> None:
        self.pending.append(Pending(name, disk, len(self.folders), facts.st_size, into))

    def _take_link(
        self, visit: _Visit, name: str, path: str, old: FolderRecord | None, found: _Found
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
                self._later(name, real, facts, found.followed)
        else:
            self.warnings.append(f"{path} does not travel: it leads to no file or folder")

    # ----------------------------------------------------------------------------------- limits

    def _sizes(self) -> list[tuple[int, str]]:
        """Sizes and paths of all files."""
        sizes = [
            (file.size, f"{folder.path}/{file.name}".lstrip("/"))
            for folder in self.folders
            for file in (*folder.files, *folder.followed)
        ]
        for item in self.pending:
            folder_path = self.folders[item.folder].path
            sizes.append((item.size, f"{folder_path}/{item.name}".lstrip("/")))
        return sizes

    def _check_size(self) -> None:
        total = sum(
            file.size for folder in self.folders for file in (*folder.files, *folder.followed)
        ) + sum(item.size for item in self.pending)
        if total > self._limits.total_bytes:
            raise limits.too_large(self._root, self._sizes(), self._limits)
        if total > self._limits.warn_bytes:
            self.warnings.append(limits.warning(self._root, self._sizes()))


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable(path: str, error: OSError) -> SpecError:
    """The error for a file or folder of the project that cannot be read."""
    return SpecError(
        f"{path} cannot be read: {error.strerror}",
        hint="make it readable, or list it in .ktignore",
    )
