"""The relay to pods, at `/{namespace}/{service}/…`, for clients that reach only the controller.

    client ── ingress, or api_url ── controller ── Relay ── agent of a pod

Requests, WebSockets and their answers pass as they come, each side read only as fast as the other
takes; `Authorization` goes on to the agent, which decides. The pod is the one that the header
`X-Kubetorch-Pod` names, else the ready one with the fewest calls. A request of a service that the
load scales is held while there is no pod; Knative does both for the services that it scales.

Strangers do not find out which services exist: a request without a token of the service gets the
same answer whether there is such a service or not. Only a public app is reached without a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from kubetorch.controller import views
from kubetorch.controller.routes.table import Exchange
from kubetorch.controller.scaling import Scaling
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
from kubetorch.lib.asgi import Receive, Scope
from kubetorch.lib.http1 import Header
from kubetorch.lib.http_server import Refusal, Upgrade
from kubetorch.lib.proxy import Mount, Passage, Target
from kubetorch.lib.tasks import cancel_all
from kubetorch.wire import exceptions, routes, tokens
from kubetorch.wire.messages import PodView, WorkloadView
from kubetorch.wire.tokens import AppRequest

#: The first part of the controller's own paths, which no namespace can have here.
RESERVED = b"v1"
#: Characters of a DNS label.
_LABEL_LIMIT = 63
#: Paths as they are sent: the pod decodes the rest of a path, so nothing is decoded twice.
_PATH = re.compile(
    rb"/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)(?=/|$)"
)
#: The names of a Service in a cluster, as pods resolve them.
_SERVICE_HOST = re.compile(
    r"(?P<name>[a-z0-9-]{1,63})"
    r"(\.(?P<namespace>[a-z0-9-]{1,63})(?P<domain>\.svc(\.cluster\.local\.?)?)?)?"
)
_POD = routes.POD.lower().encode()
_PREFIX = b"x-forwarded-prefix"
_HOST = b"host"


class Hosts(msgspec.Struct, frozen=True):
    """The names under which apps are reached through the controller.

    Attributes:
        ingress: `ingress.host` of the chart.
        app_hosts: `ingress.appHosts` of the chart, and the names of the controller itself.
        are_per_service: Whether the pages of each app have a host of their own below `ingress`;
            then `app_hosts` serve no pages.
        are_of_cluster: Whether the Services of a cluster lead here while they have no pod.
    """

    ingress: str = ""
    app_hosts: tuple[str, ...] = ()
    are_per_service: bool = False
    are_of_cluster: bool = False

    def of(self, namespace: str, name: str) -> str:
        """The host of a service; empty if it has none: both names must fit into one label."""
        label = f"{name}--{namespace}"
        is_label = len(label) <= _LABEL_LIMIT and label.count("--") == 1 and name != "xn"
        return f"{label}.{self.ingress}" if self.are_per_service and is_label else ""

    def find(self, host: str) -> tuple[str, str] | None:
        """Namespace and name of the service that has this host."""
        name, _, namespace = host.partition(".")[0].partition("--")
        return (namespace, name) if host and host == self.of(namespace, name) else None

    def match_in_cluster(self, host: str) -> re.Match[str] | None:
        """The parts of a name that a Service may have in the cluster: see `_SERVICE_HOST`."""
        if not self.are_of_cluster or host in (self.ingress, *self.app_hosts):
            return None
        return _SERVICE_HOST.fullmatch(host)

    def allowed_hosts(self, namespace: str, name: str) -> tuple[str, ...]:
        """All names by which a browser may call the app of a service."""
        service_host = self.of(namespace, name)
        return tuple(filter(None, (self.ingress, *self.app_hosts, service_host)))


#: The hosts of a controller without an ingress.
NO_HOSTS = Hosts()


class Destination(NamedTuple):
    """The target of a request: a path at the pods of a service."""

    namespace: str
    name: str
    mount: Mount
    is_app: bool
    is_service_host: bool = False


#: Finds a workload by namespace and name; raises `ServiceNotFoundError`.
Finder = Callable[[str, str], Workload]


class Relay:
    def __init__(
        self, find: Finder, *, secret: bytes, clock: Callable[[], float], hosts: Hosts = NO_HOSTS
    ) -> None:
        self._find = find
        self._hosts = hosts
        self._secret = secret
        self._clock = clock
        #: Numbers of the requests that are held.
        self._numbers = itertools.count(1)
        #: By host and port of a pod: the requests that are passed on to it.
        self._requests: Counter[tuple[str, int]] = Counter()

    def locate(self, path: bytes, headers: Iterable[Header]) -> Destination | None:
        """The target of a request to a quoted path; `None` for the controller itself."""
        header_values = dict(headers)
        host = asgi.host_of(header_values.get(_HOST, b"").decode("latin-1"))
        service_of_host = self._hosts.find(host)
        service_in_cluster = self._find_in_cluster(host, header_values)
        if service_in_cluster is not None:
            is_app = Mount(routes.APP, "").has(path)
            mount = Mount("", "")
            return Destination(*service_in_cluster, mount, is_app=is_app, is_service_host=True)
        if service_of_host is not None:
            return Destination(
                *service_of_host,
                Mount("", routes.APP, browser_prefix="/"),
                is_app=True,
                is_service_host=True,
            )
        match = _PATH.match(path)
        if match is None or match[1] == RESERVED:
            return None
        mount = Mount(
            match[0].decode(), "", browser_prefix=header_values.get(_PREFIX, b"").decode("latin-1")
        )
        is_app = Mount(routes.APP, "").has(path[match.end() :])
        return Destination(match[1].decode(), match[2].decode(), mount, is_app)

    def _find_in_cluster(self, host: str, headers: Mapping[bytes, bytes]) -> tuple[str, str] | None:
        """Namespace and name of the Service that has this host in the cluster, and no pod."""
        match = self._hosts.match_in_cluster(host)
        if match is None:
            return None
        namespace, name = match["namespace"], match["name"]
        if namespace is None:
            # Only the caller knows the namespace, whose token is for the service.
            token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")[2].strip()
            try:
                namespace, _, audience_name = tokens.claimed_audience(token).partition("/")
            except UnauthorizedError:
                return None
            return (namespace, name) if audience_name == name else None
        if match["domain"] is None:
            # It may be a name of this controller that it does not know, of some proxy.
            try:
                self._find(namespace, name)
            except ServiceNotFoundError:
                return None
        return namespace, name

    async def answer(
        self,
        destination: Destination,
        exchange: Exchange,
        scope: Scope,
        receive: Receive,
    ) -> None:
        """Answer a request with what the pod answers."""
        redirect_base = self._redirect_base(destination, scope["method"], scope["headers"])
        if redirect_base:
            rest = Mount(f"{destination.mount.outside}{routes.APP}", "").enter(scope["raw_path"])
            query = b"?" + scope["query_string"] if scope["query_string"] else b""
            location = redirect_base + (rest + query).decode("latin-1")
            await exchange.respond(b"", status=307, content_type="text/plain", location=location)
            return

        exchange.has_started = False
        target, app_request = await self._target(
            destination,
            scope["query_string"],
            scope["headers"],
            exchange.admit,
            scope.get("disconnected"),
        )
        scope = {**scope, "query_string": app_request.query}
        pod_address = (target.host, target.port)
        self._requests[pod_address] += 1
        exchange.has_started = True
        try:
            await proxy.relay(scope, app_request.headers, receive, exchange.pass_on, target)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise ControllerUnavailableError(
                f"the pod did not answer the controller: {type(error).__name__}",
                hint="try again: the pod may be starting, or be about to end",
            ) from error
        finally:
            self._requests[pod_address] -= 1
            if not self._requests[pod_address]:
                del self._requests[pod_address]
            self._note_end(destination)

    async def open(self, upgrade: Upgrade) -> Passage:
        """The way of a WebSocket; see `kubetorch.lib.proxy.Opener`."""
        destination = self.locate(upgrade.raw_path, upgrade.headers)
        assert destination is not None, upgrade.path
        try:
            self._redirect_base(destination, "POST", upgrade.headers)
            target, app_request = await self._target(
                destination, upgrade.query, upgrade.headers, upgrade.admit
            )
        except KubetorchError as error:
            failure = exceptions.describe_refusal(error, started=False)
            raise Refusal(failure.status, failure.to_json()) from error
        upgrade.query = app_request.query
        return Passage(target, app_request.headers)

    def _redirect_base(self, destination: Destination, method: str, headers: list[Header]) -> str:
        """Scheme and host to which a browser is redirected; empty where the request is relayed.

        Raises `ForeignOriginError` for a request of a page from a host of another service.
        """
        header_values = dict(headers)
        is_page = b"origin" in header_values or b"sec-fetch-site" in header_values
        if (
            not (self._hosts.are_per_service and destination.is_app and is_page)
            or destination.is_service_host
        ):
            return ""
        service_host = self._hosts.of(destination.namespace, destination.name)
        scheme = "http" if header_values.get(b"x-forwarded-proto") == b"http" else "https"
        if service_host and (method, header_values.get(b"sec-fetch-mode")) == ("GET", b"navigate"):
            _, colon, port = header_values.get(_HOST, b"").decode("latin-1").rpartition(":")
            return f"{scheme}://{service_host}{colon + port if port.isdigit() else ''}"
        raise ForeignOriginError(
            f"pages of {destination.name} are at {service_host}"
            if service_host
            else f"{destination.name} has no host for pages",
            hint=None
            if service_host
            else "names of service and namespace must have at most 61 characters together and no "
            "'--' in them; programs may go on",
        )

    async def _target(
        self,
        destination: Destination,
        query: bytes,
        headers: list[Header],
        admit: Callable[[], None],
        disconnected: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[Target, AppRequest]:
        """The server of a request, and the request without tokens of other services.

        `admit` is called if the request has a token of this service. `disconnected` waits for the
        end of the client.
        """
        namespace, name, mount = destination.namespace, destination.name, destination.mount
        workload: Workload | None = None
        missing: ServiceNotFoundError | None = None
        try:
            workload = self._find(namespace, name)
        except ServiceNotFoundError as error:
            missing = error
        refusal, app_request = self._inspect(tokens.audience(namespace, name), query, headers)
        if refusal is not None:
            app = None if workload is None else workload.spec.callable.app
            if app is None or not app.public or not destination.is_app:
                raise refusal
        else:
            admit()
        if workload is None:
            assert missing is not None
            raise missing
        pod_name = next((value.decode("latin-1") for key, value in headers if key == _POD), None)
        if workload.scaling is not None and pod_name is None and not self._has_room(workload):
            await self._hold(workload, workload.scaling, disconnected)
            if workload.is_torn_down:
                reason = f": {workload.stop_reason}" if workload.stop_reason else ""
                raise ServiceNotFoundError(
                    f"the service {name} was torn down while a request waited for its pod{reason}",
                    hint="deploy it again with .to(kt.Compute(...))",
                )
        view = workload.view()
        is_scaled = bool(view.scaler) and pod_name is None
        is_stranger = refusal is not None
        server_url = urlsplit(
            view.scaler if is_scaled else self._choose(view, pod_name, is_stranger=is_stranger).url
        )
        assert server_url.hostname is not None
        prefix = mount.browser_prefix or mount.outside + (routes.APP if destination.is_app else "")
        extra_headers: tuple[Header, ...] = ((_PREFIX, prefix.encode("latin-1")),)
        if is_scaled:
            # By this name a scaler knows the service.
            extra_headers = (*extra_headers, (_HOST, server_url.netloc.encode()))
        return Target(server_url.hostname, server_url.port or 80, mount, extra_headers), app_request

    async def _hold(
        self,
        workload: Workload,
        scaling: Scaling,
        disconnected: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Hold a request until a pod has room for it, unless its client goes."""
        held_request = scaling.hold(
            f"request {next(self._numbers)}",
            workload.spec.compute.launch_timeout,
            partial(self._has_room, workload),
            lambda: workload.has_failed,
        )
        if disconnected is None:
            await held_request
            return
        holding, end = asyncio.ensure_future(held_request), asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({holding, end}, return_when=asyncio.FIRST_COMPLETED)
            if not holding.done():
                raise asgi.ClientGoneError
            holding.result()
        finally:
            await cancel_all([holding, end])

    def _choose(
        self, view: WorkloadView, pod_name: str | None, *, is_stranger: bool = False
    ) -> PodView:
        name, reachable_pods = view.spec.name, [pod for pod in view.pods if pod.url]
        if pod_name is not None:
            chosen_pod = next((pod for pod in reachable_pods if pod.name == pod_name), None)
            if chosen_pod is None:
                raise ServiceNotFoundError(
                    f"{name} has no pod {pod_name!r} that runs", hint=f"kt status {name}"
                )
            return chosen_pod
        ready_pods = [pod for pod in reachable_pods if pod.is_ready]
        if not ready_pods:
            # Strangers learn nothing of the code of a public app.
            raise (
                CallRefusedError(f"no pod of {name} is ready")
                if is_stranger
                else views.not_ready(view)
            )
        return min(ready_pods, key=self._calls_of)

    def _note_end(self, destination: Destination) -> None:
        """Let a request that is held look for room: another one has ended."""
        with contextlib.suppress(ServiceNotFoundError):
            scaling = self._find(destination.namespace, destination.name).scaling
            if scaling is not None:
                scaling.changes.notify()

    def _has_room(self, workload: Workload) -> bool:
        """True if a pod takes calls, and has fewer than it runs at one time."""
        slots = None if workload.scaling is None else workload.scaling.pod_slots
        return any(
            slots is None or self._calls_of(pod) < slots
            for pod in workload.pod_views()
            if pod.is_ready and pod.url
        )

    def _calls_of(self, pod: PodView) -> int:
        """The calls of a pod: its own report, which requests of this moment are not in yet."""
        url = urlsplit(pod.url)
        return max(pod.calls, self._requests[url.hostname or "", url.port or 80])

    def _inspect(
        self, audience: str, query: bytes, headers: list[Header]
    ) -> tuple[UnauthorizedError | None, AppRequest]:
        """Why a request is refused, `None` if it has a token of the service; and what to relay.

        The pod is the user's: tokens of other services, which a browser brings too, stay here.
        """
        refusal: UnauthorizedError | None = UnauthorizedError(
            "this needs a token of the service",
            hint=f"send it as Authorization: Bearer <token>; {tokens.COMMAND} prints one",
        )
        key = tokens.workload_key(self._secret, audience)

        def is_passed(token: str) -> bool:
            nonlocal refusal
            try:
                tokens.verify(key, token, audience=audience, now=self._clock())
            except UnauthorizedError as error:
                # A token of another form may be for the app: then it is no wrong token of ours.
                refusal = error if refusal is not None and tokens.is_signed(token) else refusal
                return False
            refusal = None
            return True

        passed = [header for header in headers if header[0] != _POD]
        app_request = tokens.inspect(passed, query, is_ours=tokens.is_signed, is_passed=is_passed)
        return refusal, app_request
