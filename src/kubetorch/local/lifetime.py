"""Finds, starts and stops the local service: blocking, and cheap to import.

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
from kubetorch.config.settings import SETTINGS, config
from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib import files, processes
from kubetorch.lib.files import FileLock
from kubetorch.local import process
from kubetorch.local.home import Home, Running
from kubetorch.local.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions, routes
from kubetorch.wire.podenv import MARK

#: Variables of the program that a service gets beside those of the machine.
_CHOSEN_VARIABLES = ("PYTHONPATH", process.IDLE_VARIABLE, process.NETWORKS_VARIABLE)


class Endpoint(NamedTuple):
    """The address of a service; `started` is true if this program has started it."""

    url: str
    token: str
    started: bool = False


class Status(NamedTuple):
    """The files of a service, and its record if it runs."""

    home: Path
    log: Path
    running: Running | None


def home() -> Path:
    """The folder of the user's service: `KT_LOCAL_DIR`, or `~/.kt/local`."""
    return variables.local_dir().absolute()


def find(folder: Path | None = None) -> Endpoint | None:
    """The address of the running service; `None` if no service runs."""
    service_home = Home(folder or home())
    running = service_home.running()
    return None if running is None else Endpoint(running.url, service_home.read_token())


def ensure(folder: Path | None = None) -> Endpoint:
    """The address of the running service; starts a service if none runs."""
    service_home = Home(folder or home())
    endpoint = find(service_home.path)
    if endpoint is not None:
        return endpoint
    service_home.create()
    with _locked(
        service_home.start_lock, TIMING.start_seconds, "another program starts the local service"
    ):
        # Another program may have started it meanwhile.
        return find(service_home.path) or _start(service_home)


def stop(
    folder: Path | None = None, *, pods: bool = True, timeout: float = TIMING.stop_seconds
) -> bool:
    """Stop the service if it runs, and its pods unless `pods` is false; returns whether it ran."""
    service_home = Home(folder or home())
    if not service_home.path.is_dir():
        return False
    with _locked(service_home.start_lock, timeout, "another program starts the local service"):
        running = service_home.running()
        if running is not None:
            _ask_to_stop(service_home, running, pods=pods, timeout=timeout)
            with _locked(service_home.lock, timeout, f"process {running.pid} does not stop"):
                pass
        if pods:
            _end_orphans(service_home)
    return running is not None


def status(folder: Path | None = None) -> Status:
    service_home = Home(folder or home())
    return Status(service_home.path, service_home.log, service_home.running())


def service_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a service, from that of the program that starts it."""
    process.idle_seconds(environ, TIMING.idle_seconds)
    chosen_variables = {name: environ[name] for name in _CHOSEN_VARIABLES if name in environ}
    return {**variables.of_machine(environ), **chosen_variables, process.HOME_VARIABLE: str(folder)}


def _start(service_home: Home) -> Endpoint:
    environment = service_environment(os.environ, service_home.path)
    for setting in ("store_bucket", "store_endpoint"):
        if value := config.get(setting):
            environment[SETTINGS[setting].variable] = value
    service_home.rotate_log()
    log = os.open(service_home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    read_end, write_end = os.pipe()
    try:
        pid = processes.spawn(process.SERVICE, environment, output=write_end, errors=log)
    except OSError as error:
        os.close(read_end)
        raise ControllerUnavailableError(f"the local service cannot be started: {error}") from error
    finally:
        os.close(write_end)
        os.close(log)
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        line = _first_line(pipe.fileno(), time.monotonic() + TIMING.start_seconds)
    # The spawned process ended when it had forked the service.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    answer = json.loads(line) if line else {}
    if "failure" in answer:
        raise exceptions.rebuild(exceptions.parse(answer["failure"]))
    if "url" not in answer:
        raise _start_error(service_home, has_ended=line is not None)
    return Endpoint(answer["url"], service_home.read_token(), started=True)


def _first_line(descriptor: int, deadline: float) -> bytes | None:
    """The first line from a pipe; incomplete if the writers ended, `None` after the deadline."""
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


def _start_error(service_home: Home, *, has_ended: bool) -> ControllerUnavailableError:
    outcome = "ended" if has_ended else f"did not answer within {TIMING.start_seconds:.0f} s"
    log_lines = files.tail(service_home.log, LIMITS.failed_start_lines)
    log_text = "".join(f"\n  {line}" for line in log_lines)
    return ControllerUnavailableError(
        f"the local service {outcome} while it was started; the last lines of its log:{log_text}",
        hint=f"all of it is in {service_home.log}",
    )


def _ask_to_stop(service_home: Home, running: Running, *, pods: bool, timeout: float) -> None:
    from kubetorch.lib.http_client import HttpClient  # noqa: PLC0415  # loads httptools; only to stop

    body = json.dumps({"pods": pods}).encode()
    with HttpClient(running.url, service_home.read_token(), timeout=timeout) as client:
        try:
            with client.request("POST", routes.STOP, body=body) as response:
                response.read()
        except ControllerUnavailableError:
            if running.is_alive:
                raise


def _end_orphans(service_home: Home) -> None:
    """End the pods of a service that was killed before it could end them."""
    mark_prefix = process.mark_prefix(str(service_home.path))
    for pid, mark in processes.processes_with(MARK).items():
        if mark.startswith(mark_prefix):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _locked(path: Path, timeout: float, reason: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        if not lock.get(timeout):
            raise ControllerUnavailableError(
                f"{reason} (waited {timeout:.0f} s for {path})", hint="kt local status"
            )
        yield
    finally:
        lock.close()
