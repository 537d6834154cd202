"""Unix sockets for processes of one user on one machine, in folders that only this user can enter.

Both ends check the user of the other. A path may have any length: the socket is reached through a
descriptor of its folder, which is the very folder that was checked.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: True where a socket says which user has the other end, and keeps messages apart.
IS_AVAILABLE = hasattr(socket, "SO_PEERCRED") and hasattr(socket, "SOCK_SEQPACKET")

_CREDENTIALS = struct.Struct("3i")


def listen(path: Path, backlog: int) -> socket.socket:
    """A socket for messages, in a folder that is made for it; it does not block."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _folder(path) as name:
            path.unlink(missing_ok=True)
            server.bind(name)
        server.listen(backlog)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server


def connect(path: Path) -> socket.socket:
    """Connect to a socket of the same user, at once; `OSError` if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        with _folder(path) as name:
            connection.connect(name)
        check_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def is_reachable(path: Path) -> bool:
    """True if a socket of this user has this path; a process may or may not listen there."""
    if not IS_AVAILABLE:
        return False
    try:
        with _folder(path) as name:
            return stat.S_ISSOCK(os.stat(name).st_mode)  # noqa: PTH116  # as the others use it
    except OSError:
        return False


class Peer(NamedTuple):
    """The process at the other end of a socket when it was connected."""

    pid: int
    user: int


def peer(connection: socket.socket) -> Peer | None:
    """The process at the other end; `None` where the system does not say it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, user)


def check_user(connection: socket.socket, *, may_be_root: bool = False) -> None:
    """Refuse another user at the other end."""
    allowed_users = (os.geteuid(), 0) if may_be_root else (os.geteuid(),)
    other_end = peer(connection)
    if other_end is not None and other_end.user not in allowed_users:
        raise PermissionError(f"the other end belongs to user {other_end.user}")


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[str]:
    """The name of a socket by a descriptor of its folder, which is the user's alone."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path.parent, flags)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{path.parent} is not a folder of this user alone")
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
