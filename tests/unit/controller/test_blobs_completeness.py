"""Which blobs a generation lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kubetorch.controller.blobs import BlobStores, NamespaceBlobs
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.trees import Entry
from kubetorch.errors import DataStoreError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec

FILES = {"a.py": b"a = 1", "b.py": b"b = 2"}
SPEC = WorkloadSpec("ns", "f", CallableRef("fn", "f", "m", "f"))


def tree(files: dict[str, bytes]) -> trees.Tree:
    return trees.build(
        Entry(name, "file", len(data), digest_of(data)) for name, data in files.items()
    )


def put(store: BlobStore, *blobs: bytes) -> None:
    for blob in blobs:
        store.put(digest_of(blob), blob)


def of(store: BlobStore) -> NamespaceBlobs:
    return NamespaceBlobs(store, None, BlobStores(store.root))


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def test_a_workload_without_code_lacks_nothing(store: BlobStore) -> None:
    assert of(store).find_missing(SPEC) == []


def test_the_tree_and_the_init_args_are_missing_first(store: BlobStore) -> None:
    file_tree = tree(FILES)
    spec = replace(SPEC, tree=file_tree.digest, init_args=digest_of(b"{}"))
    assert of(store).find_missing(spec) == [file_tree.digest, digest_of(b"{}")]


def test_then_its_files_are(store: BlobStore) -> None:
    file_tree = tree(FILES)
    put(store, file_tree.encoded, FILES["a.py"])
    spec = replace(SPEC, tree=file_tree.digest)
    assert of(store).find_missing(spec) == [digest_of(FILES["b.py"])]


def test_nothing_is_missing_when_all_is_there(store: BlobStore) -> None:
    file_tree = tree(FILES)
    put(store, file_tree.encoded, *FILES.values())
    assert of(store).find_missing(replace(SPEC, tree=file_tree.digest)) == []


def test_after_an_edit_only_the_new_file_is_missing(store: BlobStore) -> None:
    before, after = tree(FILES), tree(FILES | {"a.py": b"a = 3"})
    put(store, before.encoded, *FILES.values(), after.encoded)
    blobs = of(store)
    blobs.find_missing(replace(SPEC, tree=before.digest))
    assert blobs.find_missing(replace(SPEC, tree=after.digest)) == [digest_of(b"a = 3")]


def test_after_blobs_were_deleted_they_are_looked_for_again(store: BlobStore) -> None:
    file_tree = tree(FILES)
    put(store, file_tree.encoded, *FILES.values())
    blobs = of(store)
    spec = replace(SPEC, tree=file_tree.digest)
    assert blobs.find_missing(spec) == []
    store.delete(digest_of(FILES["a.py"]))
    blobs.forget()
    assert blobs.find_missing(spec) == [digest_of(FILES["a.py"])]


def test_a_file_that_was_found_broken_is_missing(store: BlobStore) -> None:
    file_tree = tree(FILES)
    put(store, file_tree.encoded, *FILES.values())
    blobs = of(store)
    spec = replace(SPEC, tree=file_tree.digest)
    assert blobs.find_missing(spec) == []
    digest = digest_of(FILES["a.py"])
    store.path(digest).write_bytes(b"a = 0")
    with pytest.raises(DataStoreError, match="damaged"):
        b"".join(store.stream(digest)[1])
    assert blobs.find_missing(spec) == [digest]


def test_what_is_no_tree_is_refused(store: BlobStore) -> None:
    put(store, b"no tree")
    with pytest.raises(DataStoreError):
        of(store).find_missing(replace(SPEC, tree=digest_of(b"no tree")))
