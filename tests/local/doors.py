"""The ways to a public app of the embedded backend: its agent, and the relay of the controller.

Bytes are sent as they are: `raw_app.py` answers with those that the path of a request has.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import kubetorch as kt
from kubetorch.lib import processes
from kubetorch.lib.http_client import HttpClient
from kubetorch.local import lifetime
from kubetorch.wire import routes
from tests.free_ports import free_port
from tests.local.user_project import UserProject

SERVER = Path(__file__).with_name("raw_app.py")
PATIENCE = 60.0


class Door:
    """One way to the app."""

    def __init__(self, url: str, prefix: str, pid: int) -> None:
        self.url = url
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.address = (parts.hostname, parts.port)
        self.prefix = prefix
        self.pid = pid

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def path(self, *pieces: bytes, endless: bool = False) -> bytes:
        """The path that is answered with these pieces."""
        text = "/".join(["", *(piece.hex() for piece in pieces), *(["*"] if endless else [])])
        return (self.prefix + text).encode()

    def ask(self, path: bytes, more: bytes = b"", *, method: bytes = b"GET") -> bytes:
        """All that comes for a request, until nothing comes for a while."""
        with self.connect() as sock:
            sock.sendall(b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n" % (method, path, more))
            answer = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                while piece := sock.recv(65536):
                    answer += piece
                    sock.settimeout(1.0)
            return answer

    def rest(self) -> int:
        """Bytes that its server has in memory."""
        return processes.resident([self.pid])


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[dict[str, Door]]:
    """An app that is deployed from this folder, on the service of the current home."""
    project = UserProject(folder)
    shutil.copy(SERVER, project.folder / "server.py")
    port = free_port()
    where = (str(project.folder), "server", "app")
    command = f"{sys.executable} server.py {port}"
    handle = kt.App(None, command, where, name="raw", port=port, public=True)
    deployed = handle.to(kt.Compute(cpus="0.1"))
    service = lifetime.ensure()
    with (
        HttpClient(service.url, service.token) as client,
        client.request("GET", routes.workload("default", deployed.service_name)) as answer,
    ):
        (pod,) = json.loads(answer.read())["pods"]
    running = lifetime.status().running
    assert running is not None
    yield {
        "agent": Door(deployed.base_endpoint, "/http", pod["pid"]),
        "relay": Door(service.url, f"/default/{deployed.service_name}/http", running.pid),
    }
    deployed.teardown()
    project.forget()
