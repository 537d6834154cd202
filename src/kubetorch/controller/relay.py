"""Pods for clients that reach only the controller: `/{namespace}/{service}/…` is passed on to one.

    client ── ingress, or api_url ── controller ── Relay ── agent of a pod

Requests, WebSockets and their answers pass as they come, each side read only as fast as the other
takes; `Authorization` goes on to the agent, which decides. The pod is the one that the header
`X-Kubetorch-Pod` names, else the ready one with the fewest calls. An autoscaled service has a
scaler for that, which holds what comes while there is no pod.

Nobody finds out here which services exist. Who sends no token of the service gets one and the same
answer, whether there is such a service or not; only an app that was made public is reached without.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from urllib.parse import unquote, unquote_plus, urlsplit

from kubetorch.controller.exchange import Exchange
from kubetorch.controller.workload import Workload
from kubetorch.errors import (
    CallRefusedError,
    ControllerUnavailableError,
    KubetorchError,
    ServiceNotFoundError,
    UnauthorizedError,
)
from kubetorch.lib import proxying, tunnels
from kubetorch.lib.asgi import Message, Receive, Scope, Send
from kubetorch.lib.proxying import Header, Mount, Target
from kubetorch.wire import failures, routes, tokens
from kubetorch.wire.messages import PodView

#: The first part of the controller's own paths, which no namespace can have here.
RESERVED = "v1"
#: Genuine tokens that are remembered, so that each is verified once.
_CACHE_SIZE = 1024
_PATH = re.compile(
    r"/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)(?=/|$)"
)
_QUERY = re.compile(rb"(?:^|&)" + routes.APP_TOKEN_QUERY.encode() + rb"=([^&]*)")
_POD = routes.POD.lower().encode()
_PREFIX = b"x-forwarded-prefix"
_HOST = b"host"

#: Finds a workload by namespace and name; raises `ServiceNotFoundError`.
Finder = Callable[[str, str], Workload]


class Relay:
    """See the module.

    Args:
        find: Finds workloads.
        secret: Secret of the installation, which tokens are checked with.
        clock: Seconds since the epoch.
    """

    def __init__(self, find: Finder, *, secret: bytes, clock: Callable[[], float]) -> None:
        self._find = find
        self._secret = secret
        self._clock = clock
        #: When genuine tokens end, by audience and token.
        self._known: dict[tuple[str, str], float] = {}

    def takes(self, path: str) -> bool:
        """Whether a path is one of a pod."""
        match = _PATH.match(path)
        return match is not None and match[1] != RESERVED

    @staticmethod
    def is_app(path: str) -> bool:
        """Whether a path is one of a pod's app."""
        match = _PATH.match(path)
        return match is not None and Mount(routes.APP, "").has(path[match.end() :])

    async def answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with what the pod answers.

        Raises:
            KubetorchError: It may not be asked, or does not answer.
        """

        async def send_on(message: Message) -> None:
            exchange.passed_on()
            await send(message)

        headers = scope["headers"]
        target = self._target(scope["path"], scope["query_string"], headers)
        try:
            await proxying.relay(scope, _passed(headers), receive, send_on, target)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise ControllerUnavailableError(
                f"the pod did not answer the controller: {type(error).__name__}",
                hint="try again: the pod may be starting, or be about to end",
            ) from error

    async def open(
        self, upgrade: tunnels.Upgrade
    ) -> tuple[Target, list[Header], Callable[[], None]]:
        """The way of a WebSocket; see `kubetorch.lib.tunnels.Opener`.

        Raises:
            Refused: It may not be opened.
        """
        try:
            path = unquote(upgrade.path.decode("latin-1"))
            target = self._target(path, upgrade.query, upgrade.headers)
        except KubetorchError as error:
            failure = replace(failures.describe(error), traceback="")
            raise tunnels.Refused(failures.http_status(error), failure.to_json()) from error
        return target, _passed(upgrade.headers), lambda: None

    # ------------------------------------------------------------------------------------ inside

    def _target(self, path: str, query: bytes, headers: list[Header]) -> Target:
        """Where a request goes.

        Raises:
            UnauthorizedError: It brings no token of the service.
            ServiceNotFoundError: It does, and there is no such service or pod.
            CallRefusedError: No pod is ready.
        """
        match = _PATH.match(path)
        assert match is not None, path
        namespace, name = match[1], match[2]
        try:
            workload = self._find(namespace, name)
        except ServiceNotFoundError:
            workload = None
        refused = self._refusal(namespace, name, query, headers)
        if refused is not None:
            app = None if workload is None else workload.spec.callable.app
            if app is None or not app.public or not self.is_app(path):
                raise refused
        if workload is None:
            raise ServiceNotFoundError(
                f"there is no service {name!r} in namespace {namespace!r}",
                hint=f"kt list -n {namespace} shows what there is",
            )
        wanted = next((value.decode("latin-1") for key, value in headers if key == _POD), None)
        view = workload.view()
        is_scaled = bool(view.scaler) and wanted is None
        parts = urlsplit(view.scaler if is_scaled else _choose(name, view.pods, wanted).url)
        assert parts.hostname is not None
        outside = match[0]
        prefix = outside + (routes.APP if self.is_app(path) else "")
        is_told = any(key == _PREFIX for key, _ in headers)
        more = () if is_told else ((_PREFIX, prefix.encode()),)
        if is_scaled:
            # By this name a scaler knows the service.
            more = (*more, (_HOST, parts.netloc.encode()))
        return Target(parts.hostname, parts.port or 80, Mount(outside, ""), more)

    def _refusal(
        self, namespace: str, name: str, query: bytes, headers: list[Header]
    ) -> UnauthorizedError | None:
        """Why a request may not pass; `None` if it brings a token of the service anywhere."""
        audience = tokens.audience(namespace, name)
        refused = UnauthorizedError(
            "this needs a token of the service",
            hint="send it as Authorization: Bearer <token>; kt token NAME prints one",
        )
        for token in _candidates(query, headers):
            try:
                self._check(audience, token)
            except UnauthorizedError as error:
                # What an app takes for a token of its own is none of ours that is wrong.
                refused = error if tokens.is_signed(token) else refused
            else:
                return None
        return refused

    def _check(self, audience: str, token: str) -> None:
        now = self._clock()
        if self._known.get((audience, token), 0.0) > now:
            return
        key = tokens.workload_key(self._secret, audience)
        claims = tokens.verify(key, token, audience=audience, now=now)
        if len(self._known) >= _CACHE_SIZE:
            self._known.clear()
        self._known[audience, token] = claims.expires


def _candidates(query: bytes, headers: Iterable[Header]) -> Iterable[str]:
    """What may be a token in a request: the agent takes it from the same places."""
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"authorization":
            scheme, _, token = text.partition(" ")
            if scheme.lower() == "bearer":
                yield token.strip()
        elif name == routes.APP_TOKEN.lower().encode():
            yield text
        elif name == b"cookie":
            for pair in text.split(";"):
                cookie, _, token = pair.strip().partition("=")
                if cookie.startswith(routes.APP_COOKIE):
                    yield token
    match = _QUERY.search(query)
    if match is not None:
        yield unquote_plus(match[1].decode("latin-1"))


def _passed(headers: Iterable[Header]) -> list[Header]:
    return [header for header in headers if header[0] != _POD]


def _choose(name: str, pods: Iterable[PodView], wanted: str | None) -> PodView:
    """The pod that is meant.

    Raises:
        ServiceNotFoundError: There is no such pod.
        CallRefusedError: None is ready.
    """
    known = [pod for pod in pods if pod.url]
    if wanted is not None:
        found = next((pod for pod in known if pod.name == wanted), None)
        if found is None:
            raise ServiceNotFoundError(
                f"{name} has no pod {wanted!r} that runs", hint=f"kt status {name}"
            )
        return found
    ready = [pod for pod in known if pod.is_ready]
    if not ready:
        raise CallRefusedError(f"no pod of {name} is ready", hint=f"kt status {name}")
    return min(ready, key=lambda pod: pod.calls)
