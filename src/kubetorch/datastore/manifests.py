"""Manifests: what a key of the data store holds, as a list of entries that is itself a blob.

A manifest names the chunks of each file. A chunk is a blob, so versions of a key, and keys, share
the chunks that are equal. The hole of a sparse file is a chunk without a digest.

A manifest is data from outside: `decode` refuses one that would write outside of its folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import msgspec

from kubetorch.datastore.blobs import BlobStore, digest_of, is_digest
from kubetorch.datastore.trees import path_fault, target_fault
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError

#: What a key holds: a single file, a folder, or tensors in the safetensors format.
ContentKind = Literal["file", "folder", "tensors"]
EntryKind = Literal["file", "symlink", "folder"]


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Bytes of a file: a blob of `size` bytes; without a digest a hole of so many zeros.

    Small files share blobs: `pack` is the number of the blob in `Manifest.packs` that has these
    bytes, from `offset` on.
    """

    digest: str
    size: int
    pack: int | None = None
    offset: int = 0


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A file, a link or a folder.

    Attributes:
        path: Relative, with `/`; empty for the only entry of a key that holds a single file.
        kind: What it is.
        mode: Permission bits, as `stat.S_IMODE` gives them.
        chunks: The content of a file, in order.
        target: Where a link leads.
    """

    path: str
    kind: EntryKind = "file"
    mode: int = 0o644
    chunks: tuple[Chunk, ...] = ()
    target: str = ""

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self.chunks)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of one version of a key; entries are in the order of their paths.

    Attributes:
        packs: The digests of blobs that have several chunks, one behind the other.
        tags: Of what was pulled from a bucket the tags of its objects by path, as they were then.
    """

    kind: ContentKind
    entries: tuple[Entry, ...]
    packs: tuple[str, ...] = ()
    tags: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)

    def blob_of(self, chunk: Chunk) -> str:
        """The digest of the blob that has a chunk; empty for a hole."""
        return chunk.digest if chunk.pack is None else self.packs[chunk.pack]

    def digests(self) -> list[str]:
        """The digests of the blobs, each once."""
        return list(dict.fromkeys(self._digests()))

    def _digests(self) -> Iterator[str]:
        for entry in self.entries:
            for chunk in entry.chunks:
                if chunk.digest:
                    yield self.blob_of(chunk)

    @property
    def is_folder(self) -> bool:
        """False for a single file, which has no path of its own."""
        return not (len(self.entries) == 1 and not self.entries[0].path)


def encode(manifest: Manifest) -> tuple[str, bytes]:
    """The digest of a manifest, and the manifest as bytes."""
    encoded = msgspec.msgpack.encode(manifest)
    return digest_of(encoded), encoded


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """A manifest whose entries are not decoded: what comes may claim millions of them."""

    kind: ContentKind
    entries: msgspec.Raw
    packs: msgspec.Raw = msgspec.Raw(b"\x90")
    tags: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class _EntryHead(msgspec.Struct, array_like=True, gc=False):
    """An entry whose chunks are not decoded: a chunk of three bytes takes a hundred in memory."""

    path: str
    kind: str = ""
    mode: int = 0
    chunks: msgspec.Raw = msgspec.Raw(b"\x90")


_head_decoder = msgspec.msgpack.Decoder(_Head)
_entry_heads_decoder = msgspec.msgpack.Decoder(tuple[_EntryHead, ...])
_entries_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])
_packs_decoder = msgspec.msgpack.Decoder(tuple[str, ...])


def decode(encoded: bytes) -> Manifest:
    """A manifest, checked.

    Raises:
        DataStoreError: It is no manifest, or would write outside of its folder.
    """
    if len(encoded) > LIMITS.manifest_encoded_bytes:
        raise _too_large(len(encoded))
    try:
        head = _head_decoder.decode(encoded)
        _check_counts(head)
        entries, packs = _entries_decoder.decode(head.entries), _packs_decoder.decode(head.packs)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataStoreError(f"not a manifest: {error}") from error
    manifest = Manifest(head.kind, entries, packs, head.tags)
    check(manifest)
    return manifest


def read(store: BlobStore, digest: str) -> Manifest:
    """A stored manifest; one that is too large is refused before it is read."""
    size = store.size(digest)
    if size > LIMITS.manifest_encoded_bytes:
        raise _too_large(size)
    return decode(store.read(digest))


# -------------------------------------------------------------------------------------- checking


def _too_large(size: int) -> DataStoreError:
    return DataStoreError(
        f"a manifest of {size:,} bytes; {LIMITS.manifest_encoded_bytes:,} are allowed",
        hint="put parts of the folder at keys of their own",
    )


