"""Free ports of the loopback interface, TCP connections, and a process's limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Container
from typing import cast

from kubetorch.lib.tuning import LIMITS, TIMING

LOOPBACK = "127.0.0.1"
# Below the ports that Linux (32768-60999) and macOS (49152-65535) give to outgoing connections, so
# that a chosen port is not given to a connection before a server binds it.
PORTS = range(25000, 32000)
_ATTEMPTS = 200


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """True if a server could listen on this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: closing connections of an earlier server are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose(taken: Container[int], host: str = LOOPBACK, ports: range = PORTS) -> int:
    """A free port of `ports` that is not in `taken`."""
    for _ in range(_ATTEMPTS):
        port = ports[int.from_bytes(os.urandom(4), "big") % len(ports)]
        if port not in taken and is_free(port, host):
            return port
    raise OSError(f"no free port was found between {ports[0]} and {ports[-1]} on {host}")


def claim(port: int) -> socket.socket | None:
    """Claim a TCP port for a server that will listen on it later, against other claims.

    The claim is the UDP port of this number, as long as the socket is open; `None` if another
    process has it.
    """
    claim_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        claim_socket.bind((LOOPBACK, port))
    except OSError:
        claim_socket.close()
        return None
    return claim_socket


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, on another port if this one is taken; connections wait in its queue."""
    for candidate_port in (port, 0):
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, candidate_port))
            server.listen(1024)
        except OSError:
            server.close()
            if candidate_port == 0:
                raise
        else:
            server.setblocking(False)
            return server
    raise AssertionError  # the last port is 0, which returns or raises


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
        ("TCP_KEEPIDLE", TIMING.keepalive_idle_seconds),
        ("TCP_KEEPALIVE", TIMING.keepalive_idle_seconds),  # macOS' name of it
        ("TCP_KEEPINTVL", TIMING.keepalive_interval_seconds),
        ("TCP_KEEPCNT", TIMING.keepalive_probes),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def limit() -> int:
    """Files and connections that the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMITS.open_files if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raise the limit to `open_files`, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = (
        LIMITS.open_files if hard == resource.RLIM_INFINITY else min(LIMITS.open_files, hard)
    )
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        # macOS has a lower limit that it does not report.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
