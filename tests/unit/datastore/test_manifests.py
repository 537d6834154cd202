"""Manifests: what they say comes back, and what would be written outside is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kubetorch.datastore import manifests
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError

DIGEST = digest_of(b"x")
CHUNK = Chunk(DIGEST, 1)


def _array(count: int) -> bytes:
    """An encoded array whose items are of one byte each, and nothing that a manifest has."""
    return b"\xdd" + count.to_bytes(4, "big") + b"\xc0" * count


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    manifest = Manifest(
        "folder",
        (
            Entry("bin", "folder", 0o750),
            Entry("bin/run", "file", 0o755, (CHUNK, Chunk("", 1 << 40), CHUNK)),
            Entry("empty"),
            Entry("latest", "symlink", 0o777, target="bin/run"),
        ),
    )
    digest, encoded = manifests.encode(manifest)
    store = BlobStore(tmp_path)
    store.put(digest, encoded)
    assert manifests.read(store, digest) == manifest
    assert manifest.size == 2 + (1 << 40)
    assert manifest.digests() == [DIGEST]


@dataclass
class Refused:
    entries: list[list[Any]]
    why: str
    kind: str = "folder"


@pytest.mark.parametrize(
    "refused",
    [
        Refused([["../x"]], "has the component '.' or '..'"),
        Refused([["/x"]], "is absolute"),
        Refused([["a//b"]], "has an empty component"),
        Refused([["a\0b"]], "has a NUL character"),
        Refused([["n" * 256]], "is too long"),
        Refused([["n/" * 128 + "n"]], "has 129 levels; 128 are allowed"),
        Refused([["b"], ["a"]], "is out of order"),
        Refused([["a"], ["a"]], "is there twice"),
        Refused([["a"], ["a/b"]], "is no folder, and has entries below it"),
        Refused([["a", "symlink", 0o777, [], "b"], ["a/b"]], "is no folder"),
        Refused([["a", "file", 0o4755]], "has the mode 4755"),
        Refused([["a", "folder", 0o1777]], "has the mode 1777"),
        Refused([["a", "file", -1]], "has the mode -1"),
        Refused([["a", "symlink", 0o777, [], "../x"]], "leaves the tree"),
        Refused([["a", "symlink", 0o777, [], "/etc/passwd"]], "no plain relative path"),
        Refused([["a/b/c", "symlink", 0o777, [], "b/../../x"]], "has the component '.' or '..'"),
        Refused([["a", "symlink", 0o777, [[DIGEST, 1]], "b"]], "is a symlink, and has content"),
        Refused([["a", "folder", 0o755, [[DIGEST, 1]]]], "is a folder, and has content"),
        Refused([["a", "file", 0o644, [], "b"]], "has the target of a link"),
        Refused([["a", "file", 0o644, [["no digest", 1]]]], "has no valid digest"),
        Refused([["a", "file", 0o644, [["", 0]]]], "has a hole of 0 bytes"),
        Refused([["a", "file", 0o644, [[DIGEST, 0]]]], "has a chunk of 0 bytes"),
        Refused([["a", "file", 0o644, [["", 1 << 61]]]], "bytes of files"),
        Refused([["a", "device"]], "not a manifest"),
        Refused([["a"], ["b"]], "has one entry without a path", "file"),
        Refused([["a"]], "has one entry without a path", "file"),
        Refused([["", "folder"]], "is a folder, and has content", "file"),
        Refused([[""]], "the entry '' is empty"),
        Refused([["a"]], "not a manifest", "archive"),
    ],
    ids=lambda refused: refused.why,
)
def test_what_cannot_be_written_safely_is_refused(refused: Refused) -> None:
    encoded = msgspec.msgpack.encode({"kind": refused.kind, "entries": refused.entries})
    with pytest.raises(DataStoreError) as caught:
        manifests.decode(encoded)
    assert refused.why in caught.value.message


@pytest.mark.parametrize(
    "encoded", [b"", b"\xc1", b"\x80", b'{"kind": "file"}', b"\x93\x01\x02\x03"]
)
def test_what_is_no_manifest_is_refused(encoded: bytes) -> None:
    with pytest.raises(DataStoreError, match="not a manifest"):
        manifests.decode(encoded)


def test_a_manifest_that_claims_millions_of_entries_is_refused_before_they_are_decoded() -> None:
    count = LIMITS.manifest_entries + 1
    entries = msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + b"\x91\xa1a" * count)
    encoded = msgspec.msgpack.encode({"kind": "folder", "entries": entries})
    with pytest.raises(DataStoreError, match="500,001 files; 500,000 are allowed"):
        manifests.decode(encoded)


def test_a_manifest_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    path = store.path(DIGEST)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(LIMITS.manifest_encoded_bytes + 1)
    with pytest.raises(DataStoreError, match="33,554,432 are allowed"):
        manifests.read(store, DIGEST)
    assert store.has(DIGEST)


@pytest.mark.parametrize(
    ("entries", "packs", "count"),
    [
        ([["a", "file", 0o644, msgspec.Raw(_array(LIMITS.manifest_chunks + 1))]], (), 600_001),
        (
            [[name, "file", 0o644, msgspec.Raw(_array(300_000))] for name in "ab"],
            msgspec.Raw(_array(20)),
            600_020,
        ),
        ([["a"]], msgspec.Raw(_array(LIMITS.manifest_chunks + 1)), 600_001),
    ],
    ids=["chunks", "chunks and packs", "packs"],
)
def test_too_many_chunks_are_refused_before_they_are_decoded(
    entries: list[Any], packs: Any, count: int
) -> None:
    encoded = msgspec.msgpack.encode({"kind": "folder", "entries": entries, "packs": packs})
    with pytest.raises(DataStoreError, match=f"{count:,} chunks and packs; 600,000 are allowed"):
        manifests.decode(encoded)
