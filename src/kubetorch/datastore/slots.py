"""Code slots: the folders in which a pod keeps its project, brought up to date in place.

    <root>/<number>/<project>/…    a slot
    <root>/<number>.record         what was written there: the size, times and inode of each file
    <root>/current                 a link to the slot that the working directory shows

An update chooses a slot that no live worker holds and writes only files that differ between its
folder and the new tree. The update removes the record before its first change and writes it after
its last, so a slot whose update was cut short has no record and is made anew. A file that user code
changed differs from the record and is written again; files that user code added stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from kubetorch.datastore.blobs import Source, storage_error
from kubetorch.datastore.trees import Tree, WrittenFile, compare, materialise
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError
from kubetorch.lib.files import write_atomically

#: The link to the slot that the working directory shows.
CURRENT = "current"

_MERGED_FOLDER = ".merged"
_RECORD_VERSION = 1


class Slot(msgspec.Struct, frozen=True):
    """A folder with the project for one worker.

    A slot without a number is no copy: it is the folder of the project itself.
    """

    number: int | None
    path: Path
    tree: str


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """The files that an update wrote to a slot."""

    version: int
    project: str
    tree: str
    files: list[WrittenFile]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)


class CodeSlots:
    """The slots of one pod; several threads of its agent may use them at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        #: The numbers of slots that a worker runs in, or that an update writes.
        self._held_numbers: set[int] = set()
        #: Held during an update, so that updates follow each other; `_lock` is held briefly.
        self._update_lock = threading.Lock()

    def update(self, tree: Tree, source: Source, project: str) -> Slot:
        """Write a tree to a free slot; returns the slot, which is held until it is released."""
        if project in ("", ".", "..") or "/" in project or "\0" in project:
            raise DataStoreError(f"{project!r} is no name of a folder")
        with self._update_lock:
            number = self._choose(tree.digest)
            try:
                self._bring_up_to_date(number, tree, source, project)
                self._prune()
            except BaseException as error:
                # A half-written slot only takes up disk space; the next update makes it anew.
                if not self._record_path(number).exists():
                    shutil.rmtree(self._root / str(number), ignore_errors=True)
                with self._lock:
                    self._held_numbers.remove(number)
                if isinstance(error, OSError) and not isinstance(error, DataStoreError):
                    why = f"the project cannot be written to {self._root}: {error}"
                    raise storage_error(error, self._root) or DataStoreError(why) from error
                raise
            return Slot(number, self._root / str(number) / project, tree.digest)

    def in_place(self, project: Path) -> Slot:
        """The slot of a project that workers import from its own folder."""
        self._root.mkdir(parents=True, exist_ok=True)
        return Slot(None, project, "")

    def show(self, slot: Slot, folder: Path) -> list[str]:
        """Show a project in a working directory; returns the names that other files have there.

        The working directory gets a link with the project's name and a link for each entry at the
        top of the project, so that code finds paths that are relative to the project. All of these
        links lead through `current`, which is switched in one step:

            <folder>/<project>, <folder>/<entry>  →  <root>/current, <root>/current/<entry>
            <root>/current                        →  the slot
        """
        current = self._root / CURRENT
        try:
            entries = [path.name for path in slot.path.iterdir() if path.name != "__pycache__"]
            with self._update_lock:
                _replace_link(current, str(self._merged_folder(slot, entries)))
                links = {name: f"{current}/{name}" for name in entries}
                links[slot.path.name] = str(current)
                return _link(folder, links, f"{self._root}{os.sep}")
        except OSError as error:
            raise DataStoreError(f"it cannot be linked in {folder}: {error.strerror}") from error

    def _merged_folder(self, slot: Slot, entries: Sequence[str]) -> Path:
        """The folder that `current` leads to.

        It is the folder of the slot, unless the project has a folder of its own name at its top.
        Then `shop/` in the working directory stands for the project `shop` and for its folder
        `shop/shop/`: a merged folder has the entries of both; the entries of the project win.
        """
        inner = slot.path / slot.path.name
        if not inner.is_dir():
            return slot.path
        links = {path.name: str(path) for path in inner.iterdir()}
        links |= {name: f"{slot.path}/{name}" for name in entries}
        # The merged folder never lies in a folder of the user.
        slots_folder = self._root if slot.number is None else slot.path.parent
        merged = slots_folder / _MERGED_FOLDER
        merged.mkdir(exist_ok=True)
        _link(merged, links, f"{slot.path}{os.sep}")
        return merged

    def release(self, slot: Slot) -> None:
        """Free a slot whose worker has ended, or will not start."""
        if slot.number is not None:
            with self._lock:
                self._held_numbers.remove(slot.number)

    def _choose(self, digest: str) -> int:
        """Hold a free slot: first a slot with this tree, then any other slot, then a new slot."""
        with self._lock:
            free_numbers = [
                number for number in self._numbers() if number not in self._held_numbers
            ]
            records = {number: self._read_record(number) for number in free_numbers}
            ranked = sorted(
                free_numbers, key=lambda number: (_rank(records[number], digest), number)
            )
            if ranked:
                chosen_number = ranked[0]
            else:
                chosen_number = next(
                    n for n in range(len(self._held_numbers) + 1) if n not in self._held_numbers
                )
            self._held_numbers.add(chosen_number)
            return chosen_number

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(path.name) for path in self._root.iterdir() if path.name.isdigit())
        except FileNotFoundError:
            return []

    def _prune(self) -> None:
        """Remove slots that no worker holds and that the next generation does not need."""
        with self._lock:
            numbers = self._numbers()
            free_numbers = [number for number in numbers if number not in self._held_numbers]
            for number in free_numbers[
                max(0, LIMITS.retained_slots - (len(numbers) - len(free_numbers))) :
            ]:
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
        # User code may have removed the folder, or put a file or a link in its place.
        is_there = (folder / project).is_dir() and not (folder / project).is_symlink()
        if record is None or record.project != project or not is_there:
            self._record_path(number).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
            (folder / project).mkdir(parents=True, mode=0o755)
            record = _Record(_RECORD_VERSION, project, "", [])
        base = f"{folder}/{project}"
        unchanged_files, removed = compare(base, record.files, tree)
        if len(unchanged_files) == len(tree.entries) and not removed and record.tree == tree.digest:
            return
        self._record_path(number).unlink(missing_ok=True)
        files = materialise(base, tree, source, unchanged_files, removed)
        record = _Record(_RECORD_VERSION, project, tree.digest, files)
        write_atomically(self._record_path(number), _encoder.encode(record))


