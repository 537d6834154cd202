"""Routes about the data store: keys, and the blobs that they hold; for users, and for pods."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from kubetorch.controller.access import Asker, BoundPod, PodIdentity, User
from kubetorch.controller.blobs import BlobStores, NamespaceBlobs
from kubetorch.controller.buckets import Buckets
from kubetorch.controller.data import DataStore
from kubetorch.controller.routes.blobs import in_thread, receive
from kubetorch.controller.routes.table import (
    Audience,
    Exchange,
    Handler,
    Permission,
    Route,
)
from kubetorch.controller.tuning import LIMITS
from kubetorch.datastore.blobs import check_digest
from kubetorch.datastore.keys import canonical
from kubetorch.datastore.transfer import Delta, compressed, delta
from kubetorch.errors import DataStoreError, ProtocolError, StorageFullError, StoreUnavailableError
from kubetorch.lib.asgi import NDJSON, with_status
from kubetorch.lib.decoders import json_decoder
from kubetorch.specs import names
from kubetorch.wire import blobs as records
from kubetorch.wire import messages, routes
from kubetorch.wire.buckets import BucketProgress, PullBucket, PushBucket
from kubetorch.wire.data import (
    BlobNames,
    BlobSizes,
    CheckedKey,
    CollectionReport,
    FindKeys,
    Holder,
    HoldManifest,
    JoinGet,
    JoinWindow,
    PutKey,
    RemovePath,
)

_T = TypeVar("_T")
_GET, _LIST = Permission("get", "data"), Permission("list", "data")
_CREATE, _DELETE = Permission("create", "data"), Permission("delete", "data")
_GET_AND_CREATE = _GET, _CREATE


#: Deletes the blobs of a store that nothing needs; if the flag is set, it only counts them.
Collect = Callable[[NamespaceBlobs, bool], Awaitable[CollectionReport]]


class DataRoute(NamedTuple):
    """A verb on the data store of a namespace.

    Attributes:
        is_bulk: Whether it moves blobs, or looks for them, and asks for no key and no pod.
    """

    method: str
    verb: str
    needs: tuple[Permission, ...]
    audience: Audience = "pods"
    is_audited: bool = False
    is_bulk: bool = False

    def handled_by(self, handler: Handler) -> Route:
        path = f"{routes.DATA}/{{namespace}}/{self.verb}"
        return Route(self.method, path, handler, self.needs, self.audience, self.is_audited)


DATA_ROUTES = (
    DataRoute("POST", "put", (_CREATE,), is_audited=True),
    DataRoute("POST", "find", (_GET,)),
    DataRoute("GET", "ls", (_LIST,)),
    DataRoute("POST", "rm", (_DELETE,), is_audited=True),
    DataRoute("POST", "hold", (_CREATE,), is_audited=True),
    DataRoute("POST", "join", (_GET,)),
    DataRoute("POST", "window", (_GET,)),
    DataRoute("GET", "verify", (_GET,)),
    DataRoute("POST", "gc", (_DELETE,), "user", is_audited=True),
    DataRoute("POST", "blobs", (_CREATE,), is_audited=True, is_bulk=True),
    DataRoute("POST", "blobs-missing", (_CREATE,), is_bulk=True),
    DataRoute("POST", "blobs-fetch", (_GET,), is_bulk=True),
)
BUCKET_ROUTES = (
    DataRoute("POST", "pull", _GET_AND_CREATE, is_audited=True),
    DataRoute("POST", "push", _GET_AND_CREATE, is_audited=True),
)
#: The rights that a token for a store of its own may have.
CONTACT_NEEDS = tuple(
    Permission(verb, "data", "handler", "for a token to do so")
    for verb in ("get", "list", "create", "delete")
)
#: Where pods reach the store themselves: `StoreContact`.
CONTACT_ROUTE = DataRoute("POST", "contact", CONTACT_NEEDS, is_audited=True)
#: The verb of what only the controller asks of a store of its own: no token of a user has it.
CONTROLLER_VERB = "update"
#: The verb of requests about keys that the controller passes on: a pod's own token is for blobs.
RELAY_VERB = "relay"
SERVICES_ROUTE = DataRoute("POST", "services", (Permission(CONTROLLER_VERB, "data"),), "user")
END_ROUTE = DataRoute("POST", "end", (Permission(CONTROLLER_VERB, "data"),), "user")


class DataRoutes:
    def __init__(self, data: DataStore, blob_stores: BlobStores, collect: Collect) -> None:
        self._data = data
        self._collect = collect
        self._blob_stores = blob_stores
        #: Bytes of blobs that went to getters, as they travelled.
        self.sent_bytes = 0

    def handlers(self) -> list[tuple[DataRoute, Handler]]:
        by_verb: dict[str, Handler] = {
            "put": self.put,
            "find": self.find,
            "ls": self.list,
            "rm": self.remove,
            "hold": self.hold,
            "join": self.join,
            "window": self.window,
            "verify": self.verify,
            "gc": self.collect,
            "blobs": self.store,
            "blobs-missing": self.missing,
            "blobs-fetch": self.fetch,
        }
        return [(route, by_verb[route.verb]) for route in DATA_ROUTES]

    async def put(self, exchange: Exchange, namespace: str) -> None:
        """Let a key hold a manifest; or answer with its missing blobs."""
        await check_sender(exchange, namespace, _CREATE)
        put = await exchange.message(PutKey)
        if put.publisher is not None:
            check_reporter(exchange.asker, namespace, put.publisher)
        with faults_of_sender():
            answer = await self._data.put(namespace, put, exchange.asker.name)
        await exchange.respond_message(answer)

    async def find(self, exchange: Exchange, namespace: str) -> None:
        """The keys that have a part of a path; their blobs stay for some minutes."""
        await check_sender(exchange, namespace, _GET)
        find = await exchange.message(FindKeys)
        with faults_of_sender():
            path_keys = await self._data.find(namespace, find)
        await exchange.respond_message(path_keys)

    async def list(self, exchange: Exchange, namespace: str) -> None:
        """The names directly below `?path=`."""
        await check_sender(exchange, namespace, _LIST)
        with faults_of_sender():
            rows = await self._data.list(namespace, exchange.query("path"))
        await exchange.respond_message(rows)

    async def remove(self, exchange: Exchange, namespace: str) -> None:
        """Delete keys, or a path in the folder of a key."""
        await check_sender(exchange, namespace, _DELETE)
        remove = await exchange.message(RemovePath)
        with faults_of_sender():
            answer = await self._data.remove(namespace, remove, exchange.asker.name)
        await exchange.respond_message(answer)

    async def hold(self, exchange: Exchange, namespace: str) -> None:
        """Note whether a pod has a version of a key whole, for other getters."""
        await check_sender(exchange, namespace, _CREATE)
        hold = await exchange.message(HoldManifest)
        if hold.is_whole:  # of another pod, a getter says that it has a version no longer
            check_reporter(exchange.asker, namespace, hold.holder)
        with faults_of_sender():
            self._data.hold(namespace, hold)
        await exchange.respond_message({})

    async def join(self, exchange: Exchange, namespace: str) -> None:
        """The source from which to get a version, for one of those that get it now."""
        await check_sender(exchange, namespace, _GET)
        join = await exchange.message(JoinGet)
        if join.holder is not None:
            check_reporter(exchange.asker, namespace, join.holder)
        with faults_of_sender():
            answer = self._data.join(namespace, join)
        await exchange.respond_message(answer)

    async def window(self, exchange: Exchange, namespace: str) -> None:
        """Whether the window of a group is closed, for one of its participants."""
        await check_sender(exchange, namespace, _GET)
        join = await exchange.message(JoinWindow)
        with faults_of_sender():
            view = self._data.join_window(namespace, join)
        await exchange.respond_message(view)

    async def verify(self, exchange: Exchange, namespace: str) -> None:
        """Lines about the keys of `?path=`, whose blobs are compared with their digests."""
        await check_sender(exchange, namespace, _GET)
        path = exchange.query("path")
        with faults_of_sender():
            canonical(path)
        rows = self._data.verify(namespace, path)
        await exchange.respond_stream(_lines(rows), content_type=NDJSON)

    async def collect(self, exchange: Exchange, namespace: str) -> None:
        """Delete blobs that nothing needs; with `?dry_run=true` only count them."""
        names.check_namespace(namespace)
        store = self._blob_stores.of(namespace)
        await exchange.respond_message(await self._collect(store, exchange.flag("dry_run")))

    async def store(self, exchange: Exchange, namespace: str) -> None:
        """Store blobs."""
        await check_sender(exchange, namespace, _CREATE)
        stored = await receive(exchange.chunks(), self._blob_stores, namespace)
        blobs = self._blob_stores.of(namespace).blobs
        await self._blob_stores.in_data_thread(lambda: blobs.save(stored))
        await exchange.respond_message({"stored": len(stored)})

    async def missing(self, exchange: Exchange, namespace: str) -> None:
        """Answer with the blobs that are missing, if there is room for them."""
        await check_sender(exchange, namespace, _CREATE)
        body = await exchange.body(LIMITS.blob_names_bytes)
        blobs = await self._blob_stores.in_thread(lambda: _decode(BlobSizes, body))
        with faults_of_sender():
            missing = await self._data.missing(namespace, blobs.sizes, is_check=blobs.is_check)
        await exchange.respond_message(BlobNames(blobs=tuple(missing)))

    async def fetch(self, exchange: Exchange, namespace: str) -> None:
        """Blobs of keys."""
        await check_sender(exchange, namespace, _GET)
        body = await exchange.body(LIMITS.blob_names_bytes)
        names = await self._blob_stores.in_thread(lambda: _decode(BlobNames, body))
        digests, bases = names.blobs, names.bases
        with faults_of_sender():
            for digest in (*digests, *bases.values()):
                check_digest(digest)
        blobs = self._blob_stores.of(namespace).blobs
        await self._data.check_readable(namespace, digests)
        # Of a base that the sender may not read, a delta would tell the content.
        unreadable = await self._data.unreadable(namespace, bases.values())

        def delta_of(digest: str) -> Delta | None:
            base = bases.get(digest)
            if base is None or base in unreadable or not blobs.has(base):
                return None
            size = blobs.size(digest)
            if size > LIMITS.delta_bytes or blobs.size(base) != size:
                return None
            return delta(blobs.read(digest), base, blobs.read(base))

        missing = await self._blob_stores.in_data_thread(lambda: blobs.missing(digests))
        if missing:
            raise with_status(
                DataStoreError(
                    f"{len(missing)} blobs are not here, such as {missing[0]}",
                    hint="kt store verify KEY says which keys lack blobs; put these again",
                ),
                404,
            )
        # Before the answer begins, which could not say what is wrong any more.
        await self._blob_stores.in_data_thread(lambda: blobs.fetch(digests))
        pieces = compressed(dict.fromkeys(digests), blobs.stream, delta_of if bases else None)
        await exchange.respond_stream(
            self._counted(in_thread(pieces, self._blob_stores)), content_type=records.CONTENT_TYPE
        )

    async def _counted(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for piece in pieces:
            self.sent_bytes += len(piece)
            yield piece


class BucketRoutes:
    """What is pulled from buckets and written to them."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def handlers(self) -> list[tuple[DataRoute, Handler]]:
        by_verb: dict[str, Handler] = {"pull": self.pull, "push": self.push}
        return [(route, by_verb[route.verb]) for route in BUCKET_ROUTES]

    async def pull(self, exchange: Exchange, namespace: str) -> None:
        """Let a key hold what is at an address; lines of progress, last the key or the failure."""
        await self._check(exchange, namespace)
        pull = await exchange.message(PullBucket)
        with faults_of_sender():
            rows = self._buckets.pull(namespace, pull, exchange.asker.name)
        await exchange.respond_stream(_lines(rows), content_type=NDJSON)

    async def push(self, exchange: Exchange, namespace: str) -> None:
        """Write the files of a manifest to an address; lines as those of a pull."""
        await self._check(exchange, namespace)
        push = await exchange.message(PushBucket)
        with faults_of_sender():
            rows = self._buckets.push(namespace, push, exchange.asker.name)
        await exchange.respond_stream(_lines(rows), content_type=NDJSON)

    async def _check(self, exchange: Exchange, namespace: str) -> None:
        for permission in _GET_AND_CREATE:
            await check_sender(exchange, namespace, permission)


