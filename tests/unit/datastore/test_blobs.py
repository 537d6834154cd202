from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from kubetorch.datastore import blobs
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.tuning import TIMING
from kubetorch.errors import DataStoreError, StorageFullError

DATA = b"some bytes"
DIGEST = digest_of(DATA)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_blob_is_found_under_the_digest_of_its_bytes(store: BlobStore) -> None:
    assert store.missing([DIGEST]) == [DIGEST]
    store.put(DIGEST, DATA)
    assert store.has(DIGEST)
    assert store.missing([DIGEST]) == []
    assert store.read(DIGEST) == DATA
    assert store.path(DIGEST) == store.root / DIGEST[:2] / DIGEST
    assert files_under(store.root) == [f"{DIGEST[:2]}/{DIGEST}"]


def test_missing_names_each_digest_once_in_order(store: BlobStore) -> None:
    store.put(DIGEST, DATA)
    missing_digests = [digest_of(b"2"), digest_of(b"1")]
    assert (
        store.missing([missing_digests[0], DIGEST, missing_digests[1], missing_digests[0]])
        == missing_digests
    )


def test_digests_of_large_blobs_do_not_depend_on_threads() -> None:
    large = bytes(range(256)) * (9 * 4096)
    assert len(large) > 8 * 1024**2
    assert digest_of(large) == digest_of(memoryview(large)) == blobs.blake3(large).hexdigest()


@pytest.mark.parametrize(
    "bad",
    ["", "ab", "../" + "0" * 61, "0" * 63 + "G", "A" * 64, "0" * 65, "0" * 64 + "\n", "٣" * 64],
)
def test_what_is_no_digest_never_becomes_a_path(store: BlobStore, bad: str) -> None:
    for use in (store.has, store.path, store.read, store.delete, store.stream):
        with pytest.raises(DataStoreError, match="no digest"):
            use(bad)
    with pytest.raises(DataStoreError, match="no digest"):
        store.put(bad, b"")


def test_a_poisoned_blob_is_refused_and_leaves_nothing(store: BlobStore) -> None:
    with pytest.raises(DataStoreError, match=f"{DIGEST} is poisoned"):
        store.put(DIGEST, b"other bytes")
    assert not store.has(DIGEST)
    assert files_under(store.root) == []


@pytest.mark.parametrize("length", [len(DATA) - 1, len(DATA) + 1])
def test_a_blob_of_another_length_is_refused(store: BlobStore, length: int) -> None:
    with pytest.raises(DataStoreError, match="poisoned"), store.writer(DIGEST, length) as writer:
        writer.write(DATA)
    assert files_under(store.root) == []


def test_more_bytes_than_were_said_are_refused_before_they_are_written(store: BlobStore) -> None:
    writer = store.writer(DIGEST, len(DATA))
    writer.write(DATA)
    with pytest.raises(DataStoreError, match="more than its 10 bytes"):
        writer.write(b"!" * 1000)
    (written,) = (store.root / "tmp").iterdir()
    assert written.read_bytes() == DATA
    with pytest.raises(DataStoreError, match="1010 of its 10 bytes"):
        writer.finish()
    assert files_under(store.root) == []


def test_an_exception_while_writing_drops_the_blob(store: BlobStore) -> None:
    with pytest.raises(KeyboardInterrupt), store.writer(DIGEST, len(DATA)) as writer:
        writer.write(DATA)
        raise KeyboardInterrupt
    assert files_under(store.root) == []


def test_a_blob_is_invisible_until_it_is_complete(store: BlobStore) -> None:
    with store.writer(DIGEST, len(DATA)) as writer:
        writer.write(DATA)
        assert not store.has(DIGEST)
        assert list(store.iterate()) == []
    assert store.has(DIGEST)


def test_two_writers_of_one_blob_do_not_disturb_each_other(store: BlobStore) -> None:
    with store.writer(DIGEST, len(DATA)) as first, store.writer(DIGEST, len(DATA)) as second:
        first.write(DATA)
        second.write(DATA)
    assert store.read(DIGEST) == DATA


