"""The data store as a server of its own, to which the controller relays.

    client ──► controller ── rights, services ──► store ◄── blobs ── pods

The controller checks rights: each request has a token for one namespace, with the rights of its
sender, that only the controller can sign. Blobs take the short way: pods get such a token and send
and fetch blobs themselves. Of services and their pods the store knows what the controller told it
last. A request about keys names the state that it needs (`routes.SERVICES`); a store that does not
have it, perhaps since it started anew, refuses the request before it has done anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kubetorch._version import __version__
from kubetorch.controller.access import BoundPod, Need, Principal, User, bearer
from kubetorch.controller.app import App, Audit
from kubetorch.controller.blobs import BlobStores, GarbageCollector
from kubetorch.controller.holders import Holders
from kubetorch.controller.local_store import LocalStore
from kubetorch.controller.routes.data import (
    CONTROLLER_VERB,
    END_ROUTE,
    RELAY_VERB,
    SERVICES_ROUTE,
)
from kubetorch.controller.routes.table import Exchange, Handler, Permission, Route, Table
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import ForbiddenError, ForeignOriginError, UnauthorizedError
from kubetorch.lib.asgi import refusal
from kubetorch.lib.clock import Clock
from kubetorch.lib.http_server import Server
from kubetorch.lib.tasks import cancel_all, start_task
from kubetorch.specs import names
from kubetorch.wire import messages, routes, tokens, versions
from kubetorch.wire.data import (
    EndedKeys,
    EndService,
    NamespaceServices,
    ServicePod,
    StoreStatus,
    services_digest,
)
from kubetorch.wire.messages import PodView

_log = logging.getLogger(__name__)

_HINT = "the controller gives tokens for the store; no other token is for it"


class DataUser(User, frozen=True):
    """The sender of a request, with the rights that the controller gave it on one namespace.

    Attributes:
        pod_namespace: The namespace of the sender, if it is a pod of a service.
    """

    namespace: str = ""
    verbs: tuple[str, ...] = ()
    pod_namespace: str | None = None


class StoreGate:
    """Identifies senders by tokens of the controller; see `Gate`."""

    def __init__(self, secret: bytes, clock: Callable[[], float]) -> None:
        self._secret = secret
        self._clock = clock

    def check_origin(self, headers: Mapping[str, str]) -> None:
        if headers.get("origin") is not None:
            raise ForeignOriginError("requests of pages are refused")

    async def identify(self, headers: Mapping[str, str]) -> Principal:
        token = bearer(headers, hint=_HINT)
        audience = tokens.claimed_audience(token)
        namespace, _, name = audience.partition("/")
        if name != tokens.STORE:
            raise UnauthorizedError("this token is not for the data store", hint=_HINT)
        key = tokens.workload_key(self._secret, audience)
        claims = tokens.verify(key, token, audience=audience, now=self._clock())
        pod_namespace, _, pod = claims.pod.partition("/")
        return DataUser(
            claims.subject,
            pod=BoundPod(pod_namespace, pod, "") if pod else None,
            namespace=namespace,
            verbs=claims.verbs,
            pod_namespace=pod_namespace or None,
        )

    async def authorize(self, principal: Principal, need: Need) -> None:
        assert isinstance(principal, DataUser)
        if need.namespace != principal.namespace or need.verb not in principal.verbs:
            raise ForbiddenError(f"this token of {principal.name} is not to {need}", hint=_HINT)

    def namespace_of_pod(self, principal: Principal) -> str | None:
        assert isinstance(principal, DataUser)
        return principal.pod_namespace


class ListedPods:
    """The pods of a service, as the controller has listed them."""

    def __init__(self, pods: tuple[ServicePod, ...]) -> None:
        self.pod_names = [pod.name for pod in pods]
        self._views = tuple(
            PodView(name=pod.name, ordinal=0, phase=pod.phase, url=pod.url) for pod in pods
        )

    def pod_views(self) -> tuple[PodView, ...]:
        return self._views


class Services:
    """The services of each namespace, as the controller has listed them."""

    def __init__(self) -> None:
        self._services: dict[str, dict[str, ListedPods]] = {}
        # By namespace: the states that were told last. Requests that run at the same time may name
        # different ones; each of them gets the newest.
        self._digests: dict[str, deque[str]] = {}

    def update(self, namespace: str, encoded: bytes) -> None:
        services = messages.decode(NamespaceServices, encoded).services
        self._services[namespace] = {name: ListedPods(pods) for name, pods in services.items()}
        recent_digests = self._digests.setdefault(
            namespace, deque(maxlen=LIMITS.remembered_service_states)
        )
        recent_digests.append(services_digest(encoded))

    def is_known(self, namespace: str, digest: str) -> bool:
        return digest in self._digests.get(namespace, ())

    def has(self, namespace: str, service: str) -> bool:
        return service in self._services.get(namespace, {})

    def find(self, namespace: str, service: str) -> ListedPods | None:
        return self._services.get(namespace, {}).get(service)


class StoreServer:
    def __init__(
        self,
        *,
        blob_stores: BlobStores,
        keys: Path,
        clock: Clock,
        secret: bytes,
        environ: Mapping[str, str],
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._services = Services()
        self._data = LocalStore(
            blob_stores,
            keys,
            clock,
            has_service=self._services.has,
            holders=Holders(self._services.find, self._token_of_pods),
            collect=lambda store, is_dry: self._garbage.collect_one(store, is_dry),
            environ=environ,
        )
        self._garbage = GarbageCollector(
            blob_stores,
            specs=lambda: (),
            results=lambda _: set(),
            manifests=self._data.manifests,
            refresh=self._data.refresh,
            expire=lambda: None,
            clock=clock,
        )
        blob_stores.on_full = self._garbage.hurry
        gate = StoreGate(secret, clock.time)
        self._server = Server(App(Table(self._routes()), gate, audit=Audit(clock.time)))
        self._tasks: set[asyncio.Task[None]] = set()

    def _token_of_pods(self, namespace: str, service: str) -> str:
        """A token for the blobs that pods of a service publish."""
        audience, now = tokens.audience(namespace, service), self._clock.time()
        claims = tokens.Claims(
            audience, now + TIMING.data_token_seconds, "data", (tokens.DATA,), issued=now
        )
        return tokens.sign(tokens.workload_key(self._secret, audience), claims)

    def _routes(self) -> list[Route]:
        data_routes = [
            # Also for pods: the gate decides by the token alone.
            route._replace(audience="user").handled_by(
                handler if route.is_bulk else partial(self._with_services, handler)
            )
            for route, handler in self._data.handlers()
        ]
        return [
            Route("GET", routes.HEALTH, self.health, audience="anybody"),
            Route("GET", routes.STATUS, self.status, (Permission(CONTROLLER_VERB, "data", "all"),)),
            SERVICES_ROUTE.handled_by(self.set_services),
            END_ROUTE.handled_by(self.end_service),
            *data_routes,
        ]

    async def start(self, listener: socket.socket) -> None:
        """Serve.

        Raises:
            StoreUnavailableError: The bucket of the store does not answer.
        """
        await self._data.start()
        await self._server.start(listener)
        start_task(self._data.move(), self._tasks)
        self._garbage.start()
        _log.info("store started pid=%s", os.getpid())

    async def close(self) -> None:
        await self._garbage.close()
        await self._data.close()
        await cancel_all(self._tasks)
        await self._server.close(TIMING.server_close_seconds)

    async def _with_services(self, handler: Handler, exchange: Exchange, namespace: str) -> None:
        await exchange.asker.require(Permission(RELAY_VERB, "data").of(namespace, ""))
        digest = exchange.headers.get(routes.SERVICES.lower(), "")
        if not self._services.is_known(namespace, digest):
            message = "the store does not know the services of this request"
            raise refusal(routes.UNKNOWN_SERVICES, message)
        await handler(exchange, namespace)

    async def health(self, exchange: Exchange) -> None:
        """Answer that the store runs."""
        await exchange.respond_message(
            {"status": "healthy", "version": __version__, "protocol": versions.PROTOCOL}
        )

    async def status(self, exchange: Exchange) -> None:
        """Describe the store."""
        await exchange.respond_message(StoreStatus(await self._data.sent_bytes()))

    async def set_services(self, exchange: Exchange, namespace: str) -> None:
        """Note the services of a namespace, and their pods."""
        names.check_namespace(namespace)
        self._services.update(namespace, await exchange.body(LIMITS.namespace_services_bytes))
        await exchange.respond_message({})

    async def end_service(self, exchange: Exchange, namespace: str) -> None:
        """Delete the keys of a service that was torn down."""
        names.check_namespace(namespace)
        end = await exchange.message(EndService)
        await exchange.respond_message(
            EndedKeys(await self._data.end_service(namespace, end.service))
        )
