"""An API server on loopback that does what a test tells it: TLS, keep-alive, streams, cuts.

A handler gets each request and answers it through the exchange that it is given:

    async def handler(exchange):
        exchange.answer(200, {"kind": "Pod", ...})
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trustme

from kubetorch.k8s.kubeconfig import Access, Cluster, Pem, User
from kubetorch.lib import websocket_protocol

Handler = Callable[["Exchange"], Awaitable[None]]


class Authority:
    """A throw-away certificate authority, with a server's and a client's certificate."""

    def __init__(self, *names: str) -> None:
        self._ca = trustme.CA()
        self._names = names or ("127.0.0.1", "localhost")

    @property
    def pem(self) -> bytes:
        return self._ca.cert_pem.bytes()

    def server_context(self, *, wants_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(*self._names).configure_cert(context)
        if wants_client:
            self._ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, name: str) -> tuple[bytes, bytes]:
        """Certificate and key of a client."""
        issued = self._ca.issue_cert("client.example", common_name=name)
        return issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes()


@dataclass
class Received:
    """One request."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def token(self) -> str | None:
        return self.header("authorization")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class Exchange:
    """A request, and the way to answer it."""

    def __init__(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.request = request
        self.reader = reader
        self.writer = writer
        self._is_streaming = False

    def answer(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + data)

    def refuse(self, status: int, reason: str, message: str = "", **headers: str) -> None:
        self.answer(status, failure(status, reason, message), **headers)

    async def say(self, *events: Any) -> None:
        """Lines of a watch."""
        if not self._is_streaming:
            self._is_streaming = True
            self.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in events:
            line = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
            self.writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        await self.writer.drain()

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def cut(self) -> None:
        self.writer.transport.abort()

    async def hang(self) -> None:
        """Until the client has gone."""
        while await self.reader.read(1024):
            pass


def failure(status: int, reason: str, message: str = "", **details: Any) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": status,
        "reason": reason,
        "message": message or reason,
        "details": details,
    }


class FakeApiServer:
    """Serves until it is left.

    Attributes:
        requests: What was asked so far.
        connections: How many connections were made.
    """

    def __init__(self, handler: Handler, context: ssl.SSLContext | None = None) -> None:
        self.requests: list[Received] = []
        self.connections = 0
        self.port = 0
        self._handler = handler
        self._context = context
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> FakeApiServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        # A connection that was accepted in this pass of the loop has its task in one of the next.
        for _ in range(3):
            await asyncio.sleep(0)
        tasks = dict(self._tasks)
        for task, writer in tasks.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http{'s' if self._context else ''}://127.0.0.1:{self.port}"

    def access(self, user: User | None = None, authority: bytes | None = None) -> Access:
        cluster = Cluster(self.url, authority=Pem(data=authority))
        return Access(cluster, user or User(), namespace="team", origin="the test")

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._converse(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(self._tasks.pop)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
                while not writer.is_closing():
                    request = await _read(reader)
                    self.requests.append(request)
                    await self._handler(Exchange(request, reader, writer))
                    await writer.drain()
        finally:
            writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.partition(": ") for line in lines)
    headers = [(name.lower(), value) for name, _, value in pairs]
    length = next((int(value) for name, value in headers if name == "content-length"), 0)
    return Received(method, target, headers, await reader.readexactly(length))


def pod(name: str, version: int, **labels: str) -> dict[str, Any]:
    """A pod, as a server shows it."""
    metadata = {
        "name": name,
        "namespace": "team",
        "resourceVersion": str(version),
        "labels": labels,
        "managedFields": [{"manager": "test"}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def listing(version: int, *items: dict[str, Any], proceed: str = "") -> dict[str, Any]:
    return {
        "kind": "List",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": str(version), "continue": proceed},
        "items": list(items),
    }


def script(folder: Path, text: str) -> str:
    """A program in Python that stands for a credential plugin."""
    file = Path(tempfile.mkstemp(dir=folder, suffix=".py")[1])
    file.write_text(text)
    return str(file)


class ServerChannels:
    """The server's end of a WebSocket with channels."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._parser = websocket_protocol.Parser(self, masked=True, max_message=1024**2)

    @classmethod
    async def accept(cls, exchange: Exchange, subprotocol: str) -> ServerChannels:
        key = exchange.request.header("sec-websocket-key")
        assert key is not None
        exchange.writer.write(
            b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            + f"Sec-WebSocket-Protocol: {subprotocol}\r\n".encode()
            + f"Sec-WebSocket-Accept: {websocket_protocol.accept_key(key)}\r\n\r\n".encode()
        )
        await exchange.writer.drain()
        return cls(exchange)

    async def send(self, channel: int, data: bytes) -> None:
        payload = bytes([channel]) + data
        header = websocket_protocol.frame_header(
            websocket_protocol.BINARY, len(payload), masked=False
        )
        self._exchange.writer.write(header + payload)
        await self._exchange.writer.drain()

    async def receive(self) -> bytes | None:
        """Channel and content of the next message; `None` when the client has gone."""
        while self._messages.empty():
            data = await self._exchange.reader.read(65536)
            if not data:
                return None
            self._parser.feed(data)
        return self._messages.get_nowait()

    def end(self) -> None:
        header = websocket_protocol.frame_header(websocket_protocol.CLOSE, 2, masked=False)
        self._exchange.writer.write(
            header + websocket_protocol.close_payload(websocket_protocol.NORMAL)
        )

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self._messages.put_nowait(bytes(payload))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self._messages.put_nowait(head + bytes(rest))

    def on_control(self, opcode: int, payload: bytes) -> None:
        if opcode == websocket_protocol.CLOSE:
            self._messages.put_nowait(None)
