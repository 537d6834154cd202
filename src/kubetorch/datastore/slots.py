"""Code slots: the folders in which a pod keeps its project, brought up to date in place.

    <root>/<number>/<project>/…    a slot
    <root>/<number>.record         what was written there: the size, times and inode of each file

An update takes a slot that no live worker holds and touches only what differs between its folder
and the wanted tree. The record is removed before the first change and written after the last, so a
slot whose update was cut short, by whatever, has none and is made anew. What user code changed in
a slot differs from its record and is written again; files that it added stay.

Files are written beside and renamed, so whoever still has an old one open keeps it. With a source
its byte code goes: Python compares whole seconds and sizes, and would take a same-size edit within
one second for no edit.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH102, PTH105, PTH108, PTH106, PTH123, PTH208, PTH211

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kubetorch.datastore.blobs import Source, storage_error
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.errors import DataStoreError

#: Slots that are kept: one that serves, and one for the next generation.
KEPT = 2

_RECORD_VERSION = 1


@dataclass(frozen=True)
class Slot:
    """A folder with a tree in it.

    Attributes:
        number: Its number.
        path: The project in it.
        tree: Digest of the tree.
    """

    number: int
    path: Path
    tree: str


class _File(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was written, and what `lstat` said of it then."""

    entry: Entry
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    project: str
    tree: str
    files: list[_File]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)


class CodeSlots:
    """The slots of one pod; safe to use from several threads of its one agent.

    Args:
        root: Their folder; made when the first tree comes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._holds: dict[int, int] = {}
        # Updates come one after the other; `_lock` is only ever held for a moment.
        self._updating = threading.Lock()

    def update(self, tree: Tree, source: Source, project: str) -> Slot:
        """A slot with this tree, held once for the caller.

        Args:
            tree: What is wanted.
            source: Where the bytes of blobs come from, such as `BlobStore.stream`.
            project: Name of the folder that the tree becomes.

        Raises:
            DataStoreError: A blob is missing or broken, or the folder cannot be written. The slot
                is made anew by the next update that takes it.
            StorageFullError: There is no room.
        """
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
                self._release(number)
                if isinstance(error, OSError) and not isinstance(error, DataStoreError):
                    raise _failure(error, self._root) from error
                raise
            return Slot(number, self._root / str(number) / project, tree.digest)

    def hold(self, slot: Slot) -> None:
        """One more worker lives in this slot."""
        with self._lock:
            self._holds[slot.number] = self._holds.get(slot.number, 0) + 1

    def release(self, slot: Slot) -> None:
        """A worker of this slot has ended, or `update`'s caller is done with it."""
        self._release(slot.number)

    def is_held(self, slot: Slot) -> bool:
        """Whether the slot must not change."""
        with self._lock:
            return slot.number in self._holds

    def _release(self, number: int) -> None:
        with self._lock:
            left = self._holds[number] - 1
            if left:
                self._holds[number] = left
            else:
                del self._holds[number]

    def _choose(self, digest: str) -> int:
        """A slot that nobody holds, now held: one with this tree, any other, or a new one."""
        with self._lock:
            free = [number for number in self._numbers() if number not in self._holds]
            records = {number: self._read_record(number) for number in free}
            ranked = sorted(free, key=lambda number: (_rank(records[number], digest), number))
            if ranked:
                chosen = ranked[0]
            else:
                chosen = next(n for n in range(len(self._holds) + 1) if n not in self._holds)
            self._holds[chosen] = 1
            return chosen

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._root) if name.isdigit())
        except FileNotFoundError:
            return []

    def _prune(self) -> None:
        """Remove slots that are neither held nor needed for the next generation."""
        with self._lock:
            numbers = self._numbers()
            free = [number for number in numbers if number not in self._holds]
            for number in free[max(0, KEPT - (len(numbers) - len(free))) :]:
                self._record_path(number).unlink(missing_ok=True)
                _remove(self._root / str(number))

    # -------------------------------------------------------------------------------- one slot

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
        if record is None or record.project != project:
            self._record_path(number).unlink(missing_ok=True)
            _remove(folder)
            (folder / project).mkdir(parents=True, mode=0o755)
            record = _Record(_RECORD_VERSION, project, "", [])
        base = f"{folder}/{project}"
        kept, removed = _compare(base, record.files, tree)
        written = [entry for entry in tree.entries if entry.path not in kept]
        if not written and not removed and record.tree == tree.digest:
            return
        self._record_path(number).unlink(missing_ok=True)
        _forget_byte_code(base, [*removed, *(entry.path for entry in written)])
        for path in removed:
            _unlink(f"{base}/{path}")
        _remove_empty_folders(base, removed)
        for entry in written:
            kept[entry.path] = _write(base, entry, source)
        self._write_record(
            number, _Record(_RECORD_VERSION, project, tree.digest, list(kept.values()))
        )

    def _write_record(self, number: int, record: _Record) -> None:
        path = self._record_path(number)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(_encoder.encode(record))
        temporary.replace(path)


