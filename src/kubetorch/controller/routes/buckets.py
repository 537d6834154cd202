"""Routes about buckets: what is pulled from them and written to them; for users, and for pods."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from kubetorch.controller.buckets import Buckets
from kubetorch.controller.routes.data import check_sender, faults_of_sender
from kubetorch.controller.routes.table import Exchange, Permission, Route
from kubetorch.lib.asgi import NDJSON
from kubetorch.wire import messages, routes
from kubetorch.wire.buckets import BucketProgress, PullBucket, PushBucket

_NEEDS = Permission("get", "data"), Permission("create", "data")


class BucketRoutes:
    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def routes(self) -> list[Route]:
        base = f"{routes.DATA}/{{namespace}}"
        return [
            Route("POST", f"{base}/pull", self.pull, _NEEDS, "pods", is_audited=True),
            Route("POST", f"{base}/push", self.push, _NEEDS, "pods", is_audited=True),
        ]

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
        for permission in _NEEDS:
            await check_sender(exchange, namespace, permission)


async def _lines(rows: AsyncGenerator[BucketProgress, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rows):
        async for row in rows:
            yield messages.encode(row) + b"\n"
