"""Routes about workloads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from msgspec.structs import replace

from kubetorch.controller import views
from kubetorch.controller.access import Asker, Need
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.logs import TAIL, PodLogs, check_pod, encode
from kubetorch.controller.relay import Hosts
from kubetorch.controller.routes.blobs import receive
from kubetorch.controller.routes.table import Exchange, Permission, Route
from kubetorch.controller.workloads import TOKEN_LEAST, TOKEN_LIFETIME, TOKEN_MOST, Workloads
from kubetorch.errors import ProtocolError, SpecError
from kubetorch.lib.asgi import NDJSON
from kubetorch.wire import messages, routes, tokens
from kubetorch.wire.messages import Deploy, DeployEvent, Ready, WorkloadView

#: Bytes that the head of a deploy may have: rendering it takes tens of milliseconds.
HEAD_LIMIT = 128 * 1024
#: Most seconds that a delete may wait for calls.
GRACE_MOST = 3600.0
# Lines of an answer that are put together.
_LINES = 500
_DEPLOY = (Permission("create"), Permission("update"))
#: What tokens are for, and what somebody who wants one needs.
_VERBS = {
    "call": Permission("create", "call", "found", "for a token to call"),
    "exec": Permission("create", "exec", "found", "for a token to run commands"),
    "logs": Permission("get", "logs", "found", "for a token to read logs"),
}


class _TokenRequest(msgspec.Struct, frozen=True):
    """Body of a request for a token."""

    ttl: float = TOKEN_LIFETIME
    verbs: tuple[str, ...] = (tokens.CALL,)


class WorkloadRoutes:
    def __init__(self, workloads: Workloads, blob_stores: BlobStores, hosts: Hosts) -> None:
        self._workloads = workloads
        self._hosts = hosts
        self._blob_stores = blob_stores

    def routes(self) -> list[Route]:
        one = f"{routes.WORKLOADS}/{{namespace}}/{{name}}"
        return [
            Route("GET", routes.WORKLOADS, self.list, (Permission("list", scope="all"),)),
            Route("GET", f"{routes.WORKLOADS}/{{namespace}}", self.list, (Permission("list"),)),
            Route("GET", one, self.get, (Permission("get"),)),
            Route("GET", f"{one}/pods", self.pods, (Permission("get"),)),
            Route("DELETE", one, self.delete, (Permission("delete"),), is_audited=True),
            Route("POST", f"{one}/deploy", self.deploy, _DEPLOY, is_audited=True),
            Route("POST", f"{one}/token", self.token, tuple(_VERBS.values()), is_audited=True),
            Route("GET", f"{one}/logs", self.logs, (Permission("get", "logs"),)),
        ]

    async def list(self, exchange: Exchange, namespace: str | None = None) -> None:
        """All workloads, or those of a namespace."""
        found = self._workloads.list(namespace)
        user = exchange.asker.creator(None).user
        await exchange.respond_message([_owned(view, user) for view in found])

    async def get(self, exchange: Exchange, namespace: str, name: str) -> None:
        """One workload, with a token to call it for those who may.

        `?program=` is the process of this machine that has a handle from now on.
        """
        workload = self._workloads.get(namespace, name)
        workload.opened_by(exchange.query("program"))
        view = workload.view()
        user = exchange.asker.creator(None).user
        await exchange.respond_message(_owned(await self._complete(exchange.asker, view), user))

    async def pods(self, exchange: Exchange, namespace: str, name: str) -> None:
        """The pods of a workload as their cluster describes them.

        Who may not `get pods` sees no values of variables, and no pods that somebody else made.
        """
        workload = self._workloads.get(namespace, name)
        found = self._workloads.backend.pod_manifests(namespace, name)
        if not await exchange.asker.may(Need("get", namespace, group="", resource="pods")):
            own = {pod.name for pod in workload.pods if pod.is_ours}
            ours = (pod for pod in found if pod["metadata"]["name"] in own)
            found = [views.without_values(pod) for pod in ours]
        await exchange.respond_message(found)

    async def delete(self, exchange: Exchange, namespace: str, name: str) -> None:
        """End a workload; `?grace=` is how many seconds its calls have."""
        grace = exchange.number("grace", routes.DELETE_GRACE, least=0.0, most=GRACE_MOST)
        left = await self._workloads.delete(namespace, name, grace=grace)
        await exchange.respond_message({"deleted": name, "left": left})

    async def token(self, exchange: Exchange, namespace: str, name: str) -> None:
        """A token for one workload, for what who asks may do with it."""
        asked = await exchange.message(_TokenRequest)
        if not TOKEN_LEAST <= asked.ttl <= TOKEN_MOST:
            raise ProtocolError(
                f"ttl is {asked.ttl}; it must be from {TOKEN_LEAST:.0f} to {TOKEN_MOST:.0f} seconds"
            )
        if not asked.verbs or not set(asked.verbs) <= set(tokens.VERBS):
            raise ProtocolError(
                f"verbs is {list(asked.verbs)}; it must be some of {', '.join(tokens.VERBS)}"
            )
        for verb in asked.verbs:
            await exchange.asker.require(_VERBS[verb].of(namespace, name))
        self._workloads.get(namespace, name)
        token = self._workloads.token(
            namespace, name, ttl=asked.ttl, subject=exchange.asker.name, verbs=asked.verbs
        )
        await exchange.respond_message(token)

    async def deploy(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Deploy a workload; the answer is what happens, one event on each line."""
        chunks = exchange.chunks()
        head, rest = await _head(chunks)
        deploy = messages.decode(Deploy, head)
        self._workloads.check(deploy, namespace, name)
        creator = exchange.asker.creator(deploy.spec.username)
        # Before its code is stored, and once more when it is its turn.
        self._workloads.check_owner(deploy, creator)
        grant = await exchange.asker.check_deploy(deploy.spec)
        await receive(_joined(rest, chunks), self._blob_stores, namespace)
        events = await self._workloads.deploy(deploy, creator, grant)
        await exchange.respond_stream(self._lines(exchange, events), content_type=NDJSON)

    async def _lines(
        self, exchange: Exchange, events: AsyncIterator[DeployEvent]
    ) -> AsyncGenerator[bytes, None]:
        async for event in events:
            if isinstance(event, Ready):  # others may wait for the same deploy
                view = await self._complete(exchange.asker, event.workload)
                event = replace(event, workload=view)
            yield messages.encode(event) + b"\n"

    async def _complete(self, asker: Asker, view: WorkloadView) -> WorkloadView:
        """A workload with the host of its app, and with a token for who may call it."""
        app, key = view.spec.callable.app, (view.spec.namespace, view.spec.name)
        if app is not None and app.port is not None:
            view = replace(view, app_host=self._hosts.of(*key))
        if await asker.may(_VERBS[tokens.CALL].of(*key)):
            token = self._workloads.token(*key, ttl=TOKEN_LIFETIME, subject=asker.name)
            view = replace(view, token=token.token, token_expires=token.expires)
        return view

    async def logs(self, exchange: Exchange, namespace: str, name: str) -> None:
        """The last lines of the pods, and with `?follow=true` those that come."""
        workload = self._workloads.get(namespace, name)
        count = int(exchange.number("tail", TAIL, least=0, most=routes.TAIL_MOST))
        pod = check_pod(workload, exchange.query("pod"))
        of_pods = Need("get", namespace, subresource="log", group="", resource="pods")
        reader = PodLogs(
            workload,
            self._workloads.backend,
            token=lambda: (
                self._workloads.token(
                    namespace, name, ttl=60.0, subject="logs", verbs=(tokens.LOGS,)
                ).token
            ),
            may_read_others=lambda: exchange.asker.may(of_pods),
            pod=pod,
        )
        lines = _log_lines(reader, count, follow=exchange.flag("follow"))
        await exchange.respond_stream(lines, content_type=NDJSON)


