"""The controller in a cluster, from its start to its end.

    listen, as standby ──► lead ──► read the state ──► serve ──► SIGTERM, or the lead is lost
                            ▲                                         │
                            └──────────── another pod ◄───────────────┘

A standby answers health checks until it serves. The leader labels its own pod, and the Service
chooses pods by that label. A leader that has lost the lead ends its process at once, also while it
starts: the next leader has begun, and its work must not be done twice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import uvloop
from msgspec import structs

from kubetorch._version import __version__
from kubetorch.config.settings import INSTALL_NAMESPACE
from kubetorch.controller import database
from kubetorch.controller.access import Access
from kubetorch.controller.app import Controller
from kubetorch.controller.backends.base import Stores
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.controller.backends.kubernetes.scaling import ControllerAddress, Engine
from kubetorch.controller.backends.kubernetes.secrets import SECRETS, SecretObjects
from kubetorch.controller.backends.kubernetes.volumes import VolumeClaims
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.cluster.access import (
    Clocks,
    ClusterAccess,
    PodTokens,
    Reviews,
    WorkloadPods,
)
from kubetorch.controller.cluster.leader import NAME, Election, LeaderLabel
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.controller.cluster.state import KubernetesState
from kubetorch.controller.relay import NO_HOSTS, Hosts
from kubetorch.controller.routes.table import Exchange
from kubetorch.controller.state import SqliteState
from kubetorch.controller.tuning import LIMITS
from kubetorch.controller.workloads import Workloads
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
from kubetorch.lib.clock import SystemClock
from kubetorch.lib.descriptors import DescriptorWatch
from kubetorch.lib.http_server import Server
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs import quantity
from kubetorch.wire import exceptions, routes, versions
from kubetorch.wire.messages import Runtime

if TYPE_CHECKING:
    from kubetorch.datastore.bucket_store import StoreBucket

SECRET = "kubetorch-installation"
_KEY = "secret"
_BYTES = 32
#: The name of the blob store, and the hint when it is full.
ROOM = Room(
    "the controller's blob store",
    "tear down services that nobody uses and deploy again some minutes later, or have an "
    "administrator give it more: kt upgrade --set blobs.emptyDir.sizeLimit=40Gi, or a larger "
    "volume (blobs.persistence), and each namespace more of it (blobs.namespaceQuota)",
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings of a controller in a cluster, from its environment, which the chart sets."""

    namespace: str
    identity: str
    host: str
    port: int
    blobs: Path
    runtime: Runtime
    watched: tuple[str, ...] = ()
    log_level: str = "INFO"
    blobs_quota: int | None = None
    hosts: Hosts = NO_HOSTS
    address: str = ""
    engine: Engine = "auto"
    account_annotations: Mapping[str, str] = field(default_factory=dict)
    #: The bucket of the data store, as `s3://bucket/prefix`, and its server; empty for the disk.
    store_bucket: str = ""
    store_endpoint: str = ""
    #: Whether calls may leave records, with their arguments.
    records: bool = True
    #: The variables of the process, of which programs for buckets get some.
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:

        def value(name: str) -> str:
            if not environ.get(name):
                raise ConfigError(
                    f"{name} is not set", hint="the chart sets it; see docs/design/kubernetes.md"
                )
            return environ[name]

        namespace = environ.get("KT_INSTALL_NAMESPACE") or INSTALL_NAMESPACE
        port = environ.get("KT_LISTEN_PORT") or str(routes.CONTROLLER_PORT)
        if not port.isdigit():
            raise ConfigError(f"KT_LISTEN_PORT is {port!r}; it must be a number")
        quota = environ.get("KT_BLOBS_QUOTA")
        ingress = environ.get("KT_INGRESS_HOST") or ""
        controller_hosts = (NAME, f"{NAME}.{namespace}", f"{NAME}.{namespace}.svc")
        return cls(
            namespace=namespace,
            identity=value("POD_NAME"),
            host=environ.get("KT_LISTEN_HOST") or "0.0.0.0",  # a pod has one network
            port=int(port),
            blobs=Path(environ.get("KT_BLOBS_DIR") or "/var/lib/kubetorch"),
            runtime=Runtime(
                image=value("KT_RUNTIME_IMAGE"),
                default_image=value("KT_DEFAULT_IMAGE"),
                controller_url=environ.get("KT_CONTROLLER_URL") or routes.controller_url(namespace),
                pull_policy=environ.get("KT_IMAGE_PULL_POLICY") or None,
                node_data=environ.get("KT_NODE_DATA") or "",
            ),
            watched=_words(environ, "KT_WATCH_NAMESPACES"),
            address=environ.get("POD_IP") or "",
            engine=_engine(environ),
            hosts=Hosts(
                ingress.lower(),
                (
                    *_words(environ, "KT_APP_HOSTS"),
                    *controller_hosts,
                    f"{controller_hosts[-1]}.cluster.local",
                ),
                are_per_service=bool(ingress) and environ.get("KT_PER_SERVICE_HOSTS") == "true",
                are_of_cluster=True,
            ),
            log_level=(environ.get("KT_LOG_LEVEL") or "INFO").upper(),
            blobs_quota=quantity.size_bytes(quota, parameter="KT_BLOBS_QUOTA") if quota else None,
            account_annotations=_texts(environ, "KT_SERVICE_ACCOUNT_ANNOTATIONS"),
            store_bucket=environ.get("KT_STORE_BUCKET") or "",
            store_endpoint=environ.get("KT_STORE_ENDPOINT") or "",
            records=environ.get("KT_RECORD") != "none",
            environ=environ,
        )


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple((environ.get(name) or "").lower().replace(",", " ").split())


