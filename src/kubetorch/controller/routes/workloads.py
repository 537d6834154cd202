"""Routes about workloads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from msgspec.structs import replace

from kubetorch.controller import views
from kubetorch.controller.access import Access, Asker, Need
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.logs import PodLogs, check_pod, encode
from kubetorch.controller.relay import Hosts
from kubetorch.controller.routes.blobs import receive
from kubetorch.controller.routes.table import Exchange, Permission, Route
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import ProtocolError, SpecError
from kubetorch.lib.asgi import NDJSON
from kubetorch.wire import messages, routes, tokens
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import Deploy, DeployEvent, Ready, WorkloadView

_DEPLOY = (Permission("create"), Permission("update"))
#: By verb of a token: the right that a user needs to get the token.
_VERBS = {
    "call": Permission("create", "call", "handler", "for a token to call"),
    "exec": Permission("create", "exec", "handler", "for a token to run commands"),
    "logs": Permission("get", "logs", "handler", "for a token to read logs"),
}


class _TokenRequest(msgspec.Struct, frozen=True):
    ttl: float = TIMING.call_token_seconds
    verbs: tuple[str, ...] = (tokens.CALL,)


class WorkloadRoutes:
    def __init__(
        self, workloads: Workloads, access: Access, blob_stores: BlobStores, hosts: Hosts
    ) -> None:
        self._workloads = workloads
        self._access = access
        self._hosts = hosts
        self._blob_stores = blob_stores

    def routes(self) -> list[Route]:
        path = f"{routes.WORKLOADS}/{{namespace}}/{{name}}"
        update, token = (Permission("update"),), tuple(_VERBS.values())
        return [
            Route("GET", routes.WORKLOADS, self.list, (Permission("list", scope="all"),)),
            Route("GET", f"{routes.WORKLOADS}/{{namespace}}", self.list, (Permission("list"),)),
            Route("GET", path, self.get, (Permission("get"),)),
            Route("POST", f"{path}/wait", self.wait, (Permission("get"),)),
            Route("POST", f"{path}/scale", self.scale, update, is_audited=True),
            Route("GET", f"{path}/pods", self.pods, (Permission("get"),)),
            Route("DELETE", path, self.delete, (Permission("delete"),), is_audited=True),
            Route("POST", f"{path}/deploy", self.deploy, _DEPLOY, is_audited=True),
            Route("POST", f"{path}/token", self.token, token, is_audited=True),
            Route("GET", f"{path}/logs", self.logs, (Permission("get", "logs"),)),
        ]

    async def list(self, exchange: Exchange, namespace: str | None = None) -> None:
        """All workloads, or those of a namespace."""
        workload_views = self._workloads.list(namespace)
        user = self._access.creator(exchange.asker.principal, None).user
        await exchange.respond_message([_owned(view, user) for view in workload_views])

    async def get(self, exchange: Exchange, namespace: str, name: str) -> None:
        """One workload, with a token to call it for those who may.

        `?program=` is the process of this machine that has a handle from now on.
        """
        workload = self._workloads.get(namespace, name)
        workload.opened_by(exchange.query("program"))
        view = workload.view()
        user = self._access.creator(exchange.asker.principal, None).user
        await exchange.respond_message(_owned(await self._complete(exchange.asker, view), user))

    async def wait(self, exchange: Exchange, namespace: str, name: str) -> None:
        """One workload, as `get` has it, once its ready pods are others than the client knows.

        The calls of the client that have no pod are load until then.
        """
        wait = await exchange.message(messages.PodWait)
        workload = self._workloads.get(namespace, name)
        if workload.scaling is not None:
            if not await exchange.asker.may(_VERBS[tokens.CALL].of(namespace, name)):
                wait = replace(wait, waiting=0)  # calls that it may not make start no pod
            await workload.scaling.wait(wait)
        await self.get(exchange, namespace, name)

    async def scale(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Change keywords of `autoscale()` of a service that runs; the answer is its state."""
        change = await exchange.message(messages.ScaleChange)
        self._workloads.get(namespace, name).scale(change.settings)
        await self.get(exchange, namespace, name)

    async def pods(self, exchange: Exchange, namespace: str, name: str) -> None:
        """The pods of a workload as their cluster describes them.

        Without the right to `get pods` it has no values of variables, and no pods of other makers.
        """
        workload = self._workloads.get(namespace, name)
        pod_manifests = self._workloads.backend.pod_manifests(namespace, name)
        if not await exchange.asker.may(Need("get", namespace, group="", resource="pods")):
            our_names = {pod.name for pod in workload.pods if pod.is_ours}
            our_manifests = (pod for pod in pod_manifests if pod["metadata"]["name"] in our_names)
            pod_manifests = [views.without_values(pod) for pod in our_manifests]
        await exchange.respond_message(pod_manifests)

    async def delete(self, exchange: Exchange, namespace: str, name: str) -> None:
        """End a workload; `?grace=` is how many seconds its calls have."""
        grace = exchange.number(
            "grace",
            wire_tuning.TIMING.teardown_grace_seconds,
            least=0.0,
            most=TIMING.delete_longest_grace_seconds,
        )
        await exchange.respond_message(await self._workloads.delete(namespace, name, grace=grace))

    async def token(self, exchange: Exchange, namespace: str, name: str) -> None:
        """A token for one workload, for verbs that the user has the rights to."""
        token_request = await exchange.message(_TokenRequest)
        if (
            not TIMING.call_token_shortest_seconds
            <= token_request.ttl
            <= TIMING.call_token_longest_seconds
        ):
            raise ProtocolError(
                f"ttl is {token_request.ttl}; it must be from "
                f"{TIMING.call_token_shortest_seconds:.0f} to "
                f"{TIMING.call_token_longest_seconds:.0f} seconds"
            )
        if not token_request.verbs or not set(token_request.verbs) <= set(tokens.VERBS):
            raise ProtocolError(
                f"verbs is {list(token_request.verbs)}; it must be some of "
                f"{', '.join(tokens.VERBS)}"
            )
        for verb in token_request.verbs:
            await exchange.asker.require(_VERBS[verb].of(namespace, name))
        self._workloads.get(namespace, name)
        token = self._workloads.token(
            namespace,
            name,
            ttl=token_request.ttl,
            subject=exchange.asker.name,
            verbs=token_request.verbs,
        )
        await exchange.respond_message(token)

    async def deploy(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Deploy a workload; the answer is what happens, one event on each line."""
        chunks = exchange.chunks()
        head, rest = await _head(chunks)
        deploy = messages.decode(Deploy, head)
        self._workloads.check(deploy, namespace, name)
        principal = exchange.asker.principal
        creator = self._access.creator(principal, deploy.spec.username)
        # Checked before its code is stored, and again under the lock of the workload.
        self._workloads.check_owner(deploy, creator)
        grant = await self._access.check_deploy(principal, deploy.spec)
        await receive(_joined(rest, chunks), self._blob_stores, namespace)
        events = await self._workloads.deploy(deploy, creator, grant)
        await exchange.respond_stream(self._lines(exchange, events), content_type=NDJSON)

    async def _lines(
        self, exchange: Exchange, events: AsyncIterator[DeployEvent]
    ) -> AsyncGenerator[bytes, None]:
        async for event in events:
            if isinstance(event, Ready):  # several users may follow one deploy
                view = await self._complete(exchange.asker, event.workload)
                event = replace(event, workload=view)
            yield messages.encode(event) + b"\n"

    async def _complete(self, asker: Asker, view: WorkloadView) -> WorkloadView:
        """A workload with the host of its app, and with a token if the sender may call it."""
        app, key = view.spec.callable.app, (view.spec.namespace, view.spec.name)
        if app is not None and app.port is not None:
            view = replace(view, app_host=self._hosts.of(*key))
        if await asker.may(_VERBS[tokens.CALL].of(*key)):
            token = self._workloads.token(*key, ttl=TIMING.call_token_seconds, subject=asker.name)
            view = replace(view, token=token.token, token_expires=token.expires)
        return view

    async def logs(self, exchange: Exchange, namespace: str, name: str) -> None:
        """The last lines of the pods, and with `?follow=true` also new lines."""
        workload = self._workloads.get(namespace, name)
        count = int(
            exchange.number(
                "tail", LIMITS.shown_log_lines, least=0, most=wire_tuning.LIMITS.log_tail_lines
            )
        )
        pod = check_pod(workload, exchange.query("pod"))
        of_pods = Need("get", namespace, subresource="log", group="", resource="pods")

        def token() -> str:
            ttl, verbs = TIMING.log_token_seconds, (tokens.LOGS,)
            return self._workloads.token(
                namespace, name, ttl=ttl, subject="logs", verbs=verbs
            ).token

        reader = PodLogs(
            workload,
            self._workloads.backend,
            token=token,
            may_read_others=lambda: exchange.asker.may(of_pods),
            pod=pod,
        )
        lines = _log_lines(reader, count, follow=exchange.flag("follow"))
        await exchange.respond_stream(lines, content_type=NDJSON)


def _owned(view: WorkloadView, user: str) -> WorkloadView:
    """A workload as this user sees it: `is_own` if the user created it."""
    is_own = view.creator is not None and view.creator.user == user
    return replace(view, is_own=True) if is_own else view


async def _log_lines(reader: PodLogs, count: int, *, follow: bool) -> AsyncGenerator[bytes, None]:
    lines = await reader.tail(count)
    for start in range(0, len(lines), LIMITS.log_chunk_lines):
        yield encode(lines[start : start + LIMITS.log_chunk_lines])
    if follow:
        async for line in reader.follow():
            yield encode([line])


async def _head(chunks: AsyncIterator[bytes]) -> tuple[bytes, bytes]:
    """The first line of a body, and the bytes after it that have been read."""
    begun = bytearray()
    async for chunk in chunks:
        begun += chunk
        end = begun.find(b"\n")
        if 0 <= end <= LIMITS.deploy_head_bytes:
            return bytes(begun[:end]), bytes(begun[end + 1 :])
        if len(begun) > LIMITS.deploy_head_bytes:
            break
    else:
        return bytes(begun), b""
    raise SpecError(
        f"the declaration of the service has more than {LIMITS.deploy_head_bytes:,} bytes",
        hint="make its manifest, environment and image steps shorter; data belongs into a volume, "
        "a secret, or the project",
    )


async def _joined(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for chunk in chunks:
        yield chunk
