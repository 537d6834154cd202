"""What a controller that does not lead answers: that it lives, and who is to be asked instead."""

from __future__ import annotations

import socket

from kubetorch._version import __version__
from kubetorch.controller.exchange import Exchange
from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib.asgi import Receive, Scope, Send
from kubetorch.lib.serving import Server
from kubetorch.wire import failures, routes, versions


class Standby:
    """Answers on a listening socket until it is closed."""

    def __init__(self) -> None:
        self._server = Server(_answer)

    async def start(self, listener: socket.socket) -> None:
        """Answer on a duplicate of this socket, which stays open."""
        await self._server.start(listener.dup())

    async def close(self) -> None:
        """Stop; what comes from now on waits in the socket."""
        await self._server.close(0.0)


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    if (exchange.method, exchange.path) == ("GET", routes.HEALTH):
        await exchange.respond_message(
            {"status": "standby", "version": __version__, "protocol": versions.PROTOCOL}
        )
        return
    error = ControllerUnavailableError(
        "this controller does not lead", hint="another one does, or will in a moment"
    )
    await exchange.refuse(503, failures.describe(error).to_json())
