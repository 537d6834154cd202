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
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from kubetorch.controller.routes.table import Exchange
from kubetorch.controller.workload import Workload
from kubetorch.errors import (
    CallRefusedError,
    ControllerUnavailableError,
    ForeignOriginError,
    KubetorchError,
    ServiceNotFoundError,
    UnauthorizedError,
)
from kubetorch.lib import asgi, proxy
from kubetorch.lib.asgi import Message, Receive, Scope, Send
from kubetorch.lib.http1 import Header
from kubetorch.lib.http_server import Refusal, Upgrade
from kubetorch.lib.proxy import Mount, Passage, Target
from kubetorch.wire import exceptions, routes, tokens
from kubetorch.wire.messages import PodView
from kubetorch.wire.tokens import AppRequest

#: The first part of the controller's own paths, which no namespace can have here.
RESERVED = b"v1"
#: Characters of a DNS label.
_LABEL_LIMIT = 63
#: Of paths as they are sent: the pod decodes the rest, and nobody decodes anything twice.
_PATH = re.compile(
    rb"/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)(?=/|$)"
)
_POD = routes.POD.lower().encode()
_PREFIX = b"x-forwarded-prefix"
_HOST = b"host"


@dataclass(frozen=True)
class Hosts:
    """The names under which apps are reached through the controller.

    Attributes:
        ingress: `ingress.host` of the chart.
        others: `ingress.appHosts`, and the names of the controller itself.
        are_per_service: Whether the pages of each app have a host of their own below `ingress`:
            then there are none at the others.
    """

    ingress: str = ""
    others: tuple[str, ...] = ()
    are_per_service: bool = False

    def of(self, namespace: str, name: str) -> str:
        """The host of a service; empty if it has none: one label must say both names."""
        label = f"{name}--{namespace}"
        is_label = len(label) <= _LABEL_LIMIT and label.count("--") == 1 and name != "xn"
        return f"{label}.{self.ingress}" if self.are_per_service and is_label else ""

    def find(self, host: str) -> tuple[str, str] | None:
        """Namespace and name of the service whose host this is."""
        name, _, namespace = host.partition(".")[0].partition("--")
        return (namespace, name) if host and host == self.of(namespace, name) else None

    def known(self, namespace: str, name: str) -> tuple[str, ...]:
        """All names by which a browser may call the app of a service."""
        own = self.of(namespace, name)
        return tuple(filter(None, (self.ingress, *self.others, own)))


#: Of a controller without an ingress.
NO_HOSTS = Hosts()


class Place(NamedTuple):
    """The target of a request: a path at the pods of a service."""

    namespace: str
    name: str
    mount: Mount
    is_app: bool
    is_own_host: bool = False


#: Finds a workload by namespace and name; raises `ServiceNotFoundError`.
Finder = Callable[[str, str], Workload]


