"""Starting a program in a session of its own, as cheaply as the machine can.

`subprocess` is not used: importing it costs as much as a bare interpreter, and it wants to own what
it started. Descriptors need not be closed: Python's own are closed by `exec`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def spawn(
    command: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    stdin: int | None = None,
    output: int | None = None,
    errors: int | None = None,
) -> int:
    """Start a program as the leader of a new session; its process id.

    Args:
        command: Absolute path of the program, and its arguments.
        environment: All of its environment.
        stdin: Its descriptor 0; `/dev/null` when not given, as for the others.
        output: Its descriptor 1.
        errors: Its descriptor 2.

    Raises:
        OSError: It cannot be started.
    """
    null = os.open(os.devnull, os.O_RDWR)
    try:
        given = [null if fd is None else fd for fd in (stdin, output, errors)]
        # Above 2, so that none of them is overwritten before its turn comes.
        raised = [_above_standard(fd) for fd in given]
        try:
            return _spawn(command, environment, raised)
        finally:
            for fd in raised:
                os.close(fd)
    finally:
        os.close(null)


def _above_standard(descriptor: int) -> int:
    low = []
    copy = os.dup(descriptor)
    while copy <= 2:
        low.append(copy)
        copy = os.dup(descriptor)
    for fd in low:
        os.close(fd)
    return copy


def _spawn(command: tuple[str, ...], environment: Mapping[str, str], standard: list[int]) -> int:
    moves = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(standard)]
    try:
        return os.posix_spawn(
            command[0], command, environment, file_actions=moves, setsid=True, setsigmask=[]
        )
    except NotImplementedError:  # a C library without POSIX_SPAWN_SETSID
        return _fork(command, environment, standard)


def _fork(command: tuple[str, ...], environment: Mapping[str, str], standard: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        _become(command, environment, standard)
    return pid


def _become(command: tuple[str, ...], environment: Mapping[str, str], standard: list[int]) -> None:
    try:
        os.setsid()
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        os.execve(command[0], command, environment)
    finally:
        os._exit(127)
