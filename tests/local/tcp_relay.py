"""A TCP relay on loopback that can fail as networks do."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes bytes on between clients and a port of this machine.

    Attributes:
        accepted: Connections that were made to it.
    """

    def __init__(self, port: int) -> None:
        self.accepted = 0
        self._target = port
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold(self) -> None:
        """Swallow what comes, as a network that lost a route does, until `release`."""
        self._flows.clear()

    def release(self) -> None:
        """Pass on what waits, and what comes."""
        self._flows.set()

    def cut(self) -> None:
        """Break the connections that there are."""
        sockets, self._sockets = self._sockets, []
        for opened in sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.accepted += 1
            self._sockets += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        source.close()
