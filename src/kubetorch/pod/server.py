"""The agent's one port: plain HTTP and streams, on uvicorn's parser and protocol.

uvicorn's `Server` is left out: it installs signal handlers and wakes ten times a second to look at
flags; a pod that waits for calls does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kubetorch.lib.connections import Acceptor, upgrade_class
from kubetorch.pod.app import App
from kubetorch.pod.stream import MESSAGE_LIMIT

#: Connections that wait to be accepted.
BACKLOG = 2048
#: Bytes of a request's head.
HEAD_LIMIT = 64 * 1024
#: Seconds that a client has to read what was sent to it before the process ends.
GOODBYE_TIMEOUT = 2.0


class Protocol(HttpToolsProtocol):
    """uvicorn's, with a limit for the head of a request, which anybody may send."""

    _is_in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT:
                self.send_400_response("the head of the request is too long")


class _Connections(set[Any]):
    """The open connections; says when there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = asyncio.Event()

    def discard(self, connection: object) -> None:
        super().discard(connection)
        if not self:
            self.empty.set()


class Server:
    """Listens, and hands requests to the application and upgrades to the acceptor.

    Args:
        app: Answers requests.
        acceptor: Takes upgrades.
    """

    def __init__(self, app: App, acceptor: Acceptor) -> None:
        config = Config(
            app,
            ws=upgrade_class(acceptor, max_message=MESSAGE_LIMIT),
            http=Protocol,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        config.load()
        self._connections = _Connections()
        self._state = ServerState()
        self._state.connections = self._connections
        self._factory = functools.partial(
            Protocol, config=config, server_state=self._state, app_state={}
        )
        self._server: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on this socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._factory, sock=sock, backlog=BACKLOG)

    async def close(self) -> None:
        """Accept no more, and let clients read what was sent to them."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.shutdown()
        if self._connections:
            self._connections.empty.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._connections.empty.wait(), GOODBYE_TIMEOUT)


def bind(host: str, port: int) -> socket.socket:
    """A socket that takes connections at this address; they wait until `Server.listen`.

    Raises:
        OSError: It is taken, or is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
