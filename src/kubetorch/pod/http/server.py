"""The agent's one port: plain HTTP and streams."""

from __future__ import annotations

import socket

from kubetorch.lib import serving
from kubetorch.lib.connections import Acceptor, upgrade_class
from kubetorch.pod.apps.gate import Gate
from kubetorch.pod.calls.stream import MESSAGE_LIMIT
from kubetorch.pod.http.app import App

#: Connections that wait to be accepted.
BACKLOG = 2048
#: Seconds that a client has to read what was sent to it before the process ends.
GOODBYE_TIMEOUT = 2.0


class Server:
    """Listens, and hands requests to the application and upgrades to the acceptor.

    Args:
        app: Answers requests.
        acceptor: Takes upgrades.
        gate: Takes upgrades of the pod's app.
    """

    def __init__(self, app: App, acceptor: Acceptor, gate: Gate) -> None:
        upgrade = upgrade_class(acceptor, max_message=MESSAGE_LIMIT)
        tunnels = serving.Tunnels(gate.takes, gate.open)
        self._server = serving.Server(app, upgrade=upgrade, tunnels=tunnels)

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on this socket."""
        await self._server.start(sock)

    async def close(self) -> None:
        """Accept no more, and let clients read what was sent to them."""
        await self._server.close(GOODBYE_TIMEOUT)


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
