"""The processes of a local service: their commands, and the environment that they start with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from kubetorch.controller.backends.process import spares
from kubetorch.errors import ConfigError

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
    """The prefix of the marks of a home's processes: no other folder has its inode."""
    found = os.stat(home)  # noqa: PTH116  # pathlib costs 3 ms
    return f"{found.st_dev:x}.{found.st_ino:x}-"


def first_spare(environ: Mapping[str, str], command: tuple[str, ...]) -> spares.SpareAgent | None:
    """A spare agent, started for a service that is being started; `None` where that fails."""
    try:
        mark = marks(environ[HOME]) + os.urandom(8).hex()
        return spares.start(command, {**environ, _MARK: mark}, mark=mark, log=_STDERR)
    except (OSError, KeyError):
        return None  # the service finds out what is wrong, and says it


#: Seconds without a request after which a service with nothing deployed stops.
IDLE = "KT_LOCAL_IDLE"
IDLE_DEFAULT = 60.0


def idle_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get(IDLE, "")
    try:
        seconds = float(text) if text else IDLE_DEFAULT
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ConfigError(f"{IDLE} is {text!r}; it must be a number of seconds above 0")
    return seconds
