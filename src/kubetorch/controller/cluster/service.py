"""The controller as a process in a cluster."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, get_args

from kubetorch.controller import database
from kubetorch.controller.access import Access
from kubetorch.controller.app import Controller
from kubetorch.controller.backends.base import Stores
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.controller.backends.kubernetes.scaling import ControllerAddress, Engine
from kubetorch.controller.backends.kubernetes.secrets import SecretObjects
from kubetorch.controller.backends.kubernetes.volumes import VolumeClaims
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.cluster import process
from kubetorch.controller.cluster.access import (
    Clocks,
    ClusterAccess,
    PodTokens,
    Reviews,
    WorkloadPods,
)
from kubetorch.controller.cluster.leader import NAME, PODS_OF_CONTROLLER, Election
from kubetorch.controller.cluster.process import (
    LeadingProcess,
    ProcessSettings,
    installation_secret,
    read_settings,
    required,
)
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.controller.cluster.state import KubernetesState
from kubetorch.controller.relay import NO_HOSTS, Hosts
from kubetorch.controller.state import SqliteState
from kubetorch.controller.workloads import Workloads
from kubetorch.datastore.blobs import Room
from kubetorch.errors import (
    ConfigError,
    KubetorchError,
)
from kubetorch.k8s.kubeconfig import Access as KubernetesAccess
from kubetorch.lib.clock import SystemClock
from kubetorch.manifests.kinds import Manifest
from kubetorch.wire import routes
from kubetorch.wire.messages import Runtime

if TYPE_CHECKING:
    from kubetorch.datastore.bucket_store import StoreBucket

#: The name of the blob store, and the hint when it is full.
ROOM = Room(
    "the controller's blob store",
    "tear down services that nobody uses and deploy again some minutes later, or have an "
    "administrator give it more: kt upgrade --set blobs.emptyDir.sizeLimit=40Gi, or a larger "
    "volume (blobs.persistence), and each namespace more of it (blobs.namespaceQuota)",
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings(ProcessSettings):
    """The settings of a controller in a cluster."""

    runtime: Runtime
    watched: tuple[str, ...] = ()
    hosts: Hosts = NO_HOSTS
    address: str = ""
    engine: Engine = "auto"
    account_annotations: Mapping[str, str] = field(default_factory=dict)
    #: URL of a store of its own, which the data store then is; empty without one.
    store_url: str = ""
    #: Whether calls may leave records, with their arguments.
    records: bool = True

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        common = read_settings(environ)
        namespace = common.namespace
        ingress = environ.get("KT_INGRESS_HOST") or ""
        controller_hosts = (NAME, f"{NAME}.{namespace}", f"{NAME}.{namespace}.svc")
        return cls(
            **{item.name: getattr(common, item.name) for item in fields(common)},
            runtime=Runtime(
                image=required(environ, "KT_RUNTIME_IMAGE"),
                default_image=required(environ, "KT_DEFAULT_IMAGE"),
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
            account_annotations=_texts(environ, "KT_SERVICE_ACCOUNT_ANNOTATIONS"),
            store_url=_store_url(environ),
            records=environ.get("KT_RECORD") != "none",
        )


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple((environ.get(name) or "").lower().replace(",", " ").split())


def _store_url(environ: Mapping[str, str]) -> str:
    url = environ.get("KT_STORE_URL") or ""
    if url and not re.fullmatch(r"http://[a-z0-9.-]+(:\d{1,5})?", url):
        raise ConfigError(
            f"KT_STORE_URL is {url!r}; it must be like http://kubetorch-store.kubetorch:8080",
            hint="the chart sets it, from its value store.separate.enabled",
        )
    return url


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


def main(environ: Mapping[str, str]) -> int:
    try:
        settings = Settings.read(environ)
        return process.run(partial(ControllerProcess, settings), settings)
    except (KubetorchError, OSError) as error:
        sys.stderr.write(f"the controller cannot start: {error}\n")
        return 1


class ControllerProcess(LeadingProcess):
    name = NAME
    pods = PODS_OF_CONTROLLER

    def __init__(
        self, settings: Settings, access: KubernetesAccess, listener: socket.socket
    ) -> None:
        super().__init__(settings, access, listener)
        self._controller_settings = settings

    async def _serve(
        self, election: Election, bucket: StoreBucket | None, stack: contextlib.AsyncExitStack
    ) -> None:
        """Adopt the workloads, and serve."""
        settings = self._controller_settings
        state = KubernetesState(
            self._client, namespaces=settings.watched, may_write=lambda: election.is_leading
        )
        await state.load()
        file = settings.blobs / "calls.sqlite"
        calls = SqliteState(file, database.open_database(file))
        stack.callback(calls.close)
        stack.push_async_callback(state.close)
        controller = await self._build(state, calls, bucket)
        stack.push_async_callback(_close, controller)
        await controller.start(self._listener)

    async def _build(
        self, state: KubernetesState, calls: SqliteState, bucket: StoreBucket | None
    ) -> Controller:
        settings, client = self._controller_settings, self._client
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
                room=settings.room(ROOM),
                bucket=bucket,
            ),
            keys=settings.blobs / "keys",
            clock=clock,
            secret=secret,
            new_access=new_access,
            hosts=settings.hosts,
            environ=settings.environ,
            store_url=settings.store_url,
        )


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
