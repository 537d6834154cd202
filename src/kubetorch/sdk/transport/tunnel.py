"""Connections to pods through an API server, for threads that block.

    thread ── socket ═ Pipe ── WebSocket (port-forward) ── API server ── kubelet ── pod

One thread of the process owns the loop, the client of the API server and all WebSockets. There is
no listener: other programs of the machine cannot get in.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kubetorch.errors import KubernetesUnavailableError
from kubetorch.k8s import pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Ref
from kubetorch.lib import websocket_protocol
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.sdk.transport.background import Background, FarEnd
from kubetorch.sdk.tuning import LIMITS, TIMING

if TYPE_CHECKING:
    from kubetorch.k8s.kubeconfig import Access


_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class Tunnel:
    """One user of one cluster. Threads share it; a forked child gets connections of its own."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._background = Background(self._finish)
        #: The client of the running loop; a forked child has another loop.
        self._clients: dict[asyncio.AbstractEventLoop, Client] = {}

    def ask(
        self,
        question: Callable[[Client], Awaitable[_T]],
        *,
        timeout: float | None = 2 * TIMING.tunnel_answer_seconds,
    ) -> _T:
        try:
            return self._background.run(self._ask(question), timeout)
        except TimeoutError as error:
            raise self._silent(timeout) from error

    def dial(self, namespace: str, pod: str, port: int, timeout: float | None) -> socket.socket:
        """A blocking connection to a port of a pod.

        Only the first read shows whether a program listens there.
        """
        ref = Ref(PODS, pod, namespace)
        try:
            return self._background.dial(lambda near: self._open(near, ref, port), timeout)
        except TimeoutError as error:
            raise self._silent(timeout) from error

    def close(self) -> None:
        self._background.close()

    async def _ask(self, question: Callable[[Client], Awaitable[_T]]) -> _T:
        return await question(self._client())

    def _client(self) -> Client:
        """The client of this loop."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = Client(
                self.access,
                timeout=TIMING.tunnel_answer_seconds,
                patience=TIMING.tunnel_patience_seconds,
            )
            self._clients = {loop: client}
        return client

    async def _open(self, near: socket.socket, pod: Ref, port: int) -> None:
        client = self._client()
        end = _PodEnd(near, self._background.ends)
        try:
            await pod_streams.connect_port(client, pod, port, end)
        except BaseException:
            end.abandon()
            raise

    async def _finish(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _silent(self, timeout: float | None) -> KubernetesUnavailableError:
        return KubernetesUnavailableError(
            f"the API server {self.access.cluster.server} did not answer within {timeout} s",
            hint=f"check that the cluster runs and can be reached ({self.access.origin})",
        )


class _PodEnd(FarEnd, Endpoint):
    """The far side of a pipe: a connection's endpoint."""

    _connection: Connection | None = None
    #: Channels whose first message, the port, has come.
    _greeted = 0

    def send(self, data: bytes) -> bool:
        connection = self._connection
        if connection is None:
            return False
        connection.send(_DATA, data)
        return not connection.is_congested

    def read_on(self, is_wanted: bool) -> None:
        if self._connection is not None:
            self._connection.read_on(is_wanted)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.read_on(True)
            self._connection.close()

    def abort(self) -> None:
        if self._connection is not None:
            self._connection.abort("nobody wants it any more")

    def on_open(self, connection: Connection) -> None:
        self._connection = connection
        self.begin()

    def on_message(self, opcode: int, payload: memoryview) -> None:
        del opcode
        if not payload or self.pipe is None:
            return
        bit = 1 << payload[0]
        if not self._greeted & bit:
            self._greeted |= bit
        elif payload[0] == pod_streams.PORT_DATA:
            self.pipe.deliver(payload[1:])
        elif payload[0] == pod_streams.PORT_ERROR and len(payload) > 1:
            complaint = (
                bytes(payload[1 : LIMITS.kubelet_error_bytes]).decode(errors="replace").strip()
            )
            _logger.debug("a connection to a pod broke: %s", complaint)
            self.close()
            self.pipe.end()

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.on_message(websocket_protocol.BINARY, memoryview(head))
        if self.pipe is not None and head[0] == pod_streams.PORT_DATA:
            self.pipe.deliver(rest)

    def on_writable(self) -> None:
        if self.pipe is not None:
            self.pipe.resume()

    def on_close(self, reason: str) -> None:
        del reason
        self._connection = None
        self.lose()


_DATA = bytes([pod_streams.PORT_DATA])
