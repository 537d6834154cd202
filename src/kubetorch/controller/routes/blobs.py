"""Routes about blobs: bring them, ask which are missing, fetch them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import msgspec

from kubetorch.controller.depots import Depots
from kubetorch.controller.exchange import Exchange
from kubetorch.controller.routes.table import Permission, Route
from kubetorch.datastore.blobs import BlobStore, check_digest
from kubetorch.datastore.transfer import Receiver, compressed
from kubetorch.errors import DataStoreError, ProtocolError, StorageFullError
from kubetorch.lib.asgi import with_status
from kubetorch.lib.decoding import json_decoder
from kubetorch.wire import blobs as records
from kubetorch.wire import routes

#: Bytes of all blobs that one request may bring, decompressed.
UPLOAD_LIMIT = 4 * 1024**3
#: Bytes of a request that names digests: a million of them.
NAMES_LIMIT = 80 * 1024 * 1024

# Small pieces keep the loop free while a stream that was compressed well is written to the disk.
_FEED = 4 * 1024
# Who may deploy may bring and read what deploys are made of.
_NEEDS = (Permission("create", scope="query"),)


class _Names(msgspec.Struct, frozen=True):
    """Body of a request that names blobs."""

    blobs: tuple[str, ...]


class BlobRoutes:
    """Handlers.

    Args:
        depots: The stores.
    """

    def __init__(self, depots: Depots) -> None:
        self._depots = depots

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("POST", routes.BLOBS, self.store, _NEEDS, "pods", is_audited=True),
            Route("POST", routes.BLOBS_MISSING, self.missing, _NEEDS),
            Route("POST", routes.BLOBS_FETCH, self.fetch, _NEEDS, "pods"),
        ]

    async def store(self, exchange: Exchange) -> None:
        """Store blobs."""
        stored = await receive(exchange.chunks(), self._depots, self._namespace(exchange))
        await exchange.respond_message({"stored": stored})

    async def missing(self, exchange: Exchange) -> None:
        """Which of some blobs are not here."""
        names = await self._names(exchange)
        await exchange.respond_message({"missing": self._store(exchange).missing(names)})

    async def fetch(self, exchange: Exchange) -> None:
        """Some blobs."""
        names = await self._names(exchange)
        blobs = self._store(exchange)
        missing = blobs.missing(names)
        if missing:
            raise with_status(
                DataStoreError(
                    f"{len(missing)} blobs are not here, such as {missing[0]}",
                    hint="deploy again: the client uploads what is missing",
                ),
                404,
            )
        pieces = in_thread(compressed(dict.fromkeys(names), blobs.stream))
        await exchange.respond_stream(pieces, content_type=records.CONTENT_TYPE)

    def _store(self, exchange: Exchange) -> BlobStore:
        """The store that is asked: that of the pod's own namespace, or of `?namespace=`."""
        return self._depots.of(self._namespace(exchange)).blobs

    def _namespace(self, exchange: Exchange) -> str:
        return exchange.asker.pod_namespace or exchange.query("namespace")

    async def _names(self, exchange: Exchange) -> tuple[str, ...]:
        body = await exchange.body(NAMES_LIMIT)
        try:
            names = json_decoder(_Names).decode(body).blobs
            for digest in names:
                check_digest(digest)
        except (msgspec.MsgspecError, UnicodeDecodeError, DataStoreError) as error:
            raise ProtocolError(f'the body must be {{"blobs": [digests]}}: {error}') from error
        return names


async def receive(chunks: AsyncIterator[bytes], depots: Depots, namespace: str) -> int:
    """Store the blobs of a stream that may be empty; how many there were.

    Args:
        chunks: The stream.
        depots: The stores.
        namespace: Whose blobs they are.

    Raises:
        ProtocolError: It is no such stream, or it brings too much.
        DataStoreError: A blob is not what its digest says.
        StorageFullError: There is no room.
    """
    blobs = depots.of(namespace).blobs
    receiver: Receiver | None = None
    try:
        async for chunk in chunks:
            receiver = receiver or Receiver(blobs, limit_bytes=UPLOAD_LIMIT)
            for start in range(0, len(chunk), _FEED):
                receiver.feed(chunk[start : start + _FEED])
                if len(chunk) > _FEED:
                    await asyncio.sleep(0)
        return 0 if receiver is None else len(receiver.finish())
    except StorageFullError:
        depots.on_full()
        raise
    except DataStoreError as error:  # poisoned: the sender's fault
        with_status(error, 400)
        raise
    finally:
        if receiver is not None:
            receiver.close()


async def in_thread(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The pieces of an iterator that reads files and compresses, without holding up the loop."""
    while True:
        piece = await asyncio.to_thread(next, pieces, None)
        if piece is None:
            return
        yield piece
