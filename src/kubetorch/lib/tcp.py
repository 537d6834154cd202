"""Connections of threads that block."""

from __future__ import annotations

import socket
from typing import cast


def connect(host: str, port: int, timeout: float | None) -> socket.socket:
    """Connect by TCP, for messages that are sent at once.

    Args:
        host: A name or an address.
        port: The port.
        timeout: Seconds that it may take, and each step after it; `None` waits for ever.

    Raises:
        OSError: Nobody could be reached in time.
    """
    # A name of ASCII alone, as bytes: the codec for others takes 1 ms to import.
    name = cast("str", host.encode()) if host.isascii() else host
    connection = socket.create_connection((name, port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
