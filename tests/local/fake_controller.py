"""A controller that says what a test tells it to, over the real protocol."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

import msgspec

from kubetorch.datastore.blobs import BlobStore
from kubetorch.datastore.transfer import Receiver
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import Deploy, DeployEvent, PodView, Ready, WorkloadView

#: Ends a script of events: the connection breaks.
BREAK = "break"
#: The same, but first the answer stalls until the client is gone.
STALL = "stall"

Script = Iterable[DeployEvent | str]


def view(name: str = "train", *, kind: str = "fn", ready: bool = True) -> WorkloadView:
    """A workload as a controller describes it."""
    pod = PodView(
        name=f"{name}-0", ordinal=0, phase="Running", is_ready=ready, url="http://127.0.0.1:9"
    )
    return WorkloadView(
        spec=WorkloadSpec("default", name, CallableRef(kind, "train", "jobs", "train")),
        generation=1,
        status="Ready",
        pods=(pod,),
        url="http://127.0.0.1:9",
        token="kt1.token",
    )


class FakeController:
    """Serves until its context is left, where what was not asked for is an error.

    Args:
        folder: Where blobs go.
        deploys: For each deploy the events of its answer.
        workloads: What exists.

    Attributes:
        deploys_seen: The heads of the deploys that came.
        blobs: Where blobs of deploys and uploads went.
        stalled: Set while an answer stalls.
    """

    def __init__(
        self,
        folder: Path,
        deploys: Iterable[Script] = (),
        workloads: Iterable[WorkloadView] = (),
    ) -> None:
        self.blobs = BlobStore(folder)
        self.deploys_seen: list[Deploy] = []
        self.stalled = threading.Event()
        self._scripts = [list(script) for script in deploys]
        self._workloads = {view.spec.name: view for view in workloads}
        self._wrong: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> FakeController:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if error is None:
            assert not self._wrong, self._wrong
            assert not self._scripts, "a deploy was expected that never came"

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                name = self.path.partition("?")[0].rpartition("/")[2]
                workload = fake._workloads.get(name)
                if workload is None:
                    failure = {"error_type": "x", "message": "none", "code": "service_not_found"}
                    self._answer(404, msgspec.json.encode(failure))
                else:
                    self._answer(200, messages.encode(workload))

            def do_POST(self) -> None:
                body = self._body()
                if self.path.partition("?")[0] == routes.BLOBS:
                    fake._store(body)
                    self._answer(200, b"{}")
                elif self.path.endswith("/deploy") and fake._scripts:
                    head, _, packed = body.partition(b"\n")
                    fake.deploys_seen.append(messages.decode(Deploy, head))
                    fake._store(packed)
                    self._play(fake._scripts.pop(0))
                else:
                    fake._wrong.append(f"nobody expected POST {self.path}")
                    self._answer(500, b"{}")

            def _body(self) -> bytes:
                if "Content-Length" in self.headers:
                    return self.rfile.read(int(self.headers["Content-Length"]))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _play(self, script: list[DeployEvent | str]) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in script:
                    if isinstance(event, str):
                        if event == STALL:
                            fake.stalled.set()
                            with contextlib.suppress(ConnectionResetError):
                                self.rfile.read(1)
                        self.close_connection = True
                        return
                    line = messages.encode(event) + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")

        return Handler

    def _store(self, packed: bytes) -> None:
        if packed:
            receiver = Receiver(self.blobs)
            receiver.feed(packed)
            receiver.finish()
            receiver.close()


def ready(name: str = "train") -> Ready:
    """The event that ends a deploy well."""
    return Ready(generation=1, workload=view(name))
