"""The processes of a local service: their commands, and the environment that they start with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from kubetorch.controller.backends.process import spares
from kubetorch.errors import ConfigError

#: The variable with the folder of the service.
HOME_VARIABLE = "KT_LOCAL_DIR"
#: A copy of `kubetorch.wire.podenv.MARK`, whose import would delay the first spare agent.
_MARK_VARIABLE = "KT_PROCESS_MARK"
_STDERR = 2


def python(*arguments: str) -> tuple[str, ...]:
    """A command that runs this interpreter, with nothing of the working directory on its path."""
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe, *arguments)


SERVICE = python("-m", "kubetorch.local", "--detach")
AGENT = python("-m", "kubetorch.pod")
SPARE = python("-m", "kubetorch.pod.spare")


def mark_prefix(home: str) -> str:
    """The prefix of the marks of a service's processes: no other folder has this inode."""
    home_stat = os.stat(home)  # noqa: PTH116  # pathlib costs 3 ms
    return f"{home_stat.st_dev:x}.{home_stat.st_ino:x}-"


def first_spare(environ: Mapping[str, str], command: tuple[str, ...]) -> spares.SpareAgent | None:
    """Start a spare agent for a service that is starting; `None` if that fails."""
    try:
        mark = mark_prefix(environ[HOME_VARIABLE]) + os.urandom(8).hex()
        return spares.start(command, {**environ, _MARK_VARIABLE: mark}, mark=mark, log=_STDERR)
    except (OSError, KeyError):
        return None  # the service meets the same fault and reports it


#: The variable with the seconds without a request after which a service without workloads stops.
IDLE_VARIABLE = "KT_LOCAL_IDLE"
#: A copy of `kubetorch.controller.buckets.NETWORKS`, which clients do not import.
NETWORKS_VARIABLE = "KT_BUCKET_NETWORKS"


def idle_seconds(environ: Mapping[str, str], default_seconds: float) -> float:
    text = environ.get(IDLE_VARIABLE, "")
    try:
        seconds = float(text) if text else default_seconds
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ConfigError(f"{IDLE_VARIABLE} is {text!r}; it must be a number of seconds above 0")
    return seconds
