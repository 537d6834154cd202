"""Proxies on the way to a server."""

import asyncio
import contextlib
import socket
import ssl
import sys

import pytest

from kubetorch.lib import transports
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.transports import Route
from local.fake_apiserver import Authority


async def echo(reader, writer):
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1024):
            writer.write(data)
    writer.close()


class Socks:
    """A SOCKS 5 proxy that wants these credentials."""

    def __init__(self, user="", password="", code=0):
        self.user, self.password, self.code = user.encode(), password.encode(), code
        self.target = None

    async def __call__(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self.serve(reader, writer)
        await writer.drain()
        writer.close()

    async def serve(self, reader, writer):
        _, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        method = 2 if self.user else 0
        writer.write(bytes([5, method if method in methods else 255]))
        if method not in methods:
            return
        if method == 2:
            _, length = await reader.readexactly(2)
            user = await reader.readexactly(length)
            (length,) = await reader.readexactly(1)
            is_right = (user, await reader.readexactly(length)) == (self.user, self.password)
            writer.write(bytes([1, 0 if is_right else 1]))
            if not is_right:
                return
        _, _, _, kind = await reader.readexactly(4)
        length = {1: 4, 4: 16}.get(kind) or (await reader.readexactly(1))[0]
        address = await reader.readexactly(length)
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.target = (kind, address, port)
        writer.write(bytes([5, self.code, 0, 3, 1]) + b"x" + b"\0\0")
        if self.code:
            return
        await relay(reader, writer, port)


async def relay(reader, writer, port):
    """Pass bytes on until one side ends."""
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
    tasks = [
        asyncio.create_task(pump(reader, far_writer)),
        asyncio.create_task(pump(far_reader, writer)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await abort(far_writer)


async def pump(reader, writer):
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)


async def abort(writer):
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def connect(reader, writer):
    """A proxy that knows CONNECT."""
    head = await reader.readuntil(b"\r\n\r\n")
    port = int(head.split(b" ")[1].rpartition(b":")[2])
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    await relay(reader, writer, port)


@contextlib.asynccontextmanager
async def listening(handler, context=None):
    tasks = set()

    async def serve(reader, writer):
        try:
            await handler(reader, writer)
        finally:
            await abort(writer)

    def accept(reader, writer):
        tasks.add(asyncio.get_running_loop().create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def exchange(route):
    reader = asyncio.StreamReader()
    transport, protocol = await transports.dial(
        route, lambda: asyncio.StreamReaderProtocol(reader), timeout=20
    )
    writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    await abort(writer)


@pytest.mark.parametrize("tls", [True, False])
def test_a_socks_proxy_is_passed_and_resolves_names(tls):
    authority = Authority("localhost")
    trust = ssl.create_default_context(cadata=authority.pem.decode())

    async def scenario():
        proxy = Socks("user", "pass word")
        context = authority.server_context() if tls else None
        async with listening(echo, context) as port, listening(proxy) as proxy_port:
            url = f"socks5://user:pass%20word@127.0.0.1:{proxy_port}"
            await exchange(Route("localhost", port, trust if tls else None, proxy=url))
            assert proxy.target == (3, b"localhost", port)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("proxy", "credentials", "message"),
    [
        (Socks("u", "p"), "", "another way to authenticate"),
        (Socks("u", "p"), "u:wrong@", "refused the user"),
        (Socks(code=5), "", "connection refused"),
    ],
)
def test_a_socks_proxy_that_refuses_says_why(proxy, credentials, message):
    async def scenario():
        async with listening(proxy) as port:
            route = Route("localhost", 1, proxy=f"socks5://{credentials}127.0.0.1:{port}")
            with pytest.raises(transports.UnreachableError, match=message):
                await exchange(route)

    asyncio.run(scenario())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio has TLS in TLS from 3.11 on")
def test_a_proxy_with_tls_is_checked_by_the_systems_authorities(tmp_path, monkeypatch):
    outer, inner = Authority("localhost"), Authority("localhost")
    (tmp_path / "ca.pem").write_bytes(outer.pem)

    async def scenario():
        async with (
            listening(echo, inner.server_context()) as port,
            listening(connect, outer.server_context()) as proxy_port,
        ):
            trust = ssl.create_default_context(cadata=inner.pem.decode())
            route = Route("localhost", port, trust, proxy=f"https://localhost:{proxy_port}")
            with pytest.raises(transports.UntrustedError, match="does not verify"):
                await exchange(route)
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            await exchange(route)

    asyncio.run(scenario())


def test_a_proxy_that_is_away_is_named():
    async def scenario():
        with socket.socket() as taken:  # so that nobody else listens there meanwhile
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            with pytest.raises(transports.UnreachableError, match=f"the proxy localhost:{port}"):
                await exchange(Route("a.example", 1, proxy=f"http://localhost:{port}"))

    asyncio.run(scenario())


def test_a_proxy_of_an_unknown_kind_is_named_without_its_password():
    async def scenario():
        with pytest.raises(transports.UnreachableError, match="no known kind") as caught:
            await exchange(Route("a.example", 1, proxy="ftp://u:secret@proxy"))
        assert "secret" not in str(caught.value)

    asyncio.run(scenario())


def test_a_server_that_never_speaks_tls_is_given_up():
    async def scenario():
        async def silent(reader, writer):
            await reader.read()
            writer.close()

        async with listening(silent) as port:
            with pytest.raises(transports.UnreachableError, match=r"within 0\.3 s"):
                await transports.dial(
                    Route("127.0.0.1", port, ssl.create_default_context()),
                    asyncio.Protocol,
                    timeout=0.3,
                )

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_handshake_that_breaks_is_no_wrong_certificate(answer):
    """A server that is just starting or ending does that: it is worth another attempt."""

    async def scenario():
        async def breaking(reader, writer):
            await reader.read(10)
            writer.write(answer)
            writer.close()

        async with listening(breaking) as port:
            route = Route("127.0.0.1", port, ssl.create_default_context())
            with pytest.raises(transports.UnreachableError) as caught:
                await transports.dial(route, asyncio.Protocol, timeout=20)
            assert not isinstance(caught.value, transports.UntrustedError)

    asyncio.run(scenario())


def test_a_peer_that_falls_silent_is_given_up_by_the_kernel():
    async def scenario():
        async with listening(echo) as port:
            route = transports.Route("127.0.0.1", port)
            transport, _ = await transports.dial(route, asyncio.Protocol, timeout=20)
            connection = transport.get_extra_info("socket")
            option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            transport.abort()
            assert option == lib_tuning.TIMING.unacknowledged_milliseconds

    asyncio.run(scenario())


def test_a_connection_to_a_server_that_is_not_trusted_is_closed():
    async def scenario():
        closed = asyncio.Event()

        async def until_closed(reader, _writer):
            with contextlib.suppress(OSError):
                await reader.read()
            closed.set()

        async with listening(until_closed) as port:
            route = transports.Route("127.0.0.1", port, tls=ssl.create_default_context())
            with pytest.raises(transports.UnreachableError):
                await transports.dial(route, asyncio.Protocol, timeout=0.2)
            await asyncio.wait_for(closed.wait(), 20)

    asyncio.run(scenario())


def test_a_connection_to_a_proxy_that_refuses_is_closed():
    async def scenario():
        closed = asyncio.Event()

        async def refusing(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            with contextlib.suppress(OSError):
                await reader.read()
            closed.set()

        async with listening(refusing) as port:
            route = Route("a.example", 1, proxy=f"http://127.0.0.1:{port}")
            with pytest.raises(transports.UnreachableError, match=r"to a\.example:1: '407 Proxy"):
                await exchange(route)
            await asyncio.wait_for(closed.wait(), 5)

    asyncio.run(scenario())


def test_what_a_proxy_says_that_is_no_http_is_shown():
    async def scenario():
        async def serve_no_http(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH\r\n")

        async with listening(serve_no_http) as port:
            route = Route("a.example", 1, proxy=f"http://127.0.0.1:{port}")
            with pytest.raises(transports.UnreachableError, match="not an HTTP answer"):
                await exchange(route)

    asyncio.run(scenario())
