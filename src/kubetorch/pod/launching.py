"""Starting the process of a zygote, for an agent or for one that waits to become one.

Imports nothing of weight: a spare agent starts a zygote before it imports anything else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from kubetorch.lib import spawning
from kubetorch.pod.worker.pools import VARIABLES

#: What an agent runs in the user's interpreter.
PROGRAM = os.path.join(os.path.dirname(__file__), "worker", "__main__.py")  # noqa: PTH118, PTH120  # pathlib costs 3 ms
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
