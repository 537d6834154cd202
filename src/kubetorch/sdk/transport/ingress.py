"""Connections to pods through the controller's own URL: `URL/namespace/service/…`.

See `kubetorch.sdk.transport.pod_transport` for how a pod of the service is named.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kubetorch.errors import ConfigError
from kubetorch.lib import sockets
from kubetorch.sdk.transport.background import Background, FarEnd
from kubetorch.sdk.transport.pod_transport import DIRECT, pod_headers, relay_url, service_url
from kubetorch.sdk.tuning import TIMING

if TYPE_CHECKING:
    from kubetorch.wire.messages import PodView


class IngressTransport:
    """See the module (a `kubetorch.sdk.transport.pod_transport.PodTransport`)."""

    patience = TIMING.ingress_patience_seconds

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/")
        self._background = Background()

    def address(self, namespace: str, service: str, pod: PodView) -> str:
        return relay_url(self._base_url, namespace, service, pod.name) if pod.url else ""

    def scaler(self, namespace: str, service: str, url: str) -> str:
        """Below the controller's URL: no pod is named."""
        del url
        return service_url(self._base_url, namespace, service)

    def connect(self, url: str, timeout: float | None) -> socket.socket:
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.hostname is None:
            return DIRECT.connect(url, timeout)
        host, port = parts.hostname, parts.port or 443
        try:
            return self._background.dial(lambda near: self._secure(near, host, port), timeout)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"the certificate of {self._base_url} does not verify: {error.verify_message}",
                hint="api_url must be of a host whose certificate this machine trusts; "
                "SSL_CERT_FILE names further authorities",
            ) from error

    def headers(self, url: str) -> Mapping[str, str]:
        return pod_headers(url)

    def base_url(self, namespace: str, service: str) -> str | None:
        return service_url(self._base_url, namespace, service)

    def close(self) -> None:
        self._background.close()

    async def _secure(self, near: socket.socket, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context()
        end = _TlsEnd(near, self._background.ends)
        try:
            transport, _ = await loop.create_connection(lambda: end, host, port, ssl=context)
            sockets.keep_alive(transport.get_extra_info("socket"))
        except BaseException:
            end.abandon()
            raise


class _TlsEnd(FarEnd, asyncio.Protocol):
    """The far side of a pipe: a connection inside TLS."""

    _transport: asyncio.Transport | None = None
    _is_congested = False

    def send(self, data: bytes) -> bool:
        if self._transport is not None:
            self._transport.write(data)
        return not self._is_congested

    def read_on(self, is_wanted: bool) -> None:
        transport = self._transport
        if transport is not None and transport.is_reading() != is_wanted:
            (transport.resume_reading if is_wanted else transport.pause_reading)()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.begin()

    def data_received(self, data: bytes) -> None:
        if self.pipe is not None:
            self.pipe.deliver(memoryview(data))

    def pause_writing(self) -> None:
        self._is_congested = True

    def resume_writing(self) -> None:
        self._is_congested = False
        if self.pipe is not None:
            self.pipe.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self.lose()
