"""TCP: connections of threads that block, and what all connections have."""

from __future__ import annotations

import socket
from typing import cast

#: A silent peer is probed after so many seconds, then so often, and given up after so many probes.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 15, 5, 4


def connect(host: str, port: int, timeout: float | None) -> socket.socket:
    """Connect by TCP, for messages that are sent at once.

    Args:
        host: A name or an address.
        port: The port.
        timeout: Seconds that it may take, and each step after it; `None` waits for as long as
            the peer is there.

    Raises:
        OSError: Nobody could be reached in time.
    """
    # A name of ASCII alone, as bytes: the codec for others takes 1 ms to import.
    name = cast("str", host.encode()) if host.isascii() else host
    connection = socket.create_connection((name, port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Have TCP notice that the peer of a silent connection is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
        ("TCP_KEEPALIVE", KEEPALIVE_IDLE),  # macOS' name of it
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
