"""Finding, starting and stopping the local service: blocking, and cheap to import.

ensure ── service.json names a living process ──────────────────────────────► Endpoint
   └───── start.lock ── spawn, detached ── one line on its stdout: it listens ──┘
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kubetorch.config import environment as variables
from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib import files, processes
from kubetorch.lib.files import FileLock
from kubetorch.local import process
from kubetorch.local.home import Home, Running
from kubetorch.wire import exceptions, routes
from kubetorch.wire.podenv import MARK

#: Seconds that a start may take.
START_TIMEOUT = 30.0
#: Seconds that a stop may take: its pods have a few to let their calls end.
STOP_TIMEOUT = 30.0
_SHOWN_LINES = 20
#: Variables that a service has beside those of the machine.
_CHOSEN = ("PYTHONPATH", process.IDLE)


class Endpoint(NamedTuple):
    url: str
    token: str
    started: bool = False


class Status(NamedTuple):
    home: Path
    log: Path
    running: Running | None


def home() -> Path:
    """Folder of the user's service: `KT_LOCAL_DIR`, or `~/.kt/local`."""
    return variables.local_dir().absolute()


def find(folder: Path | None = None) -> Endpoint | None:
    place = Home(folder or home())
    running = place.running()
    return None if running is None else Endpoint(running.url, place.read_token())


def ensure(folder: Path | None = None) -> Endpoint:
    """The running service, which is started if there is none."""
    place = Home(folder or home())
    found = find(place.path)
    if found is not None:
        return found
    place.create()
    with _locked(place.start_lock, START_TIMEOUT, "another program starts the local service"):
        # Another program may have started it meanwhile.
        return find(place.path) or _start(place)


def stop(folder: Path | None = None, *, pods: bool = True, timeout: float = STOP_TIMEOUT) -> bool:
    """Stop the service, if it runs; whether it did."""
    place = Home(folder or home())
    if not place.path.is_dir():
        return False
    with _locked(place.start_lock, timeout, "another program starts the local service"):
        running = place.running()
        if running is not None:
            _ask_to_stop(place, running, pods=pods, timeout=timeout)
            with _locked(place.lock, timeout, f"process {running.pid} does not stop"):
                pass
        if pods:
            _end_orphans(place)
    return running is not None


def status(folder: Path | None = None) -> Status:
    place = Home(folder or home())
    return Status(place.path, place.log, place.running())


def for_service(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a service that a program with this one starts."""
    process.idle_seconds(environ)
    chosen = {name: environ[name] for name in _CHOSEN if name in environ}
    return {**variables.of_machine(environ), **chosen, process.HOME: str(folder)}


def _start(place: Home) -> Endpoint:
    """Start a service, and wait until it listens."""
    started = for_service(os.environ, place.path)
    place.rotate_log()
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    reading, writing = os.pipe()
    try:
        pid = processes.spawn(process.SERVICE, started, output=writing, errors=log)
    except OSError as error:
        os.close(reading)
        raise ControllerUnavailableError(f"the local service cannot be started: {error}") from error
    finally:
        os.close(writing)
        os.close(log)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        line = _first_line(pipe.fileno(), time.monotonic() + START_TIMEOUT)
    # What was spawned has only forked the service.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    answer = json.loads(line) if line else {}
    if "failure" in answer:
        raise exceptions.rebuild(exceptions.parse(answer["failure"]))
    if "url" not in answer:
        raise _not_started(place, has_ended=line is not None)
    return Endpoint(answer["url"], place.read_token(), started=True)


def _first_line(descriptor: int, deadline: float) -> bytes | None:
    """The first line from a pipe: cut when its writers are gone, `None` when time is over."""
    line = b""
    while not line.endswith(b"\n"):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        data = os.read(descriptor, 65536)
        if not data:
            break
        line += data
    return line


def _not_started(place: Home, *, has_ended: bool) -> ControllerUnavailableError:
    what = "ended" if has_ended else f"did not answer within {START_TIMEOUT:.0f} s"
    lines = files.tail(place.log, _SHOWN_LINES)
    shown = "".join(f"\n  {line}" for line in lines)
    return ControllerUnavailableError(
        f"the local service {what} while it was started; the last lines of its log:{shown}",
        hint=f"all of it is in {place.log}",
    )


def _ask_to_stop(place: Home, running: Running, *, pods: bool, timeout: float) -> None:
    from kubetorch.lib.http_client import HttpClient  # noqa: PLC0415  # loads httptools; only to stop

    body = json.dumps({"pods": pods}).encode()
    with HttpClient(running.url, place.read_token(), timeout=timeout) as client:
        try:
            with client.request("POST", routes.STOP, body=body) as response:
                response.read()
        except ControllerUnavailableError:
            if running.is_alive:
                raise


def _end_orphans(place: Home) -> None:
    """End pods that a service left behind which was killed."""
    marks = process.marks(str(place.path))
    for pid, mark in processes.processes_with(MARK).items():
        if mark.startswith(marks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _locked(path: Path, timeout: float, what: str) -> Iterator[None]:
    waiting = FileLock(path)
    try:
        if not waiting.get(timeout):
            raise ControllerUnavailableError(
                f"{what} (waited {timeout:.0f} s for {path})", hint="kt local status"
            )
        yield
    finally:
        waiting.close()
