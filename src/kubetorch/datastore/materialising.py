"""A tree in a folder: what of it is as it should be, and the rest written anew.

Files are written beside and renamed, so whoever still has an old one open keeps it. With a source
its byte code goes: Python compares whole seconds and sizes, and would take a same-size edit within
one second for no edit.

User code may have done anything to the folder since: what it changed differs from the record, and
a link that it put in place of a folder is removed before anything is written below it.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH102, PTH105, PTH108, PTH106, PTH114, PTH123, PTH208, PTH211

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Sequence

import msgspec

from kubetorch.datastore.blobs import Source
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.errors import DataStoreError


class WrittenFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was written, and what `lstat` said of it then."""

    entry: Entry
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def materialise(
    base: str, tree: Tree, source: Source, kept: dict[str, WrittenFile], removed: list[str]
) -> list[WrittenFile]:
    """Make a folder what `tree` says.

    Args:
        base: The folder.
        tree: What is wanted.
        source: Where the bytes of blobs come from.
        kept: Files that can stay, as `compare` found them.
        removed: Paths that must go, as `compare` found them.

    Raises:
        DataStoreError: A blob is missing or broken.
        OSError: The folder cannot be written.
    """
    written = [entry for entry in tree.entries if entry.path not in kept]
    _forget_byte_code(base, [*removed, *(entry.path for entry in written)])
    for path in removed:
        _unlink(f"{base}/{path}")
    _remove_empty_folders(base, removed)
    return [*kept.values(), *(_write(base, entry, source) for entry in written)]


def compare(
    base: str, files: Sequence[WrittenFile], tree: Tree
) -> tuple[dict[str, WrittenFile], list[str]]:
    """What of a folder can stay: the files that are as wanted and untouched, and what must go."""
    wanted = {entry.path: entry for entry in tree.entries}
    kept: dict[str, WrittenFile] = {}
    removed: list[str] = []
    lstat = os.lstat
    _remove_links_to_folders(base, [*wanted, *(file.entry.path for file in files)])
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
    folders: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    for folder in sorted(folders):  # those above first: nothing is ever reached through a link
        try:
            if not stat.S_ISDIR(os.lstat(f"{base}/{folder}").st_mode):
                os.unlink(f"{base}/{folder}")
        except (FileNotFoundError, NotADirectoryError):
            continue


# --------------------------------------------------------------------------------------- writing


def _write(base: str, entry: Entry, source: Source) -> WrittenFile:
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
    return WrittenFile(entry, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


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
            found = [] if os.path.islink(cache) else os.listdir(cache)
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
