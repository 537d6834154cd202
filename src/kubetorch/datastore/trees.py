"""Trees: what lies in a folder, as a canonical list of entries that is itself a blob.

The digest of that blob is the *tree digest*: two folders with the same content have the same one.
Folders are implied by the paths in them; an empty one leaves no trace.

A tree is data from outside: `decode` takes nothing that would write beside the folder that it is
materialised in, or that two ways of materialising would disagree on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from kubetorch.datastore.blobs import DIGEST_LENGTH, digest_of
from kubetorch.errors import DataStoreError
from kubetorch.lib.records import record

Mode = Literal["file", "executable", "symlink"]

#: Most entries that a tree may have.
ENTRY_LIMIT = 1_000_000
_PATH_BYTES = 4096
_NAME_BYTES = 255

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Paths that are right for sure: most of them, so that a large tree is checked quickly.
_PLAIN_PATH = re.compile(
    r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}){0,15}"
)
# As many steps up as there are, then names: see `_check_target`.
_TARGET = re.compile(r"\.|(?P<up>(?:\.\./)*)(?:\.\.|(?P<down>[^/\0]+(?:/[^/\0]+)*))")


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A file or symbolic link in a tree.

    Attributes:
        path: Where it lies, relative to the tree, with `/`.
        mode: What it is.
        size: Bytes of a file; 0 for a link.
        digest: Digest of a file's content; empty for a link.
        target: What a link points to, relative to the folder that it lies in; empty for a file.
    """

    path: str
    mode: Mode
    size: int = 0
    digest: str = ""
    target: str = ""


@record
class Tree:
    """Entries in the order of their paths.

    Attributes:
        digest: The tree digest.
        entries: The entries.
        encoded: The blob.
    """

    digest: str
    entries: tuple[Entry, ...]
    encoded: bytes

    def digests(self) -> list[str]:
        """The blobs of its files, each once."""
        return list(dict.fromkeys(entry.digest for entry in self.entries if entry.digest))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])


def build(entries: Iterable[Entry]) -> Tree:
    """The tree of these entries, in any order.

    Raises:
        DataStoreError: They make no tree.
    """
    ordered = tuple(sorted(entries, key=_path))
    check(ordered)
    encoded = _encoder.encode(ordered)
    return Tree(digest_of(encoded), ordered, encoded)


def decode(encoded: bytes) -> Tree:
    """The tree that `build` made.

    Raises:
        DataStoreError: It is no tree, or one that must not be materialised; names the entry.
    """
    try:
        entries = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataStoreError(f"not a tree: {error}") from error
    check(entries)
    if _encoder.encode(entries) != encoded:
        raise DataStoreError("not a tree: it is encoded in a way that build() does not")
    return Tree(digest_of(encoded), entries, encoded)


def _path(entry: Entry) -> str:
    return entry.path


# -------------------------------------------------------------------------------------- checking


def check(entries: Sequence[Entry]) -> None:
    """Whether these entries are a tree that can be materialised safely.

    Raises:
        DataStoreError: They are not; the message names the entry.
    """
    if len(entries) > ENTRY_LIMIT:
        raise DataStoreError(f"a tree of {len(entries)} entries; {ENTRY_LIMIT} are allowed")
    previous: str | None = None
    folders: set[str] = set()
    for entry in entries:
        path = entry.path
        if not _PLAIN_PATH.fullmatch(path):
            check_path(path)
        if previous is not None and path <= previous:
            what = "is there twice" if path == previous else "is out of order"
            raise _refusal(path, what)
        previous = path
        _check_content(entry)
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    for entry in entries:
        if entry.path in folders:
            raise _refusal(entry.path, "is a file or link, and a folder of other entries")


def check_path(path: str) -> None:
    """Whether a path stays in its tree and can be written.

    Raises:
        DataStoreError: It does not.
    """
    fault = _fault(path)
    if fault is not None:
        raise _refusal(path, fault)


def _fault(path: str) -> str | None:
    """What is wrong with a relative path."""
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
        _check_target(entry)
        return
    if entry.target:
        raise _refusal(entry.path, "is a file, and has the target of a link")
    if len(entry.digest) != DIGEST_LENGTH or not _DIGEST.fullmatch(entry.digest):
        raise _refusal(entry.path, f"has no valid digest: {entry.digest!r}")
    if entry.size < 0:
        raise _refusal(entry.path, f"has {entry.size} bytes")


def _check_target(entry: Entry) -> None:
    """Whether a link's target lies in the tree.

    Steps up come first: the folder of a link is no link, so they lead where they seem to. After a
    name, which may be that of another link, a step up could lead anywhere.
    """
    target = entry.target
    match = _TARGET.fullmatch(target)
    if match is None or len(target) > _PATH_BYTES:
        raise _refusal(entry.path, f"is a link to {target!r}, which is no plain relative path")
    ups = target.split("/").count("..")
    if ups > entry.path.count("/"):
        raise _refusal(entry.path, f"is a link to {target!r}, which leaves the tree")
    down = match["down"]
    fault = None if down is None else _fault(down)
    if fault is not None:
        raise _refusal(entry.path, f"is a link to {target!r}, which {fault}")


def _refusal(path: str, why: str) -> DataStoreError:
    return DataStoreError(f"not a tree that can be used: the entry {path!r} {why}")