def _engine(environ: Mapping[str, str]) -> Engine:
    name = environ.get("KT_AUTOSCALING_ENGINE") or "auto"
    engines: tuple[Engine, ...] = get_args(Engine)
    engine = next((engine for engine in engines if engine == name), None)
    if engine is None:
        raise ConfigError(
            f"KT_AUTOSCALING_ENGINE is {name!r}; it must be one of {', '.join(engines)}",
            hint="the chart sets it, from its value autoscaling.engine",
        )
    return engine


def _texts(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """A JSON object of texts."""
    try:
        texts = json.loads(environ.get(name) or "{}")
    except ValueError:
        texts = None
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ConfigError(f"{name} is {environ[name]!r}; it must be a JSON object of texts")
    return texts


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


async def _answer_as_standby(scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    if (exchange.method, exchange.path) == ("GET", routes.HEALTH):
        await exchange.respond_message(
            {"status": "standby", "version": __version__, "protocol": versions.PROTOCOL}
        )
        return
    error = ControllerUnavailableError(
        "this controller does not lead", hint="another one does, or will in a moment"
    )
    await exchange.refuse(503, exceptions.describe_refusal(error).to_json())


def main(environ: Mapping[str, str]) -> int:
    try:
        settings = Settings.read(environ)
        access = kubeconfig.find()
        listener = socket.create_server(
            (settings.host, settings.port), backlog=LIMITS.waiting_connections
        )
    except (KubetorchError, OSError) as error:
        sys.stderr.write(f"the controller cannot start: {error}\n")
        return 1
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    os.umask(0o077)
    # Each agent has a connection; many runtimes start containers with 1024.
    sockets.raise_limit()
    try:
        return uvloop.run(_Service(settings, access, listener).run())
    except (KubetorchError, OSError):
        _log.exception("controller failed")
        return 1
    finally:
        listener.close()


class _Service:
    def __init__(
        self, settings: Settings, access: KubernetesAccess, listener: socket.socket
    ) -> None:
        self._settings = settings
        self._client = Client(access)
        # A client of its own renews the lease in time, however many other requests there are.
        self._lease_client = Client(access)
        self._listener = listener
        self._is_stopped = asyncio.Event()

    async def run(self) -> int:
        """Wait to lead, lead, and stop; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_stopped.set)
        # Before a probe finds this process ready: the controller before it goes on meanwhile.
        bucket = await asyncio.to_thread(self._open_bucket)
        descriptors = DescriptorWatch(_give_up)
        descriptors.start()
        standby = Server(_answer_as_standby)
        await standby.start(self._listener.dup())
        settings = self._settings
        election = Election(
            self._lease_client, namespace=settings.namespace, pod=settings.identity, name=NAME
        )
        async with self._client, self._lease_client, election:
            if not await self._wait_unless_stopped(election.won()):
                await standby.close(0.0)
                return 0
            ending = asyncio.create_task(self._end_when_lost(election))
            try:
                async with contextlib.AsyncExitStack() as stack:
                    # The signal to stop may come while many workloads are still adopted.
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
        """Adopt the workloads, and serve; the stack closes everything."""
        stack.push_async_callback(standby.close, 0.0)
        settings = self._settings
        state = KubernetesState(
            self._client, namespaces=settings.watched, may_write=lambda: election.is_leading
        )
        await state.load()
        settings.blobs.mkdir(parents=True, exist_ok=True)
        file = settings.blobs / "calls.sqlite"
        calls = SqliteState(file, database.open_database(file))
        stack.callback(calls.close)
        stack.push_async_callback(state.close)
        controller = await self._build(state, calls, bucket)
        stack.push_async_callback(_close, controller)
        await controller.start(self._listener)
        # Not before: probes would get no answer, and end a process that still adopts workloads.
        # Requests from now on wait in the socket.
        await standby.close(0.0)
        mark = LeaderLabel(self._client, settings.namespace, settings.identity, election.won)
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

    async def _build(
        self, state: KubernetesState, calls: SqliteState, bucket: StoreBucket | None
    ) -> Controller:
        settings, client = self._settings, self._client
        secret = await installation_secret(client, settings.namespace)
        clock = SystemClock()
        clocks = Clocks(clock.time, time.monotonic)
        watched = settings.watched
        stores = Stores(SecretObjects(client, watched), VolumeClaims(client, watched))
        pod_tokens = PodTokens(client, secret=secret, clocks=clocks)

        def new_access(workloads: Workloads) -> Access:
            return ClusterAccess(
                Reviews(client, watched, settings.namespace),
                pods=WorkloadPods(workloads),
                pod_tokens=pod_tokens,
                stores=stores,
                secret=secret,
                clocks=clocks,
                hosts=settings.hosts,
                records=settings.records,
            )

        backend = KubernetesBackend(
            client,
            runtime=settings.runtime,
            stores=stores,
            prerequisites=PodPrerequisites(
                Namespaces(client, settings.account_annotations), stores, pod_tokens.ensure
            ),
            owner=lambda namespace, name: _reference(state, namespace, name),
            watched=watched,
            engine=settings.engine,
            address=ControllerAddress(settings.address, settings.port)
            if settings.address
            else None,
        )
        return Controller(
            backend=backend,
            state=state,
            call_state=calls,
            blob_stores=BlobStores(
                settings.blobs / "blobs",
                room=structs.replace(ROOM, limit_bytes=settings.blobs_quota),
                bucket=bucket,
            ),
            keys=settings.blobs / "keys",
            clock=clock,
            secret=secret,
            new_access=new_access,
            hosts=settings.hosts,
            environ=settings.environ,
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


async def _close(controller: Controller) -> None:
    with contextlib.suppress(KubetorchError):
        await controller.close(pods=False)


def _reference(state: KubernetesState, namespace: str, name: str) -> Manifest | None:
    """An owner reference to the object of a workload, for the objects of its backend."""
    uid = state.uid(namespace, name)
    if not uid:
        return None
    metadata = {"name": name, "uid": uid}
    return {"apiVersion": WORKLOADS.api_version, "kind": WORKLOADS.kind, "metadata": metadata}
