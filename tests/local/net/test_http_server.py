"""The HTTP server, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import clock_loop
from kubetorch.lib import deadlines, sockets
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.http_server import Server

Scenario = Callable[["Client"], Awaitable[None]]


class Client:
    """A connection to the server, byte by byte."""

    def __init__(self, app: App, server: Server, address: tuple[str, int]) -> None:
        self.app = app
        self.server = server
        self._address = address
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(*self._address)
        self._writers.append(self.writer)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ") for line in lines)
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(first.split(" ")[1]), headers, body

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        await self.send(data)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Whether the server closes the connection."""
        try:
            return await asyncio.wait_for(self.reader.read(), 15) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class App:
    """Answers by the path; notes what it saw."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.disconnected = asyncio.Event()
        self.written = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/stranger":
            scope["admit"]()
        if scope["path"] == "/broken":
            raise ValueError("on purpose")
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.disconnected.set()
            return
        if scope["path"] == "/499":
            await send({"type": "http.response.start", "status": 499, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})
            return
        if scope["path"] == "/later":
            await self.go_on.wait()
        if scope["path"] == "/close":
            headers = [(b"connection", b"close"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body"})
            return
        if scope["path"] == "/unread":
            await self._answer(send, b"not read")
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return
            body += message["body"]
            more = message["more_body"]
        self.requests.append((scope["method"], scope["path"], body))
        if scope["path"] == "/endless":
            await self._stream(send)
        elif scope["path"] == "/cut":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ValueError("on purpose")
        elif scope["path"] == "/chunked":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"a", b"", b"bc"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"d"})
        else:
            await self._answer(send, b"%d bytes" % len(body))

    async def _answer(self, send: Any, body: bytes) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2000):
            await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
            self.written += 100_000


def run(scenario: Scenario, *, keep_alive: float = 30.0, most: int | None = None) -> None:
    async def main() -> None:
        listener = sockets.listen(sockets.LOOPBACK, 0)
        app = App()
        server = Server(app, keep_alive=keep_alive, most=most)
        client = Client(app, server, listener.getsockname())
        await server.start(listener)
        try:
            await client.connect()
            async with deadlines.timeout(60):
                await scenario(client)
        finally:
            client.close()
            await server.close(1.0)

    asyncio.run(main())


GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_connection_serves_one_request_after_the_other() -> None:
    async def scenario(client: Client) -> None:
        for _ in range(3):
            status, headers, body = await client.ask(GET)
            assert (status, body) == (200, b"0 bytes")
            assert "connection" not in headers

    run(scenario)


def test_who_connects_and_asks_nothing_makes_room_for_others() -> None:
    async def scenario(client: Client) -> None:
        assert (await client.ask(GET))[0] == 200
        used = client.reader, client.writer
        await client.connect()
        silent = client.reader
        await client.connect()
        assert (await client.ask(GET))[0] == 200
        client.reader = silent
        assert await client.is_closed()
        client.reader, client.writer = used
        assert (await client.ask(GET))[0] == 200
        assert len(client.server.connections) == 2

    run(scenario, most=2)


def test_a_stranger_makes_room_whatever_was_asked_and_the_one_longest_ago_first() -> None:
    async def scenario(client: Client) -> None:
        stranger = b"GET /stranger HTTP/1.1\r\nHost: h\r\n\r\n"
        assert (await client.ask(stranger))[0] == 200
        early = client.reader, client.writer
        await client.connect()
        assert (await client.ask(stranger))[0] == 200
        late = client.reader
        client.reader, client.writer = early
        assert (await client.ask(stranger))[0] == 200
        await client.connect()
        assert (await client.ask(GET))[0] == 200
        client.reader = late
        assert await client.is_closed()
        client.reader, client.writer = early
        assert (await client.ask(stranger))[0] == 200

    run(scenario, most=2)


def test_beyond_the_most_that_are_used_nobody_is_let_in() -> None:
    async def scenario(client: Client) -> None:
        assert (await client.ask(GET))[0] == 200
        used = client.reader, client.writer
        await client.connect()
        assert await client.is_closed()
        client.reader, client.writer = used
        assert (await client.ask(GET))[0] == 200

    run(scenario, most=1)


def test_a_body_arrives_whole_however_it_comes() -> None:
    async def scenario(client: Client) -> None:
        large = bytes(range(256)) * 8192
        assert (await client.ask(post("/large", large)))[0] == 200
        chunked = b"POST /chunks HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        for piece in (chunked, b"3\r\nabc\r\n", b"2\r\nd", b"e\r\n", b"0\r\n\r\n"):
            await client.send(piece)
        assert (await client.answer())[2] == b"5 bytes"
        assert client.app.requests == [("POST", "/large", large), ("POST", "/chunks", b"abcde")]

    run(scenario)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def scenario(client: Client) -> None:
        count = 100
        await client.send(b"".join(post(f"/{n}", b"x" * n) for n in range(count)))
        answers = [(await client.answer())[2] for _ in range(count)]
        assert answers == [b"%d bytes" % n for n in range(count)]

    run(scenario)


def test_an_answer_without_length_is_chunked() -> None:
    async def scenario(client: Client) -> None:
        status, headers, body = await client.ask(b"GET /chunked HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (status, headers["transfer-encoding"], body) == (200, "chunked", b"abcd")
        assert (await client.ask(GET))[0] == 200

    run(scenario)


def test_an_old_client_gets_an_answer_that_ends_with_the_connection() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /chunked HTTP/1.0\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"chunked" not in head
        assert await client.reader.read() == b"abcd"

    run(scenario)


def test_a_client_that_wants_to_close_is_obeyed() -> None:
    async def scenario(client: Client) -> None:
        request = b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        _, headers, _ = await client.ask(request)
        assert headers["connection"] == "close"
        assert await client.is_closed()

    run(scenario)


def test_head_has_no_body() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        assert (await client.ask(GET))[2] == b"0 bytes"

    run(scenario)


def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async def scenario(client: Client) -> None:
        await client.send(
            b"POST /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        )
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(b"abc"))[2] == b"3 bytes"

    run(scenario)


def test_a_status_without_a_name_is_sent() -> None:
    async def scenario(client: Client) -> None:
        status, _, body = await client.ask(b"GET /499 HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (status, body) == (499, b"x")

    run(scenario)


def test_paths_are_decoded() -> None:
    async def scenario(client: Client) -> None:
        await client.ask(b"GET /a%20b%C3%A4?q=1 HTTP/1.1\r\nHost: h\r\n\r\n")
        assert client.app.requests == [("GET", "/a bä", b"")]

    run(scenario)


def test_a_body_that_nobody_reads_does_not_spoil_the_next_request() -> None:
    async def scenario(client: Client) -> None:
        body = bytes(3 * lib_tuning.LIMITS.waiting_body_bytes)
        sending = asyncio.ensure_future(client.send(post("/unread", body) + GET))
        assert (await client.answer())[2] == b"not read"
        await sending
        assert (await client.answer())[2] == b"0 bytes"

    run(scenario)


def test_an_application_can_close_the_connection() -> None:
    async def scenario(client: Client) -> None:
        status, headers, _ = await client.ask(b"GET /close HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (status, headers["connection"]) == (413, "close")
        assert await client.is_closed()

    run(scenario)


def test_a_body_that_nobody_wanted_is_not_taken_without_end() -> None:
    async def scenario(client: Client) -> None:
        head = b"POST /unread HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000000\r\n\r\n"
        assert (await client.ask(head))[2] == b"not read"
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 500_000_000:
                await client.send(bytes(1_000_000))
                sent += 1_000_000
        assert sent < 50_000_000

    run(scenario)


def test_what_nobody_takes_is_not_read_without_end() -> None:
    async def scenario(client: Client) -> None:
        sent = 0
        client.writer.write(
            b"POST /later HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000000\r\n\r\n"
        )
        with pytest.raises(TimeoutError):
            async with deadlines.timeout(1):
                while True:
                    await client.send(bytes(1_000_000))
                    sent += 1_000_000
        assert sent < 50_000_000

    run(scenario)


def test_an_answer_that_is_not_read_stops_the_application() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /endless HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        before = -1
        while client.app.written != before:
            before = client.app.written
            await asyncio.sleep(0.2)
        assert before < 50_000_000

    run(scenario)


def test_the_application_hears_that_the_client_is_gone() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
        await asyncio.sleep(0.05)
        client.close()
        await client.app.disconnected.wait()

    run(scenario)


def test_the_application_hears_that_a_client_went_away_in_its_body() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nabc")
        await asyncio.sleep(0.05)
        client.close()
        await client.app.disconnected.wait()
        assert client.app.requests == []

    run(scenario)


def test_a_failing_application_answers_500_and_the_next_request_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(client: Client) -> None:
        assert (await client.ask(b"GET /broken HTTP/1.1\r\nHost: h\r\n\r\n"))[0] == 500
        assert (await client.ask(GET))[0] == 200

    with caplog.at_level(logging.CRITICAL):
        run(scenario)


def test_an_answer_that_fails_half_way_is_told_from_a_whole_one() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /cut HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await client.reader.read()).endswith(b"4\r\nhalf\r\n")

    run(scenario)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost h\r\n\r\n",
        b"GET /x HTTP/9.9\r\n\r\n",
        b"POST /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
    ids=["words", "header", "version", "two lengths", "length", "TLS", "CONNECT", "upgrade"],
)
def test_what_is_no_request_is_refused_and_an_unknown_upgrade_is_an_ordinary_one(
    request_bytes: bytes,
) -> None:
    async def scenario(client: Client) -> None:
        await client.send(request_bytes)
        status, *_ = await client.answer()
        assert status == (200 if b"Upgrade" in request_bytes else 400)
        assert await client.is_closed()
        await client.connect()
        assert (await client.ask(GET))[0] == 200

    run(scenario)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_a_request_for_an_upgrade_may_have_a_body_and_is_the_last(
    framing: bytes, protocol: bytes
) -> None:
    async def scenario(client: Client) -> None:
        head = b"POST /x HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: " + protocol
        sent = head + b"\r\n" + framing
        await client.send(sent[:-3])
        await client.send(sent[-3:] + b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert await client.is_closed()
        assert client.app.requests == [("POST", "/x", b"hello")]

    run(scenario)


def test_what_follows_a_body_is_no_header() -> None:
    scopes: list[Any] = []

    async def scenario(client: Client) -> None:
        original = client.server.app

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)
            await original(scope, receive, send)

        client.server.app = noting
        head = b"POST /x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        status, _, _ = await client.ask(head + b"3\r\nabc\r\n0\r\nauthorization: x\r\n\r\n")
        assert status == 200

    run(scenario)
    names = [name for name, _ in scopes[0]["headers"]]
    assert names == [b"host", b"transfer-encoding"]


def test_a_request_with_two_hosts_is_refused() -> None:
    async def scenario(client: Client) -> None:
        status, _, _ = await client.ask(b"GET /x HTTP/1.1\r\nHost: evil\r\nHost: localhost\r\n\r\n")
        assert status == 400
        assert await client.is_closed()

    run(scenario)


def test_a_head_that_never_ends_is_refused() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /x HTTP/1.1\r\nHost: h\r\n")
        await client.send(b"X-Filler: " + b"x" * 2 * lib_tuning.LIMITS.http_head_bytes + b"\r\n")
        assert (await client.answer())[0] == 431
        assert await client.is_closed()

    run(scenario)


def test_a_connection_without_requests_is_closed() -> None:
    async def scenario(client: Client) -> None:
        await client.ask(GET)
        assert await client.is_closed()

    run(scenario, keep_alive=0.2)


def test_a_connection_that_never_says_anything_is_closed() -> None:
    async def scenario(client: Client) -> None:
        assert await client.is_closed()

    run(scenario, keep_alive=0.2)


def test_a_slow_application_is_not_taken_for_an_idle_connection() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /later HTTP/1.1\r\nHost: h\r\n\r\n")
        await asyncio.sleep(0.4)
        client.app.go_on.set()
        assert (await client.answer())[0] == 200

    run(scenario, keep_alive=0.2)


def test_closing_lets_requests_end() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /later HTTP/1.1\r\nHost: h\r\n\r\n")
        await asyncio.sleep(0.05)
        assert client.server.open_requests == 1
        closing = asyncio.ensure_future(client.server.close(5.0))
        await asyncio.sleep(0.05)
        client.app.go_on.set()
        assert (await client.answer())[0] == 200
        await closing
        assert await client.is_closed()
        with pytest.raises(OSError, match=r"."):
            socket.create_connection(client._address, timeout=1)

    run(scenario)


def test_closing_lets_a_client_read_what_was_sent_to_it() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /chunked HTTP/1.1\r\nHost: h\r\n\r\n" + GET)
        await asyncio.sleep(0.05)
        await client.server.close(5.0)
        assert not client.server.connections
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]

    run(scenario)


def test_a_request_that_outlasts_the_end_of_the_server_is_ended() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /later HTTP/1.1\r\nHost: h\r\n\r\n")
        while not client.server.open_requests:
            await asyncio.sleep(0.01)
        await client.server.close(0.01)
        assert client.server.open_requests == 0
        assert await client.is_closed()

    run(scenario)


def test_the_application_hears_of_what_is_no_request_behind_its_own() -> None:
    async def scenario(client: Client) -> None:
        await client.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n" + b"no request\r\n\r\n")
        await client.app.disconnected.wait()
        assert await client.is_closed()

    run(scenario)


def test_who_sends_too_many_requests_at_once_is_refused() -> None:
    async def scenario(client: Client) -> None:
        await client.send(
            b"GET /later HTTP/1.1\r\nHost: h\r\n\r\n"
            + GET * (lib_tuning.LIMITS.pipelined_requests_of_piece + 2)
        )
        assert await client.is_closed()
        assert client.app.requests == []

    run(scenario)


def test_who_does_not_leave_when_refused_is_cut_off() -> None:
    async def scenario() -> None:
        listener = sockets.listen(sockets.LOOPBACK, 0)
        server = Server(App())
        await server.start(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"no request\r\n\r\n")
        assert b"no valid HTTP" in await reader.read()
        assert len(server.connections) == 1
        await clock_loop.put_ahead(lib_tuning.TIMING.http_refusal_seconds + 0.1)
        assert not server.connections
        writer.transport.abort()
        await server.close(1.0)

    clock_loop.run(scenario(), clock_loop.AheadLoop)
