"""An ASGI application on a listening socket: uvicorn's HTTP protocol on the running loop.

uvicorn's own `Server` wakes ten times a second to look whether it should stop, and takes over the
process's signals; here the owner says when to stop, and signals are the owner's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

#: Bytes that the head of a request may have.
HEAD_LIMIT = 64 * 1024

_Message = MutableMapping[str, Any]
Application = Callable[
    [_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]],
    Awaitable[None],
]


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with a limit for the head of a request, which anybody may send."""

    _is_in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT:
                self.send_400_response("the head of the request is too long")


class Server:
    """Serves until it is closed.

    Args:
        app: The application.
        upgrade: What takes over WebSocket upgrades, see `kubetorch.lib.connections.upgrade_class`.
        keep_alive: Seconds that an idle connection is kept.
    """

    def __init__(
        self,
        app: Application,
        *,
        upgrade: type[asyncio.Protocol] | None = None,
        keep_alive: int = 75,
    ) -> None:
        self._state = ServerState()
        self._config = uvicorn.Config(
            cast("Any", app),
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            # What a proxy claims about its client is believed by nobody here.
            proxy_headers=False,
            ws=upgrade or "none",
            timeout_keep_alive=keep_alive,
        )
        self._config.load()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections of a socket that listens already."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, sock=listener)

    def _protocol(self) -> asyncio.Protocol:
        return _Protocol(config=self._config, server_state=self._state, app_state={})

    @property
    def open_requests(self) -> int:
        """Requests that are being answered."""
        return len(self._state.tasks)

    async def close(self, grace: float) -> None:
        """Take no more connections; requests that run have so many seconds to end."""
        if self._server is not None:
            self._server.close()
        connections: list[Any] = list(self._state.connections)
        for connection in connections:
            connection.shutdown()
        tasks = [task for task in self._state.tasks if task is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
