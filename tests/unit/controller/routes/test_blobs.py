"""Blobs that come with a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.routes import blobs
from kubetorch.datastore import transfer
from kubetorch.datastore.blobs import Room, digest_of
from kubetorch.errors import KubetorchError, StorageFullError
from kubetorch.wire import exceptions

BLOB = b"def f(): return 1"


class Stores(BlobStores):
    """Stores that say whether one was found full."""

    def __init__(self, folder: Path, room: Room | None = None) -> None:
        super().__init__(folder, room=room)
        self.times_full = 0
        self.on_full = self._count

    def _count(self) -> None:
        self.times_full += 1


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


def receive(stores: Stores, *data: bytes) -> list[str]:
    return asyncio.run(blobs.receive(pieces(*data), stores, "team"))


def packed(named: bytes = BLOB) -> bytes:
    source = {digest_of(named): (len(BLOB), [BLOB])}
    return b"".join(transfer.compressed(source, source.__getitem__))


def test_blobs_are_stored_however_they_come(tmp_path: Path) -> None:
    stores, sent = Stores(tmp_path), packed()
    assert receive(stores) == []
    assert receive(stores, sent[:5], sent[5:]) == [digest_of(BLOB)]
    assert stores.of("team").blobs.has(digest_of(BLOB))
    assert not stores.of("other").blobs.has(digest_of(BLOB))


def test_a_store_that_is_full_is_to_be_looked_through(tmp_path: Path) -> None:
    stores = Stores(tmp_path, Room(limit_bytes=1))
    with pytest.raises(StorageFullError):
        receive(stores, packed())
    assert stores.times_full == 1


@pytest.mark.parametrize(
    "sent",
    [b"no blobs", packed()[:-3], packed(b"another")],
    ids=["no blobs", "cut", "poisoned"],
)
def test_what_is_no_blob_is_the_senders_fault(tmp_path: Path, sent: bytes) -> None:
    stores = Stores(tmp_path)
    with pytest.raises(KubetorchError) as caught:
        receive(stores, sent)
    assert exceptions.http_status(caught.value) == 400
    assert stores.times_full == 0
    assert list(stores.of("team").blobs.iterate()) == []
