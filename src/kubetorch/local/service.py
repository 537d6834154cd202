"""The local service: the controller with the process backend, in a process of its own.

`main` checks the machine, listens, and writes the address, or a typed error, to the standard output
for the program that started the service. `run` then builds the controller, serves, and stops. The
first spare agent, which waits to become a pod, starts before this module is imported, so that both
import at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import uvloop

from kubetorch._version import __version__
from kubetorch.config import environment as variables
from kubetorch.controller import database
from kubetorch.controller.access import LocalAccess
from kubetorch.controller.app import Controller
from kubetorch.controller.backends.process.backend import ProcessBackend
from kubetorch.controller.backends.process.pods import PodHome
from kubetorch.controller.backends.process.spares import SpareAgent
from kubetorch.controller.backends.process.stores import PodAttachments, SecretFiles, VolumeFolders
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.state import SqliteState
from kubetorch.datastore import addresses
from kubetorch.datastore import tuning as store_tuning
from kubetorch.datastore.blobs import Room
from kubetorch.errors import ControllerUnavailableError, KubetorchError
from kubetorch.lib import processes, sockets
from kubetorch.lib.clock import SystemClock
from kubetorch.lib.descriptors import DescriptorWatch
from kubetorch.lib.files import FileLock
from kubetorch.local import process
from kubetorch.local.home import Home, Running
from kubetorch.local.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions, tokens

if TYPE_CHECKING:
    from kubetorch.datastore.bucket_store import StoreBucket

_log = logging.getLogger(__name__)

_STDOUT, _STDERR = 1, 2


class Agents(NamedTuple):
    """How the service starts agents.

    Attributes:
        command: The command of an agent.
        spare: The command of a spare agent; `None` for a service without spare agents.
        first: A spare agent that has been started already.
    """

    command: tuple[str, ...]
    spare: tuple[str, ...] | None = None
    first: SpareAgent | None = None


def main(
    environ: Mapping[str, str],
    agents: Agents,
    store_timing: store_tuning.Timing = store_tuning.TIMING,
) -> int:
    os.umask(0o077)
    try:
        service = _open_service(environ, agents, store_timing)
    except (KubetorchError, OSError) as error:
        sys.stderr.write(f"the local service cannot start: {error}\n")
        _write_answer({"failure": {**exceptions.describe(error).to_dict(), "traceback": ""}})
        return 1
    _write_answer({"url": service.url})
    os.dup2(_STDERR, _STDOUT)
    return run(service)


def _open_service(
    environ: Mapping[str, str], agents: Agents, store_timing: store_tuning.Timing
) -> Service:
    """Open a service: it listens, and does not answer yet."""
    home_path = environ.get(process.HOME_VARIABLE)
    home = Home((Path(home_path) if home_path else variables.local_dir()).absolute())
    home.create()
    os.chdir(home.path)
    if not FileLock(home.lock).get(TIMING.service_lock_seconds):  # held until this process ends
        raise ControllerUnavailableError(
            f"another local service runs in {home.path} (waited "
            f"{TIMING.service_lock_seconds:.0f} s for it)",
            hint="kt local status",
        )
    home.check()
    token = home.secret_bytes(home.token).decode()
    secret = bytes.fromhex(home.secret_bytes(home.secret).decode())
    state = SqliteState(home.state, database.open_database(home.state))
    bucket = _open_bucket(environ, store_timing)
    listener = sockets.listen(sockets.LOOPBACK, _last_port(home))
    running = Running(
        pid=os.getpid(),
        start_time=processes.start_time(os.getpid()) or "",
        started=time.time(),
        url=f"http://{sockets.LOOPBACK}:{listener.getsockname()[1]}",
        version=__version__,
        has_bucket=bucket is not None,
    )
    home.write_running(running)
    return Service(home, listener, state, running.url, token, secret, environ, agents, bucket)


def _open_bucket(environ: Mapping[str, str], timing: store_tuning.Timing) -> StoreBucket | None:
    """The bucket of the data store, if the user has set one."""
    bucket = environ.get("KT_STORE_BUCKET")
    if not bucket:
        return None
    from kubetorch.datastore import bucket_store  # noqa: PLC0415  # obstore takes 20 MB

    # Not from the environment, which pods inherit.
    files = {}
    for name in ("config", "credentials"):
        with contextlib.suppress(OSError, UnicodeDecodeError, RuntimeError):
            files[name] = Path(f"~/.aws/{name}").expanduser().read_text()
    credentials = addresses.variables_of_files(files)
    endpoint = environ.get("KT_STORE_ENDPOINT") or ""
    return bucket_store.open_bucket(
        bucket, endpoint, credentials, has_identity=False, timing=timing
    )


def _last_port(home: Home) -> int:
    """The port of the service before this one, so that its URLs stay valid; 0 without one."""
    try:
        return int(home.controller_url.read_text().rpartition(":")[2])
    except (OSError, ValueError):
        return 0


def _write_answer(answer: Mapping[str, object]) -> None:
    """Answer the program that started the service, if it still reads."""
    try:
        os.write(_STDOUT, json.dumps(answer).encode() + b"\n")
    except OSError:
        return


def run(service: Service) -> int:
    """Serve until a request or a signal stops the service, or it is idle; returns the status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sockets.raise_limit()
    # Objects of imported modules stay for good: the collector need not visit them again.
    gc.freeze()
    gc.enable()
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(service.run())
    except (KubetorchError, OSError):
        _log.exception("service failed")
        return 1
    finally:
        service.home.service.unlink(missing_ok=True)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    return 0