def test_a_blob_that_was_damaged_on_disk_is_removed_when_it_is_read(store: BlobStore) -> None:
    store.put(DIGEST, DATA)
    for use in (store.read, lambda digest: list(store.stream(digest)[1])):
        store.path(DIGEST).write_bytes(bytes(len(DATA)))
        with pytest.raises(DataStoreError, match="poisoned"):
            use(DIGEST)
        assert store.missing([DIGEST]) == [DIGEST]


def test_a_blob_that_is_not_there_is_a_data_store_error(store: BlobStore) -> None:
    for use in (store.read, store.open, store.stream):
        with pytest.raises(DataStoreError, match=f"{DIGEST} is not in"):
            use(DIGEST)
    assert not store.delete(DIGEST)


def test_stream_gives_length_and_pieces(store: BlobStore) -> None:
    large = os.urandom(3 * 1024 * 1024)
    store.put(digest_of(large), large)
    length, pieces = store.stream(digest_of(large))
    parts = list(pieces)
    assert length == len(large)
    assert b"".join(parts) == large
    assert len(parts) > 1


def test_iterate_finds_blobs_only(store: BlobStore) -> None:
    assert list(store.iterate()) == []
    store.put(DIGEST, DATA)
    store.put(digest_of(b""), b"")
    (store.root / "tmp" / "left").write_bytes(b"123")
    (store.root / "ab").mkdir(exist_ok=True)
    (store.root / "ab" / "stranger").write_bytes(b"123")
    blobs = {blob.digest: blob for blob in store.iterate()}
    assert blobs.keys() == {DIGEST, digest_of(b"")}
    assert blobs[DIGEST].size == len(DATA)
    assert abs(blobs[DIGEST].mtime - time.time()) < 60
    assert store.delete(DIGEST)
    assert [blob.digest for blob in store.iterate()] == [digest_of(b"")]


def test_sweep_removes_only_what_was_abandoned(store: BlobStore) -> None:
    store.sweep()
    store.put(DIGEST, DATA)
    old, new = store.root / "tmp" / "old", store.root / "tmp" / "new"
    old.touch()
    new.touch()
    os.utime(old, (0, time.time() - TIMING.abandoned_file_seconds - 10))
    store.sweep()
    assert not old.exists()
    assert new.exists()
    assert store.has(DIGEST)


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "quota")]
)
def test_a_full_disk_names_the_folder_and_what_is_free(
    tmp_path: Path, number: int, words: str
) -> None:
    error = blobs.storage_error(OSError(number, "full"), tmp_path)
    assert isinstance(error, StorageFullError)
    assert isinstance(error, OSError)
    assert words in str(error)
    assert str(tmp_path) in str(error)
    assert "MiB free" in str(error)
    assert "hint" in str(error)


def test_a_full_disk_of_another_machine_says_whose_it_is(tmp_path: Path) -> None:
    room = blobs.Room("the controller's store", "ask for more")
    error = blobs.storage_error(OSError(errno.ENOSPC, "full"), tmp_path, room)
    assert error is not None
    assert str(error).startswith("the controller's store is full: no space left in ")
    assert error.hint == "ask for more"


def test_other_errors_of_the_system_are_not_a_full_disk(tmp_path: Path) -> None:
    assert blobs.storage_error(PermissionError(errno.EACCES, "no"), tmp_path) is None


def test_a_store_that_cannot_be_written_says_which(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = BlobStore(tmp_path / "file")
    with pytest.raises(DataStoreError, match=str(tmp_path)):
        store.put(DIGEST, DATA)


def test_a_store_has_no_more_bytes_than_it_may(tmp_path: Path) -> None:
    room = blobs.Room("the store", "make room", limit_bytes=3 * blobs.BLOCK)
    store = BlobStore(tmp_path / "team", room)
    store.put(DIGEST, DATA)
    store.put(DIGEST, DATA)
    large = bytes(2 * blobs.BLOCK)
    store.put(digest_of(large), large)
    with pytest.raises(StorageFullError, match=r"namespace team: it has 12,288 of its 12,288"):
        store.put(digest_of(b"more"), b"more")
    with pytest.raises(StorageFullError):
        BlobStore(tmp_path / "team", room).put(digest_of(b"more"), b"more")
    store.delete(DIGEST)
    with pytest.raises(DataStoreError, match="poisoned"):
        store.put(digest_of(b"more"), b"less")
    store.put(digest_of(b"more"), b"more")
