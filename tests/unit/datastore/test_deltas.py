"""Blobs that travel as the difference to another blob that the receiver has."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.transfer import Receiver, compressed, delta, exclusive_or
from kubetorch.errors import DataStoreError, ProtocolError

BASE = random.Random(1).randbytes(500_000)
CHANGED = b"changed" + BASE[7:]
WHOLE = random.Random(2).randbytes(100_000)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def stream(base: bytes = BASE) -> bytes:
    """The changed blob as a delta, then another one whole."""
    contents = {digest_of(content): content for content in (CHANGED, WHOLE)}
    return b"".join(
        compressed(
            contents,
            lambda digest: (len(contents[digest]), [contents[digest]]),
            lambda digest: (
                delta(CHANGED, digest_of(base), base) if digest == digest_of(CHANGED) else None
            ),
        )
    )


@pytest.mark.parametrize("size", [7, 4096, 10**9])
def test_a_delta_becomes_the_blob_however_the_stream_is_cut(store: BlobStore, size: int) -> None:
    store.add(BASE)
    packed = stream()
    assert len(packed) < len(WHOLE) + 2000
    receiver = Receiver(store, bases=store)
    for begin in range(0, len(packed), size):
        receiver.feed(packed[begin : begin + size])
    assert receiver.finish() == [digest_of(CHANGED), digest_of(WHOLE)]
    receiver.close()
    assert store.read(digest_of(CHANGED)) == CHANGED
    assert store.read(digest_of(WHOLE)) == WHOLE


def receive(store: BlobStore, packed: bytes, bases: BlobStore | None) -> None:
    receiver = Receiver(store, bases=bases)
    try:
        receiver.feed(packed)
        receiver.finish()
    finally:
        receiver.close()


def test_a_delta_without_its_base_is_refused(store: BlobStore) -> None:
    with pytest.raises(DataStoreError, match=f"{digest_of(BASE)} is not in"):
        receive(store, stream(), store)
    with pytest.raises(ProtocolError, match="as a delta"):
        receive(store, stream(), None)
    assert list(store.iterate()) == []


def test_a_delta_to_a_base_that_was_damaged_is_poisoned(store: BlobStore) -> None:
    store.add(BASE)
    store.path(digest_of(BASE)).write_bytes(BASE[:-1] + b"?")
    with pytest.raises(DataStoreError, match="poisoned"):
        receive(store, stream(), store)
    store.path(digest_of(BASE)).write_bytes(BASE[:-1])
    with pytest.raises(DataStoreError, match="another length"):
        receive(store, stream(), store)
    assert not store.has(digest_of(CHANGED))


def test_a_blob_that_shares_nothing_with_its_base_travels_whole() -> None:
    assert delta(random.Random(3).randbytes(500_000), digest_of(BASE), BASE) is None
    assert delta(CHANGED, digest_of(BASE), BASE) is not None


def test_without_numpy_the_difference_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy = bytes(exclusive_or(BASE, CHANGED))
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert bytes(exclusive_or(BASE, CHANGED)) == with_numpy
    assert bytes(exclusive_or(b"", b"")) == b""