def _owned(view: WorkloadView, user: str) -> WorkloadView:
    """A workload as this user sees it, whose own it may be."""
    is_own = view.creator is not None and view.creator.user == user
    return replace(view, is_own=True) if is_own else view


async def _log_lines(reader: PodLogs, count: int, *, follow: bool) -> AsyncGenerator[bytes, None]:
    found = await reader.tail(count)
    for start in range(0, len(found), _LINES):
        yield encode(found[start : start + _LINES])
    if follow:
        async for line in reader.follow():
            yield encode([line])


async def _head(chunks: AsyncIterator[bytes]) -> tuple[bytes, bytes]:
    """The first line of a body, and what came with it."""
    begun = bytearray()
    async for chunk in chunks:
        begun += chunk
        end = begun.find(b"\n")
        if 0 <= end <= HEAD_LIMIT:
            return bytes(begun[:end]), bytes(begun[end + 1 :])
        if len(begun) > HEAD_LIMIT:
            break
    else:
        return bytes(begun), b""
    raise SpecError(
        f"the declaration of the service has more than {HEAD_LIMIT:,} bytes",
        hint="make its manifest, environment and image steps shorter; data belongs into a volume, "
        "a secret, or the project",
    )


async def _joined(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for chunk in chunks:
        yield chunk
