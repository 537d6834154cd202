"""Trees: the content of a folder as a canonical list of entries, which is itself a blob.

The digest of that blob is the *tree digest*: folders with the same content have the same tree
digest. The paths of entries imply the folders above them; only an empty folder has an entry.

A tree is data from outside: `decode` refuses a tree that would write outside of its folder, or that
two implementations of `materialise` could write differently.

`compare` finds the files of a folder that can stay, and `materialise` writes the others. A file is
written under a temporary name and renamed, so a process that has the old file open keeps it. When a
source file changes, its byte code is removed: Python compares whole seconds and sizes, and would
not notice an edit of the same size within one second.

User code may have changed the folder since: a file that it changed differs from the record, and a
link that it put in place of a folder is removed before a file is written below it.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH102, PTH105, PTH106, PTH108, PTH114, PTH123, PTH208, PTH211

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from kubetorch.datastore.blobs import DIGEST_LENGTH, BlobStore, Source, digest_of
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError, ProjectTooLargeError

Mode = Literal["file", "executable", "symlink", "folder"]

_PATH_BYTES = 4096
_NAME_BYTES = 255

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Most paths match this pattern, which is cheap to check, and are then right.
_PLAIN_PATH = re.compile(
    r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}){0,15}"
)
# Steps up, then names: see `target_fault`.
_TARGET = re.compile(r"\.|(?P<up>(?:\.\./)*)(?:\.\.|(?P<down>[^/\0]+(?:/[^/\0]+)*))")


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A file, a link or an empty folder of a tree; `target` is where a link leads."""

    path: str
    mode: Mode
    size: int = 0
    digest: str = ""
    target: str = ""


class Tree(msgspec.Struct, frozen=True):
    """Entries in the order of their paths."""

    digest: str
    entries: tuple[Entry, ...]
    encoded: bytes

    def digests(self) -> list[str]:
        """The digests of its files, each once."""
        return list(dict.fromkeys(entry.digest for entry in self.entries if entry.digest))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])


def build(entries: Iterable[Entry]) -> Tree:
    ordered = tuple(sorted(entries, key=attrgetter("path")))
    check(ordered)
    encoded = _encoder.encode(ordered)
    return Tree(digest_of(encoded), ordered, encoded)


def read(store: BlobStore, digest: str) -> Tree:
    """A tree of a store; a tree that is too large is refused before it is read."""
    size = store.size(digest)
    if size > LIMITS.tree_encoded_bytes:
        raise _too_large(
            f"a list of files of {size:,} bytes; {LIMITS.tree_encoded_bytes:,} are allowed"
        )
    return decode(store.read(digest))


def decode(encoded: bytes) -> Tree:
    _check_count(_count(encoded))
    try:
        entries = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataStoreError(f"not a tree: {error}") from error
    check(entries)
    if _encoder.encode(entries) != encoded:
        raise DataStoreError("not a tree: it is encoded in a way that build() does not")
    return Tree(digest_of(encoded), entries, encoded)


# -------------------------------------------------------------------------------------- checking


def _count(encoded: bytes) -> int:
    """The number of entries that an encoded tree claims to have, read without decoding."""
    if encoded[:1] == b"\xdd":
        return int.from_bytes(encoded[1:5], "big")
    return int.from_bytes(encoded[1:3], "big") if encoded[:1] == b"\xdc" else 0


def _check_count(entries: int) -> None:
    if entries > LIMITS.tree_entries:
        raise _too_large(f"{entries:,} files; {LIMITS.tree_entries:,} are allowed")


def _too_large(excess: str) -> ProjectTooLargeError:
    return ProjectTooLargeError(
        f"the project has {excess}", hint="list what the pods do not need in .ktignore"
    )


def check(entries: Sequence[Entry]) -> None:
    """Refuse entries that cannot be materialised safely."""
    _check_count(len(entries))
    previous: str | None = None
    for entry in entries:
        path = entry.path
        fault = path_fault(path)
        if fault is not None:
            raise _refusal(path, fault)
        if previous is not None and path <= previous:
            order_fault = "is there twice" if path == previous else "is out of order"
            raise _refusal(path, order_fault)
        previous = path
        _check_content(entry)
    total = sum(entry.size for entry in entries)
    if total > LIMITS.tree_files_bytes:
        raise _too_large(f"files of {total:,} bytes; {LIMITS.tree_files_bytes:,} are allowed")
    # NUL sorts before all other characters, so a path below an entry follows the entry at once.
    ordered = sorted(entry.path.replace("/", "\0") for entry in entries)
    for path, following in itertools.pairwise(ordered):
        if following.startswith(f"{path}\0"):
            above = path.replace("\0", "/")
            raise _refusal(above, "is a file, a link or empty, and a folder of other entries")


def _folders(paths: Iterable[str]) -> set[str]:
    folders: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders


