"""The local service: the controller with the process backend, in a process of its own.

The order of a start is chosen for speed. An agent that waits to become a pod was started before
this is imported, so both import at the same time. As soon as the socket listens the caller is told,
and its first request waits in the socket's queue while the rest is imported
(`kubetorch.local.running`). What can be wrong with the machine is found before that, and told to
the caller as a typed error.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kubetorch._version import __version__
from kubetorch.config import environment as variables
from kubetorch.controller import database
from kubetorch.controller.backends.spare import Spare
from kubetorch.errors import ControllerUnavailableError, KubetorchError
from kubetorch.lib import identity, ports
from kubetorch.local import commands
from kubetorch.local.home import Home, Running

#: Seconds that a service may take to end which says no more that it runs: it lets requests end.
LOCK_TIMEOUT = 10.0
_STDOUT, _STDERR = 1, 2


class Agents(NamedTuple):
    """Where agents come from.

    Attributes:
        command: What starts one.
        spare: What starts one that waits to become a pod, if there are to be such.
        first: One that waits already.
    """

    command: tuple[str, ...]
    spare: tuple[str, ...] | None = None
    first: Spare | None = None


class Begun(NamedTuple):
    """A service that listens and does not answer yet.

    Attributes:
        place: Its folder, whose lock this process holds until it ends.
        listener: Its socket.
        database: Its state.
        running: What it says of itself.
        token: The user's token.
        secret: The installation's secret.
        environ: Its environment.
        agents: Where agents come from.
    """

    place: Home
    listener: socket.socket
    database: sqlite3.Connection
    running: Running
    token: str
    secret: bytes
    environ: Mapping[str, str]
    agents: Agents


def main(environ: Mapping[str, str], agents: Agents) -> int:
    """Run the service; its exit status."""
    os.umask(0o077)
    try:
        begun = _begin(environ, agents)
    except (KubetorchError, OSError) as error:
        sys.stderr.write(f"the local service cannot start: {error}\n")
        _tell({"failure": _describe(error)})
        return 1
    _tell({"url": begun.running.url})
    os.dup2(_STDERR, _STDOUT)
    # Only now: it imports the server, while the caller prepares its first request.
    from kubetorch.local.running import run  # noqa: PLC0415

    return run(begun)


def _begin(environ: Mapping[str, str], agents: Agents) -> Begun:
    named = environ.get(commands.HOME)
    place = Home((Path(named) if named else variables.local_dir()).absolute())
    place.create()
    os.chdir(place.path)
    _lock(place)
    place.check()
    token = place.secret_bytes(place.token).decode()
    secret = bytes.fromhex(place.secret_bytes(place.secret).decode())
    state = database.open_database(place.state)
    listener = ports.listen(ports.LOOPBACK, _last_port(place))
    running = Running(
        pid=os.getpid(),
        start_time=identity.start_time(os.getpid()) or "",
        started=time.time(),
        url=f"http://{ports.LOOPBACK}:{listener.getsockname()[1]}",
        version=__version__,
    )
    place.write_running(running)
    return Begun(place, listener, state, running, token, secret, environ, agents)


def _lock(place: Home) -> None:
    """Be the only service here, until this process ends.

    Raises:
        ControllerUnavailableError: Another one is, and does not end.
    """
    descriptor = os.open(place.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        os.close(descriptor)
    # Only now: it costs 2 ms, and mostly nobody holds the lock.
    from kubetorch.lib.locking import FileLock  # noqa: PLC0415

    if not FileLock(place.lock).get(LOCK_TIMEOUT):
        raise ControllerUnavailableError(
            f"another local service runs in {place.path} (waited {LOCK_TIMEOUT:.0f} s for it)",
            hint="kt local status",
        )


def _last_port(place: Home) -> int:
    """The port that the service had before, so that addresses stay right; 0 if there was none."""
    try:
        return int(place.controller_url.read_text().rpartition(":")[2])
    except (OSError, ValueError):
        return 0


def _tell(answer: Mapping[str, object]) -> None:
    """Tell the caller, who may be gone."""
    try:
        os.write(_STDOUT, json.dumps(answer).encode() + b"\n")
    except OSError:
        return


def _describe(error: Exception) -> dict[str, object]:
    from kubetorch.wire import failures  # noqa: PLC0415  # not needed by a start that succeeds

    return {**failures.describe(error).to_dict(), "traceback": ""}
