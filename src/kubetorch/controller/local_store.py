"""The data store in the process that has its disk: the controller, or a store of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kubetorch.controller.blobs import BlobStores, NamespaceBlobs
from kubetorch.controller.buckets import Buckets
from kubetorch.controller.data import DataStore
from kubetorch.controller.holders import Holders
from kubetorch.controller.routes.data import (
    CONTACT_ROUTE,
    BucketRoutes,
    Collect,
    DataRoute,
    DataRoutes,
)
from kubetorch.controller.routes.table import Exchange, Handler, Route
from kubetorch.lib.clock import Clock
from kubetorch.specs import names
from kubetorch.wire.data import StoreContact


class LocalStore:
    def __init__(
        self,
        blob_stores: BlobStores,
        keys: Path,
        clock: Clock,
        *,
        has_service: Callable[[str, str], bool],
        holders: Holders,
        collect: Collect,
        environ: Mapping[str, str],
    ) -> None:
        self._data = DataStore(keys, blob_stores, clock, has_service=has_service, holders=holders)
        self._buckets = Buckets(self._data, blob_stores, environ)
        self._data_routes = DataRoutes(self._data, blob_stores, collect)

    def handlers(self) -> list[tuple[DataRoute, Handler]]:
        """The routes of the store with their handlers."""
        return [*self._data_routes.handlers(), *BucketRoutes(self._buckets).handlers()]

    def routes(self) -> list[Route]:
        """The routes of the store where it is the controller."""
        data_routes = [route.handled_by(handler) for route, handler in self.handlers()]
        return [*data_routes, CONTACT_ROUTE.handled_by(_answer_without_store)]

    async def start(self) -> None:
        """Read the keys that a bucket has.

        Raises:
            StoreUnavailableError: It does not answer.
        """
        await self._data.load()

    async def move(self) -> None:
        """Move keys that were put before the store had a bucket there."""
        await self._data.move()

    async def close(self) -> None:
        await self._buckets.close()

    def manifests(self, store: NamespaceBlobs) -> set[str]:
        """The manifests whose blobs the garbage collector keeps."""
        return self._data.manifests(store)

    def refresh(self, store: NamespaceBlobs, only_unsettled: bool) -> None:
        """Know the keys of a store as its bucket has them, before blobs are deleted."""
        self._data.refresh(store, only_unsettled)

    async def end_service(self, namespace: str, service: str) -> int:
        """Delete the keys of a service that was torn down; returns their number."""
        return await self._data.end_service(namespace, service)

    async def sent_bytes(self) -> int:
        """Bytes of blobs that went to getters, as they travelled."""
        return self._data_routes.sent_bytes


async def _answer_without_store(exchange: Exchange, namespace: str) -> None:
    """Answer that the controller itself is the store."""
    names.check_namespace(namespace)
    await exchange.respond_message(StoreContact())
