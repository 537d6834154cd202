"""WebSocket connections over loopback: both ends, the server's below our HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest

import clock_loop
from kubetorch.lib import http_server, sockets, transports, websocket, websocket_protocol
from kubetorch.lib.http_server import Refusal
from kubetorch.lib.tuning import TIMING, Timing
from kubetorch.lib.websocket import Connection
from kubetorch.lib.websocket_protocol import ClientHandshake, UpgradeRefusedError, WebSocketError

MIB = 1024 * 1024
LIMIT = 64 * MIB


class Endpoint:
    """Keeps what it is told; places large messages in memory of its own."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.messages: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.writable = asyncio.Event()
        self.placed = 0

    def on_open(self, connection: Connection) -> None:
        self.connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.messages.put_nowait((opcode, bytes(payload)))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        self.placed += 1
        return memoryview(bytearray(length - len(head)))

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.messages.put_nowait((websocket_protocol.BINARY, head + bytes(rest)))

    def on_writable(self) -> None:
        self.writable.set()

    def on_close(self, reason: str) -> None:
        self.closed.set_result(reason)

    async def next(self) -> tuple[int, bytes]:
        return await asyncio.wait_for(self.messages.get(), 20)

    async def reason(self) -> str:
        return await asyncio.wait_for(asyncio.shield(self.closed), 20)


class Server:
    """A server with an acceptor that the test reads."""

    def __init__(self, max_message: int = LIMIT, timing: Timing = TIMING) -> None:
        self.accepted: list[Endpoint] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.refusal: Refusal | None = None
        upgrade = websocket.upgrader(self._accept, max_message=max_message, timing=timing)
        self._server = http_server.Server(self._app, upgrade=upgrade)

    async def __aenter__(self) -> Server:
        listener = sockets.listen(sockets.LOOPBACK, 0)
        self.port = listener.getsockname()[1]
        await self._server.start(listener)
        return self

    async def __aexit__(self, *_exc) -> None:
        await self._server.close(5.0)

    async def connect(self, endpoint: Endpoint, path: str = "/x", **headers: str) -> Connection:
        url = f"http://127.0.0.1:{self.port}{path}"
        return await websocket.connect(url, endpoint, headers=headers, max_message=LIMIT)

    def _accept(self, path, headers):
        self.requests.append((path, dict(headers)))
        if self.refusal is not None:
            raise self.refusal
        endpoint = Endpoint()
        self.accepted.append(endpoint)
        return endpoint

    async def _app(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"plain"})


def test_messages_travel_both_ways(runs):
    async def scenario():
        async with Server() as server:
            client = Endpoint()
            connection = await server.connect(client, "/path?query", **{"X-A": "b"})
            (path, headers), (end,) = server.requests[0], server.accepted
            assert (path, headers["x-a"]) == ("/path", "b")
            connection.send(b"one", b"", b"two")
            connection.send(b"text", opcode=websocket_protocol.TEXT)
            assert await end.next() == (websocket_protocol.BINARY, b"onetwo")
            assert await end.next() == (websocket_protocol.TEXT, b"text")
            end.connection.send(b"back")
            assert await client.next() == (websocket_protocol.BINARY, b"back")
            connection.close(websocket_protocol.NORMAL, "done")
            assert await end.reason() == "done"
            assert end.connection.close_code == websocket_protocol.NORMAL
            assert await client.reason() == "done"

    runs(scenario)


def test_large_messages_are_placed_by_their_receiver(runs):
    async def scenario():
        async with Server() as server:
            client = Endpoint()
            connection = await server.connect(client)
            data = bytes(range(256)) * (40 * 1024)
            for number in range(5):
                connection.send(b"head%d" % number, memoryview(data))
            for number in range(5):
                _, payload = await server.accepted[0].next()
                assert payload == b"head%d" % number + data
            assert server.accepted[0].placed == 5
            server.accepted[0].connection.send(data)
            assert (await client.next())[1] == data
            connection.close()
            await client.reason()

    runs(scenario)


