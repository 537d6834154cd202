"""A port of this machine that leads to the pods of a service.

The listener is on loopback and passes requests on unchanged: clients need a token, as they do for
the pods themselves, and get none of this program's rights, unless `headers` has a token: then
what answers behind the port decides who may ask.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import socket
import threading
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from kubetorch.errors import KubetorchError, ResourceNotAvailableError, ServiceNotFoundError
from kubetorch.lib import sockets
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.http_client import authority
from kubetorch.lib.proxy import Forwarder, Mount, NoTargetError, Target
from kubetorch.sdk.transport.pod_transport import DIRECT, PodTransport
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import routes
from kubetorch.wire.messages import PodView, WorkloadView

#: Port of a pod at which its agent answers, as on Kubernetes.
SERVER_PORT = 32300
_SERVICE = re.compile(rb"/([a-z0-9-]+)/([a-z0-9-]+)(?::\d{1,5})?(?=/)")


class LocalPort:
    """A listener, until it is closed; at the latest when this program ends."""

    def __init__(
        self,
        find: Callable[[], str],
        transport: PodTransport,
        *,
        inside: str = "",
        port: int | None = None,
        service: tuple[str, str] = ("", ""),
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        if port is not None and not sockets.is_free(port):
            raise ResourceNotAvailableError(
                f"port {port} of this machine is taken", hint="choose another one"
            )
        self._find = find
        self._transport = transport
        self._inside = inside
        self._headers = headers
        self._prefix = "/".join(service)
        self._url: str | None = None
        self._socket = sockets.listen(sockets.LOOPBACK, port or 0)
        #: Port of the listener.
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kubetorch-forward", daemon=True)
        self._thread.start()
        self._ready.wait(TIMING.local_listener_seconds)
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMING.local_listener_seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        headers = [(b"x-forwarded-prefix", b"/")] if self._inside else []
        forwarder = Forwarder(self._target, headers)
        await forwarder.server.start(self._socket)
        self._ready.set()
        await self._stop.wait()
        await forwarder.server.close(lib_tuning.TIMING.listener_goodbye_seconds)

    async def _target(self, path: bytes, is_new: bool) -> Target:
        if is_new or self._url is None:
            try:
                self._url = await asyncio.to_thread(self._find)
            except KubetorchError as error:
                raise NoTargetError(error.message) from error
        service_match = _SERVICE.match(path)
        outside = ""
        if service_match is not None and b"/".join(service_match.groups()).decode() == self._prefix:
            outside = service_match[0].decode()
        url = self._url
        parts = urlsplit(url)
        if parts.hostname is None:
            raise NoTargetError("the service has no pod that answers")
        mount = Mount(outside, parts.path.rstrip("/") + self._inside)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        header_values = dict(await asyncio.to_thread(self._headers))
        if self._transport is DIRECT and not header_values:
            return Target(parts.hostname, port, mount)
        header_values |= self._transport.headers(url)
        # Pods take any host, so that of the client stays; an ingress needs its own.
        if header_values.pop("Host", None) is None:
            header_values["Host"] = authority(parts)
        header_pairs = tuple(
            (name.lower().encode(), value.encode()) for name, value in header_values.items()
        )
        if self._transport is DIRECT:
            return Target(parts.hostname, port, mount, header_pairs)

        async def dial() -> socket.socket:
            connection = await asyncio.to_thread(
                self._transport.connect, url, lib_tuning.TIMING.proxy_connect_seconds
            )
            connection.setblocking(False)
            return connection

        return Target(parts.hostname, port, mount, header_pairs, dial)


def choose(view: WorkloadView, pod: str | None = None) -> PodView:
    """The pod of this name; without a name the oldest that serves."""
    reachable_pods = [
        listed_pod for listed_pod in view.pods if listed_pod.url and pod in (None, listed_pod.name)
    ]
    if not reachable_pods:
        raise ServiceNotFoundError(
            f"{view.spec.name} has no {'pod that runs' if pod is None else f'pod {pod}'}",
            hint=f"kt status {view.spec.name}",
        )
    return min(
        reachable_pods,
        key=lambda listed_pod: (not listed_pod.is_ready, listed_pod.started, listed_pod.ordinal),
    )


def inside(view: WorkloadView, port: int) -> str:
    """The prefix of paths at a pod's agent that lead to this port of the pod."""
    app = view.spec.callable.app
    agent_port = view.spec.compute.server_port or SERVER_PORT
    if port == agent_port:
        return ""
    if app is not None and port == app.port:
        return routes.APP
    agent_hint = f"{agent_port} is that of the pod itself"
    app_hint = f", {app.port} that of its app" if app is not None and app.port is not None else ""
    raise ResourceNotAvailableError(
        f"nothing answers at port {port} of the pods of {view.spec.name}",
        hint=f"{agent_hint}{app_hint}",
    )
