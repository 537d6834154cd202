"""Code slots: the folders in which a pod keeps its project, brought up to date in place.

    <root>/<number>/<project>/…    a slot
    <root>/<number>.record         what was written there: the size, times and inode of each file
    <root>/current                 a link to the one that is seen in the working directory

An update takes a slot that no live worker holds and touches only what differs between its folder
and the wanted tree. The record is removed before the first change and written after the last, so a
slot whose update was cut short, by whatever, has none and is made anew. What user code changed in
a slot differs from its record and is written again; files that it added stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kubetorch.datastore.blobs import Source, storage_error
from kubetorch.datastore.trees import Tree, WrittenFile, compare, materialise
from kubetorch.errors import DataStoreError
from kubetorch.lib.files import write_atomically

#: Slots that are kept: one that serves, and one for the next generation.
KEPT = 2

#: The link to the slot that is seen in the working directory.
CURRENT = "current"

_MERGED = ".merged"
_RECORD_VERSION = 1


@dataclass(frozen=True)
class Slot:
    """A project for one worker; one without a number is nobody's copy, but the project itself."""

    number: int | None
    path: Path
    tree: str


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    project: str
    tree: str
    files: list[WrittenFile]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)


class CodeSlots:
    """The slots of one pod; safe to use from several threads of its one agent."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._held: set[int] = set()
        # Updates come one after the other; `_lock` is only ever held for a moment.
        self._updating = threading.Lock()

    def update(self, tree: Tree, source: Source, project: str) -> Slot:
        """A slot with this tree, held until it is released."""
        if project in ("", ".", "..") or "/" in project or "\0" in project:
            raise DataStoreError(f"{project!r} is no name of a folder")
        with self._updating:
            number = self._choose(tree.digest)
            try:
                self._bring_up_to_date(number, tree, source, project)
                self._prune()
            except BaseException as error:
                # What is half-written would only take up room; the next update makes it anew.
                if not self._record_path(number).exists():
                    shutil.rmtree(self._root / str(number), ignore_errors=True)
                with self._lock:
                    self._held.remove(number)
                if isinstance(error, OSError) and not isinstance(error, DataStoreError):
                    why = f"the project cannot be written to {self._root}: {error}"
                    raise storage_error(error, self._root) or DataStoreError(why) from error
                raise
            return Slot(number, self._root / str(number) / project, tree.digest)

    def in_place(self, project: Path) -> Slot:
        """What stands for a slot where workers import a project from its own folder."""
        self._root.mkdir(parents=True, exist_ok=True)
        return Slot(None, project, "")

    def show(self, slot: Slot, folder: Path) -> list[str]:
        """Show a project in a working directory; returns the names that something else has there.

        It is there by its name, and so is each entry at its top: paths that are relative to the
        project are found. All of these are links to one, which is switched in one step:

            <folder>/<project>, <folder>/<entry>  →  <root>/current, <root>/current/<entry>
            <root>/current                        →  the slot
        """
        current = self._root / CURRENT
        try:
            entries = [one.name for one in slot.path.iterdir() if one.name != "__pycache__"]
            with self._updating:
                _replace_link(current, str(self._merged(slot, entries)))
                wanted = {name: f"{current}/{name}" for name in entries}
                wanted[slot.path.name] = str(current)
                return _link(folder, wanted, f"{self._root}{os.sep}")
        except OSError as error:
            raise DataStoreError(f"it cannot be linked in {folder}: {error.strerror}") from error

    def _merged(self, slot: Slot, entries: Sequence[str]) -> Path:
        """The folder of a slot; of a project with a folder of its own name at its top, both.

        `shop/` in the working directory of a project `shop` is the project, and it is the folder
        `shop/` of the project: so it has the entries of the former, and of the latter the others.
        """
        inner = slot.path / slot.path.name
        if not inner.is_dir():
            return slot.path
        wanted = {one.name: str(one) for one in inner.iterdir()}
        wanted |= {name: f"{slot.path}/{name}" for name in entries}
        # Never in the user's own folders.
        own = self._root if slot.number is None else slot.path.parent
        merged = own / _MERGED
        merged.mkdir(exist_ok=True)
        _link(merged, wanted, f"{slot.path}{os.sep}")
        return merged

    def release(self, slot: Slot) -> None:
        """The worker of this slot has ended, or there is to be none."""
        if slot.number is not None:
            with self._lock:
                self._held.remove(slot.number)

    def _choose(self, digest: str) -> int:
        """A slot that nobody holds, now held: one with this tree, any other, or a new one."""
        with self._lock:
            free = [number for number in self._numbers() if number not in self._held]
            records = {number: self._read_record(number) for number in free}
            ranked = sorted(free, key=lambda number: (_rank(records[number], digest), number))
            if ranked:
                chosen = ranked[0]
            else:
                chosen = next(n for n in range(len(self._held) + 1) if n not in self._held)
            self._held.add(chosen)
            return chosen

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(path.name) for path in self._root.iterdir() if path.name.isdigit())
        except FileNotFoundError:
            return []

    def _prune(self) -> None:
        """Remove slots that are neither held nor needed for the next generation."""
        with self._lock:
            numbers = self._numbers()
            free = [number for number in numbers if number not in self._held]
            for number in free[max(0, KEPT - (len(numbers) - len(free))) :]:
                self._record_path(number).unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self._root / str(number))

    def _record_path(self, number: int) -> Path:
        return self._root / f"{number}.record"

    def _read_record(self, number: int) -> _Record | None:
        try:
            record = _decoder.decode(self._record_path(number).read_bytes())
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return record if record.version == _RECORD_VERSION else None

    def _bring_up_to_date(self, number: int, tree: Tree, source: Source, project: str) -> None:
        folder = self._root / str(number)
        record = self._read_record(number)
        # User code may have removed the folder, or put something else in its place.
        is_there = (folder / project).is_dir() and not (folder / project).is_symlink()
        if record is None or record.project != project or not is_there:
            self._record_path(number).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
            (folder / project).mkdir(parents=True, mode=0o755)
            record = _Record(_RECORD_VERSION, project, "", [])
        base = f"{folder}/{project}"
        kept, removed = compare(base, record.files, tree)
        if len(kept) == len(tree.entries) and not removed and record.tree == tree.digest:
            return
        self._record_path(number).unlink(missing_ok=True)
        files = materialise(base, tree, source, kept, removed)
        record = _Record(_RECORD_VERSION, project, tree.digest, files)
        write_atomically(self._record_path(number), _encoder.encode(record))


def uncover(folder: Path, root: Path, names: Iterable[str]) -> None:
    """Remove links to the project from a working directory that is to have own files there."""
    for name in names:
        path = folder / name
        if path.is_symlink() and str(path.readlink()).startswith(f"{root}{os.sep}"):
            path.unlink()


def _link(folder: Path, wanted: Mapping[str, str], ours: str) -> list[str]:
    """Link names into a folder in place of our earlier links; returns the names that are taken."""
    taken = []
    with os.scandir(folder) as entries:
        # Of a link where it leads, of everything else nothing.
        there = {one.name: os.readlink(one) if one.is_symlink() else "" for one in entries}  # noqa: PTH115  # may be thousands
    for name, target in sorted(wanted.items()):
        found = there.pop(name, None)
        if found is None:
            os.symlink(target, f"{folder}/{name}")  # noqa: PTH211  # as above
        elif found != target and not found.startswith(ours):
            taken.append(name)
        elif found != target:
            _replace_link(folder / name, target)
    for name, found in there.items():
        if found.startswith(ours):
            (folder / name).unlink()
    return taken


def _replace_link(path: Path, target: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.switch")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def _rank(record: _Record | None, digest: str) -> int:
    if record is None:
        return 2
    return 0 if record.tree == digest else 1
