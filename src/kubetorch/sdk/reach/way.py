"""How this program gets connections to pods: a `Way`; the direct one is what most programs have.

    Route, HttpClient ── connect(url) ──► Way ──┬─ Direct    TCP to the URL
                                                ├─ Cluster   port-forward through the API server
                                                └─ Relayed   the controller's own URL

A way gives each pod a URL (`address`). It stands for the pod everywhere above, and only the way
that gave it can connect to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from kubetorch.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from kubetorch.lib.http import Credential, HttpClient
    from kubetorch.wire.messages import PodView

#: Seconds for which calls wait for pods and a controller that are reached directly.
PATIENCE = 30.0


class Way(Protocol):
    """See the module. Threads share it.

    Attributes:
        patience: Seconds for which calls wait while their pods cannot be reached.
    """

    patience: float

    def address(self, namespace: str, service: str, pod: PodView) -> str:
        """URL of the agent of a pod; empty while there is none."""

    def scaler(self, namespace: str, service: str, url: str) -> str:
        """URL of the scaler of an autoscaled service, whose URL in the cluster is given."""

    def connect(self, url: str, timeout: float | None) -> socket.socket:
        """A blocking connection to what the URL stands for.

        Raises:
            ConnectionRefusedError: There is nobody any more.
            OSError: It cannot be reached now.
            KubetorchError: It never will.
        """

    def headers(self, url: str) -> Mapping[str, str]:
        """What requests to the URL need to get there."""

    def base_url(self, namespace: str, service: str) -> str | None:
        """Where other programs of this machine call a service.

        Empty where the controller's own word counts, `None` where it takes a forwarded port.
        """

    def close(self) -> None:
        """Close every connection."""


class Direct:
    """TCP to hosts and ports that this machine reaches by itself."""

    patience = PATIENCE

    def address(self, namespace: str, service: str, pod: PodView) -> str:
        """As the controller has it."""
        del namespace, service
        return pod.url

    def scaler(self, namespace: str, service: str, url: str) -> str:
        """As the controller has it."""
        del namespace, service
        return url

    def connect(self, url: str, timeout: float | None) -> socket.socket:
        """Connect by TCP."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError(f"{url!r} is no URL that calls can go to; it must begin with http://")
        from kubetorch.lib import tcp  # noqa: PLC0415  # not before there is something to call

        return tcp.connect(parts.hostname, parts.port or 80, timeout)

    def headers(self, url: str) -> Mapping[str, str]:
        """None."""
        del url
        return {}

    def base_url(self, namespace: str, service: str) -> str | None:
        """As the controller has it."""
        del namespace, service
        return ""

    def close(self) -> None:
        """Whoever has a connection closes it."""


DIRECT = Direct()


def client(
    way: Way,
    url: str,
    token: str | Credential | None,
    *,
    timeout: float | None = 30.0,
    hint: str | None = None,
) -> HttpClient:
    """Requests to what a URL of this way stands for."""
    from kubetorch.lib.http import HttpClient  # noqa: PLC0415  # calls do without it

    return HttpClient(
        url,
        token,
        timeout=timeout,
        hint=hint,
        headers=way.headers(url),
        dialler=None if isinstance(way, Direct) else lambda limit: way.connect(url, limit),
    )
