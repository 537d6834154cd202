"""A port on loopback whose connections go to a port of a pod, as `kubectl port-forward` has it.

    local program ── loopback ── PortForward ──(a WebSocket each)── API server ── kubelet ── pod

The end of one direction cannot be told to the other side in this protocol: when the local program
has ended its side, what the pod still says is passed on until it is silent for `LINGER` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from benchmarks.port_stream import PortStream, connect
from kubetorch.errors import KubernetesError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Ref

#: Seconds of silence after which a connection whose local side has ended is closed.
LINGER = 10.0
#: Connections that are forwarded at the same time.
LIMIT = 256
_PIECE = 64 * 1024

#: Says which pod a new connection goes to.
Target = Callable[[], Awaitable[Ref]]


class PortForward:
    """A port on loopback whose connections go to a port of a pod; an asynchronous context manager.

    Each connection asks anew where to go, so when a pod is replaced the next one finds its
    successor.
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
