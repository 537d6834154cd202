"""The commands that start the processes of an installation, and the first of them.

Imports nothing of weight: an agent is started here before the service imports anything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from kubetorch.controller.backends import spare

#: Home of the service.
HOME = "KT_LOCAL_DIR"
#: `kubetorch.wire.podenv.MARK`, which costs more to import than a spare agent may wait for.
_MARK = "KT_PROCESS_MARK"
_STDERR = 2


def python(*arguments: str) -> tuple[str, ...]:
    """A command that runs this interpreter, with nothing of the working directory on its path."""
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe, *arguments)


SERVICE = python("-m", "kubetorch.local", "--detach")
AGENT = python("-m", "kubetorch.pod")
SPARE = python("-m", "kubetorch.pod.spare")


def marks(home: str) -> str:
    """What the marks of a home's processes begin with: no other folder has its inode.

    Raises:
        OSError: There is no such folder.
    """
    found = os.stat(home)  # noqa: PTH116  # pathlib costs 3 ms
    return f"{found.st_dev:x}.{found.st_ino:x}-"


def first_spare(environ: Mapping[str, str], command: tuple[str, ...]) -> spare.Spare | None:
    """A spare agent, started for a service that is being started; `None` where that fails."""
    try:
        mark = marks(environ[HOME]) + os.urandom(8).hex()
        return spare.start(command, {**environ, _MARK: mark}, mark=mark, log=_STDERR)
    except (OSError, KeyError):
        return None  # the service finds out what is wrong, and says it