def test_a_large_text_message_arrives_whole(runs):
    async def scenario():
        async with Server() as server:
            client = Endpoint()
            connection = await server.connect(client)
            connection.send(b"t" * (2 * MIB), opcode=websocket_protocol.TEXT)
            assert await server.accepted[0].next() == (websocket_protocol.TEXT, b"t" * (2 * MIB))
            connection.close()
            await client.reason()

    runs(scenario)


def test_a_slow_reader_congests_its_sender_until_it_reads(runs):
    async def scenario():
        async with Server() as server:
            loop = asyncio.get_running_loop()
            sock = await upgrade(server)
            end = server.accepted[0]
            sent = 0
            while not end.connection.is_congested:
                end.connection.send(bytes(64 * 1024))
                sent += 64 * 1024 + 10
                await asyncio.sleep(0)
            assert sent < 64 * MIB

            async def read() -> None:
                while await loop.sock_recv(sock, 1 << 20):
                    pass

            reading = asyncio.ensure_future(read())
            await asyncio.wait_for(end.writable.wait(), 20)
            assert not end.connection.is_congested
            end.connection.close()
            await reading
            sock.close()
            await end.reason()

    runs(scenario)


async def upgrade(server: Server) -> socket.socket:
    """A plain socket on which a WebSocket was opened."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", server.port))
    await loop.sock_sendall(sock, ClientHandshake("localhost", "/", []).request)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await loop.sock_recv(sock, 1)
    assert head.startswith(b"HTTP/1.1 101")
    while not server.accepted or server.accepted[-1].connection is None:
        await asyncio.sleep(0.01)
    return sock


async def read_all(sock: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while piece := await asyncio.wait_for(loop.sock_recv(sock, 65536), 20):
        received += piece
    sock.close()
    return received


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff" * 20, websocket_protocol.PROTOCOL_ERROR),
        (b"\x82\x05hello", websocket_protocol.PROTOCOL_ERROR),
        (struct.pack("!BBQ", 0x82, 0xFF, LIMIT + 1) + bytes(4), websocket_protocol.TOO_BIG),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_told_and_cut_off(runs, data, code):
    async def scenario():
        async with Server() as server:
            sock = await upgrade(server)
            await asyncio.get_running_loop().sock_sendall(sock, data)
            answer = await read_all(sock)
            assert answer[0] == 0x80 | websocket_protocol.CLOSE
            assert websocket_protocol.parse_close(answer[2:])[0] == code
            await server.accepted[0].reason()
            assert server.accepted[0].connection.close_code == code
            assert server.accepted[0].messages.empty()

    runs(scenario)


def test_a_connection_that_breaks_has_no_close_code(runs):
    async def scenario():
        async with Server() as server:
            sock = await upgrade(server)
            sock.close()
            end = server.accepted[0]
            await end.reason()
            assert end.connection.close_code is None
            assert not end.connection.is_open
            end.connection.send(b"dropped")

    runs(scenario)


def test_a_ping_is_answered_with_its_payload(runs):
    async def scenario():
        async with Server() as server:
            sock = await upgrade(server)
            loop = asyncio.get_running_loop()
            header = websocket_protocol.frame_header(websocket_protocol.PING, 3, masked=True)
            await loop.sock_sendall(sock, header + b"abc")
            assert await loop.sock_recv(sock, 100) == b"\x8a\x03abc"
            sock.close()
            await server.accepted[0].reason()

    runs(scenario)


def test_a_peer_that_is_silent_for_too_long_is_given_up(runs):
    timing = Timing(websocket_ping_seconds=0.05, websocket_silence_seconds=0.2)

    async def scenario():
        async with Server(timing=timing) as server:
            sock = await upgrade(server)
            assert "silent" in await server.accepted[0].reason()
            assert (await read_all(sock)).startswith(b"\x89\x00")

    runs(scenario)


def test_a_peer_that_has_said_nothing_yet_is_not_called_silent():
    async def scenario():
        async with Server() as server:
            client = Endpoint()
            connection = await server.connect(client)
            await clock_loop.put_ahead(TIMING.websocket_ping_seconds + 0.1)
            await asyncio.sleep(0.05)
            assert connection.is_open
            assert server.accepted[0].connection.is_open
            connection.close()
            await client.reason()

    clock_loop.run(scenario(), clock_loop.AheadLoop)


def test_a_peer_that_is_not_read_is_not_called_silent(runs):
    timing = Timing(websocket_ping_seconds=0.05, websocket_silence_seconds=1.0)

    async def scenario():
        async with Server(timing=timing) as server:
            client = Endpoint()
            connection = await server.connect(client)
            endpoint = server.accepted[0]
            endpoint.connection.read_on(False)
            connection.send(b"waits")
            await asyncio.sleep(2.0)
            assert endpoint.connection.is_open
            assert endpoint.messages.empty()
            endpoint.connection.read_on(True)
            assert await endpoint.next() == (websocket_protocol.BINARY, b"waits")
            connection.close()
            await client.reason()

    runs(scenario)


def test_a_goodbye_that_is_never_read_is_given_up(runs):
    async def scenario():
        async with Server(timing=Timing(websocket_close_seconds=0.2)) as server:
            sock = await upgrade(server)
            end = server.accepted[0]
            while not end.connection.is_congested:
                end.connection.send(bytes(MIB))
                await asyncio.sleep(0)
            end.connection.close(websocket_protocol.GOING_AWAY, "bye")
            assert await end.reason() == "bye"
            sock.close()

    runs(scenario)


def test_nothing_is_delivered_after_the_owner_closed(runs):
    async def scenario():
        async with Server() as server:
            client = Endpoint()
            connection = await server.connect(client)
            end = server.accepted[0]
            end.connection.send(b"one")
            end.connection.send(b"two")
            original = client.on_message

            def close_on_first(opcode, payload):
                original(opcode, payload)
                connection.close()

            client.on_message = close_on_first
            await client.reason()
            assert client.messages.qsize() == 1

    runs(scenario)


# ------------------------------------------------------------------------------- handshakes


def test_an_upgrade_is_refused_with_status_and_body(runs):
    async def scenario():
        async with Server() as server:
            server.refusal = Refusal(403, b'{"message":"no"}')
            with pytest.raises(UpgradeRefusedError) as caught:
                await server.connect(Endpoint())
            assert (caught.value.status, caught.value.body) == (403, b'{"message":"no"}')

    runs(scenario)


@pytest.mark.parametrize("missing", ["Sec-WebSocket-Key", "Sec-WebSocket-Version"])
def test_an_upgrade_without_its_headers_is_refused(runs, missing):
    async def scenario():
        async with Server() as server:
            loop = asyncio.get_running_loop()
            request = ClientHandshake("localhost", "/", []).request
            lines = [
                line for line in request.split(b"\r\n") if not line.startswith(missing.encode())
            ]
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", server.port))
            await loop.sock_sendall(sock, b"\r\n".join(lines))
            assert (await read_all(sock)).startswith(b"HTTP/1.1 400")
            assert server.accepted == []

    runs(scenario)


@contextlib.asynccontextmanager
async def listening(serve) -> AsyncIterator[int]:
    """A server that does this with each connection; its port. Ends when all of them have."""
    handlers: list[asyncio.Task[None]] = []

    async def handle(reader, writer):
        handlers.append(asyncio.current_task())
        await serve(reader, writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*handlers, return_exceptions=True)


SWITCH = b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"


async def connect_to(answer: bytes, *, then_close: bool = True, timeout: float = 20.0) -> Endpoint:
    """Connect to a server that sends these bytes to whoever connects."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if not then_close:
            await reader.read()

    endpoint = Endpoint()
    async with listening(serve) as port:
        await websocket.connect(
            f"http://127.0.0.1:{port}/", endpoint, headers={}, max_message=LIMIT, timeout=timeout
        )
    return endpoint


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", OSError),
        (b"SSH-2.0-x\r\n\r\n", WebSocketError),
        (b"HTTP/1.1 \xb200 x\r\n\r\n", WebSocketError),
        (SWITCH + b"Sec-WebSocket-Accept: wrong\r\n\r\n", WebSocketError),
        (SWITCH + b"\r\n", WebSocketError),
        (b"HTTP/1.1 101 x\r\n\r\n", WebSocketError),
        (b"HTTP/1.1 500 x\r\nContent-Length: nonsense\r\n\r\n", WebSocketError),
        (b"HTTP/1.1 500 x\r\nContent-Length: 100\r\n\r\ncut", UpgradeRefusedError),
        (b"x" * 200_000, WebSocketError),
    ],
)
def test_a_server_that_is_none_is_an_error(runs, answer, error):
    async def scenario():
        with pytest.raises(error):
            await connect_to(answer)

    runs(scenario)


