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
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kubetorch.controller.access import Asker, BoundPod, PodIdentity, Principal, User
from kubetorch.controller.blobs import NamespaceBlobs
from kubetorch.controller.routes.data import (
    BUCKET_ROUTES,
    CONTACT_NEEDS,
    CONTACT_ROUTE,
    CONTROLLERS,
    DATA_ROUTES,
    END_ROUTE,
    SERVICES_ROUTE,
    DataRoute,
    check_sender,
)
from kubetorch.controller.routes.table import Exchange, Route
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Workload
from kubetorch.errors import KubetorchError, StoreUnavailableError
from kubetorch.lib import deadlines, proxy, sockets
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

_log = logging.getLogger(__name__)

_HINT = "kt check says why; then try again"


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
        self._keys = keys
        self._host, self._port = address.hostname, address.port or 80
        self._secret = secret
        self._clock = clock
        self._workloads = services
        # By namespace: the services that the store was told last.
        self._service_digests: dict[str, str] = {}
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
        count = await asyncio.to_thread(
            lambda: sum(file.is_file() for file in self._keys.rglob("*"))
        )
        if count:
            _log.warning("keys of before stay on this disk count=%s folder=%s", count, self._keys)

    async def close(self) -> None:
        await cancel_all(self._tasks)

    def manifests(self, store: NamespaceBlobs) -> set[str]:
        """No manifest is here."""
        return set()

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
        token = self._token(namespace, verbs, exchange.asker, TIMING.relay_token_seconds)
        headers = [_authorization(token), _header(routes.REQUEST_ID, exchange.request_id)]
        if route.is_bulk:
            await self._pass_on(exchange, headers)
            return
        # It may be sent more than once.
        await exchange.body(LIMITS.request_body_bytes)
        for _ in range(LIMITS.store_attempts):
            digest = await self._list_services(namespace)
            if await self._pass_on(exchange, [*headers, _header(routes.SERVICES, digest)]):
                return
            self._service_digests.pop(namespace, None)
        raise StoreUnavailableError("the data store forgets the services", hint=_HINT)

    async def _pass_on(self, exchange: Exchange, headers: list[Header]) -> bool:
        """Pass a request on, and its answer back, unless the store does not know its services."""
        is_known = True

        async def send(message: Message) -> None:
            nonlocal is_known
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

    def _target(self, headers: Iterable[Header], patience: float) -> Target:
        mount = Mount("", "")
        return Target(self._host, self._port, mount, tuple(headers), partial(self._dial, patience))

    async def _dial(self, patience: float) -> socket.socket:
        """Connect to the store, which may be about to start; nothing was sent before."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while True:
            try:
                connection = await asyncio.to_thread(
                    sockets.connect, self._host, self._port, TIMING.store_connect_seconds
                )
            except OSError:
                if loop.time() >= end:
                    raise
            else:
                connection.setblocking(False)
                return connection
            await asyncio.sleep(TIMING.store_connect_interval_seconds)

    def _unavailable(self, error: Exception) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the data store at {self._url} does not answer: {str(error) or type(error).__name__}",
            hint=_HINT,
        )

    # ----------------------------------------------------------------- what the controller asks

    async def _list_services(self, namespace: str) -> str:
        """Let the store know the services of a namespace; returns their digest."""
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
            StoreUnavailableError: The store does not answer. It is asked again later.
        """
        try:
            return await self._end_service(namespace, service)
        except StoreUnavailableError:
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
            status = messages.decode(StoreStatus, await self._ask(routes.STATUS, ""))
            self._sent_bytes = status.sent_bytes
        return self._sent_bytes

    async def _ask(
        self, path: str, namespace: str, body: bytes | None = None, *, patience: float = 0.0
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
        try:
            async with deadlines.timeout(TIMING.store_answer_seconds):
                answer = await _exchange(scope, body or b"", target)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise self._unavailable(error) from error
        if answer.status >= 300:
            raise exceptions.rebuild(exceptions.parse_json(answer.body))
        return answer.body

    def _own_token(self, namespace: str) -> str:
        now = self._clock.time()
        audience = tokens.audience(namespace, tokens.STORE)
        expires = now + TIMING.relay_token_seconds
        claims = tokens.Claims(audience, expires, "controller", (CONTROLLERS,), now)
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
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    await proxy.relay(scope, scope["headers"], receive, send, target)
    return _Answer(status, b"".join(pieces))


def _header(name: str, value: str) -> Header:
    return name.lower().encode(), value.encode("latin-1")


def _authorization(token: str) -> Header:
    return _header(routes.AUTHORIZATION, f"Bearer {token}")
