"""Routes about spawned calls."""

from __future__ import annotations

from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.calls import Calls, unknown_call
from kubetorch.controller.routes.blobs import in_thread
from kubetorch.controller.routes.table import Exchange, Permission, Route
from kubetorch.controller.workloads import Workloads
from kubetorch.wire import routes
from kubetorch.wire.messages import CallView

#: Content type of a packed outcome.
OUTCOME = "application/octet-stream"

# The id says neither namespace nor workload.
_READ = (Permission("get", scope="handler", when="on the workload that runs it"),)
_CALL = (Permission("create", "call", "handler", "on the workload that runs it"),)


class CallRoutes:
    def __init__(self, calls: Calls, workloads: Workloads, blob_stores: BlobStores) -> None:
        self._calls = calls
        self._workloads = workloads
        self._blob_stores = blob_stores

    def routes(self) -> list[Route]:
        call_path = f"{routes.CALLS}/{{call_id}}"
        return [
            Route("GET", routes.CALLS, self.list, (Permission("list", scope="query"),)),
            Route("GET", call_path, self.get, _READ),
            Route("POST", f"{call_path}/cancel", self.cancel, _CALL, is_audited=True),
            Route("GET", f"{call_path}/result", self.result, _CALL),
            Route("GET", f"{call_path}/record", self.record, _CALL),
            Route("GET", f"{call_path}/arguments", self.arguments, _CALL),
        ]

    async def list(self, exchange: Exchange) -> None:
        """Calls, newest first; `?namespace=` and `?workload=` choose some."""
        calls = self._calls.list(
            namespace=exchange.query("namespace"), workload=exchange.query("workload")
        )
        await exchange.respond_message(calls)

    async def get(self, exchange: Exchange, call_id: str) -> None:
        """One call."""
        await exchange.respond_message(await self._find(exchange, call_id, _READ))

    async def cancel(self, exchange: Exchange, call_id: str) -> None:
        """Cancel a call that still runs."""
        await self._find(exchange, call_id, _CALL)
        await exchange.respond_message(self._workloads.cancel_call(call_id))

    async def result(self, exchange: Exchange, call_id: str) -> None:
        """Answer with the packed outcome of a call."""
        call = await self._find(exchange, call_id, _CALL)
        digest = self._calls.result(call_id)
        _, pieces = self._blob_stores.of(call.namespace).blobs.stream(digest)
        answer = in_thread(iter(pieces), self._blob_stores)
        await exchange.respond_stream(answer, content_type=OUTCOME)

    async def record(self, exchange: Exchange, call_id: str) -> None:
        """Answer with what a call was, for a replay."""
        call = await self._find(exchange, call_id, _CALL)
        await self._calls.expect_record(call_id)
        await exchange.respond_message(self._calls.replays.view(call, exchange.asker.name))

    async def arguments(self, exchange: Exchange, call_id: str) -> None:
        """Answer with the packed record of a call, which has its arguments."""
        call = await self._find(exchange, call_id, _CALL)
        digest = self._calls.replays.digest(call)
        _, pieces = self._blob_stores.of(call.namespace).blobs.stream(digest)
        answer = in_thread(iter(pieces), self._blob_stores)
        await exchange.respond_stream(answer, content_type=OUTCOME)

    async def _find(
        self, exchange: Exchange, call_id: str, needs: tuple[Permission, ...]
    ) -> CallView:
        """A call that the sender may use; any other call gets the error of an unknown one."""
        call = await self._calls.expect(call_id)
        for permission in needs:
            need = permission.of(call.namespace, call.workload)
            if not await exchange.asker.may(need):
                raise unknown_call(call_id)
        return call
