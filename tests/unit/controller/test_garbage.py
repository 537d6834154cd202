"""Which blobs are deleted."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kubetorch.controller.depots import Depot, Depots
from kubetorch.controller.garbage import YOUNG, Garbage
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.lib.clock import ManualClock


@pytest.fixture
def depots(tmp_path: Path) -> Depots:
    return Depots(tmp_path)


@pytest.fixture
def store(depots: Depots) -> BlobStore:
    return depots.of("ns").blobs


def put(store: BlobStore, clock: ManualClock, data: bytes, *, age: float) -> str:
    digest = digest_of(data)
    store.put(digest, data)
    when = clock.time() - age
    os.utime(store.path(digest), (when, when))
    return digest


def collect(depots: Depots, clock: ManualClock, *needed: str) -> int:
    garbage = Garbage(depots, needed=lambda depot: set(needed), clock=clock)
    return asyncio.run(garbage.collect())


def test_only_what_is_old_and_not_needed_is_deleted(depots: Depots, store: BlobStore) -> None:
    clock = ManualClock()
    needed = put(store, clock, b"needed", age=10 * YOUNG)
    young = put(store, clock, b"young", age=YOUNG - 1)
    old = put(store, clock, b"old", age=YOUNG + 1)
    assert collect(depots, clock, needed) == 1
    assert store.missing([needed, young, old]) == [old]


def test_what_another_namespace_needs_is_no_reason_to_keep_it(depots: Depots) -> None:
    clock = ManualClock()
    mine, theirs = depots.of("mine").blobs, depots.of("theirs").blobs
    digest = put(mine, clock, b"shared", age=2 * YOUNG)
    put(theirs, clock, b"shared", age=2 * YOUNG)
    found = Depots(mine.root.parent)  # another process, which has been asked for nothing yet
    garbage = Garbage(
        found, needed=lambda depot: {digest} if depot.namespace == "mine" else set(), clock=clock
    )
    assert asyncio.run(garbage.collect()) == 1
    assert (mine.has(digest), theirs.has(digest)) == (True, False)


def test_what_becomes_needed_in_between_is_kept(depots: Depots, store: BlobStore) -> None:
    clock = ManualClock()
    blobs = [put(store, clock, str(index).encode(), age=2 * YOUNG) for index in range(250)]
    asked: list[set[str]] = []

    def needed(depot: Depot) -> set[str]:
        # A deploy that came after the first batch refers to everything that is left.
        asked.append({digest for digest in blobs if store.has(digest)} if asked else set())
        return asked[-1]

    garbage = Garbage(depots, needed=needed, clock=clock)
    assert asyncio.run(garbage.collect()) == 100
    assert len(store.missing(blobs)) == 100


def test_a_store_that_was_found_full_is_looked_through_at_once(
    depots: Depots, store: BlobStore
) -> None:
    clock = ManualClock()
    old = put(store, clock, b"old", age=YOUNG + 1)
    asked: list[Depot] = []

    async def scenario() -> None:
        looked = asyncio.Event()

        def needed(depot: Depot) -> set[str]:
            asked.append(depot)
            looked.set()
            return set()

        garbage = Garbage(depots, needed=needed, clock=clock)
        garbage.hurry()
        garbage.hurry()
        await looked.wait()
        await garbage.close()

    asyncio.run(scenario())
    assert store.missing([old]) == [old]
    assert len(asked) == 1
