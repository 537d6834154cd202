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

_Message = MutableMapping[str, Any]
Application = Callable[
    [_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]],
    Awaitable[None],
]


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
        return HttpToolsProtocol(config=self._config, server_state=self._state, app_state={})

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
