"""Free ports of the loopback interface, for processes that bind them themselves."""

from __future__ import annotations

import os
import socket
from collections.abc import Container

LOOPBACK = "127.0.0.1"
# Below the ports that Linux (32768-60999) and macOS (49152-65535) give to outgoing connections, so
# that nobody is given one of these between the moment that it is chosen and the one it is bound in.
_FIRST, _LAST = 18000, 31999
_ATTEMPTS = 200


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier server that are not quite gone are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose(taken: Container[int], host: str = LOOPBACK) -> int:
    """A port that is free and not one of `taken`.

    Raises:
        OSError: None was found.
    """
    for _ in range(_ATTEMPTS):
        port = _FIRST + int.from_bytes(os.urandom(4), "big") % (_LAST - _FIRST + 1)
        if port not in taken and is_free(port, host):
            return port
    raise OSError(f"no free port was found between {_FIRST} and {_LAST} on {host}")


def listen(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """A listening socket; connections wait in its queue until somebody accepts them.

    Args:
        host: The interface.
        port: The port; any free one is taken when it is 0 or belongs to somebody else.
        backlog: How many connections may wait.

    Raises:
        OSError: There is no port.
    """
    for wanted in (port, 0):
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, wanted))
            server.listen(backlog)
        except OSError:
            server.close()
            if wanted == 0:
                raise
        else:
            server.setblocking(False)
            return server
    raise AssertionError  # the last port is 0, which returns or raises
