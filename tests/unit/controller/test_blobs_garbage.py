"""Which blobs are deleted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kubetorch.controller.blobs import BlobStores, GarbageCollector, NamespaceBlobs
from kubetorch.controller.tuning import TIMING
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.trees import Entry, Tree
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from manual_clock import ManualClock

FILES = {"a.py": b"a = 1", "b.py": b"b = 2"}
SPEC = WorkloadSpec("ns", "f", CallableRef("fn", "f", "m", "f"))


def build(files: dict[str, bytes]) -> Tree:
    return trees.build(
        Entry(name, "file", len(data), digest_of(data)) for name, data in files.items()
    )


@pytest.fixture
def blob_stores(tmp_path: Path) -> BlobStores:
    return BlobStores(tmp_path)


@pytest.fixture
def store(blob_stores: BlobStores) -> BlobStore:
    return blob_stores.of("ns").blobs


def put(store: BlobStore, clock: ManualClock, data: bytes, *, age: float) -> str:
    digest = digest_of(data)
    store.put(digest, data)
    when = clock.time() - age
    os.utime(store.path(digest), (when, when))
    return digest


def make(
    blob_stores: BlobStores,
    clock: ManualClock,
    results: Callable[[NamespaceBlobs], set[str]],
    specs: Callable[[], list[WorkloadSpec]] = list,
) -> GarbageCollector:
    return GarbageCollector(
        blob_stores,
        specs=specs,
        results=results,
        manifests=lambda store: set(),
        refresh=lambda store, only_unsettled: None,
        expire=lambda: None,
        clock=clock,
    )


def collect(blob_stores: BlobStores, clock: ManualClock, *needed: str) -> int:
    return asyncio.run(make(blob_stores, clock, lambda store: set(needed)).collect())


def test_only_what_is_old_and_not_needed_is_deleted(
    blob_stores: BlobStores, store: BlobStore
) -> None:
    clock = ManualClock()
    needed = put(store, clock, b"needed", age=10 * TIMING.young_blob_seconds)
    young = put(store, clock, b"young", age=TIMING.young_blob_seconds - 1)
    old = put(store, clock, b"old", age=TIMING.young_blob_seconds + 1)
    assert collect(blob_stores, clock, needed) == 1
    assert store.missing([needed, young, old]) == [old]


def test_trees_their_files_and_init_args_of_generations_are_kept(
    blob_stores: BlobStores, store: BlobStore
) -> None:
    clock = ManualClock()
    tree = build(FILES)
    kept_digests = [
        put(store, clock, data, age=2 * TIMING.young_blob_seconds)
        for data in (*FILES.values(), tree.encoded, b"{}")
    ]
    old = put(store, clock, b"old", age=2 * TIMING.young_blob_seconds)
    spec = replace(SPEC, tree=tree.digest, init_args=digest_of(b"{}"))
    elsewhere = replace(SPEC, namespace="other", tree=old)
    garbage = make(blob_stores, clock, lambda store: set(), lambda: [spec, elsewhere])
    assert asyncio.run(garbage.collect()) == 1
    assert store.missing([*kept_digests, old]) == [old]


def test_a_generation_that_comes_in_between_is_kept(
    blob_stores: BlobStores, store: BlobStore
) -> None:
    clock = ManualClock()
    tree = build(FILES)
    for data in (*FILES.values(), tree.encoded):
        put(store, clock, data, age=2 * TIMING.young_blob_seconds)
    looks = 0

    def specs() -> list[WorkloadSpec]:
        nonlocal looks
        looks += 1
        return [] if looks == 1 else [replace(SPEC, tree=tree.digest)]

    assert asyncio.run(make(blob_stores, clock, lambda store: set(), specs).collect()) == 0


def test_a_generation_whose_tree_is_damaged_keeps_no_collection_from_its_end(
    blob_stores: BlobStores, store: BlobStore
) -> None:
    clock = ManualClock()
    tree = build(FILES)
    put(store, clock, tree.encoded, age=2 * TIMING.young_blob_seconds)
    old = put(store, clock, b"old", age=2 * TIMING.young_blob_seconds)
    path = store.path(tree.digest)
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    garbage = make(
        blob_stores, clock, lambda store: set(), lambda: [replace(SPEC, tree=tree.digest)]
    )
    asyncio.run(garbage.collect())
    assert store.missing([old]) == [old]


def test_what_another_namespace_needs_is_no_reason_to_keep_it(blob_stores: BlobStores) -> None:
    clock = ManualClock()
    mine, theirs = blob_stores.of("mine").blobs, blob_stores.of("theirs").blobs
    digest = put(mine, clock, b"shared", age=2 * TIMING.young_blob_seconds)
    put(theirs, clock, b"shared", age=2 * TIMING.young_blob_seconds)
    reopened_stores = BlobStores(
        mine.root.parent
    )  # another process, which has been asked for nothing yet
    garbage = make(
        reopened_stores, clock, lambda store: {digest} if store.namespace == "mine" else set()
    )
    assert asyncio.run(garbage.collect()) == 1
    assert (mine.has(digest), theirs.has(digest)) == (True, False)


def test_what_becomes_needed_in_between_is_kept(blob_stores: BlobStores, store: BlobStore) -> None:
    clock = ManualClock()
    blobs = [
        put(store, clock, str(index).encode(), age=2 * TIMING.young_blob_seconds)
        for index in range(250)
    ]
    needed_digests: list[set[str]] = []

    def needed(_: NamespaceBlobs) -> set[str]:
        # A deploy that came after the first batch refers to everything that is left.
        needed_digests.append(
            {digest for digest in blobs if store.has(digest)} if len(needed_digests) > 1 else set()
        )
        return needed_digests[-1]

    garbage = make(blob_stores, clock, needed)
    assert asyncio.run(garbage.collect()) == 100
    assert len(store.missing(blobs)) == 100


def test_what_a_deploy_awaits_that_is_not_stored_yet_is_kept(
    blob_stores: BlobStores, store: BlobStore
) -> None:
    clock = ManualClock()
    tree = build(FILES)
    for data in (*FILES.values(), tree.encoded):
        put(store, clock, data, age=2 * TIMING.young_blob_seconds)
    with blob_stores.of("ns").keep(replace(SPEC, tree=tree.digest)):
        assert collect(blob_stores, clock) == 0
    assert collect(blob_stores, clock) == 3


def test_a_store_that_was_found_full_is_looked_through_at_once(
    blob_stores: BlobStores, store: BlobStore
) -> None:
    clock = ManualClock()
    old = put(store, clock, b"old", age=TIMING.young_blob_seconds + 1)
    asked_stores: list[NamespaceBlobs] = []

    async def scenario() -> None:
        looked = asyncio.Event()

        def needed(_: NamespaceBlobs) -> set[str]:
            asked_stores.append(store)
            looked.set()
            return set()

        garbage = make(blob_stores, clock, needed)
        garbage.hurry()
        garbage.hurry()
        await looked.wait()
        while store.has(old):
            await asyncio.to_thread(int)
        await garbage.close()

    asyncio.run(scenario())
    assert store.missing([old]) == [old]
    assert len(asked_stores) == 2, "before the only batch, and for it"