async def _lines(
    rows: AsyncGenerator[CheckedKey | BucketProgress, None],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(rows):
        async for row in rows:
            yield messages.encode(row) + b"\n"


def _decode(kind: type[_T], body: bytes) -> _T:
    try:
        return json_decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the body must be {kind.__name__}: {error}") from error


async def check_sender(exchange: Exchange, namespace: str, permission: Permission) -> None:
    """Refuse a pod of another namespace, unless its account has the right as a user."""
    names.check_namespace(namespace)
    pod_namespace = exchange.asker.pod_namespace
    if pod_namespace is not None and pod_namespace != namespace:
        await exchange.asker.require(permission.of(namespace, ""))


def check_reporter(asker: Asker, namespace: str, holder: Holder) -> None:
    """Refuse a pod that says what another pod has; the token of some pods names none."""
    match asker.principal:
        case PodIdentity(pod=pod) | User(pod=BoundPod(name=pod)) if asker.pod_namespace is not None:
            if (asker.pod_namespace, pod) != (namespace, holder.pod):
                raise with_status(
                    DataStoreError(
                        f"this is the pod {pod} of namespace {asker.pod_namespace}; the holder is "
                        f"{holder.pod[:100]!r} of namespace {namespace}",
                        hint="pods publish what they have themselves, in their own namespace",
                    ),
                    403,
                )


@contextmanager
def faults_of_sender() -> Iterator[None]:
    """Answer errors of the data store that have no status of their own as those of the request."""
    try:
        yield
    except (StorageFullError, StoreUnavailableError):
        raise
    except DataStoreError as error:
        raise with_status(error, 400) from error.__cause__
