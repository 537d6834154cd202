"""Writing what a get fetches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.checkout import Checkout
from kubetorch.datastore.chunk_cache import ChunkCache
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.errors import DataStoreError, ProtocolError, StorageFullError

DATA = os.urandom(20 * 1024 * 1024)
DIGEST = digest_of(DATA)
MANIFEST = Manifest("folder", (Entry("file", mode=0o640, chunks=(Chunk(DIGEST, len(DATA)),)),))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def checkout(root: Path) -> Checkout:
    return Checkout(str(root), ChunkCache(root.parent / "cache", str(root)))


def send(target: Checkout, digest: str, data: bytes) -> None:
    writer = target.writer(digest, len(data))
    for begin in range(0, len(data), 1_000_000):
        writer.write(data[begin : begin + 1_000_000])
    writer.finish()


def test_a_blob_lands_in_all_files_that_have_parts_of_it(root: Path) -> None:
    manifest = Manifest(
        "folder",
        (
            Entry("a", chunks=(Chunk(digest_of(DATA[5:10]), 5, 0, 5),)),
            Entry(
                "b",
                chunks=(
                    Chunk("", 4096),
                    Chunk(digest_of(DATA[9_000_000:]), len(DATA) - 9_000_000, 0, 9_000_000),
                ),
            ),
        ),
        (DIGEST,),
    )
    with checkout(root) as target:
        for entry in manifest.entries:
            target.add(entry.path, entry, manifest)
        target.begin()
        send(target, DIGEST, DATA)
        assert list(root.glob("[ab]")) == []
        target.install()
    assert (root / "a").read_bytes() == DATA[5:10]
    assert (root / "b").read_bytes() == bytes(4096) + DATA[9_000_000:]
    assert {path.name for path in root.iterdir()} == {"a", "b"}


def test_a_flipped_bit_is_refused_and_the_next_attempt_is_taken(root: Path) -> None:
    (entry,) = MANIFEST.entries
    with checkout(root) as target:
        target.add("file", entry, MANIFEST)
        target.begin()
        with pytest.raises(DataStoreError, match="poisoned"):
            send(target, DIGEST, bytes([DATA[0] ^ 1]) + DATA[1:])
        assert not target.is_written(DIGEST)
        send(target, DIGEST, DATA)
        target.install()
    assert (root / "file").read_bytes() == DATA


def test_a_blob_that_nothing_needs_is_refused(root: Path) -> None:
    with checkout(root) as target, pytest.raises(ProtocolError, match="came unasked"):
        target.writer(DIGEST, 5)


def test_a_pack_that_is_shorter_than_its_manifest_says_is_refused(root: Path) -> None:
    entry = Entry("file", chunks=(Chunk("0" * 64, 10, 0, len(DATA) - 5),))
    with checkout(root) as target:
        target.add("file", entry, Manifest("folder", (entry,), (DIGEST,)))
        target.begin()
        with pytest.raises(DataStoreError, match="less than its files need"):
            send(target, DIGEST, DATA)


def test_a_get_that_fails_changes_nothing(root: Path) -> None:
    (root / "file").write_text("old")
    (entry,) = MANIFEST.entries
    with pytest.raises(RuntimeError, match="cut"), checkout(root) as target:
        target.add("file", entry, MANIFEST)
        target.begin()
        send(target, DIGEST, DATA)
        raise RuntimeError("cut")
    assert (root / "file").read_text() == "old"
    assert [path.name for path in root.iterdir()] == ["file"]


def test_more_bytes_than_the_disk_has_are_refused_before_the_first_comes(root: Path) -> None:
    entry = Entry("file", chunks=(Chunk(DIGEST, 2**60),))
    with checkout(root) as target, pytest.raises(StorageFullError, match="no space left"):
        target.add("file", entry, Manifest("folder", (entry,)))
        target.begin()
    assert list(root.iterdir()) == []


def test_a_link_that_appears_in_place_of_a_folder_during_a_get_is_not_followed(root: Path) -> None:
    manifest = Manifest("folder", (Entry("a/file", chunks=(Chunk(DIGEST, len(DATA)),)),))
    (root / "a").mkdir()
    outside = root.parent / "outside"
    outside.mkdir()
    with checkout(root) as target:
        target.add("a/file", manifest.entries[0], manifest)
        target.begin()
        send(target, DIGEST, DATA)
        (root / "a").rmdir()
        (root / "a").symlink_to(outside)
        with pytest.raises(DataStoreError, match="/a has become a link during the get"):
            target.install()
    assert list(outside.iterdir()) == []
    assert [path.name for path in root.iterdir()] == ["a"]
