"""Free ports of the loopback interface, TCP connections, and how many a process may have open."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Container
from typing import cast

LOOPBACK = "127.0.0.1"
# Below the ports that Linux (32768-60999) and macOS (49152-65535) give to outgoing connections, so
# that nobody is given one of these between the moment that it is chosen and the one it is bound in.
PORTS = range(25000, 32000)
_ATTEMPTS = 200


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """True if a server could listen on this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier server that are not quite gone are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose(taken: Container[int], host: str = LOOPBACK, ports: range = PORTS) -> int:
    """A port of these that is free and not one of `taken`."""
    for _ in range(_ATTEMPTS):
        port = ports[int.from_bytes(os.urandom(4), "big") % len(ports)]
        if port not in taken and is_free(port, host):
            return port
    raise OSError(f"no free port was found between {ports[0]} and {ports[-1]} on {host}")


def claim(port: int) -> socket.socket | None:
    """Keep a TCP port, for a server that will listen on it later, from others who claim theirs.

    The claim is the UDP port of this number, as long as the socket is open; `None` if somebody has
    it.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        held.bind((LOOPBACK, port))
    except OSError:
        held.close()
        return None
    return held


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its queue until somebody accepts them."""
    for wanted in (port, 0):
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, wanted))
            server.listen(1024)
        except OSError:
            server.close()
            if wanted == 0:
                raise
        else:
            server.setblocking(False)
            return server
    raise AssertionError  # the last port is 0, which returns or raises


#: A silent peer is probed after so many seconds, then so often, and given up after so many probes.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 15, 5, 4


def connect(host: str, port: int, timeout: float | None) -> socket.socket:
    """Connect by TCP, for messages that are sent at once."""
    # A name of ASCII alone, as bytes: the codec for others takes 1 ms to import.
    name = cast("str", host.encode()) if host.isascii() else host
    connection = socket.create_connection((name, port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Make TCP notice that the peer of a silent connection is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
        ("TCP_KEEPALIVE", KEEPALIVE_IDLE),  # macOS' name of it
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


#: What a server with many clients asks for.
MANY = 65536


def limit() -> int:
    """Files and connections that the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MANY if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Allow the process `MANY`, or as many as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if hard == resource.RLIM_INFINITY else min(MANY, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has a lower limit that it does not report.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