def test_a_server_that_does_not_answer_is_given_up(runs):
    async def scenario():
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await connect_to(b"HTTP/1.1 101", then_close=False, timeout=1.0)

    runs(scenario)


class Undecided:
    """A server whose acceptor does not decide."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()
        self.is_given_up = asyncio.Event()
        upgrade = websocket.upgrader(self._accept, max_message=LIMIT)
        self._server = http_server.Server(None, upgrade=upgrade)

    async def __aenter__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        listener = sockets.listen(sockets.LOOPBACK, 0)
        await self._server.start(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(ClientHandshake("localhost", "/x", ()).request)
        await self.was_asked.wait()
        return reader, writer

    async def __aexit__(self, *_exc) -> None:
        await self._server.close(5.0)

    async def _accept(self, path, headers):
        self.was_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_given_up.set()


def test_a_server_that_stops_waits_for_no_decision():
    async def scenario():
        server = Undecided()
        async with server as (reader, writer):
            pass
        await asyncio.wait_for(server.is_given_up.wait(), 10)
        assert await reader.read() == b""
        writer.close()

    asyncio.run(scenario())


def test_an_upgrade_about_which_nobody_decides_is_refused_in_the_end():
    async def scenario():
        server = Undecided()
        async with server as (reader, writer):
            await clock_loop.put_ahead(TIMING.upgrade_decision_seconds - 1)
            assert not server.is_given_up.is_set()
            await clock_loop.put_ahead(2)
            assert server.is_given_up.is_set()
            assert (await reader.read()).startswith(b"HTTP/1.1 500")
            writer.close()

    clock_loop.run(scenario(), clock_loop.AheadLoop)


def test_nobody_listening_is_an_os_error(runs):
    async def scenario():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))  # taken, so that nobody else listens there meanwhile
            url = f"http://127.0.0.1:{sock.getsockname()[1]}/"
            with pytest.raises(transports.UnreachableError, match="nobody listens there"):
                await websocket.connect(url, Endpoint(), headers={}, max_message=LIMIT)

    runs(scenario)


@pytest.mark.parametrize("pause", [0, 0.05])
def test_messages_right_behind_the_answer_are_not_lost(runs, pause):
    async def scenario():
        async def serve(reader, writer):
            request = await reader.readuntil(b"\r\n\r\n")
            key = next(
                line.split(b": ")[1].decode()
                for line in request.split(b"\r\n")
                if line.lower().startswith(b"sec-websocket-key")
            )
            writer.write(
                SWITCH
                + b"Sec-WebSocket-Accept: "
                + websocket_protocol.accept_key(key).encode()
                + b"\r\n\r\n\x82\x03one"
            )
            await writer.drain()
            await asyncio.sleep(pause)
            for _ in range(3):
                writer.write(b"\x82\x03two")
                await writer.drain()
            await reader.read()

        endpoint = Endpoint()
        async with listening(serve) as port:
            connection = await websocket.connect(
                f"ws://127.0.0.1:{port}/", endpoint, headers={}, max_message=LIMIT
            )
            payloads = [(await endpoint.next())[1] for _ in range(4)]
            assert payloads == [b"one", b"two", b"two", b"two"]
            connection.close()
            await endpoint.reason()

    runs(scenario)


def test_plain_http_stays_with_the_application(runs):
    async def scenario():
        async with Server() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"plain\r\n0\r\n\r\n")
            writer.close()

    runs(scenario)
