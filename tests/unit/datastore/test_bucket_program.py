"""What a server or a manifest says of sizes is not believed by the program for buckets."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kubetorch.datastore import addresses, buckets
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.bucket_program import Pull, Report, push
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.errors import DataStoreError

pytestmark = pytest.mark.security
ADDRESS = addresses.parse("s3://bucket")


@pytest.mark.parametrize("size", [0, 1, 2**20, 40 * 2**30, 50 * 2**30, 5 * 2**40])
def test_no_object_is_written_in_more_parts_than_a_cloud_takes(size: int) -> None:
    part = buckets._part_bytes(size)
    assert part * 10_000 >= size
    assert part == 5 * 2**20 or part * 9_999 < size


class EndlessBucket(buckets.Bucket):
    """A bucket whose objects never end, though its list says that they do."""

    def __init__(self, size: int) -> None:
        self.address = ADDRESS
        self.info = buckets.ObjectInfo("a", size, "tag", "a")

    def objects(self) -> list[buckets.ObjectInfo]:
        return [self.info]

    def read(
        self, infos: Iterable[buckets.ObjectInfo]
    ) -> Iterator[tuple[buckets.ObjectInfo, memoryview]]:
        for info in infos:
            for _ in itertools.count():
                yield info, memoryview(bytes(1024))

    def write(self, path: str, pieces: Iterable[bytes], size: int) -> str:
        return str(len(b"".join(pieces)))


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


@pytest.mark.parametrize("size", [10, 5_000_000])
def test_an_object_larger_than_listed_is_left_at_once(blobs: BlobStore, size: int) -> None:
    pull = Pull(ADDRESS, blobs, None, Report(lambda _: None))
    with pytest.raises(buckets.ObjectChangedError, match="came with another content"):
        pull.run(EndlessBucket(size))


def test_an_entry_of_another_size_is_fetched_whatever_its_tag(blobs: BlobStore) -> None:
    entry = Entry("a", chunks=(Chunk(blobs.add(b"forged"), 6),))
    before = Manifest("folder", (entry,), tags={"a": "tag"})
    with pytest.raises(buckets.ObjectChangedError):
        Pull(ADDRESS, blobs, before, Report(lambda _: None)).run(EndlessBucket(10))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_push_of_blobs_of_other_sizes_is_refused(blobs: BlobStore, is_packed: bool) -> None:
    digest = blobs.add(b"12345")
    chunk = Chunk(digest_of(b"x"), 9, 0, 1) if is_packed else Chunk(digest, 1)
    manifest = Manifest("folder", (Entry("a", chunks=(chunk,)),), (digest,))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(DataStoreError, match="its manifest says"):
            push(EndlessBucket(0), blobs, manifest, Report(lambda _: None))
    finally:
        signal.signal(signal.SIGTERM, before)
