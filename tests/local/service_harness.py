"""A local service in a process of its own, and raw requests to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubetorch.datastore import transfer
from kubetorch.datastore.blobs import digest_of
from kubetorch.lib.http_client import HttpClient
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, routes, versions
from kubetorch.wire.messages import Deploy, DeployEvent, WorkloadView
from tests.free_ports import free_port

FAKE = (sys.executable, str(Path(__file__).with_name("fake_service.py")))
REAL = (sys.executable, "-m", "kubetorch.local")


def reserve_port(home: Path) -> None:
    """Give a new home a port that no other test takes while its service is down."""
    home.mkdir(mode=0o700)
    (home / "controller-url").write_text(f"http://127.0.0.1:{free_port()}")


class Service:
    """The service of a home; it is started and killed as the test likes."""

    def __init__(self, home: Path, command: tuple[str, ...]) -> None:
        self.home = home
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    # ------------------------------------------------------------------------------- its process

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, **environ: str) -> Service:
        log = self.home.parent / "service-output"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "KT_LOCAL_DIR": str(self.home), **environ},
                stdout=subprocess.PIPE,
                stderr=output,
            )
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            answer = json.loads(lines.readline() or b"{}")
        assert "url" in answer, (answer, log.read_text())
        self.url = answer["url"]
        return self

    def kill(self) -> None:
        """Kill it, as nothing that it could prepare for."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def terminate(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def wait(self, timeout: float = 60) -> int:
        assert self._process is not None
        return self._process.wait(timeout)

    def log(self) -> str:
        return (self.home.parent / "service-output").read_text()

    # ---------------------------------------------------------------------------------- requests

    @property
    def token(self) -> str:
        return (self.home / "token").read_text()

    def client(self, token: str | None = None) -> HttpClient:
        return HttpClient(self.url, self.token if token is None else token, timeout=60.0)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        with (
            self.client(token) as client,
            client.request(method, path, body=body, headers=dict(headers or {})) as response,
        ):
            data = response.read()
        return response.status, json.loads(data) if data else None

    def get(self, name: str, namespace: str = "default") -> WorkloadView:
        status, body = self.request("GET", routes.workload(namespace, name))
        assert status == 200, body
        return messages.decode(WorkloadView, json.dumps(body))

    def delete(self, name: str, *, grace: float = 5.0) -> int:
        path = f"{routes.workload('default', name)}?grace={grace}"
        return self.request("DELETE", path)[0]

    def deploy(
        self, name: str, *, blobs: Iterable[bytes] = (), deploy_id: str = "", **compute: Any
    ) -> list[DeployEvent]:
        """The events of a deploy."""
        return list(self.events(deploy(spec(name, **compute), deploy_id), blobs))

    def events(self, deploy: Deploy, blobs: Iterable[bytes] = ()) -> Iterator[DeployEvent]:
        path = routes.workload(deploy.spec.namespace, deploy.spec.name, "deploy")
        body = messages.encode(deploy) + b"\n" + pack(blobs)
        with self.client() as client, client.request("POST", path, body=body) as response:
            if response.status != 200:
                raise AssertionError(response.read())
            for line in response.iter_lines():
                yield messages.decode(DeployEvent, line)

    def until(
        self, name: str, condition: Callable[[WorkloadView], bool], timeout: float = 60
    ) -> WorkloadView:
        """The first view of a workload that a condition holds for."""
        deadline = time.monotonic() + timeout
        while True:
            view = self.get(name)
            if condition(view):
                return view
            assert time.monotonic() < deadline, (view, self.log())
            time.sleep(0.02)


def is_ready(view: WorkloadView) -> bool:
    return view.status == "Ready" and all(pod.phase == "Running" for pod in view.pods)


def spec(name: str = "f", **compute: Any) -> WorkloadSpec:
    variables = compute.pop("env", {})
    workload_fields = {key: compute.pop(key) for key in ("tree", "init_args") if key in compute}
    return WorkloadSpec(
        namespace="default",
        name=name,
        callable=CallableRef("fn", name, "module", name),
        compute=ComputeSpec(env_vars=tuple(variables.items()), launch_timeout=60, **compute)
        if "launch_timeout" not in compute
        else ComputeSpec(env_vars=tuple(variables.items()), **compute),
        **workload_fields,
    )


def deploy(workload: WorkloadSpec, deploy_id: str = "") -> Deploy:
    return Deploy(
        id=deploy_id or uuid.uuid4().hex,
        spec=workload,
        protocol=versions.PROTOCOL,
        version="0",
    )


def pack(blobs: Iterable[bytes]) -> bytes:
    """Blobs as they travel."""
    blob_by_digest = {digest_of(blob): blob for blob in blobs}
    if not blob_by_digest:
        return b""
    return b"".join(
        transfer.compressed(blob_by_digest, lambda d: (len(blob_by_digest[d]), [blob_by_digest[d]]))
    )


def last(events: list[DeployEvent]) -> DeployEvent:
    return events[-1]


@contextmanager
def in_background(action: Callable[[], object]) -> Iterator[list[object]]:
    """Run something beside the test; its result is in the list when the block is left."""
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.append(action()))
    thread.start()
    try:
        yield result
    finally:
        thread.join(60)
        assert not thread.is_alive()