def switch(link: Path, slot: Slot) -> None:
    """Make `link` point to this slot, in one step: whoever looks sees the old one or the new one.

    Raises:
        DataStoreError: Something that is no link has this name, or the folder cannot be written.
    """
    temporary = link.with_name(f".{link.name}.{os.getpid()}.switch")
    try:
        if link.exists() and not link.is_symlink():
            raise DataStoreError(
                f"{link} exists and is no link, so the project cannot be shown there",
                hint="give the file or folder of that name another one",
            )
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(slot.path)
        temporary.replace(link)
    except OSError as error:
        if isinstance(error, DataStoreError):
            raise
        raise _failure(error, link.parent) from error


def _rank(record: _Record | None, digest: str) -> int:
    if record is None:
        return 2
    return 0 if record.tree == digest else 1


def _failure(error: OSError, folder: Path) -> DataStoreError:
    return storage_error(error, folder) or DataStoreError(
        f"the project cannot be written to {folder}: {error}"
    )


# ------------------------------------------------------------------------------------ comparing


def _compare(base: str, files: Iterable[_File], tree: Tree) -> tuple[dict[str, _File], list[str]]:
    """What of a folder can stay: the files that are as wanted and untouched, and what must go."""
    wanted = {entry.path: entry for entry in tree.entries}
    kept: dict[str, _File] = {}
    removed: list[str] = []
    lstat = os.lstat
    _remove_links_to_folders(base, wanted)
    for file in files:
        path = file.entry.path
        entry = wanted.get(path)
        if entry is None:
            removed.append(path)
            continue
        if entry != file.entry:
            continue
        try:
            facts = lstat(f"{base}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        if (
            facts.st_ctime_ns == file.ctime_ns
            and facts.st_mtime_ns == file.mtime_ns
            and facts.st_size == file.size
            and facts.st_ino == file.inode
        ):
            kept[path] = file
    return kept, removed


def _remove_links_to_folders(base: str, paths: Iterable[str]) -> None:
    """Where a folder of the tree should be, user code may have put a link that leads elsewhere."""
    for folder in sorted({path.rpartition("/")[0] for path in paths}):
        while folder:
            path = f"{base}/{folder}"
            try:
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                pass
            folder = folder.rpartition("/")[0]


# --------------------------------------------------------------------------------------- writing


def _write(base: str, entry: Entry, source: Source) -> _File:
    path = f"{base}/{entry.path}"
    temporary = f"{path.rpartition('/')[0]}/.kt-new-{os.getpid()}"
    try:
        _create(temporary, entry, source)
    except (FileNotFoundError, NotADirectoryError):
        _make_folder(base, entry.path.rpartition("/")[0])
        _create(temporary, entry, source)
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        shutil.rmtree(path)
        os.replace(temporary, path)
    facts = os.lstat(path)
    return _File(entry, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def _create(temporary: str, entry: Entry, source: Source) -> None:
    if entry.mode == "symlink":
        os.symlink(entry.target, temporary)
        return
    mode = 0o777 if entry.mode == "executable" else 0o666
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb", buffering=0) as file:
        length, pieces = source(entry.digest)
        if length != entry.size:
            raise DataStoreError(
                f"the blob of {entry.path!r} has {length} bytes; the tree says {entry.size}"
            )
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]


def _make_folder(base: str, folder: str) -> None:
    """Make a folder and those above it; what user code has put in the way goes."""
    path = base
    for name in folder.split("/") if folder else ():
        path = f"{path}/{name}"
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                os.mkdir(path, 0o755)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except IsADirectoryError:
        shutil.rmtree(path)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return


def _remove_empty_folders(base: str, removed: Iterable[str]) -> None:
    """Remove the folders that removed files have left empty: one would be a namespace package."""
    for folder in sorted({path.rpartition("/")[0] for path in removed}, reverse=True):
        while folder:
            for empty in (f"{base}/{folder}/__pycache__", f"{base}/{folder}"):
                try:
                    os.rmdir(empty)
                except OSError:
                    continue
            folder = folder.rpartition("/")[0]


def _forget_byte_code(base: str, paths: Iterable[str]) -> None:
    """Delete the byte code of these sources."""
    modules: dict[str, set[str]] = {}
    for path in paths:
        if path.endswith(".py"):
            folder, _, name = path.rpartition("/")
            modules.setdefault(folder, set()).add(name[: -len(".py")])
    for folder, names in modules.items():
        cache = f"{base}/{folder}/__pycache__" if folder else f"{base}/__pycache__"
        try:
            found = os.listdir(cache)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for file in found:
            # <module>.<interpreter>[.opt-N].pyc
            if _module_of(file) in names:
                _unlink(f"{cache}/{file}")


def _module_of(byte_code: str) -> str:
    stem = byte_code.removesuffix(".pyc")
    head, _, last = stem.rpartition(".")
    return head.rpartition(".")[0] if last.startswith("opt-") else head
