"""The controller's ASGI application: checks the sender, finds the handler, answers errors.

    request ──► Host and Origin ──► token ──► route ──► its needs ──► handler
                      │                │         │          │            │
                      └────────────────┴─── failure envelope ┴───────────┘

Requests for a pod are passed on to its agent (`kubetorch.controller.relay`) before all that. The
sessions of agents are WebSockets, which `accept` opens after the same checks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from kubetorch.controller.access import (
    Access,
    Asker,
    Gate,
    PodIdentity,
    Principal,
    User,
    identity_of,
    name_of,
)
from kubetorch.controller.backends.base import Backend
from kubetorch.controller.blobs import BlobRecovery, BlobStores, GarbageCollector
from kubetorch.controller.calls import Calls
from kubetorch.controller.holders import Holders
from kubetorch.controller.local_store import LocalStore
from kubetorch.controller.relay import NO_HOSTS, Hosts, Relay
from kubetorch.controller.routes.blobs import BlobRoutes
from kubetorch.controller.routes.calls import CallRoutes
from kubetorch.controller.routes.status import ServiceRoutes
from kubetorch.controller.routes.stores import SecretRoutes, VolumeRoutes
from kubetorch.controller.routes.table import Exchange, Route, Table
from kubetorch.controller.routes.workloads import WorkloadRoutes
from kubetorch.controller.sessions import Session
from kubetorch.controller.state import SqliteState, State
from kubetorch.controller.store_relay import StoreRelay
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Workload
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import KubetorchError, UnauthorizedError
from kubetorch.lib import proxy, websocket
from kubetorch.lib.asgi import ClientGoneError, Receive, Scope, Send, refusal
from kubetorch.lib.clock import Clock
from kubetorch.lib.http_server import Refusal, Server
from kubetorch.lib.tasks import start_task
from kubetorch.lib.websocket import Endpoint
from kubetorch.wire import exceptions, routes

_log = logging.getLogger(__name__)
_audit_log = logging.getLogger("kubetorch.audit")
_AUDITED_NAMES = ("name", "claim", "call_id")


class App:
    def __init__(
        self,
        table: Table,
        gate: Gate,
        relay: Relay | None = None,
        *,
        new_session: Callable[[Principal], Session] | None = None,
        on_request: Callable[[], None] = lambda: None,
        audit: Audit | None = None,
    ) -> None:
        self.table = table
        self._gate = gate
        self._relay = relay
        self._new_session = new_session
        self._on_request = on_request
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            relay = self._relay
            destination = None
            if relay is not None:
                destination = relay.locate(scope["raw_path"], scope["headers"])
            if relay is not None and destination is not None:
                if not destination.is_app:
                    # Pages may use apps, on the terms of the agent.
                    self._gate.check_origin(exchange.headers)
                await relay.answer(destination, exchange, scope, receive)
                return
            route, parameters = await self._admit(exchange)
            await route.handler(exchange, **parameters)
        except ClientGoneError:
            return
        except KubetorchError as error:
            await self._refuse(exchange, error)
        except Exception as error:  # noqa: BLE001  # one request must not end the server
            _log.exception("request failed method=%s path=%s", exchange.method, exchange.path)
            await self._refuse(exchange, error)

    async def accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        try:
            self._gate.check_origin(headers)
            principal = await self._gate.identify(headers)
            if path != routes.SESSIONS or self._new_session is None:
                raise refusal(404, "there is no WebSocket at this path")
            return self._new_session(principal)
        except KubetorchError as error:
            failure = exceptions.describe_refusal(error)
            raise Refusal(failure.status, failure.to_json()) from error

    async def _admit(self, exchange: Exchange) -> tuple[Route, dict[str, str]]:
        self._gate.check_origin(exchange.headers)
        if (exchange.method, exchange.path) == ("GET", routes.HEALTH):
            return self.table.find(exchange)
        self._observe(exchange, None)
        principal = await self._gate.identify(exchange.headers)
        exchange.admit()
        self._observe(exchange, principal)
        if isinstance(principal, User):
            self._on_request()
        route, parameters = self.table.find(exchange)
        exchange.asker = asker = Asker(principal, self._gate)
        if route.audience != "pods" or asker.pod_namespace is None:
            await self._check(route, exchange, parameters)
        return route, parameters

    def _observe(self, exchange: Exchange, principal: Principal | None) -> None:
        """Write a line about a request when it is answered, also when it is refused."""
        audit = self._audit
        match = None if audit is None else self.table.match(exchange)
        if audit is not None and match is not None and match[0].is_audited:
            exchange.on_status(lambda status: audit.write(exchange, *match, principal, status))

    async def _check(self, route: Route, exchange: Exchange, parameters: dict[str, str]) -> None:
        """Refuse pods, and users without the rights that the route needs."""
        if not isinstance(exchange.asker.principal, User):
            raise UnauthorizedError(
                "the token of a pod is not for this", hint="use the user's token"
            )
        for permission in route.needs:
            if permission.scope != "handler":
                await exchange.asker.require(permission.need(exchange, parameters))

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        if exchange.has_begun:
            # The status is sent: the client sees the error by the missing end of the body.
            return
        failure = exceptions.describe_refusal(error, started=exchange.has_started)
        await exchange.refuse(failure.status, failure.to_json())


class Audit:
    """One line of JSON for each request that changes something, or shows a secret.

    A line is written when the status of the answer is decided, before it is sent. It has neither
    tokens nor values: nothing of a request's body, and of its query only the namespace.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._minute = 0
        self._strangers = 0

    def write(
        self,
        exchange: Exchange,
        route: Route,
        parameters: Mapping[str, str],
        principal: Principal | None,
        status: int,
    ) -> None:
        now = self._clock()
        if principal is None and not self._is_listed(int(now // 60)):
            return
        needs = [need.verb for need in route.needs] or [route.method.lower()]
        subresources = [need.subresource for need in route.needs if need.subresource]
        named = next((parameters[key] for key in _AUDITED_NAMES if key in parameters), "")
        outcome = "refused" if status in (401, 403) else "failed"
        groups = principal.groups[: LIMITS.audited_groups] if isinstance(principal, User) else ()
        line = {
            "time": datetime.fromtimestamp(now, timezone.utc).isoformat(),
            "user": None if principal is None else name_of(principal),
            "groups": groups,
            "verb": "+".join(dict.fromkeys(needs)),
            "subresource": "+".join(dict.fromkeys(subresources)),
            "namespace": parameters.get("namespace") or exchange.query("namespace"),
            "name": named,
            "method": exchange.method,
            "path": exchange.path[:500],
            "outcome": "allowed" if status < 400 else outcome,
            "status": status,
            "request_id": exchange.request_id,
            "source": exchange.source,
        }
        _audit_log.info(json.dumps(line, ensure_ascii=True))

    def _is_listed(self, minute: int) -> bool:
        """True if one more request of a stranger has a line."""
        if minute != self._minute:
            if self._strangers > LIMITS.unidentified_lines:
                _audit_log.info('{"left_out": %d}', self._strangers - LIMITS.unidentified_lines)
            self._minute, self._strangers = minute, 0
        self._strangers += 1
        return self._strangers <= LIMITS.unidentified_lines


def _server(app: App, relay: Relay) -> Server:
    """The server of requests, sessions of pods and tunnels to pods."""
    sessions = websocket.upgrader(app.accept, max_message=LIMITS.session_message_bytes)
    upgrade = proxy.tunnels(
        lambda request: relay.locate(request.raw_path, request.headers) is not None,
        relay.open,
        sessions,
    )
    return Server(app, upgrade=upgrade)


class Controller:
    def __init__(  # noqa: PLR0913  # its collaborators
        self,
        *,
        backend: Backend,
        state: State,
        call_state: SqliteState,
        blob_stores: BlobStores,
        keys: Path,
        clock: Clock,
        secret: bytes,
        new_access: Callable[[Workloads], Access],
        stop: Callable[[bool], None] | None = None,
        hosts: Hosts = NO_HOSTS,
        environ: Mapping[str, str] | None = None,
        store_url: str = "",
    ) -> None:
        calls = Calls(call_state, blob_stores, clock)
        self._clock = clock
        self._backend = backend
        self._sessions: set[Session] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Sessions whose agents have not sent `Hello` yet.
        self._sessions_before_hello: set[Session] = set()
        self._last_request = clock.time()
        self.workloads = Workloads(
            backend=backend,
            state=state,
            blob_stores=blob_stores,
            calls=calls,
            clock=clock,
            secret=secret,
        )
        self._data: LocalStore | StoreRelay
        if store_url:
            self._data = StoreRelay(
                store_url, keys, secret=secret, clock=clock, services=self.workloads.in_namespace
            )
        else:
            self._data = LocalStore(
                blob_stores,
                keys,
                clock,
                has_service=self.workloads.has,
                holders=Holders(self.workloads.find, self.workloads.data_token),
                collect=lambda store, is_dry: self._garbage.collect_one(store, is_dry),
                environ=environ or {},
            )
        self.workloads.on_torn_down = self._data.end_service
        self._recovery = BlobRecovery(blob_stores, clock)
        self._garbage = self._garbage_collector(calls, blob_stores)
        blob_stores.on_full = self._garbage.hurry
        self._access = new_access(self.workloads)
        relay = Relay(self.workloads.get, secret=secret, clock=clock.time, hosts=hosts)
        self.app = App(
            self._routes(calls, blob_stores, hosts, stop),
            self._access,
            relay,
            new_session=self._new_session,
            on_request=self._note_request,
            # The local service has one user.
            audit=None if stop is not None else Audit(clock.time),
        )
        self._server = _server(self.app, relay)

    def _garbage_collector(self, calls: Calls, blob_stores: BlobStores) -> GarbageCollector:
        return GarbageCollector(
            blob_stores,
            specs=lambda: [*self.workloads.specs(), *calls.replays.specs()],
            results=calls.results,
            manifests=self._data.manifests,
            refresh=self._data.refresh,
            expire=calls.expire,
            clock=self._clock,
        )

    def _routes(
        self,
        calls: Calls,
        blob_stores: BlobStores,
        hosts: Hosts,
        stop: Callable[[bool], None] | None,
    ) -> Table:
        service = ServiceRoutes(
            self.workloads,
            backend=self._backend.name,
            started=self._clock.time(),
            sent_bytes=self._data.sent_bytes,
            stop=stop,
        )
        stores = self._backend.stores
        all_routes = [
            *service.routes(),
            *WorkloadRoutes(self.workloads, self._access, blob_stores, hosts).routes(),
            *BlobRoutes(blob_stores, self._ask_pods).routes(),
            *self._data.routes(),
            *CallRoutes(calls, self.workloads, blob_stores).routes(),
            *SecretRoutes(stores.secrets, self.workloads).routes(),
            *VolumeRoutes(stores.volumes, self.workloads).routes(),
        ]
        table = Table(route for route in all_routes if stop is not None or not route.is_local)
        service.described = table.routes
        return table

    async def start(self, listener: socket.socket) -> None:
        """Adopt the workloads and serve.

        Raises:
            StoreUnavailableError: The bucket of the store does not answer.
        """
        await self._data.start()
        await self.workloads.start()
        await self._server.start(listener)
        start_task(self._data.move(), self._tasks)
        self._garbage.start()
        _log.info("controller started pid=%s workloads=%s", os.getpid(), len(self.workloads))

    async def close(self, *, pods: bool) -> None:
        await self._garbage.close()
        await self._data.close()
        for task in self._tasks:
            task.cancel()
        await self.workloads.close(pods=pods)
        await self._backend.close(pods=pods)
        for session in list(self._sessions):
            session.close("the controller stops")
        await self._server.close(TIMING.server_close_seconds)

    def idle_seconds(self) -> float:
        """Seconds without a workload and without a request; 0 while there is either."""
        if self._server.open_requests or not self.workloads.is_empty:
            self._last_request = self._clock.time()
        return self._clock.time() - self._last_request

    def _note_request(self) -> None:
        self._last_request = self._clock.time()

    def _new_session(self, principal: Principal) -> Session:
        identity = identity_of(principal)
        identities = [identity_of(session.principal) for session in self._sessions_before_hello]
        if identities.count(identity) >= LIMITS.waiting_sessions:
            raise refusal(
                429,
                f"{name_of(principal)} has {LIMITS.waiting_sessions} sessions that have not said "
                "hello",
            )
        session = Session(
            principal,
            access=self._access,
            workloads=self.workloads,
            on_begin=self._recover,
            on_hello=self._sessions_before_hello.discard,
            clock=self._clock,
            on_end=self._end_session,
        )
        self._sessions.add(session)
        self._sessions_before_hello.add(session)
        return session

    def _recover(self, workload: Workload, session: Session) -> None:
        start_task(self._recovery.request(workload, session.send), self._tasks)

    async def _ask_pods(self, namespace: str, name: str, pod: str) -> str:
        """Request the blobs that a pod waits for from other pods; returns the state in words."""
        workload = self.workloads.workload_of(PodIdentity(namespace, name, pod))
        return "" if workload is None else await self._recovery.request_for(workload, pod)

    def _end_session(self, session: Session) -> None:
        self._sessions.discard(session)
        self._sessions_before_hello.discard(session)
