"""A process of an installation in a cluster that leads, from its start to its end.

    listen, as standby ──► lead ──► start ──► serve ──► SIGTERM, or the lead is lost
                            ▲                                 │
                            └──────── another pod ◄───────────┘

A standby answers health checks until it serves. The leader labels its own pod, and the Service
chooses pods by that label. A leader that has lost the lead ends its process at once, also while it
starts: the next leader has begun, and its work must not be done twice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from msgspec import structs

from kubetorch._version import __version__
from kubetorch.config.settings import INSTALL_NAMESPACE
from kubetorch.controller.backends.kubernetes.secrets import SECRETS
from kubetorch.controller.cluster.leader import NAME, Election, LeaderLabel
from kubetorch.controller.routes.table import Exchange
from kubetorch.controller.tuning import LIMITS
from kubetorch.datastore.blobs import Room
from kubetorch.errors import (
    ConfigError,
    ControllerUnavailableError,
    KubernetesConflictError,
    KubernetesNotFoundError,
    KubetorchError,
)
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.k8s.kubeconfig import Access as KubernetesAccess
from kubetorch.k8s.resources import Object, Ref
from kubetorch.lib import sockets
from kubetorch.lib.asgi import Receive, Scope, Send
from kubetorch.lib.descriptors import DescriptorWatch
from kubetorch.lib.http_server import Server
from kubetorch.lib.tasks import cancel_all
from kubetorch.specs import quantity
from kubetorch.wire import exceptions, routes, versions

if TYPE_CHECKING:
    from kubetorch.datastore.bucket_store import StoreBucket

SECRET = "kubetorch-installation"
_KEY = "secret"
_BYTES = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """The settings that the processes have in common, from their environment: the chart sets it.

    Attributes:
        blobs: The folder of what the process keeps.
        blobs_quota: Bytes that the blobs of one namespace may have; `None` without a limit.
        store_bucket: The bucket of the data store, as `s3://bucket/prefix`; empty for the disk.
        store_endpoint: URL of the bucket's server.
        environ: The variables of the process, of which programs for buckets get some.
    """

    namespace: str
    identity: str
    host: str
    port: int
    blobs: Path
    log_level: str = "INFO"
    blobs_quota: int | None = None
    store_bucket: str = ""
    store_endpoint: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)

    def room(self, room: Room) -> Room:
        """The room of the blob stores, within the quota."""
        return structs.replace(room, limit_bytes=self.blobs_quota)


def read_settings(environ: Mapping[str, str]) -> ProcessSettings:
    port = environ.get("KT_LISTEN_PORT") or str(routes.CONTROLLER_PORT)
    if not port.isdigit():
        raise ConfigError(f"KT_LISTEN_PORT is {port!r}; it must be a number")
    quota = environ.get("KT_BLOBS_QUOTA")
    return ProcessSettings(
        namespace=environ.get("KT_INSTALL_NAMESPACE") or INSTALL_NAMESPACE,
        identity=required(environ, "POD_NAME"),
        host=environ.get("KT_LISTEN_HOST") or "0.0.0.0",  # a pod has one network
        port=int(port),
        blobs=Path(environ.get("KT_BLOBS_DIR") or "/var/lib/kubetorch"),
        log_level=(environ.get("KT_LOG_LEVEL") or "INFO").upper(),
        blobs_quota=quantity.size_bytes(quota, parameter="KT_BLOBS_QUOTA") if quota else None,
        store_bucket=environ.get("KT_STORE_BUCKET") or "",
        store_endpoint=environ.get("KT_STORE_ENDPOINT") or "",
        environ=environ,
    )


def required(environ: Mapping[str, str], name: str) -> str:
    """A variable that must have a value."""
    if not environ.get(name):
        raise ConfigError(
            f"{name} is not set", hint="the chart sets it; see docs/design/kubernetes.md"
        )
    return environ[name]


async def installation_secret(client: Client, namespace: str) -> bytes:
    """The secret that tokens of workloads are derived from; the first controller makes it."""
    ref = Ref(SECRETS, SECRET, namespace)
    try:
        return _secret_value(await client.get(ref))
    except KubernetesNotFoundError:
        new_secret = _manifest(namespace, os.urandom(_BYTES))
    try:
        return _secret_value(await client.create(new_secret))
    except KubernetesConflictError:  # another controller was faster
        return _secret_value(await client.get(ref))


def _manifest(namespace: str, value: bytes) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": SECRET,
            "namespace": namespace,
            "labels": {
                "app.kubernetes.io/name": "kubetorch",
                "app.kubernetes.io/managed-by": NAME,
            },
        },
        "data": {_KEY: base64.b64encode(value.hex().encode()).decode()},
    }


def _secret_value(secret: Object) -> bytes:
    try:
        value = bytes.fromhex(base64.b64decode((secret.get("data") or {})[_KEY]).decode())
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the Secret {SECRET} has no {_KEY!r} that can be read",
            hint="delete it: the controller makes a new one, and calls need new tokens",
        ) from error
    if len(value) < _BYTES:
        raise ConfigError(f"the Secret {SECRET} has {len(value)} bytes; {_BYTES} are needed")
    return value


async def answer_as_standby(scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    if (exchange.method, exchange.path) == ("GET", routes.HEALTH):
        await exchange.respond_message(
            {"status": "standby", "version": __version__, "protocol": versions.PROTOCOL}
        )
        return
    error = ControllerUnavailableError(
        "this process does not lead", hint="another one does, or will in a moment"
    )
    failure = exceptions.describe_refusal(error).to_json()
    await exchange.respond(failure, status=503, **{routes.STANDBY.lower(): "true"})


class LeadingProcess(ABC):
    """A process of which the leader serves.

    Attributes:
        name: The name of its Lease.
        pods: Selects the pods of its Deployment.
    """

    name: str
    pods: str

    def __init__(
        self, settings: ProcessSettings, access: KubernetesAccess, listener: socket.socket
    ) -> None:
        self._settings = settings
        self._client = Client(access)
        # A client of its own renews the lease in time, however many other requests there are.
        self._lease_client = Client(access)
        self._listener = listener
        self._is_stopped = asyncio.Event()

    @abstractmethod
    async def _serve(
        self, election: Election, bucket: StoreBucket | None, stack: contextlib.AsyncExitStack
    ) -> None:
        """Adopt what is there, and serve at the listener; the stack closes everything."""

    async def run(self) -> int:
        """Wait to lead, lead, and stop; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_stopped.set)
        # Before a probe finds this process ready: the one before it goes on meanwhile.
        bucket = await asyncio.to_thread(self._open_bucket)
        descriptors = DescriptorWatch(_give_up)
        descriptors.start()
        standby = Server(answer_as_standby)
        await standby.start(self._listener.dup())
        settings = self._settings
        election = Election(
            self._lease_client, namespace=settings.namespace, pod=settings.identity, name=self.name
        )
        async with self._client, self._lease_client, election:
            if not await self._wait_unless_stopped(election.won()):
                await standby.close(0.0)
                return 0
            ending = asyncio.create_task(self._end_when_lost(election))
            try:
                async with contextlib.AsyncExitStack() as stack:
                    # The signal to stop may come while much is still adopted.
                    if await self._wait_unless_stopped(
                        self._start(election, standby, bucket, stack)
                    ):
                        await self._is_stopped.wait()
            finally:
                ending.cancel()
                descriptors.stop()
        return 0

    async def _end_when_lost(self, election: Election) -> None:
        await election.lost()
        _log.error("lead lost identity=%s", self._settings.identity)
        # Nothing is closed in good order: the next leader has begun already.
        os._exit(1)

    async def _start(
        self,
        election: Election,
        standby: Server,
        bucket: StoreBucket | None,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        stack.push_async_callback(standby.close, 0.0)
        settings = self._settings
        settings.blobs.mkdir(parents=True, exist_ok=True)
        await self._serve(election, bucket, stack)
        # Not before: probes would get no answer, and end a process that still adopts workloads.
        # Requests from now on wait in the socket.
        await standby.close(0.0)
        mark = LeaderLabel(
            self._client, settings.namespace, settings.identity, election.won, pods=self.pods
        )
        await stack.enter_async_context(mark)

    def _open_bucket(self) -> StoreBucket | None:
        settings = self._settings
        if not settings.store_bucket:
            return None
        from kubetorch.datastore import bucket_store  # noqa: PLC0415  # obstore takes 20 MB

        return bucket_store.open_bucket(
            settings.store_bucket,
            settings.store_endpoint,
            settings.environ,
            has_identity=not settings.environ.get("AWS_ACCESS_KEY_ID"),
        )

    async def _wait_unless_stopped(self, event: Awaitable[object]) -> bool:
        """Wait for an event; returns false if the signal to stop comes first."""
        waiting = asyncio.ensure_future(event)
        stopped = asyncio.ensure_future(self._is_stopped.wait())
        try:
            await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_stopped.is_set():
                return False
            await waiting
            return True
        finally:
            await cancel_all((waiting, stopped))


def _give_up(reason: str) -> None:
    """End at once: Kubernetes starts the container again."""
    _log.error("controller ends error=%s", reason)
    os._exit(1)


def run(
    new_process: Callable[[KubernetesAccess, socket.socket], LeadingProcess],
    settings: ProcessSettings,
) -> int:
    """Run a process to its end; the exit status."""
    access = kubeconfig.find()
    listener = socket.create_server(
        (settings.host, settings.port), backlog=LIMITS.waiting_connections
    )
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    os.umask(0o077)
    # Each agent has a connection; many runtimes start containers with 1024.
    sockets.raise_limit()
    process = new_process(access, listener)
    try:
        return uvloop.run(process.run())
    except (KubetorchError, OSError):
        _log.exception("%s failed", process.name)
        return 1
    finally:
        listener.close()