def uncover(folder: Path, root: Path, names: Iterable[str]) -> None:
    """Remove links to the project that have the names of files which the image puts there."""
    for name in names:
        path = folder / name
        if path.is_symlink() and str(path.readlink()).startswith(f"{root}{os.sep}"):
            path.unlink()


def _link(folder: Path, links: Mapping[str, str], our_prefix: str) -> list[str]:
    """Link names to targets in a folder; returns the names that other files have.

    Earlier links of ours, whose targets begin with `our_prefix`, are replaced or removed.
    """
    taken_names = []
    with os.scandir(folder) as entries:
        # The target of each link by its name; files and folders have no target.
        present_links = {
            entry.name: os.readlink(entry) if entry.is_symlink() else ""  # noqa: PTH115  # may be thousands
            for entry in entries
        }
    for name, target in sorted(links.items()):
        present_target = present_links.pop(name, None)
        if present_target is None:
            os.symlink(target, f"{folder}/{name}")  # noqa: PTH211  # as above
        elif present_target != target and not present_target.startswith(our_prefix):
            taken_names.append(name)
        elif present_target != target:
            _replace_link(folder / name, target)
    for name, present_target in present_links.items():
        if present_target.startswith(our_prefix):
            (folder / name).unlink()
    return taken_names


def _replace_link(path: Path, target: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.switch")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def _rank(record: _Record | None, digest: str) -> int:
    if record is None:
        return 2
    return 0 if record.tree == digest else 1
