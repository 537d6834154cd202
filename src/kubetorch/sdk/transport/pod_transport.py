"""Connections from this program to pods: a `PodTransport`; most programs have the direct one.

    Route, HttpClient ── connect(url) ──► PodTransport ──┬─ Direct       TCP to the URL
                                                         ├─ PortForward  through the API server
                                                         └─ Ingress      the controller's own URL

A transport gives each pod a URL (`address`). The URL stands for the pod everywhere above, and only
the transport that gave it can connect to it.

URLs of pods behind a controller that relays requests: `URL/namespace/service/…`.

The name of the pod stands behind `#` in the URL, which is not sent, and in a header, which is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote, urlsplit

from kubetorch.errors import ConfigError
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import routes

if TYPE_CHECKING:
    import socket

    from kubetorch.lib.http_client import Credential, HttpClient
    from kubetorch.wire.messages import PodView, WorkloadView


class PodTransport(Protocol):
    """See the module. Threads share it."""

    patience: float

    def address(self, namespace: str, service: str, pod: PodView) -> str:
        """URL of the agent of a pod; empty while there is none."""

    def scaler(self, namespace: str, service: str, url: str) -> str:
        """URL of the scaler of an autoscaled service, whose URL in the cluster is given."""

    def connect(self, url: str, timeout: float | None) -> socket.socket:
        """A blocking connection to the pod or controller of the URL."""

    def headers(self, url: str) -> Mapping[str, str]:
        """The headers that requests need on the way to the URL."""

    def base_url(self, namespace: str, service: str) -> str | None:
        """The URL of a service for other programs of this machine.

        Empty where the URL from the controller is right, `None` where a port has to be forwarded.
        """

    def close(self) -> None:
        """Close every connection."""


class DirectTransport:
    """TCP to hosts and ports that this machine reaches by itself."""

    patience = TIMING.direct_patience_seconds

    def address(self, namespace: str, service: str, pod: PodView) -> str:
        del namespace, service
        return pod.url

    def scaler(self, namespace: str, service: str, url: str) -> str:
        del namespace, service
        return url

    def connect(self, url: str, timeout: float | None) -> socket.socket:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError(f"{url!r} is no URL that calls can go to; it must begin with http://")
        from kubetorch.lib import sockets  # noqa: PLC0415  # not before there is something to call

        return sockets.connect(parts.hostname, parts.port or 80, timeout)

    def headers(self, url: str) -> Mapping[str, str]:
        del url
        return {}

    def base_url(self, namespace: str, service: str) -> str | None:
        del namespace, service
        return ""

    def close(self) -> None: ...


DIRECT = DirectTransport()


def client(
    transport: PodTransport,
    url: str,
    token: str | Credential | None,
    *,
    timeout: float | None = 30.0,
    hint: str | None = None,
) -> HttpClient:
    """A client for the pod or controller that a URL of this transport stands for."""
    from kubetorch.lib.http_client import HttpClient  # noqa: PLC0415  # calls do without it

    return HttpClient(
        url,
        token,
        timeout=timeout,
        hint=hint,
        headers=transport.headers(url),
        dialler=None
        if isinstance(transport, DirectTransport)
        else lambda limit: transport.connect(url, limit),
    )


def relay_url(base_url: str, namespace: str, service: str, pod: str) -> str:
    return f"{service_url(base_url, namespace, service)}#{quote(pod, safe='')}"


def service_url(base_url: str, namespace: str, service: str) -> str:
    return f"{base_url.rstrip('/')}/{quote(namespace, safe='')}/{quote(service, safe='')}"


def app_url(base_url: str, view: WorkloadView) -> str:
    """The URL of an app: below that of its pods, or at a host behind an ingress."""
    parts, spec = urlsplit(base_url), view.spec
    if view.app_host and parts.path.endswith(f"/{spec.namespace}/{spec.name}"):
        return f"{parts.scheme}://{view.app_host}{f':{parts.port}' if parts.port else ''}"
    return base_url + routes.APP


def pod_headers(url: str) -> Mapping[str, str]:
    """The headers by which the relay knows the pod."""
    pod = unquote(urlsplit(url).fragment)
    return {routes.POD: pod} if pod else {}
