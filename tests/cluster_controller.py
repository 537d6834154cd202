"""A controller with the access of a cluster, and pods that a test makes up, on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kubetorch.controller import database
from kubetorch.controller.access import Access, PodIdentity
from kubetorch.controller.app import Controller
from kubetorch.controller.backends.base import (
    Backend,
    EventLine,
    Listener,
    Manifest,
    PodStatus,
    Stores,
    Trouble,
)
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.controller.backends.kubernetes.secrets import SecretObjects
from kubetorch.controller.backends.kubernetes.volumes import VolumeClaims
from kubetorch.controller.backends.process.stores import SecretFiles, VolumeFolders
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.cluster.access import (
    Clocks,
    ClusterAccess,
    PodTokens,
    Reviews,
    WorkloadPods,
)
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.controller.cluster.state import KubernetesState
from kubetorch.controller.state import SqliteState, State
from kubetorch.controller.workloads import Workloads
from kubetorch.k8s.client import Client
from kubetorch.lib import websocket, websocket_protocol
from kubetorch.lib.clock import SystemClock
from kubetorch.lib.http_client import HttpClient
from kubetorch.lib.websocket import Connection
from kubetorch.manifests.desired_pods import MountedNames
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, routes, versions
from kubetorch.wire.messages import Deploy, Hello, Runtime

SECRET = b"s" * 32
_T = TypeVar("_T")


class MadeUp(Backend):
    """A backend whose pods are those that a test names; `<workload>-0` if it names none."""

    name = "kubernetes"

    def __init__(self, folder: Path) -> None:
        clock = time.time
        self.stores = Stores(
            SecretFiles(folder / "secrets", clock), VolumeFolders(folder / "volumes", clock)
        )
        self.named: dict[tuple[str, str], list[PodStatus]] = {}
        self.logs: dict[tuple[str, str], list[bytes]] = {}
        self.objects: dict[tuple[str, str], list[Manifest]] = {}
        self._listener: Listener = lambda namespace, name: None

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        pass

    def check(self, spec: WorkloadSpec) -> None:
        pass

    async def apply(self, spec: WorkloadSpec) -> None:
        key = (spec.namespace, spec.name)
        self.named.setdefault(key, [PodStatus(f"{spec.name}-0", 0, "Running", "", uid="")])

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        self.named.pop((namespace, name), None)
        return []

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        return self.named.get((namespace, name), [])

    def pod_manifests(self, namespace: str, name: str) -> list[Manifest]:
        return self.objects.get((namespace, name), [])

    def trouble(self, namespace: str, name: str) -> Trouble:
        return Trouble()

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        return spec

    def url(self, spec: WorkloadSpec, manifest: Manifest | None) -> str:
        return ""

    def expected(self, namespace: str, name: str) -> int | None:
        return len(self.pods(namespace, name))

    def event_lines(self, namespace: str, name: str) -> list[EventLine]:
        return []

    def mounted(self, namespace: str, name: str, pod: str) -> MountedNames:
        return MountedNames()

    def mark_ready(self, namespace: str, name: str, pods: frozenset[str]) -> None:
        pass

    def prepare(self) -> None:
        pass

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        return ()

    def scaler(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        return ""

    def equipment(self, namespace: str, name: str) -> None:
        return None

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        return ()

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        return self.logs.get((namespace, pod), [])

    async def close(self, *, pods: bool) -> None:
        pass


class InCluster:
    """The controller, on a thread with a loop of its own.

    Args:
        folder: For its files.
        client: Makes what asks the API server, on that loop.
    """

    #: URL of a data store of its own; empty without one.
    store_url = ""

    def __init__(self, folder: Path, client: Callable[[], Client]) -> None:
        self.folder = folder
        self.backend = MadeUp(folder)
        self._new_client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="controller")
        self.url = ""

    def __enter__(self) -> InCluster:
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run something on its loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _start(self) -> None:
        # One thread, and from the start: the leak check looks at threads test by test.
        self._loop.set_default_executor(ThreadPoolExecutor(1))
        await asyncio.to_thread(int)
        await self._prepare()
        client = self.client = self._new_client()
        clock = SystemClock()
        clocks = Clocks(clock.time, time.monotonic)
        path = self.folder / "state.sqlite"
        self._state = SqliteState(path, database.open_database(path))
        self.pod_tokens = PodTokens(client, secret=SECRET, clocks=clocks)

        def new_access(workloads: Workloads) -> Access:
            return ClusterAccess(
                Reviews(client),
                pods=WorkloadPods(workloads),
                pod_tokens=self.pod_tokens,
                stores=backend.stores,
                secret=SECRET,
                clocks=clocks,
            )

        backend, state = await self._runner()
        self.controller = Controller(
            backend=backend,
            state=state,
            call_state=self._state,
            blob_stores=BlobStores(self.folder / "blobs"),
            keys=self.folder / "keys",
            clock=clock,
            secret=SECRET,
            new_access=new_access,
            store_url=self.store_url,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await self.controller.start(listener)

    async def _prepare(self) -> None:
        """What has to be there before the controller starts."""

    async def _runner(self) -> tuple[Backend, State]:
        """What runs workloads, and what keeps them."""
        return self.backend, self._state

    async def _stop(self) -> None:
        await self.controller.close(pods=False)
        await self.client.close()
        self._state.close()
        await self._loop.shutdown_default_executor()

    # ---------------------------------------------------------------------------------- requests

    def request(
        self,
        method: str,
        path: str,
        token: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        with (
            HttpClient(self.url, token or None, timeout=30.0) as client,
            client.request(method, path, body=body, headers=dict(headers or {})) as answer,
        ):
            data = answer.read()
        try:
            return answer.status, json.loads(data or b"null")
        except ValueError:
            return answer.status, data

    def deploy(
        self,
        token: str,
        namespace: str,
        name: str,
        *,
        path: str = "",
        tree: str | None = None,
        **compute: Any,
    ) -> tuple[int, Any]:
        """Status and first event, or the error, of a deploy that nobody waits for."""
        spec = WorkloadSpec(
            namespace, name, CallableRef("fn", name, "m", name), ComputeSpec(**compute), tree
        )
        deploy = Deploy(id=f"{time.time()}", spec=spec, protocol=versions.PROTOCOL, version="0")
        body = messages.encode(deploy) + b"\n"
        where = path or routes.workload(namespace, name, "deploy")
        with (
            HttpClient(self.url, token, timeout=30.0) as client,
            client.request("POST", where, body=body) as answer,
        ):
            if answer.status != 200:
                return answer.status, json.loads(answer.read())
            for line in answer.iter_lines():
                return answer.status, json.loads(line)
        raise AssertionError("a deploy without events")


class OnKubernetes(InCluster):
    """The same with the backend and the state of a cluster, in one namespace.

    Args:
        folder: For its files.
        client: Makes what asks the API server.
        namespace: Which; it is there when the controller starts.
    """

    def __init__(self, folder: Path, client: Callable[[], Client], namespace: str) -> None:
        super().__init__(folder, client)
        self.namespace = namespace

    async def _runner(self) -> tuple[Backend, State]:
        client, watched = self.client, (self.namespace,)
        state = self.records = KubernetesState(client, namespaces=watched)
        await state.load()
        stores = Stores(SecretObjects(client, watched), VolumeClaims(client, watched))

        def owner(namespace: str, name: str) -> Manifest | None:
            uid = state.uid(namespace, name)
            reference = {"apiVersion": WORKLOADS.api_version, "kind": WORKLOADS.kind}
            return {**reference, "metadata": {"name": name, "uid": uid}} if uid else None

        backend = KubernetesBackend(
            client,
            runtime=Runtime("image", "image", "http://controller", "Never"),
            stores=stores,
            prerequisites=PodPrerequisites(Namespaces(client), stores, self.pod_tokens.ensure),
            owner=owner,
            watched=watched,
        )
        return backend, state

    async def _stop(self) -> None:
        await self.records.close()
        await super()._stop()


def say_hello(url: str, token: str, pod: PodIdentity, *, generation: int = 0) -> list[str]:
    """What a pod is told that says hello: types of messages, or why it is sent away."""

    async def main() -> list[str]:
        endpoint = _Pod()
        try:
            await websocket.connect(
                url + routes.SESSIONS,
                endpoint,
                headers={routes.AUTHORIZATION: f"Bearer {token}"},
                max_message=1024**2,
                timeout=60.0,
            )
        except websocket_protocol.UpgradeRefusedError as error:
            return [str(error.status)]
        hello = Hello(
            namespace=pod.namespace,
            workload=pod.workload,
            pod=pod.pod,
            incarnation="1",
            url="http://127.0.0.1:9",
            protocol=versions.PROTOCOL,
            version="0",
            generation=generation,
        )
        assert endpoint.connection is not None
        endpoint.connection.send(messages.encode(hello), opcode=websocket_protocol.TEXT)
        await asyncio.wait_for(endpoint.is_told.wait(), 60)
        told = endpoint.told[:]
        endpoint.connection.abort("the test has seen enough")
        return told

    return asyncio.run(main())


class _Pod:
    """The end of a pod, which is told something or sent away."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.is_told = asyncio.Event()
        self.connection: Connection | None = None

    def on_open(self, connection: Connection) -> None:
        self.connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.told.append(json.loads(bytes(payload))["type"])
        if self.told[-1] == "members":  # what comes after the key
            self.is_told.set()

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.on_message(0, memoryview(head + rest))

    def on_writable(self) -> None:
        return None

    def on_close(self, reason: str) -> None:
        self.told.append(reason)
        self.is_told.set()


def open_session(url: str, token: str) -> int:
    """The status that an attempt to open a session is answered with."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        lines = [
            f"GET {routes.SESSIONS} HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            *([f"Authorization: Bearer {token}"] if token else []),
        ]
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return int(sock.recv(4096).split(b" ")[1])
