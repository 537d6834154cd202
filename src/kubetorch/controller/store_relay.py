"""The controller's side of a store of its own (`kubetorch.controller.store_server`).

Requests of the data store are passed on as they come, with a token for their sender's rights and,
if they are about keys, the digest of the namespace's services, which the store is told before. A
store that does not know these services any more refuses the request, which is then sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from kubetorch.controller.access import Asker, BoundPod, PodIdentity, Principal, User
from kubetorch.controller.blobs import NamespaceBlobs
from kubetorch.controller.routes.data import (
    BUCKET_ROUTES,
    CONTACT_NEEDS,
    CONTACT_ROUTE,
    CONTROLLER_VERB,
    DATA_ROUTES,
    END_ROUTE,
    RELAY_VERB,
    SERVICES_ROUTE,
    DataRoute,
    check_sender,
)
from kubetorch.controller.routes.table import Exchange, Route
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Workload
from kubetorch.datastore.key_folder import KeyFolder
from kubetorch.errors import KubetorchError, StoreUnavailableError
from kubetorch.lib import deadlines, proxy
from kubetorch.lib.asgi import Message
from kubetorch.lib.clock import Clock
from kubetorch.lib.http1 import Header
from kubetorch.lib.proxy import Mount, Target
from kubetorch.lib.tasks import cancel_all, start_task
from kubetorch.specs import names
from kubetorch.wire import exceptions, messages, routes, tokens
from kubetorch.wire.data import (
    EndedKeys,
    EndService,
    NamespaceServices,
    ServicePod,
    StoreContact,
    StoreStatus,
    services_digest,
)

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_HINT = "kt check says why; then try again"


class _StandbyError(Exception):
    """The store that answers does not lead, or not yet: it has begun nothing."""


class _Answer(NamedTuple):
    status: int
    body: bytes


class StoreRelay:
    """Passes requests of the data store on.

    Args:
        url: The store's base URL.
        keys: The folder of the keys that the controller had before there was such a store.
        services: The workloads of a namespace.
    """

    def __init__(
        self,
        url: str,
        keys: Path,
        *,
        secret: bytes,
        clock: Clock,
        services: Callable[[str], Iterable[Workload]],
    ) -> None:
        address = urlsplit(url)
        assert address.hostname is not None, url
        self._url = url
        # What the controller had stays whole: the store may be given up again.
        entries = keys.iterdir() if keys.is_dir() else ()
        self._former_keys = {entry.name: KeyFolder(entry) for entry in entries if entry.is_dir()}
        self._host, self._port = address.hostname, address.port or 80
        self._secret = secret
        self._clock = clock
        self._workloads = services
        # By namespace: the services that the store was told last.
        self._service_digests: dict[str, str] = {}
        self._list_locks: dict[str, asyncio.Lock] = {}
        self._sent_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """The routes of a store in this process, passed on."""
        relayed = (*DATA_ROUTES, *BUCKET_ROUTES)
        return [
            *(route.handled_by(partial(self._relay, route)) for route in relayed),
            CONTACT_ROUTE.handled_by(self.contact),
        ]

    async def start(self) -> None:
        """Begin without the store: it may start later, and anew."""

    async def move(self) -> None:
        """Leave the keys that the controller had before, and say so."""
        for namespace, folder in self._former_keys.items():
            if len(folder):
                _log.warning("keys stay on this disk namespace=%s count=%s", namespace, len(folder))

    async def close(self) -> None:
        await cancel_all(self._tasks)

    def manifests(self, store: NamespaceBlobs) -> set[str]:
        """The manifests of the keys that the controller had before."""
        folders = [folder for name, folder in self._former_keys.items() if store.is_of(name)]
        return {view.manifest for folder in folders for view in folder.all()}

    def refresh(self, store: NamespaceBlobs, only_unsettled: bool) -> None:
        """Read no keys: they are not here."""

    async def contact(self, exchange: Exchange, namespace: str) -> None:
        """Where the store is, and a token with the rights that the sender has on the namespace."""
        names.check_namespace(namespace)
        asker = exchange.asker
        is_own_pod = asker.pod_namespace == namespace
        verbs = [
            permission.verb
            for permission in CONTACT_NEEDS
            if is_own_pod or await asker.may(permission.of(namespace, ""))
        ]
        seconds = TIMING.store_token_seconds
        contact = StoreContact(
            self._url,
            self._token(namespace, tuple(verbs), asker, seconds),
            self._clock.time() + seconds,
        )
        await exchange.respond_message(contact)

    async def _relay(self, route: DataRoute, exchange: Exchange, namespace: str) -> None:
        names.check_namespace(namespace)
        if route.audience == "pods":
            for need in route.needs:
                await check_sender(exchange, namespace, need)
        verbs = tuple(need.verb for need in route.needs)
        if route.is_bulk:
            headers = self._headers(exchange, namespace, verbs)
            await self._patiently(partial(self._pass_on, exchange, headers), 0.0)
            return
        # It may be sent more than once.
        await exchange.body(LIMITS.request_body_bytes)
        for _ in range(LIMITS.store_attempts):
            digest = await self._list_services(namespace)
            headers = self._headers(exchange, namespace, (*verbs, RELAY_VERB))
            headers.append(_header(routes.SERVICES, digest))
            send = partial(self._pass_on, exchange, headers)
            if await self._patiently(send, TIMING.store_patience_seconds):
                return
            self._service_digests.pop(namespace, None)
        raise StoreUnavailableError("the data store forgets the services", hint=_HINT)

    def _headers(self, exchange: Exchange, namespace: str, verbs: tuple[str, ...]) -> list[Header]:
        token = self._token(namespace, verbs, exchange.asker, TIMING.relay_token_seconds)
        return [_authorization(token), _header(routes.REQUEST_ID, exchange.request_id)]

    async def _pass_on(self, exchange: Exchange, headers: list[Header]) -> bool:
        """Pass a request on, and its answer back, unless the store does not know its services."""
        is_known = True

        async def send(message: Message) -> None:
            nonlocal is_known
            _check_leader(message)
            if message.get("status") == routes.UNKNOWN_SERVICES:
                is_known = False
            if is_known:
                await exchange.pass_on(message)

        sent_headers, receive = exchange.replay()
        target = self._target(headers, TIMING.store_patience_seconds)
        try:
            await proxy.relay(exchange.scope, sent_headers, receive, send, target)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise self._unavailable(error) from error
        return is_known

    async def _patiently(self, send: Callable[[], Awaitable[_T]], patience: float) -> _T:
        """Send a request again while the store that answers does not lead."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while True:
            try:
                return await send()
            except _StandbyError as error:
                if loop.time() >= end:
                    raise self._unavailable(error) from error
            await asyncio.sleep(TIMING.store_connect_interval_seconds)

    def _target(self, headers: Iterable[Header], patience: float) -> Target:
        mount = Mount("", "")
        return Target(self._host, self._port, mount, tuple(headers), partial(self._dial, patience))

    async def _dial(self, patience: float) -> socket.socket:
        """Connect to the store, which may be about to start; nothing was sent before."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while True:
            try:
                return await self._connect()
            except (OSError, TimeoutError, asyncio.TimeoutError):
                if loop.time() >= end:
                    raise
            await asyncio.sleep(TIMING.store_connect_interval_seconds)

    async def _connect(self) -> socket.socket:
        # Not in a thread: those of the loop work for deploys, too.
        loop = asyncio.get_running_loop()
        async with deadlines.timeout(TIMING.store_connect_seconds):
            infos = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = infos[0]
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                await loop.sock_connect(connection, address)
            except BaseException:
                connection.close()
                raise
            return connection

    def _unavailable(self, error: Exception) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the data store at {self._url} does not answer: {str(error) or type(error).__name__}",
            hint=_HINT,
        )

    # ----------------------------------------------------------------- what the controller asks

    async def _list_services(self, namespace: str) -> str:
        """Let the store know the services of a namespace; returns their digest."""
        # One list at a time: the store keeps the last one that arrives.
        async with self._list_locks.setdefault(namespace, asyncio.Lock()):
            services = {
                workload.key[1]: _service_pods(workload) for workload in self._workloads(namespace)
            }
            encoded = messages.encode(NamespaceServices(services))
            digest = services_digest(encoded)
            if self._service_digests.get(namespace) != digest:
                path = routes.data(namespace, SERVICES_ROUTE.verb)
                await self._ask(path, namespace, encoded, patience=TIMING.store_patience_seconds)
                self._service_digests[namespace] = digest
            return digest

    async def end_service(self, namespace: str, service: str) -> int:
        """Delete the keys of a service that was torn down; returns their number.

        Raises:
            KubetorchError: The store does not answer, or refuses. It is asked again later.
        """
        try:
            return await self._end_service(namespace, service)
        except KubetorchError:
            start_task(self._end_later(namespace, service), self._tasks)
            raise

    async def _end_service(self, namespace: str, service: str) -> int:
        path = routes.data(namespace, END_ROUTE.verb)
        answer = await self._ask(path, namespace, messages.encode(EndService(service)))
        return messages.decode(EndedKeys, answer).keys

    async def _end_later(self, namespace: str, service: str) -> None:
        """Ask until the store answers, or there is a new service of this name."""
        while True:
            await asyncio.sleep(TIMING.store_retry_seconds)
            if any(workload.key[1] == service for workload in self._workloads(namespace)):
                return
            try:
                count = await self._end_service(namespace, service)
            except KubetorchError as error:
                _log.warning("keys not deleted service=%s/%s error=%s", namespace, service, error)
            else:
                _log.info("keys deleted service=%s/%s count=%s", namespace, service, count)
                return

    async def sent_bytes(self) -> int:
        """Bytes of blobs that the store has sent to getters, as far as it has told."""
        with contextlib.suppress(KubetorchError):
            answer = await self._ask(routes.STATUS, "", seconds=TIMING.store_connect_seconds)
            self._sent_bytes = messages.decode(StoreStatus, answer).sent_bytes
        return self._sent_bytes

    async def _ask(
        self,
        path: str,
        namespace: str,
        body: bytes | None = None,
        *,
        patience: float = 0.0,
        seconds: float = TIMING.store_answer_seconds,
    ) -> bytes:
        """The body of an answer to the controller itself; without a body it is a `GET`."""
        token = self._own_token(namespace)
        headers = [_authorization(token)]
        if body is not None:
            headers.append((b"content-length", str(len(body)).encode()))
        scope = {
            "method": "GET" if body is None else "POST",
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        target = self._target([(b"host", self._host.encode())], patience)
        send = partial(_exchange, scope, body or b"", target)
        try:
            async with deadlines.timeout(seconds):
                answer = await self._patiently(send, patience)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise self._unavailable(error) from error
        if answer.status >= 300:
            raise exceptions.rebuild(exceptions.parse_json(answer.body))
        return answer.body

    def _own_token(self, namespace: str) -> str:
        now = self._clock.time()
        audience = tokens.audience(namespace, tokens.STORE)
        expires = now + TIMING.relay_token_seconds
        claims = tokens.Claims(audience, expires, "controller", (CONTROLLER_VERB,), now)
        return tokens.sign(tokens.workload_key(self._secret, audience), claims)

    def _token(self, namespace: str, verbs: tuple[str, ...], asker: Asker, seconds: float) -> str:
        """A token for the rights of a sender, who may be a pod."""
        audience, now = tokens.audience(namespace, tokens.STORE), self._clock.time()
        pod = ""
        if asker.pod_namespace is not None:
            pod = f"{asker.pod_namespace}/{_pod_name(asker.principal)}"
        claims = tokens.Claims(audience, now + seconds, asker.name, verbs, now, pod)
        return tokens.sign(tokens.workload_key(self._secret, audience), claims)


def _pod_name(principal: Principal) -> str:
    """The name of a pod; empty for any pod of its namespace."""
    match principal:
        case PodIdentity(pod=pod) | User(pod=BoundPod(name=pod)):
            return pod
    return ""


def _service_pods(workload: Workload) -> tuple[ServicePod, ...]:
    """The pods of a workload, also those that have not connected yet."""
    views = {pod.name: pod for pod in workload.pod_views()}
    pods = [
        ServicePod(name, views[name].url, views[name].phase) if name in views else ServicePod(name)
        for name in sorted(workload.pod_names)
    ]
    return tuple(pods)


def _check_leader(message: Message) -> None:
    """Raise `_StandbyError` at the begin of the answer of a store that does not lead."""
    names = [name for name, _ in message.get("headers", ())]
    if routes.STANDBY.lower().encode() in names:
        raise _StandbyError("it does not lead yet")


async def _exchange(scope: Message, body: bytes, target: Target) -> _Answer:
    """The answer to a request with this body."""
    request = iter([{"type": "http.request", "body": body, "more_body": False}])
    pieces: list[bytes] = []
    status = 0

    async def receive() -> Message:
        message = next(request, None)
        return message if message is not None else await asyncio.Future[Message]()

    async def send(message: Message) -> None:
        nonlocal status
        _check_leader(message)
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    await proxy.relay(scope, scope["headers"], receive, send, target)
    return _Answer(status, b"".join(pieces))


def _header(name: str, value: str) -> Header:
    return name.lower().encode(), value.encode("latin-1")


def _authorization(token: str) -> Header:
    return _header(routes.AUTHORIZATION, f"Bearer {token}")
