"""WebSockets that are passed on to another server: what passes when, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import clock_loop
from kubetorch.lib import proxy, sockets
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.http_server import Refusal, Server, Upgrade
from kubetorch.lib.proxy import Mount, Passage, Target
from kubetorch.lib.websocket_protocol import ClientHandshake

ASK = ClientHandshake("localhost", "/socket?a=b", ()).request
SWITCHED = b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Tunnel:
    """A client, what passes its WebSocket on, and the server that it leads to."""

    def __init__(self, serve: Serve, error: Exception | None = None) -> None:
        self._serve = serve
        self._error = error
        self.finished = 0
        self.answered = asyncio.Event()
        #: What the server read after the head of the request, until its end.
        self.rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Tunnel:
        self._far_server = await asyncio.start_server(self._accept, sockets.LOOPBACK, 0)
        self.port = self._far_server.sockets[0].getsockname()[1]
        listener = sockets.listen(sockets.LOOPBACK, 0)
        upgrade = proxy.tunnels(lambda _: True, self._open, lambda _: None)
        unused: Callable[..., Awaitable[None]] = self._accept
        self._server = Server(unused, upgrade=upgrade)
        await self._server.start(listener)
        self.reader, self.writer = await asyncio.open_connection(*listener.getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()
        await self._server.close(5.0)
        self._far_server.close()

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def _open(self, upgrade: Upgrade) -> Passage:
        if self._error is not None:
            raise self._error
        target = Target(sockets.LOOPBACK, self.port, Mount("", ""))
        return Passage(target, upgrade.headers, on_end=self._finish)

    def _finish(self) -> None:
        self.finished += 1

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /socket?a=b HTTP/1.1")
        await self._serve(reader, writer)
        self.answered.set()
        rest = b""
        with contextlib.suppress(ConnectionError):
            rest = await reader.read()
        self.rest.set_result(rest)
        writer.close()


def saying(data: bytes) -> Serve:
    """A server that answers with this and then says nothing more."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return serve


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    clock_loop.run(scenario(), clock_loop.AheadLoop)


def test_what_a_client_sends_early_comes_once_the_upgrade_is_made() -> None:
    async def scenario() -> None:
        async with Tunnel(saying(SWITCHED + b"hello")) as tunnel:
            tunnel.writer.write(ASK + b"early")
            assert (await tunnel.head()).startswith(b"HTTP/1.1 101")
            assert await tunnel.reader.readexactly(5) == b"hello"
            tunnel.writer.write(b" and late")
            tunnel.writer.write_eof()
            assert await tunnel.rest == b"early and late"
            assert tunnel.finished == 1

    run(scenario)


def test_without_an_upgrade_it_does_not_come_and_the_refusal_is_the_last_that_passes() -> None:
    async def scenario() -> None:
        refusal = b"HTTP/1.1 403 F\r\nContent-Length: 2\r\n\r\nno"
        async with Tunnel(saying(refusal)) as tunnel:
            tunnel.writer.write(ASK + b"GET /other HTTP/1.1\r\n\r\n")
            answer = await tunnel.reader.read()
            assert answer.startswith(b"HTTP/1.1 403")
            assert answer.endswith(b"\r\n\r\nno")
            assert await tunnel.rest == b""
            assert tunnel.finished == 1

    run(scenario)


def test_the_end_of_the_client_is_the_end_of_the_server() -> None:
    async def scenario() -> None:
        async with Tunnel(saying(SWITCHED)) as tunnel:
            tunnel.writer.write(ASK)
            await tunnel.head()
            tunnel.writer.transport.abort()
            assert await tunnel.rest == b""
            assert tunnel.finished == 1

    run(scenario)


def test_the_end_of_the_server_is_the_end_of_the_client() -> None:
    async def scenario() -> None:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(SWITCHED + b"bye")
            writer.close()

        async with Tunnel(serve) as tunnel:
            tunnel.writer.write(ASK)
            await tunnel.head()
            assert await tunnel.reader.read() == b"bye"
            assert tunnel.finished == 1

    run(scenario)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Refusal(418, b"a teapot"), [b"HTTP/1.1 418", b"a teapot"]),
        (ValueError("of ours"), [b"HTTP/1.1 500", b"KubetorchError"]),
        (ConnectionRefusedError("10.0.0.5:80"), [b"HTTP/1.1 502", b"ConnectionRefusedError"]),
        (TimeoutError("10.0.0.5:80"), [b"HTTP/1.1 502", b"TimeoutError"]),
    ],
)
def test_a_way_that_is_not_found_is_refused_and_nothing_inside_is_told(
    error: Exception, words: list[bytes]
) -> None:
    async def scenario() -> None:
        async with Tunnel(saying(SWITCHED), error) as tunnel:
            tunnel.writer.write(ASK)
            answer = await tunnel.reader.read()
            assert all(word in answer for word in words)
            assert b"10.0.0.5" not in answer
            assert b"of ours" not in answer
            assert tunnel.finished == 0

    run(scenario)


def test_an_answer_that_begins_and_does_not_go_on_is_given_up() -> None:
    async def scenario() -> None:
        async with Tunnel(saying(b"HTTP/1.1 101 S\r\nUpgr")) as tunnel:
            tunnel.writer.write(ASK)
            await tunnel.answered.wait()
            await asyncio.sleep(0.05)
            await clock_loop.put_ahead(lib_tuning.TIMING.proxy_head_seconds + 1)
            answer = await tunnel.reader.read()
            assert answer.startswith(b"HTTP/1.1 502")
            assert b"not complete" in answer

    run(scenario)


def test_a_refusal_that_begins_and_does_not_go_on_is_given_up() -> None:
    async def scenario() -> None:
        async with Tunnel(saying(b"HTTP/1.1 403 F\r\nContent-Length: 9\r\n\r\nhalf")) as tunnel:
            tunnel.writer.write(ASK)
            assert (await tunnel.head()).startswith(b"HTTP/1.1 403")
            assert await tunnel.reader.readexactly(4) == b"half"
            await clock_loop.put_ahead(lib_tuning.TIMING.proxy_refusal_seconds + 1)
            assert await tunnel.reader.read() == b""
            assert await tunnel.rest == b""

    run(scenario)
