"""A real agent process, a controller that only speaks the protocol, and raw clients."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from kubetorch.datastore import trees
from kubetorch.datastore.blobs import digest_of
from kubetorch.lib import websocket, websocket_protocol
from kubetorch.lib.http_server import Refusal, Server
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import RuntimeSpec, WorkloadSpec
from kubetorch.wire import blobs as records
from kubetorch.wire import codecs, frames, messages, routes, tokens, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Kind
from kubetorch.wire.podenv import PodEnv
from tests.decoding import decode
from tests.free_ports import free_port

SECRET = b"secret of the installation"
USER_TOKEN = "the user's own token"
SESSION_TOKEN = "the session's token"
NAMESPACE, WORKLOAD, POD = "default", "demo", "demo-0"
#: Seconds that anything in these tests may take.
TIMEOUT = 60.0

_M = TypeVar("_M")


class FakeController:
    """The controller's end of sessions, and its blobs.

    Args:
        folder: Where it says where it answers.
        host: Where it listens.
        is_known: Whether a token is one of its agents'.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        is_known: Callable[[str], bool] = lambda token: token == SESSION_TOKEN,
    ) -> None:
        self._is_known = is_known
        self.url_file = folder / "controller-url"
        self.blobs: dict[str, bytes] = {}
        self.messages: queue.Queue[messages.FromAgent] = queue.Queue()
        self.refuse_status: int | None = None
        self.hangs = False
        self._loop = asyncio.new_event_loop()
        self._link: _ServerLink | None = None
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._sock = socket.create_server((host, 0))
        self.port = self._sock.getsockname()[1]
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(TIMEOUT)
        self.url = f"http://{host}:{self.port}"
        self.url_file.write_text(f"{self.url}\n")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        upgrade = websocket.upgrader(self._accept, max_message=1 << 24)
        self._server = Server(self._app, upgrade=upgrade)
        self._loop.run_until_complete(self._server.start(self._sock))
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    def close(self) -> None:
        self.hangs = False

        def stop() -> None:
            closing = self._loop.create_task(self._server.close(0.05))
            closing.add_done_callback(lambda _: self._loop.stop())

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(TIMEOUT)

    def cut(self) -> None:
        """Break the session's connection."""
        link = self._link
        assert link is not None and link.connection is not None
        self._connected.clear()
        self._loop.call_soon_threadsafe(link.connection.abort, "cut")

    def send(self, message: messages.FromController) -> None:
        assert self._connected.wait(TIMEOUT)
        link = self._link
        assert link is not None and link.connection is not None
        self._loop.call_soon_threadsafe(
            functools.partial(
                link.connection.send, messages.encode(message), opcode=websocket_protocol.TEXT
            )
        )

    def wait_for(self, kind: type[_M], condition: Callable[[_M], bool] = lambda _: True) -> _M:
        """The next message of this kind for which the condition holds; others are dropped."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            message = self.messages.get(timeout=max(deadline - time.monotonic(), 0.01))
            if isinstance(message, kind) and condition(message):
                return message

    # ----------------------------------------------------------------------------- protocol

    def _accept(self, path: str, headers: Mapping[str, str]) -> websocket.Endpoint:
        if self.refuse_status is not None:
            raise Refusal(self.refuse_status, b'{"message":"no"}')
        assert path == routes.SESSIONS
        assert self._is_known(headers["authorization"].removeprefix("Bearer "))
        assert headers[routes.PROTOCOL.lower()] == str(versions.PROTOCOL)
        self._link = _ServerLink(self)
        return self._link

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        while self.hangs:
            await asyncio.sleep(0.05)
        headers = dict(scope["headers"])
        assert self._is_known(headers[b"authorization"].decode().removeprefix("Bearer "))
        status, answer = 200, b""
        if scope["path"] == routes.BLOBS_FETCH:
            wanted = [d for d in json.loads(body)["blobs"] if d in self.blobs]
            plain = b"".join(records.pack(d, len(self.blobs[d])) + self.blobs[d] for d in wanted)
            answer = zstandard.compress(plain)
        elif scope["path"] == routes.BLOBS:
            unpacker = records.Unpacker()
            plain = zstandard.ZstdDecompressor().decompressobj().decompress(body)
            for digest, _, piece in unpacker.feed(plain):
                self.blobs[digest] = self.blobs.get(digest, b"") + piece
        else:
            status = 404
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-length", str(len(answer)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": answer})

    # ------------------------------------------------------------------------------- deploys

    def put(self, data: bytes) -> str:
        digest = digest_of(data)
        self.blobs[digest] = data
        return digest

    def spec(
        self,
        source: str,
        name: str,
        *,
        kind: str = "fn",
        init_args: dict[str, Any] | None = None,
        codecs_allowed: tuple[str, ...] = ("json", "pickle"),
        env: tuple[tuple[str, str], ...] = (),
        files: Mapping[str, str] | None = None,
    ) -> WorkloadSpec:
        contents = {"program.py": source, **(files or {})}
        entries = [
            trees.Entry(path, "file", len(text.encode()), self.put(text.encode()))
            for path, text in contents.items()
        ]
        tree = trees.build(entries)
        self.blobs[tree.digest] = tree.encoded
        return WorkloadSpec(
            namespace=NAMESPACE,
            name=WORKLOAD,
            callable=CallableRef(
                kind=kind,
                name=name,
                module="program",
                qualname=name,
                project="proj",
                source_file="program.py",
            ),
            compute=ComputeSpec(
                env_vars=env,
                allowed_serialization=codecs_allowed,
                logging=LoggingConfig(level="info"),
                launch_timeout=60,
            ),
            tree=tree.digest,
            init_args=self.put(json.dumps(init_args).encode()) if init_args else None,
            runtime=RuntimeSpec(python=sys.executable),
        )

    def deploy(self, generation: int, source: str, name: str, **more: Any) -> messages.Observed:
        """Deploy and wait for what comes of it."""
        spec = self.spec(source, name, **more)
        self.send(messages.Reload(generation=generation, spec=spec))
        return self.wait_for(messages.Observed, lambda m: m.generation == generation)


class _ServerLink:
    def __init__(self, controller: FakeController) -> None:
        self._controller = controller
        self.connection: websocket.Connection | None = None

    def on_open(self, connection: websocket.Connection) -> None:
        self.connection = connection
        self._controller._connected.set()

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self._controller.messages.put(messages.decode(messages.FromAgent, bytes(payload)))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        raise AssertionError("sessions have text only")

    def on_writable(self) -> None:
        return None

    def on_close(self, reason: str) -> None:
        if self._controller._link is self:  # not one whose successor is there already
            self._controller._connected.clear()


class AgentProcess:
    """`python -m kubetorch.pod`, with an environment of `PodEnv`."""

    def __init__(self, folder: Path, controller: FakeController, *, port: int = 0) -> None:
        self.folder = folder
        self.root = folder / "pod"
        self.work = self.root / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        key = tokens.workload_key(SECRET, tokens.audience(NAMESPACE, WORKLOAD))
        credentials = folder / "credentials.json"
        credentials.write_text(
            json.dumps(
                {
                    "key": key.hex(),
                    "session": SESSION_TOKEN,
                    "user": tokens.fingerprint(USER_TOKEN),
                }
            )
        )
        pod = PodEnv(
            namespace=NAMESPACE,
            workload=WORKLOAD,
            pod=POD,
            controller_file=str(controller.url_file),
            credentials_file=str(credentials),
            host="127.0.0.1",
            port=self.port,
            root=str(self.root),
            working_dir=str(self.work),
            environments=str(folder / "environments"),
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("KT_")}
        self.log_file = folder / "agent.log"
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kubetorch.pod"],
                env={**env, **pod.write(), "KT_LOG_LEVEL": "info", "MARK": "inherited"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # Closed at the end, whatever a test that fails leaves open.
        self._sockets: list[socket.socket] = []
        self.controller = controller
        self.hello = controller.wait_for(messages.Hello)

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        for sock in self._sockets:
            sock.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        for sock in self._sockets:
            sock.close()
        self.process.kill()
        self.process.wait(TIMEOUT)

    def token(self, *, audience: str | None = None, ttl: float = 60.0) -> str:
        mine = tokens.audience(NAMESPACE, WORKLOAD)
        key = tokens.workload_key(SECRET, mine)
        return tokens.sign(key, tokens.Claims(audience or mine, time.time() + ttl))

    def http(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        token: str | None = USER_TOKEN,
    ) -> tuple[int, dict[str, str], bytes]:
        sent = dict(headers or {})
        if token is not None:
            sent.setdefault("Authorization", f"Bearer {token}")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, body=body, headers=sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()

    def post(
        self, path: str, *args: Any, headers: Mapping[str, str] | None = None, **kwargs: Any
    ) -> tuple[int, Any]:
        body = json.dumps({"args": args, "kwargs": kwargs}).encode()
        status, _, answer = self.http("POST", path, body, headers)
        return status, json.loads(answer)

    def client(self, **more: Any) -> StreamClient:
        client = StreamClient(self.port, **more)
        self._sockets.append(client.sock)
        return client


class StreamClient:
    """One client of the stream, frame by frame, on a blocking socket."""

    def __init__(
        self,
        port: int,
        *,
        client: str = "client-1",
        resume: str | None = None,
        token: str = USER_TOKEN,
        headers: Mapping[str, str] | None = None,
        receive_buffer: int | None = None,
    ) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = {
            routes.AUTHORIZATION: f"Bearer {token}",
            routes.PROTOCOL: str(versions.PROTOCOL),
            routes.CLIENT: client,
            **(headers or {}),
        }
        if resume is not None:
            sent[routes.RESUME] = resume
        handshake = websocket_protocol.ClientHandshake(
            f"127.0.0.1:{port}", routes.STREAM, sent.items()
        )
        self.sock.sendall(handshake.request)
        self.status, self.refusal = 101, b""
        try:
            while not handshake.feed(self.sock.recv(1)):
                pass
        except websocket_protocol.UpgradeRefusedError as error:
            self.status, self.refusal = error.status, error.body
        self.received = 0
        self.frames: list[tuple[Kind, int, Any, bytes]] = []
        self.close_code: int | None = None
        self._parser = websocket_protocol.Parser(self, masked=False, max_message=1 << 30)
        if self.status != 101:
            self.sock.close()
            return
        kind, _, self.welcome, _ = self.next()
        assert kind == Kind.WELCOME

    def close(self, code: int | None = websocket_protocol.NORMAL) -> None:
        if code is not None:
            self.send_raw(
                websocket_protocol.frame_header(websocket_protocol.CLOSE, 2, masked=True)
                + websocket_protocol.close_payload(code)
            )
        self.sock.close()

    # -------------------------------------------------------------------------------- sending

    def send_raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send(self, kind: Kind, number: int, meta: Any = None, payload: bytes = b"") -> None:
        head = frames.encode(kind, number, meta)
        size = len(head) + len(payload)
        header = websocket_protocol.frame_header(websocket_protocol.BINARY, size, masked=True)
        self.send_raw(header + head + payload)

    def open(
        self,
        number: int,
        *args: Any,
        name: str = "f",
        codec: str = "json",
        kwargs: Mapping[str, Any] | None = None,
        **meta: Any,
    ) -> None:
        segments = codecs.encode(codec, {"args": list(args), "kwargs": dict(kwargs or {})})
        payload = b"".join(codecs.join(segments))
        body = frames.Body(codec, tuple(len(s) for s in segments), len(payload))
        meta.setdefault("id", f"call-{os.urandom(6).hex()}")
        opening = frames.Open(callable=name, body=body, **meta)
        if len(payload) <= wire_tuning.LIMITS.chunk_bytes:
            self.send(Kind.OPEN, number, opening, payload)
            return
        self.send(Kind.OPEN, number, opening)
        for begin in range(0, len(payload), wire_tuning.LIMITS.chunk_bytes):
            self.send(
                Kind.DATA, number, None, payload[begin : begin + wire_tuning.LIMITS.chunk_bytes]
            )

    def ack(self) -> None:
        self.send(Kind.ACK, 0, frames.Ack(self.received))

    # ------------------------------------------------------------------------------ receiving

    def next(self) -> tuple[Kind, int, Any, bytes]:
        """The next frame; `EOFError` at the end of the connection."""
        while not self.frames:
            buffer = self._parser.get_buffer()
            count = self.sock.recv_into(buffer)
            if not count:
                raise EOFError
            self._parser.advance(count)
            if self.close_code is not None and not self.frames:
                raise EOFError
        return self.frames.pop(0)

    def until(self, number: int, *kinds: Kind) -> list[tuple[Kind, int, Any, bytes]]:
        """Frames of a call up to the first one of these kinds; those of other calls are dropped."""
        found = []
        while True:
            frame = self.next()
            if frame[1] == number:
                found.append(frame)
                if frame[0] in kinds:
                    return found

    def result(self, number: int) -> Any:
        """The value of a call, or the failure as a dict in an `AssertionError`."""
        kind, _, meta, payload = self.until(number, Kind.RESULT, Kind.ERROR)[-1]
        if kind == Kind.ERROR:
            raise CallFailed(json.loads(payload))
        while len(payload) < meta.body.total:
            frame = self.until(number, Kind.DATA)[-1]
            payload += frame[3]
            self.send(Kind.CREDIT, number, frames.Credit(len(frame[3])))
        segments = codecs.split(memoryview(payload), meta.body.sizes)
        return codecs.decode(meta.body.codec, segments)

    def call(self, number: int, *args: Any, **more: Any) -> Any:
        self.open(number, *args, **more)
        return self.result(number)

    def _take(self, data: bytes) -> None:
        kind, number, meta, payload = decode(data)
        if kind not in frames.UNCOUNTED:
            self.received += 1
        self.frames.append((kind, number, meta, bytes(payload)))

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self._take(bytes(payload))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self._take(head + bytes(rest))

    def on_control(self, opcode: int, payload: bytes) -> None:
        if opcode == websocket_protocol.CLOSE:
            self.close_code, self.close_reason = websocket_protocol.parse_close(payload)
        elif opcode == websocket_protocol.PING:
            self.send_raw(
                websocket_protocol.frame_header(websocket_protocol.PONG, len(payload), masked=True)
                + payload
            )


class CallFailed(Exception):
    """A call that ended with an ERROR frame."""

    def __init__(self, failure: dict[str, Any]) -> None:
        super().__init__(f"{failure['error_type']}: {failure['message']}")
        self.failure = failure


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for something that no message tells of."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def end_softly(pod: Mapping[str, Any]) -> None:
    """Tell the agent of a pod to end, and wait until its controller knows."""
    os.kill(pod["pid"], signal.SIGTERM)

    def serves() -> bool:
        connection = http.client.HTTPConnection(*pod["url"].removeprefix("http://").split(":"))
        try:
            connection.request("GET", routes.SERVING)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    # The agent notifies the controller first.
    wait_until(lambda: not serves())
