"""Connections to ports of pods, through the API server.

    local program ── loopback ── PortForward ──(a WebSocket each)── API server ── kubelet ── pod

Every TCP connection is a WebSocket of its own (`v4.channel.k8s.io`), so one that is read slowly
holds up no other, and none outlives its pod. The end of one direction cannot be told to the other
side in this protocol: when the local program has ended its side, what the pod still says is passed
on until it is silent for `LINGER` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kubetorch.errors import KubernetesError, KubernetesUnavailableError, KubetorchError
from kubetorch.k8s.channels import Channels
from kubetorch.k8s.client import Client
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Ref
from kubetorch.k8s.session import Call
from kubetorch.lib.connections import Endpoint

#: Seconds of silence after which a connection whose local side has ended is closed.
LINGER = 10.0
#: Connections that are forwarded at the same time.
LIMIT = 256
#: What the first byte of a message says.
DATA, ERROR = 0, 1
_PIECE = 64 * 1024
_logger = logging.getLogger(__name__)


class PortStream:
    """One connection to a port of a pod; an asynchronous context manager.

    Attributes:
        received: Bytes that have come from the pod.
    """

    def __init__(self, channels: Channels, action: Action, port: int) -> None:
        self._channels = channels
        self._action = action
        self._port = port
        #: The first message of each channel repeats the port.
        self._greeted: set[int] = set()
        self._complaint = b""
        self.received = 0

    async def __aenter__(self) -> PortStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def read(self) -> bytes:
        """The next bytes from the pod; none when it has ended the connection.

        Raises:
            KubernetesError: Nobody listens on the port, or the pod is gone.
        """
        while (received := await self._channels.receive()) is not None:
            channel, data = received
            if channel not in self._greeted:
                self._greeted.add(channel)
            elif channel == DATA and data:
                self.received += len(data)
                return data
            elif channel == ERROR:
                self._complaint += data[:1000]
        if self._complaint:
            said = self._complaint.decode(errors="replace").strip()
            raise KubernetesError(
                f"cannot forward to port {self._port} ({self._action}): {said}",
                hint=f"does the pod run, and does something listen on its port {self._port}?",
            )
        return b""

    async def write(self, data: bytes) -> None:
        """Send bytes to the pod, as fast as it takes them.

        Raises:
            KubernetesUnavailableError: The connection is gone.
        """
        try:
            await self._channels.send(DATA, data)
        except ConnectionResetError as error:
            raise KubernetesUnavailableError(f"{self._action}: {error}") from error

    async def close(self) -> None:
        """Close the connection."""
        self._channels.close()
        await self._channels.wait_closed()


async def connect(client: Client, pod: Ref, port: int) -> PortStream:
    """Open a connection to a port of a pod.

    Whether anybody listens there is known only when something is read.
    """
    channels = Channels()
    return PortStream(channels, await attach(client, pod, port, channels), port)


async def attach(client: Client, pod: Ref, port: int, endpoint: Endpoint) -> Action:
    """Open a connection to a port of a pod whose messages go to an endpoint.

    The first byte of a message is `DATA` or `ERROR`; the first message of each only repeats the
    port.

    Returns:
        What was asked, for messages.
    """
    ref = replace(pod, subresource="portforward")
    action = client.action("get", ref)
    call = Call(action, "GET", client.path(ref), (("ports", str(port)),))
    await client.session.open_channel(call, endpoint, ("v4.channel.k8s.io",))
    return action


#: Says which pod a new connection goes to.
Target = Callable[[], Awaitable[Ref]]


class PortForward:
    """A port on loopback whose connections go to a port of a pod; an asynchronous context manager.

    Each connection asks anew where to go, so when a pod is replaced the next one finds its
    successor.

    Args:
        client: Asks the server.
        target: Says which pod.
        port: The port of the pod.
        local_port: The port here; any free one by default.

    Attributes:
        error: Why the last connection could not be made or broke; `None` when it did not.
    """

    def __init__(self, client: Client, target: Target, port: int, *, local_port: int = 0) -> None:
        self.error: KubetorchError | None = None
        self._client = client
        self._target = target
        self._port = port
        self._local_port = local_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> PortForward:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._local_port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def local_port(self) -> int:
        """The port on 127.0.0.1."""
        assert self._server is not None, "not entered"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and close every connection."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= LIMIT:
            self.error = KubernetesError(f"more than {LIMIT} connections at the same time")
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await connect(self._client, await self._target(), self._port) as stream:
                await _relay_both(reader, writer, stream)
            self.error = None
        except KubetorchError as error:
            self.error = error
            _logger.debug("a forwarded connection broke: %s", error)
            writer.transport.abort()
        except OSError:  # the local program has gone
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _relay_both(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: PortStream
) -> None:
    up = asyncio.create_task(_relay_up(reader, stream))
    down = asyncio.create_task(_relay_down(stream, writer))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        received = -1
        while not down.done() and stream.received != received:
            received = stream.received
            await asyncio.wait({down}, timeout=LINGER)
        if down.done():
            down.result()
    finally:
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _relay_up(reader: asyncio.StreamReader, stream: PortStream) -> None:
    while data := await reader.read(_PIECE):
        await stream.write(data)


async def _relay_down(stream: PortStream, writer: asyncio.StreamWriter) -> None:
    while data := await stream.read():
        writer.write(data)
        await writer.drain()
