"""Which blobs are deleted."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kubetorch.controller.garbage import YOUNG, Garbage
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.lib.clock import ManualClock


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def put(store: BlobStore, clock: ManualClock, data: bytes, *, age: float) -> str:
    digest = digest_of(data)
    store.put(digest, data)
    when = clock.time() - age
    os.utime(store.path(digest), (when, when))
    return digest


def collect(store: BlobStore, clock: ManualClock, *needed: str) -> int:
    notes: list[None] = []
    garbage = Garbage(
        store,
        needed=lambda: set(needed),
        clock=clock,
        on_deleted=lambda: notes.append(None),
    )
    return asyncio.run(garbage.collect())


def test_only_what_is_old_and_not_needed_is_deleted(store: BlobStore) -> None:
    clock = ManualClock()
    needed = put(store, clock, b"needed", age=10 * YOUNG)
    young = put(store, clock, b"young", age=YOUNG - 1)
    old = put(store, clock, b"old", age=YOUNG + 1)
    assert collect(store, clock, needed) == 1
    assert store.missing([needed, young, old]) == [old]


def test_what_becomes_needed_in_between_is_kept(store: BlobStore) -> None:
    clock = ManualClock()
    blobs = [put(store, clock, str(index).encode(), age=2 * YOUNG) for index in range(250)]
    asked: list[set[str]] = []

    def needed() -> set[str]:
        # A deploy that came after the first batch refers to everything that is left.
        asked.append({digest for digest in blobs if store.has(digest)} if asked else set())
        return asked[-1]

    garbage = Garbage(store, needed=needed, clock=clock, on_deleted=lambda: None)
    assert asyncio.run(garbage.collect()) == 100
    assert len(store.missing(blobs)) == 100