class Relay:
    def __init__(
        self,
        find: Finder,
        *,
        secret: bytes,
        clock: Callable[[], float],
        hosts: Hosts = NO_HOSTS,
    ) -> None:
        self._find = find
        self._hosts = hosts
        self._secret = secret
        self._clock = clock

    def locate(self, path: bytes, headers: Iterable[Header]) -> Place | None:
        """The target of a request to a quoted path; `None` for the controller itself."""
        known = dict(headers)
        own = self._hosts.find(asgi.host_of(known.get(_HOST, b"").decode("latin-1")))
        if own is not None:
            return Place(*own, Mount("", routes.APP, seen="/"), is_app=True, is_own_host=True)
        match = _PATH.match(path)
        if match is None or match[1] == RESERVED:
            return None
        mount = Mount(match[0].decode(), "", seen=known.get(_PREFIX, b"").decode("latin-1"))
        is_app = Mount(routes.APP, "").has(path[match.end() :])
        return Place(match[1].decode(), match[2].decode(), mount, is_app)

    async def answer(
        self, place: Place, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request with what the pod answers."""
        moved = self._moved(place, scope["method"], scope["headers"])
        if moved:
            rest = Mount(f"{place.mount.outside}{routes.APP}", "").enter(scope["raw_path"])
            query = b"?" + scope["query_string"] if scope["query_string"] else b""
            location = moved + (rest + query).decode("latin-1")
            await exchange.respond(b"", status=307, content_type="text/plain", location=location)
            return

        async def send_on(message: Message) -> None:
            exchange.passed_on()
            await send(message)

        target, asked = self._target(place, scope["query_string"], scope["headers"], exchange.admit)
        scope = {**scope, "query_string": asked.query}
        try:
            await proxy.relay(scope, asked.headers, receive, send_on, target)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise ControllerUnavailableError(
                f"the pod did not answer the controller: {type(error).__name__}",
                hint="try again: the pod may be starting, or be about to end",
            ) from error

    async def open(self, upgrade: Upgrade) -> Passage:
        """The way of a WebSocket; see `kubetorch.lib.proxy.Opener`."""
        place = self.locate(upgrade.raw_path, upgrade.headers)
        assert place is not None, upgrade.path
        try:
            self._moved(place, "POST", upgrade.headers)
            target, asked = self._target(place, upgrade.query, upgrade.headers, upgrade.admit)
        except KubetorchError as error:
            failure = exceptions.describe_refusal(error)
            raise Refusal(failure.status, failure.to_json()) from error
        upgrade.query = asked.query
        return Passage(target, asked.headers)

    def _moved(self, place: Place, method: str, headers: list[Header]) -> str:
        """The host that a browser is to be sent to, with its scheme; empty for all else.

        Raises `ForeignOriginError` for what only a page asks where the page does not belong.
        """
        known = dict(headers)
        is_page = b"origin" in known or b"sec-fetch-site" in known
        if not (self._hosts.are_per_service and place.is_app and is_page) or place.is_own_host:
            return ""
        own = self._hosts.of(place.namespace, place.name)
        scheme = "http" if known.get(b"x-forwarded-proto") == b"http" else "https"
        if own and (method, known.get(b"sec-fetch-mode")) == ("GET", b"navigate"):
            _, colon, port = known.get(_HOST, b"").decode("latin-1").rpartition(":")
            return f"{scheme}://{own}{colon + port if port.isdigit() else ''}"
        raise ForeignOriginError(
            f"pages of {place.name} are at {own}" if own else f"{place.name} has no host for pages",
            hint=None
            if own
            else "names of service and namespace must have at most 61 characters together and no "
            "'--' in them; programs may go on",
        )

    def _target(
        self, place: Place, query: bytes, headers: list[Header], admit: Callable[[], None]
    ) -> tuple[Target, AppRequest]:
        """The server of a request, and the request without tokens of other services.

        `admit` is called if it has a token of this one.
        """
        namespace, name, mount = place.namespace, place.name, place.mount
        try:
            workload = self._find(namespace, name)
        except ServiceNotFoundError:
            workload = None
        refused, asked = self._inspect(tokens.audience(namespace, name), query, headers)
        if refused is not None:
            app = None if workload is None else workload.spec.callable.app
            if app is None or not app.public or not place.is_app:
                raise refused
        else:
            admit()
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
        prefix = mount.seen or mount.outside + (routes.APP if place.is_app else "")
        more: tuple[Header, ...] = ((_PREFIX, prefix.encode("latin-1")),)
        if is_scaled:
            # By this name a scaler knows the service.
            more = (*more, (_HOST, parts.netloc.encode()))
        return Target(parts.hostname, parts.port or 80, mount, more), asked

    def _inspect(
        self, audience: str, query: bytes, headers: list[Header]
    ) -> tuple[UnauthorizedError | None, AppRequest]:
        """Why a request may not pass, `None` if it brings a token of the service anywhere.

        The pod is the user's: tokens of other services, which a browser brings too, stay here.
        """
        refused: UnauthorizedError | None = UnauthorizedError(
            "this needs a token of the service",
            hint=f"send it as Authorization: Bearer <token>; {tokens.COMMAND} prints one",
        )
        key = tokens.workload_key(self._secret, audience)

        def is_passed(token: str) -> bool:
            nonlocal refused
            try:
                tokens.verify(key, token, audience=audience, now=self._clock())
            except UnauthorizedError as error:
                # What an app takes for a token of its own is none of ours that is wrong.
                refused = error if refused is not None and tokens.is_signed(token) else refused
                return False
            refused = None
            return True

        passed = [header for header in headers if header[0] != _POD]
        asked = tokens.inspect(passed, query, is_ours=tokens.is_signed, is_passed=is_passed)
        return refused, asked


def _choose(name: str, pods: Iterable[PodView], wanted: str | None) -> PodView:
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
