"""A server that sends what one WebSocket says to all pods, and tells it when all have answered.

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
    """The connections of all pods, and of the control program."""

    def __init__(self) -> None:
        self.control: Connection | None = None
        self.pods: list[Connection] = []
        self.missing_answers = 0

    def accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        """Accept a connection."""
        return _End(self, is_control=path == "/control")


class _End(Endpoint):
    def __init__(self, hub: Hub, *, is_control: bool) -> None:
        self._hub = hub
        self._is_control = is_control

    def on_open(self, connection: Connection) -> None:
        if self._is_control:
            self._hub.control = connection
        else:
            self._hub.pods.append(connection)

    def on_message(self, opcode: int, payload: memoryview) -> None:
        hub = self._hub
        if self._is_control:
            message = bytes(payload)
            hub.missing_answers = len(hub.pods)
            for connection in hub.pods:
                connection.send(message, opcode=websocket_protocol.TEXT)
            return
        hub.missing_answers -= 1
        if hub.missing_answers == 0 and hub.control is not None:
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
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        uvloop.run(main(listener))
