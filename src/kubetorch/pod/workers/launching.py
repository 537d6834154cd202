"""Starting the process of a zygote, for an agent or for one that waits to become one.

Imports nothing of weight: a spare agent makes a zygote of itself before it imports the rest.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from kubetorch.lib import spawning
from kubetorch.pod.worker.pools import VARIABLES

# pathlib costs 3 ms.
_POD = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
#: What an agent runs in the user's interpreter.
PROGRAM = os.path.join(_POD, "worker", "__main__.py")  # noqa: PTH118
_STDOUT, _STDERR = 1, 2


class Launched(NamedTuple):
    """A zygote that was started and has not been told anything yet; it ends with its socket.

    Attributes:
        pid: Its process, which leads a session and is a child of this one.
        control: The socket to it.
        python: Its interpreter.
        environ: Its environment, but for the sizes of thread pools.
    """

    pid: int
    control: socket.socket
    python: str
    environ: Mapping[str, str]


def fork() -> Launched:
    """Make a zygote of this process, for workers with its interpreter and environment.

    What takes a zygote longest to import, an agent needs too; so both have it for the time of one.
    To be called before this process has threads, or anything that is not to be in a worker.

    Raises:
        OSError: It cannot be forked.
    """
    import asyncio  # noqa: F401, PLC0415  # for both

    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
        if pid == 0:
            _become_zygote(ours, theirs)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Launched(pid, ours, sys.executable, dict(os.environ))


def _become_zygote(ours: socket.socket, theirs: socket.socket) -> NoReturn:
    status = 70
    try:
        os.setsid()
        os.dup2(theirs.fileno(), 0)
        ours.close()
        theirs.close()
        os.environ.update(dict.fromkeys(VARIABLES, "1"))
        from kubetorch.pod.worker import zygote  # noqa: PLC0415  # not into the agent

        zygote.main()
        status = 0
    finally:  # whatever happens, the child must not go on as an agent
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def launch(python: str, environ: Mapping[str, str]) -> Launched:
    """Start a zygote.

    Args:
        python: Absolute path of the interpreter.
        environ: The environment of the workers.

    Raises:
        OSError: The interpreter cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        pid = spawning.spawn(
            (python, PROGRAM, "zygote"),
            {**environ, **dict.fromkeys(VARIABLES, "1")},
            stdin=theirs.fileno(),
            output=_STDOUT,
            errors=_STDERR,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Launched(pid, ours, python, dict(environ))