class Service(msgspec.Struct, eq=False, dict=True):
    """The service, from its start to its end."""

    home: Home
    listener: socket.socket
    state: SqliteState
    url: str
    token: str
    secret: bytes
    environ: Mapping[str, str]
    agents: Agents
    bucket: StoreBucket | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle_limit = process.idle_seconds(self.environ, TIMING.idle_seconds)
        self._stopped: asyncio.Future[bool] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, False)
        controller = self._build()
        await controller.start(self.listener)
        self._watch_idle(controller)
        descriptors = DescriptorWatch(self._give_up)
        descriptors.start()
        pods = await self._stopped
        descriptors.stop()
        # Before pods end: a program that needs a service from now on starts a new one.
        self.home.service.unlink(missing_ok=True)
        _log.info("service stops pods=%s", pods)
        await controller.close(pods=pods)
        self.state.close()

    def _build(self) -> Controller:
        clock, state = SystemClock(), self.state
        user = tokens.fingerprint(self.token)
        pod_home = PodHome(
            home=self.home.path,
            secret=self.secret,
            user=user,
            environment={**self.environ, process.HOME_VARIABLE: str(self.home.path)},
            command=self.agents.command,
            marks=process.mark_prefix(str(self.home.path)),
        )
        secrets = SecretFiles(self.home.secrets, clock.time)
        volumes = VolumeFolders(self.home.volumes, clock.time)
        backend = ProcessBackend(
            pod_home,
            state,
            attachments=PodAttachments(secrets, volumes),
            clock=clock,
            spare_command=self.agents.spare,
            first=self.agents.first,
        )
        room = Room(limit_bytes=None if self.bucket is None else LIMITS.bucket_copies_bytes)
        return Controller(
            backend=backend,
            state=state,
            call_state=state,
            blob_stores=BlobStores(self.home.blobs, is_shared=True, room=room, bucket=self.bucket),
            keys=self.home.keys,
            clock=clock,
            secret=self.secret,
            new_access=lambda workloads: LocalAccess(
                user=user,
                secret=self.secret,
                clock=clock.time,
                session_token_of=lambda pod: (
                    pod_home.session(pod.namespace, pod.pod) if workloads.workload_of(pod) else ""
                ),
            ),
            stop=self._stop,
            environ=self.environ,
        )

    def _stop(self, pods: bool) -> None:
        if not self._stopped.done():
            self._stopped.set_result(pods)

    def _give_up(self, reason: str) -> None:
        """Stop without the pods; the next program that needs a service starts one for them."""
        _log.error("service ends error=%s", reason)
        self._stop(False)
        # Without file descriptors, closing may hang: then the process ends anyway.
        asyncio.get_running_loop().call_later(TIMING.hung_close_seconds, os._exit, 1)

    def _watch_idle(self, controller: Controller) -> None:
        remaining_seconds = self._idle_limit - controller.idle_seconds()
        if remaining_seconds <= 0:
            self._stop(True)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(remaining_seconds, self._watch_idle, controller)
