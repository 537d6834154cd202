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
from kubetorch.controller.access import Access
from kubetorch.controller.backends.base import Listener, Manifest, News, PodStatus, Trouble
from kubetorch.controller.backends.secret_files import SecretFiles
from kubetorch.controller.backends.stores import Stores
from kubetorch.controller.backends.volume_folders import VolumeFolders
from kubetorch.controller.cluster.access import Clocks, ClusterAccess
from kubetorch.controller.cluster.pods import KnownPods
from kubetorch.controller.cluster.podtokens import PodTokens
from kubetorch.controller.cluster.reviews import Reviews
from kubetorch.controller.controller import Controller
from kubetorch.controller.depots import Depots
from kubetorch.controller.state import Kept, SqliteState
from kubetorch.controller.workloads import Workloads
from kubetorch.k8s.client import Client
from kubetorch.lib.clock import SystemClock
from kubetorch.lib.http import HttpClient
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, routes, versions
from kubetorch.wire.messages import Deploy

SECRET = b"s" * 32
_T = TypeVar("_T")


class MadeUp:
    """A backend whose pods are those that a test names; `<workload>-0` if it names none."""

    name = "kubernetes"

    def __init__(self, folder: Path) -> None:
        clock = time.time
        self.stores = Stores(
            SecretFiles(folder / "secrets", clock), VolumeFolders(folder / "volumes", clock)
        )
        self.named: dict[tuple[str, str], list[PodStatus]] = {}
        self.logs: dict[tuple[str, str], list[bytes]] = {}
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

    async def delete(self, namespace: str, name: str, *, grace: float) -> None:
        self.named.pop((namespace, name), None)

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        return self.named.get((namespace, name), [])

    def trouble(self, namespace: str, name: str) -> Trouble:
        return Trouble()

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        return spec

    def url(self, spec: WorkloadSpec, manifest: Manifest | None) -> str:
        return ""

    def expected(self, namespace: str, name: str) -> int | None:
        return len(self.pods(namespace, name))

    def news(self, namespace: str, name: str) -> list[News]:
        return []

    def mark_ready(self, namespace: str, name: str, pods: frozenset[str]) -> None:
        pass

    def prepare(self) -> None:
        pass

    def warnings(self, manifest: Manifest) -> tuple[str, ...]:
        return ()

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
        client = self.client = self._new_client()
        clock = SystemClock()
        clocks = Clocks(clock.time, time.monotonic)
        path = self.folder / "state.sqlite"
        self._state = SqliteState(path, database.open_database(path))
        self.pod_tokens = PodTokens(client, secret=SECRET, clocks=clocks)

        def new_access(workloads: Workloads) -> Access:
            return ClusterAccess(
                Reviews(client),
                pods=KnownPods(workloads),
                tokens_of_namespaces=self.pod_tokens,
                stores=self.backend.stores,
                secret=SECRET,
                clocks=clocks,
            )

        self.controller = Controller(
            backend=self.backend,
            state=Kept(self._state, self._state),
            depots=Depots(self.folder / "blobs"),
            clock=clock,
            secret=SECRET,
            new_access=new_access,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await self.controller.start(listener)

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
