"""Routes about workloads."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from msgspec.structs import replace

from kubetorch.controller.access import Asker, Need
from kubetorch.controller.depots import Depots
from kubetorch.controller.exchange import Exchange
from kubetorch.controller.podlogs import TAIL, PodLogs, check_pod, encode
from kubetorch.controller.routes.blobs import receive
from kubetorch.controller.routes.table import Permission, Route
from kubetorch.controller.workload import Workload
from kubetorch.controller.workloads import (
    TOKEN_LEAST,
    TOKEN_LIFETIME,
    TOKEN_MOST,
    Workloads,
)
from kubetorch.errors import ProtocolError
from kubetorch.lib.asgi import NDJSON
from kubetorch.wire import messages, routes, tokens, waits
from kubetorch.wire.messages import Deploy, DeployEvent, Ready

#: Bytes that the head of a deploy may have.
HEAD_LIMIT = 1024 * 1024
#: Most seconds that a delete may wait for calls.
GRACE_MOST = 3600.0
# Lines of an answer that are put together.
_LINES = 500

_log = logging.getLogger(__name__)

_DEPLOY = (Permission("create"), Permission("update"))
#: What tokens are for, and what somebody who wants one needs.
_VERBS = {
    "call": Permission("create", "call", "found", "for a token to call"),
    "exec": Permission("create", "exec", "found", "for a token to run commands"),
    "logs": Permission("get", "logs", "found", "for a token to read logs"),
}


class _TokenRequest(msgspec.Struct, frozen=True):
    """Body of a request for a token.

    Attributes:
        ttl: How many seconds it is good for.
        verbs: What it is for: `call`, `exec`, `logs`.
    """

    ttl: float = TOKEN_LIFETIME
    verbs: tuple[str, ...] = (tokens.CALL,)


class WorkloadRoutes:
    """Handlers.

    Args:
        workloads: What they work on.
        depots: Where blobs of deploys go.
    """

    def __init__(self, workloads: Workloads, depots: Depots) -> None:
        self._workloads = workloads
        self._depots = depots

    def routes(self) -> list[Route]:
        """The routes."""
        one = f"{routes.WORKLOADS}/{{namespace}}/{{name}}"
        return [
            Route("GET", routes.WORKLOADS, self.list, (Permission("list", scope="all"),)),
            Route("GET", f"{routes.WORKLOADS}/{{namespace}}", self.list, (Permission("list"),)),
            Route("GET", one, self.get, (Permission("get"),)),
            Route("DELETE", one, self.delete, (Permission("delete"),), is_audited=True),
            Route("POST", f"{one}/deploy", self.deploy, _DEPLOY, is_audited=True),
            Route("POST", f"{one}/token", self.token, tuple(_VERBS.values()), is_audited=True),
            Route("GET", f"{one}/logs", self.logs, (Permission("get", "logs"),)),
        ]

    async def list(self, exchange: Exchange, namespace: str | None = None) -> None:
        """All workloads, or those of a namespace."""
        await exchange.respond_message(self._workloads.list(namespace))

    async def get(self, exchange: Exchange, namespace: str, name: str) -> None:
        """One workload, with a token to call it for those who may."""
        workload = self._workloads.get(namespace, name)
        if await exchange.asker.may(_VERBS[tokens.CALL].of(namespace, name)):
            view = self._workloads.view(workload, exchange.asker.name)
        else:
            view = workload.view()
        await exchange.respond_message(view)

    async def delete(self, exchange: Exchange, namespace: str, name: str) -> None:
        """End a workload; `?grace=` is how many seconds its calls have."""
        grace = exchange.number("grace", waits.DELETE_GRACE, least=0.0, most=GRACE_MOST)
        await self._workloads.delete(namespace, name, grace=grace)
        await exchange.respond_message({"deleted": name})

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

    # ------------------------------------------------------------------------------------ deploy

    async def deploy(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Deploy a workload; the answer is what happens, one event on each line."""
        chunks = exchange.chunks()
        head, rest = await _head(chunks)
        deploy = messages.decode(Deploy, head)
        self._workloads.check(deploy, namespace, name)
        await exchange.asker.check_deploy(deploy.spec)
        await receive(_joined(rest, chunks), self._depots, namespace)
        events = await self._workloads.deploy(deploy)
        await exchange.respond_stream(self._lines(exchange, events), content_type=NDJSON)

    async def _lines(
        self, exchange: Exchange, events: AsyncIterator[DeployEvent]
    ) -> AsyncGenerator[bytes, None]:
        async for event in events:
            if isinstance(event, Ready):
                event = await self._with_token(exchange.asker, event)
            yield messages.encode(event) + b"\n"

    async def _with_token(self, asker: Asker, ready: Ready) -> Ready:
        """The end of a deploy as who deployed sees it; others may wait for the same deploy."""
        key = (ready.workload.spec.namespace, ready.workload.spec.name)
        if not await asker.may(_VERBS[tokens.CALL].of(*key)):
            return ready
        token = self._workloads.token(*key, ttl=TOKEN_LIFETIME, subject=asker.name)
        view = replace(ready.workload, token=token.token, token_expires=token.expires)
        return replace(ready, workload=view)

    # -------------------------------------------------------------------------------------- logs

    async def logs(self, exchange: Exchange, namespace: str, name: str) -> None:
        """The last lines of the pods, and with `?follow=true` those that come."""
        workload = self._workloads.get(namespace, name)
        count = int(exchange.number("tail", TAIL, least=0, most=routes.TAIL_MOST))
        pod = check_pod(workload, exchange.query("pod"))
        reader = self._reader(workload, pod, exchange.asker)
        lines = _log_lines(reader, count, follow=exchange.flag("follow"))
        await exchange.respond_stream(lines, content_type=NDJSON)

    def _reader(self, workload: Workload, pod: str | None, asker: Asker) -> PodLogs:
        of_pods = Need("get", workload.key[0], subresource="log", group="", resource="pods")
        return PodLogs(
            workload,
            self._workloads.backend,
            token=lambda: (
                self._workloads.token(
                    *workload.key, ttl=60.0, subject="logs", verbs=(tokens.LOGS,)
                ).token
            ),
            may_read_others=lambda: asker.may(of_pods),
            pod=pod,
        )


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
        if end >= 0:
            return bytes(begun[:end]), bytes(begun[end + 1 :])
        if len(begun) > HEAD_LIMIT:
            raise ProtocolError(f"the head of a deploy has more than {HEAD_LIMIT} bytes")
    return bytes(begun), b""


async def _joined(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for chunk in chunks:
        yield chunk
