"""A server that sends what one WebSocket says to all others, and tells it when all have answered.

broadcast_server SOCKET: the number of a listening socket. The one is that at `/control`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping

import uvloop

from kubetorch.lib import websocket_protocol
from kubetorch.lib.asgi import Receive, Scope, Send
from kubetorch.lib.http_server import Server
from kubetorch.lib.websocket import Connection, Endpoint, upgrader


class Hub:
    """All connections."""

    def __init__(self) -> None:
        self.control: Connection | None = None
        self.others: list[Connection] = []
        self.left = 0

    def accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        """One more."""
        return _End(self, is_control=path == "/control")


class _End(Endpoint):
    def __init__(self, hub: Hub, *, is_control: bool) -> None:
        self._hub = hub
        self._is_control = is_control

    def on_open(self, connection: Connection) -> None:
        if self._is_control:
            self._hub.control = connection
        else:
            self._hub.others.append(connection)

    def on_message(self, opcode: int, payload: memoryview) -> None:
        hub = self._hub
        if self._is_control:
            said = bytes(payload)
            hub.left = len(hub.others)
            for other in hub.others:
                other.send(said, opcode=websocket_protocol.TEXT)
            return
        hub.left -= 1
        if hub.left == 0 and hub.control is not None:
            hub.control.send(b"done", opcode=websocket_protocol.TEXT)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.on_message(websocket_protocol.TEXT, memoryview(head + rest))

    def on_writable(self) -> None:
        return

    def on_close(self, reason: str) -> None:
        return


async def main(listener: socket.socket) -> None:
    """Serve until it is told to stop."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    server = Server(_no_http, upgrade=upgrader(Hub().accept, max_message=2**24))
    await server.start(listener)
    await stopped.wait()
    await server.close(1.0)


async def _no_http(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotImplementedError  # only upgrades come: the benchmark is at fault


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        uvloop.run(main(given))
