"""Whose program has the other end of a connection on loopback, where ports are open to all users.

`SO_PEERCRED` does not exist for TCP, but the system lists its connections with their owners.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kubetorch.lib.sockets import LOOPBACK
from kubetorch.sdk.tuning import TIMING

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


def is_of_this_user(connection: socket.socket) -> bool:
    """True if a program of this user, or of root, dialled the connection, from 127.0.0.1.

    Both whole addresses are compared: of a connection from 127.0.0.2 this end's own entry may have
    the same two ports.
    """
    try:
        peer, here = connection.getpeername(), connection.getsockname()
    except OSError:  # it has gone
        return False
    if peer[0] != LOOPBACK:
        return False
    users = set(_users(peer, here) if _TABLES[0].exists() else _users_by_lsof(peer[1], here[1]))
    return bool(users) and users <= {os.getuid(), 0}


def _users(peer: tuple[str, int], here: tuple[str, int]) -> Iterator[int]:
    """The owners of the other end."""
    for table, prefix in zip(_TABLES, ("", "::ffff:"), strict=True):
        addresses = [_address(f"{prefix}{host}", port) for host, port in (peer, here)]
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        for row in rows:
            _, local, remote, state, _, _, _, user, *_ = row.split()
            if [local, remote] == addresses and state == _ESTABLISHED:
                yield int(user)


def _address(host: str, port: int) -> str:
    """An address as the tables have it: words of 32 bits in the order of this machine."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = [packed[begin : begin + 4] for begin in range(0, len(packed), 4)]
    text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{text}:{port:04X}"


def _users_by_lsof(peer_port: int, port: int) -> Iterator[int]:
    """This user, if another process of the user has the other end: macOS has no tables."""
    query = ["lsof", "-nP", "-a", "-u", str(os.getuid()), f"-iTCP:{peer_port}"]
    query += ["-sTCP:ESTABLISHED", "-Fpn"]
    try:
        shown = subprocess.run(
            query, capture_output=True, text=True, timeout=TIMING.debug_adapter_seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return iter(())
    return by_lsof(shown.stdout, peer_port, port)


def by_lsof(shown: str, peer_port: int, port: int) -> Iterator[int]:
    """As above, of what lsof has shown."""
    name, process = f"n{LOOPBACK}:{peer_port}->{LOOPBACK}:{port}", ""
    for line in shown.splitlines():
        if line.startswith("p"):
            process = line
        elif line == name and process != f"p{os.getpid()}":
            yield os.getuid()