def _check_counts(head: _Head) -> None:
    """Refuse too many entries or chunks before they are decoded."""
    count = _count(head.entries)
    if count > LIMITS.manifest_entries:
        raise DataStoreError(
            f"a manifest of {count:,} files; {LIMITS.manifest_entries:,} are allowed",
            hint="put parts of the folder at keys of their own, or the files as an archive",
        )
    count = _count(head.packs)
    if count <= LIMITS.manifest_chunks:
        count += sum(_count(entry.chunks) for entry in _entry_heads_decoder.decode(head.entries))
    if count > LIMITS.manifest_chunks:
        raise DataStoreError(
            f"a manifest of {count:,} chunks and packs; {LIMITS.manifest_chunks:,} are allowed",
            hint="put parts of the folder at keys of their own",
        )


def _count(array: msgspec.Raw) -> int:
    """The items of a msgpack array, as its header says."""
    header = bytes(memoryview(array)[:5])
    if header[:1] == b"\xdd":
        return int.from_bytes(header[1:5], "big")
    if header[:1] == b"\xdc":
        return int.from_bytes(header[1:3], "big")
    return header[0] & 0x0F if header[:1] and 0x90 <= header[0] <= 0x9F else 0


def check(manifest: Manifest) -> None:
    """Refuse what cannot be written safely below a folder."""
    entries = manifest.entries
    if manifest.kind == "file" and manifest.is_folder:
        raise DataStoreError("not a manifest: a key that holds a file has one entry without a path")
    if manifest.kind == "folder" and not manifest.is_folder:
        raise _refusal("", "is empty")
    for digest in manifest.packs:
        if not is_digest(digest):
            raise DataStoreError(f"not a manifest: {digest!r} is no digest")
    previous: str | None = None
    for entry in entries:
        fault = _fault(
            entry, previous, packs=len(manifest.packs), may_be_empty=not manifest.is_folder
        )
        if fault is not None:
            raise _refusal(entry.path, fault)
        previous = entry.path
    if manifest.size > LIMITS.manifest_files_bytes:
        raise DataStoreError(
            f"not a manifest that can be used: it has {manifest.size:,} bytes of files; "
            f"{LIMITS.manifest_files_bytes:,} are allowed"
        )
    # NUL sorts before all other characters, so a path below an entry follows the entry at once.
    ordered = sorted((entry.path.replace("/", "\0"), entry.kind) for entry in entries)
    for (path, kind), (following, _) in itertools.pairwise(ordered):
        if kind != "folder" and following.startswith(f"{path}\0"):
            raise _refusal(path.replace("\0", "/"), "is no folder, and has entries below it")


def _fault(entry: Entry, previous: str | None, *, packs: int, may_be_empty: bool) -> str | None:
    """Why an entry cannot be used, in words; `None` for a right entry."""
    path = entry.path
    fault = None if may_be_empty and not path else path_fault(path)
    if fault is not None:
        return fault
    levels = path.count("/") + 1
    if levels > LIMITS.manifest_path_levels:
        return f"has {levels} levels; {LIMITS.manifest_path_levels} are allowed"
    if previous is not None and path <= previous:
        return "is there twice" if path == previous else "is out of order"
    if not 0 <= entry.mode <= 0o777:
        return f"has the mode {entry.mode:o}; permission bits alone are allowed, up to 777"
    if entry.kind != "file" and (entry.chunks or not path):
        return f"is a {entry.kind}, and has content"
    if entry.kind == "symlink":
        return target_fault(path, entry.target)
    if entry.target:
        return f"is a {entry.kind}, and has the target of a link"
    return next(filter(None, (_chunk_fault(chunk, packs) for chunk in entry.chunks)), None)


def _chunk_fault(chunk: Chunk, packs: int) -> str | None:
    if not chunk.digest:
        return None if chunk.size > 0 else f"has a hole of {chunk.size} bytes"
    if not is_digest(chunk.digest):
        return f"has no valid digest: {chunk.digest!r}"
    if not 0 < chunk.size <= LIMITS.chunk_bytes:
        return f"has a chunk of {chunk.size:,} bytes; from 1 to {LIMITS.chunk_bytes:,} are allowed"
    if chunk.pack is None:
        return "has a chunk that begins in the middle of its blob" if chunk.offset else None
    if not 0 <= chunk.pack < packs:
        return f"has a chunk in pack {chunk.pack}; there are {packs}"
    if not 0 <= chunk.offset <= LIMITS.chunk_bytes:
        return f"has a chunk at {chunk.offset} of its pack"
    return None


def _refusal(path: str, why: str) -> DataStoreError:
    return DataStoreError(f"not a manifest that can be used: the entry {path!r} {why}")