def is_text(name: str) -> bool:
    """False for a name of bytes that are no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def path_fault(path: str) -> str | None:
    """Why a path leaves its tree or cannot be written, in words; `None` for a right path."""
    if _PLAIN_PATH.fullmatch(path):
        return None
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    names = encoded.split(b"/")
    if path.startswith("/"):
        return "is absolute"
    if b"" in names:
        return "has an empty component"
    if b"." in names or b".." in names:
        return "has the component '.' or '..'"
    if "\0" in path:
        return "has a NUL character"
    if len(encoded) > _PATH_BYTES or max(map(len, names)) > _NAME_BYTES:
        return "is too long"
    return None


def _check_content(entry: Entry) -> None:
    if entry.mode == "symlink":
        if entry.digest or entry.size:
            raise _refusal(entry.path, "is a link, and has content")
        fault = target_fault(entry.path, entry.target)
        if fault is not None:
            raise _refusal(entry.path, fault)
        return
    if entry.mode == "folder":
        if entry.digest or entry.size or entry.target:
            raise _refusal(entry.path, "is a folder, and has content")
        return
    if entry.target:
        raise _refusal(entry.path, "is a file, and has the target of a link")
    if len(entry.digest) != DIGEST_LENGTH or not _DIGEST.fullmatch(entry.digest):
        raise _refusal(entry.path, f"has no valid digest: {entry.digest!r}")
    if entry.size < 0:
        raise _refusal(entry.path, f"has {entry.size} bytes")


def target_fault(path: str, target: str) -> str | None:
    """Why the target of the link at a path may lie outside the tree, in words; else `None`.

    A target begins with its steps up: the folder of a link is no link, so these steps stay in the
    tree. Behind a name, which may be that of another link, a step up could lead anywhere.
    """
    match = _TARGET.fullmatch(target)
    if match is None or len(target) > _PATH_BYTES:
        return f"is a link to {target!r}, which is no plain relative path"
    if target.split("/").count("..") > path.count("/"):
        return f"is a link to {target!r}, which leaves the tree"
    path_below = match["down"]
    fault = None if path_below is None else path_fault(path_below)
    return None if fault is None else f"is a link to {target!r}, which {fault}"


def _refusal(path: str, why: str) -> DataStoreError:
    return DataStoreError(f"not a tree that can be used: the entry {path!r} {why}")


class WrittenFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file that was written, with its `lstat` result after the write."""

    entry: Entry
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def materialise(
    base: str,
    tree: Tree,
    source: Source,
    unchanged_files: dict[str, WrittenFile],
    removed_paths: list[str],
) -> list[WrittenFile]:
    """Write a tree to a folder, with the two results of `compare`; returns all its files."""
    new_entries = [entry for entry in tree.entries if entry.path not in unchanged_files]
    _remove_byte_code(base, [*removed_paths, *(entry.path for entry in new_entries)])
    for path in removed_paths:
        if not path.endswith("/"):
            _unlink(f"{base}/{path}")
    _remove_empty_folders(base, removed_paths)
    return [*unchanged_files.values(), *(_write(base, entry, source) for entry in new_entries)]


def compare(
    base: str, files: Sequence[WrittenFile], tree: Tree
) -> tuple[dict[str, WrittenFile], list[str]]:
    """Compare a folder with its record and with a tree.

    Returns:
        The files that are as recorded and as in the tree, by path, and the paths to remove.
    """
    entries = {entry.path: entry for entry in tree.entries}
    unchanged_files: dict[str, WrittenFile] = {}
    removed_paths: list[str] = []
    _remove_links_to_folders(base, [*entries, *(file.entry.path for file in files)])
    for file in files:
        path = file.entry.path
        entry = entries.get(path)
        if entry is None:
            # A folder of the record was empty; files that user code wrote to it stay.
            removed_paths.append(f"{path}/" if file.entry.mode == "folder" else path)
            continue
        if entry != file.entry:
            continue
        try:
            file_stat = os.lstat(f"{base}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        if (
            file_stat.st_ctime_ns == file.ctime_ns
            and file_stat.st_mtime_ns == file.mtime_ns
            and file_stat.st_size == file.size
            and file_stat.st_ino == file.inode
        ):
            unchanged_files[path] = file
    return unchanged_files, removed_paths


def _remove_links_to_folders(base: str, paths: Iterable[str]) -> None:
    """Remove links that user code has put in place of folders of the tree."""
    # Upper folders first, so that no path is ever reached through a link.
    for folder in sorted(_folders(paths)):
        try:
            if not stat.S_ISDIR(os.lstat(f"{base}/{folder}").st_mode):
                os.unlink(f"{base}/{folder}")
        except (FileNotFoundError, NotADirectoryError):
            continue


# --------------------------------------------------------------------------------------- writing


def _write(base: str, entry: Entry, source: Source) -> WrittenFile:
    path = f"{base}/{entry.path}"
    if entry.mode == "folder":
        _make_folder(base, entry.path)
        return _written(entry, path)
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
    return _written(entry, path)


def _written(entry: Entry, path: str) -> WrittenFile:
    file_stat = os.lstat(path)
    return WrittenFile(
        entry, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns, file_stat.st_ino
    )


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
            unwritten = memoryview(piece)
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]


def _make_folder(base: str, folder: str) -> None:
    """Make a folder and its parents; a file that user code has put in their place is removed."""
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
    """Remove folders that are empty without the removed files: Python could import them."""
    for folder in sorted({path.rpartition("/")[0] for path in removed}, reverse=True):
        while folder:
            for empty in (f"{base}/{folder}/__pycache__", f"{base}/{folder}"):
                try:
                    os.rmdir(empty)
                except OSError:
                    continue
            folder = folder.rpartition("/")[0]


def _remove_byte_code(base: str, paths: Iterable[str]) -> None:
    modules: dict[str, set[str]] = {}
    for path in paths:
        if path.endswith(".py"):
            folder, _, name = path.rpartition("/")
            modules.setdefault(folder, set()).add(name[: -len(".py")])
    for folder, names in modules.items():
        cache = f"{base}/{folder}/__pycache__" if folder else f"{base}/__pycache__"
        try:
            byte_code_files = [] if os.path.islink(cache) else os.listdir(cache)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for byte_code_file in byte_code_files:
            # <module>.<interpreter>[.opt-N].pyc
            if _module_of(byte_code_file) in names:
                _unlink(f"{cache}/{byte_code_file}")


def _module_of(byte_code: str) -> str:
    stem = byte_code.removesuffix(".pyc")
    head, _, last = stem.rpartition(".")
    return head.rpartition(".")[0] if last.startswith("opt-") else head
