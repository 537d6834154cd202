"""Messages that have no end, over real sockets: refused early, in little memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib import processes, sockets, transports, websocket
from kubetorch.lib.async_http import HttpPool, Request
from kubetorch.lib.http1 import BrokenError
from kubetorch.lib.http_client import HttpClient
from kubetorch.lib.http_server import Server
from kubetorch.lib.websocket_protocol import WebSocketError

pytestmark = pytest.mark.security

#: Bytes that a peer tries to send.
ENDLESS = 100 * 1024 * 1024
#: Bytes of them that may be taken, those in the buffers of both sockets included.
TAKEN = 32 * 1024 * 1024
#: Bytes by which the process may grow.
GROWTH = 32 * 1024 * 1024
#: Seconds in which it is over.
PATIENCE = 60.0

CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: h\r\n" + CHUNKED
OK = b"HTTP/1.1 200 OK\r\n"

#: What comes first, what is repeated without an end, and the status of the refusal.
REQUESTS = {
    "target": (b"GET /", b"a" * 1000, 431),
    "header": (b"GET / HTTP/1.1\r\nX-Long: ", b"a" * 1000, 431),
    "headers": (b"GET / HTTP/1.1\r\n", b"X-A: b\r\n" * 100, 431),
    "blank lines": (b"", b"\r\n" * 500, 431),
    "trailers": (POST + b"3\r\nabc\r\n0\r\n", b"X-A: b\r\n" * 100, 400),
    "trailer": (POST + b"3\r\nabc\r\n0\r\nX-Long: ", b"a" * 1000, 400),
    "extension": (POST + b"3;x=", b"a" * 1000, 400),
    "after a request": (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", b"\r\n" * 500, 400),
}
ANSWERS = {
    "reason": (b"HTTP/1.1 200 ", b"a" * 1000),
    "header": (OK + b"X-Long: ", b"a" * 1000),
    "headers": (OK, b"X-A: b\r\n" * 100),
    "interim": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 20),
    "trailers": (OK + CHUNKED + b"3\r\nabc\r\n0\r\n", b"X-A: b\r\n" * 100),
    "extension": (OK + CHUNKED + b"3;x=", b"a" * 1000),
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    if message["type"] == "http.request":
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    before, began = processes.resident([os.getpid()]), time.monotonic()
    yield
    assert processes.resident([os.getpid()]) - before < GROWTH
    assert time.monotonic() - began < PATIENCE


def send_endlessly(peer: socket.socket, first: bytes, piece: bytes, *, is_polite: bool) -> int:
    """Send until the other side has enough; a polite peer stops when it is answered."""
    peer.settimeout(PATIENCE)
    sent = 0
    with contextlib.suppress(OSError):
        peer.sendall(first)
        while sent < ENDLESS:
            peer.sendall(piece)
            sent += len(piece)
            if is_polite:
                peer.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if b"HTTP/1.1 4" in peer.recv(65536, socket.MSG_PEEK):
                        break
                peer.settimeout(PATIENCE)
    return sent


@pytest.mark.parametrize("is_polite", [True, False], ids=["polite", "deaf"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_without_an_end_is_refused(kind: str, is_polite: bool) -> None:
    first, piece, status = REQUESTS[kind]

    def talk(port: int) -> bytes:
        with socket.create_connection((sockets.LOOPBACK, port)) as client:
            sent = send_endlessly(client, first, piece, is_polite=is_polite)
            assert sent < TAKEN
            client.settimeout(PATIENCE)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(65536):
                    answer += data
            return answer

    async def main() -> bytes:
        listener = sockets.listen(sockets.LOOPBACK, 0)
        server = Server(app)
        await server.start(listener)
        try:
            return await asyncio.to_thread(talk, listener.getsockname()[1])
        finally:
            await server.close(1.0)

    with little_memory():
        answer = asyncio.run(main())
    if is_polite and kind != "after a request":
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]


@contextlib.asynccontextmanager
async def answering(first: bytes, piece: bytes):
    """A server that answers without an end; its port, and how much it sent."""
    sent: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        sent.append(0)
        with contextlib.suppress(OSError):
            writer.write(first)
            while sent[0] < ENDLESS:
                writer.write(piece)
                sent[0] += len(piece)
                await writer.drain()
        writer.transport.abort()

    server = await asyncio.start_server(handle, sockets.LOOPBACK, 0)
    try:
        yield server.sockets[0].getsockname()[1], sent
    finally:
        server.close()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_without_an_end_is_an_error_of_the_asynchronous_client(kind: str) -> None:
    async def main() -> None:
        async with answering(*ANSWERS[kind]) as (port, sent):
            pool = HttpPool()
            try:
                with pytest.raises(BrokenError, match="not an HTTP answer"):
                    route = transports.Route(sockets.LOOPBACK, port)
                    answer = await pool.send(route, Request("GET", "/"), timeout=PATIENCE)
                    await answer.read(ENDLESS, timeout=PATIENCE)
            finally:
                await pool.close()
            assert sent[0] < TAKEN

    with little_memory():
        asyncio.run(main())


@pytest.mark.parametrize("kind", [*ANSWERS, "continue"])
def test_an_answer_without_an_end_is_an_error_of_the_blocking_client(kind: str) -> None:
    answers = {**ANSWERS, "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40)}

    def ask(port: int) -> None:
        with (
            HttpClient(f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
            pytest.raises(ControllerUnavailableError),
            client.request("GET", "/") as answer,
        ):
            answer.read()

    async def main() -> None:
        async with answering(*answers[kind]) as (port, sent):
            await asyncio.to_thread(ask, port)
            assert sent[0] < TAKEN

    with little_memory():
        asyncio.run(main())


@pytest.mark.parametrize("kind", ["reason", "header", "headers", "interim"])
def test_an_answer_to_an_upgrade_without_an_end_is_an_error(kind: str) -> None:
    async def main() -> None:
        async with answering(*ANSWERS[kind]) as (port, sent):
            with pytest.raises(WebSocketError, match="not an HTTP answer"):
                await websocket.connect(
                    f"http://127.0.0.1:{port}/",
                    None,  # type: ignore[arg-type]  # nothing is opened
                    headers={},
                    max_message=1024,
                    timeout=PATIENCE,
                )
            assert sent[0] < TAKEN

    with little_memory():
        asyncio.run(main())
