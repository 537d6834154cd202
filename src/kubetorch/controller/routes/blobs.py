"""Routes about blobs: upload them, list the missing ones, fetch them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

import msgspec

from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.routes.table import Exchange, Permission, Route
from kubetorch.controller.tuning import LIMITS
from kubetorch.datastore.blobs import BlobStore, check_digest
from kubetorch.datastore.transfer import Receiver, compressed
from kubetorch.errors import DataStoreError, ProtocolError, StorageFullError
from kubetorch.lib.asgi import with_status
from kubetorch.lib.decoders import json_decoder
from kubetorch.wire import blobs as records
from kubetorch.wire import routes

# Users who may deploy may upload and read the blobs of deploys.
_NEEDS = (Permission("create", scope="query"),)


class _Names(msgspec.Struct, frozen=True):
    """Body of a request that names blobs."""

    blobs: tuple[str, ...]


class BlobRoutes:
    def __init__(
        self, blob_stores: BlobStores, ask_pods: Callable[[str, str, str], Awaitable[str]]
    ) -> None:
        self._blob_stores = blob_stores
        # Requests the blobs of a pod (namespace, workload, name) from others; returns the state.
        self._ask_pods = ask_pods

    def routes(self) -> list[Route]:
        return [
            Route("POST", routes.BLOBS, self.store, _NEEDS, "pods", is_audited=True),
            Route("POST", routes.BLOBS_MISSING, self.missing, _NEEDS),
            Route("POST", routes.BLOBS_FETCH, self.fetch, _NEEDS, "pods"),
        ]

    async def store(self, exchange: Exchange) -> None:
        """Store blobs."""
        stored = await receive(exchange.chunks(), self._blob_stores, self._namespace(exchange))
        await exchange.respond_message({"stored": len(stored)})

    async def missing(self, exchange: Exchange) -> None:
        """Answer with the blobs that are missing."""
        _, missing = await self._names(exchange)
        await exchange.respond_message({"missing": missing})

    async def fetch(self, exchange: Exchange) -> None:
        """Some blobs."""
        names, missing = await self._names(exchange)
        if missing:
            where = ""
            if exchange.asker.pod_namespace is not None:
                names_of_pod = (exchange.query("workload", ""), exchange.query("pod", ""))
                where = await self._ask_pods(exchange.asker.pod_namespace, *names_of_pod)
            raise with_status(
                DataStoreError(
                    f"{len(missing)} blobs are not here, such as {missing[0]}"
                    + (f": {where}" if where else ""),
                    hint="deploy again: the client uploads what is missing",
                ),
                404,
            )
        pieces = compressed(dict.fromkeys(names), self._store(exchange).stream)
        await exchange.respond_stream(
            in_thread(pieces, self._blob_stores), content_type=records.CONTENT_TYPE
        )

    def _store(self, exchange: Exchange) -> BlobStore:
        """The store of the pod's own namespace, or of `?namespace=`."""
        return self._blob_stores.of(self._namespace(exchange)).blobs

    def _namespace(self, exchange: Exchange) -> str:
        return exchange.asker.pod_namespace or exchange.query("namespace")

    async def _names(self, exchange: Exchange) -> tuple[tuple[str, ...], list[str]]:
        """The blobs that a request names, and those of them that are missing."""
        body = await exchange.body(LIMITS.blob_names_bytes)
        store = self._store(exchange)

        def find_missing() -> tuple[tuple[str, ...], list[str]]:
            try:
                names = json_decoder(_Names).decode(body).blobs
                for digest in names:
                    check_digest(digest)
            except (msgspec.MsgspecError, UnicodeDecodeError, DataStoreError) as error:
                raise ProtocolError(f'the body must be {{"blobs": [digests]}}: {error}') from error
            return names, store.missing(names)

        return await self._blob_stores.in_thread(find_missing)


async def receive(
    chunks: AsyncIterator[bytes], blob_stores: BlobStores, namespace: str
) -> list[str]:
    """Store the blobs of a stream, which may be empty; returns their digests."""
    blobs = blob_stores.of(namespace).blobs
    receiver: Receiver | None = None
    try:
        async for chunk in chunks:
            receiver = receiver or Receiver(blobs, bases=blobs, limit_bytes=LIMITS.upload_bytes)
            await blob_stores.in_thread(partial(receiver.feed, chunk))
        return [] if receiver is None else receiver.finish()
    except StorageFullError:
        blob_stores.on_full()
        raise
    except DataStoreError as error:  # poisoned: the sender's fault
        with_status(error, 400)
        raise
    finally:
        if receiver is not None:
            receiver.close()


async def in_thread(
    pieces: Iterator[bytes], blob_stores: BlobStores
) -> AsyncGenerator[bytes, None]:
    """The pieces of an iterator that reads files and compresses, without holding up the loop."""
    while (piece := await blob_stores.in_thread(lambda: next(pieces, None))) is not None:
        yield piece
