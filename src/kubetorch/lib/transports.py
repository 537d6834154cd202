"""Transports to a server: TCP with keep-alive, through a proxy where there is one, inside TLS.

    Route ── dial ──► TCP to the server, or to the proxy (CONNECT or SOCKS 5) ──► TLS ──► protocol

The TLS is that of the standard library. TCP itself notices a peer that is cut off (keep-alive
probes, and a limit for unacknowledged data), so that a stream which is rightly silent for hours
needs no traffic of its own.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from kubetorch.lib import deadlines, sockets
from kubetorch.lib.http1 import AnswerReader, BrokenError, encoded, request_head
from kubetorch.lib.tuning import TIMING

_PIECE = 16 * 1024
_SOCKS_FAILURES = {
    1: "general failure",
    2: "not allowed by its rules",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "TTL expired",
    7: "command not supported",
    8: "address type not supported",
}

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)


class UnreachableError(ConnectionError):
    """No connection could be made, so no byte was sent."""


class UntrustedError(UnreachableError):
    """The server's certificate does not verify."""


class Route(msgspec.Struct, frozen=True):
    host: str
    port: int
    tls: ssl.SSLContext | None = None
    tls_name: str | None = None
    proxy: str | None = None


def host_header(route: Route) -> str:
    host = f"[{route.host}]" if ":" in route.host else route.host
    usual = 80 if route.tls is None else 443
    return host if route.port == usual else f"{host}:{route.port}"


async def dial(
    route: Route, factory: Callable[[], ProtocolT], *, timeout: float
) -> tuple[asyncio.Transport, ProtocolT]:
    """Connect, and give the connection to a new protocol."""
    transport: asyncio.Transport | None = None
    try:
        async with deadlines.timeout(timeout):
            if route.proxy is None:
                transport, greeting = await _open(route.host, route.port)
            else:
                proxy, host = _parse_proxy(route.proxy)
                transport, greeting = await _open_proxy(proxy, host)
                if proxy.scheme == "https":
                    context = ssl.create_default_context()
                    transport = await _secure(transport, greeting, context, host)
                await _negotiate(proxy, transport, greeting, route)
            if route.tls is not None:
                name = route.tls_name or route.host
                transport = await _secure(transport, greeting, route.tls, name)
    except BaseException as error:
        if transport is not None:
            transport.abort()
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"its certificate does not verify: {error.verify_message}"
            raise UntrustedError(why) from error
        if isinstance(error, TimeoutError):
            raise UnreachableError(f"no connection within {timeout:g} s") from error
        if isinstance(error, EOFError):
            raise UnreachableError("the connection was closed") from error
        if isinstance(error, OSError) and not isinstance(error, UnreachableError):
            raise UnreachableError(_reason(error)) from error
        raise
    protocol = factory()
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    return transport, protocol


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved: {error.strerror}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    return error.strerror or str(error) or type(error).__name__


def _parse_proxy(url: str) -> tuple[SplitResult, str]:
    """The parts of a proxy's URL, and its host."""
    proxy = urlsplit(url)
    if proxy.scheme not in ("http", "https", "socks5", "socks5h") or not proxy.hostname:
        raise UnreachableError(f"the proxy {url.rpartition('@')[2]!r} is of no known kind")
    return proxy, proxy.hostname


async def _open_proxy(proxy: SplitResult, host: str) -> tuple[asyncio.Transport, _Greeting]:
    port = proxy.port or {"http": 80, "https": 443}.get(proxy.scheme, 1080)
    try:
        return await _open(host, port)
    except OSError as error:
        raise UnreachableError(f"the proxy {host}:{port}: {_reason(error)}") from error


async def _negotiate(
    proxy: SplitResult, transport: asyncio.Transport, greeting: _Greeting, route: Route
) -> None:
    """Have a proxy connect this transport to the server."""
    credentials = (unquote(proxy.username or ""), unquote(proxy.password or ""))
    if proxy.scheme.startswith("socks5"):
        await _negotiate_socks(transport, greeting, route, credentials)
    else:
        await _negotiate_connect(transport, greeting, route, credentials)


async def _open(host: str, port: int) -> tuple[asyncio.Transport, _Greeting]:
    loop = asyncio.get_running_loop()
    transport, greeting = await loop.create_connection(_Greeting, host, port)
    connection: socket.socket = transport.get_extra_info("socket")
    sockets.keep_alive(connection)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TIMING.unacknowledged_milliseconds
        )
    return transport, greeting


async def _secure(
    transport: asyncio.Transport, greeting: _Greeting, context: ssl.SSLContext, name: str
) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    try:
        secured = await loop.start_tls(transport, greeting, context, server_hostname=name)
    except TypeError as error:  # TLS inside TLS, which asyncio has from Python 3.11 on
        raise UnreachableError(f"a proxy with https:// needs Python 3.11: {error}") from error
    if secured is None:
        raise ConnectionResetError("the connection was closed during the TLS handshake")
    return secured


class _Greeting(asyncio.StreamReaderProtocol):
    """The protocol until the server's own begins: the answers of a proxy are read from it."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        super().__init__(self.reader)

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # the connection closes, and the server's own protocol learns of it


async def _negotiate_connect(
    transport: asyncio.Transport, greeting: _Greeting, route: Route, credentials: tuple[str, str]
) -> None:
    target = f"[{route.host}]:{route.port}" if ":" in route.host else f"{route.host}:{route.port}"
    headers = [("Host", target)]
    if any(credentials):
        encoded_pair = base64.b64encode(":".join(credentials).encode()).decode()
        headers.append(("Proxy-Authorization", f"Basic {encoded_pair}"))
    transport.write(request_head("CONNECT", target, encoded(headers)))
    answer = AnswerReader()
    while not answer.has_head:
        try:
            answer.feed(await greeting.reader.read(_PIECE))
        except BrokenError as error:
            raise UnreachableError(
                f"the proxy refused a connection to {target}: {error}"
            ) from error
    if not 200 <= answer.status < 300:
        why = f"{answer.status} {answer.reason.decode('latin-1')[:100]}"
        raise UnreachableError(f"the proxy refused a connection to {target}: {why!r}")


async def _negotiate_socks(
    transport: asyncio.Transport, greeting: _Greeting, route: Route, credentials: tuple[str, str]
) -> None:
    """SOCKS 5 (RFC 1928, 1929); names are resolved by the proxy."""
    methods = b"\x00\x02" if any(credentials) else b"\x00"
    transport.write(bytes([5, len(methods)]) + methods)
    reader = greeting.reader
    version, method = await reader.readexactly(2)
    if version != 5 or method not in methods:
        raise UnreachableError("the SOCKS proxy wants another way to authenticate")
    if method == 2:
        user, password = (text.encode()[:255] for text in credentials)
        transport.write(b"\x01" + bytes([len(user)]) + user + bytes([len(password)]) + password)
        if (await reader.readexactly(2))[1] != 0:
            raise UnreachableError("the SOCKS proxy refused the user and password")
    transport.write(b"\x05\x01\x00" + _socks_address(route.host) + route.port.to_bytes(2, "big"))
    _, code, _, kind = await reader.readexactly(4)
    if code != 0:
        why = _SOCKS_FAILURES.get(code, f"failure {code}")
        raise UnreachableError(f"the SOCKS proxy cannot reach {route.host}:{route.port}: {why}")
    length = {1: 4, 4: 16}.get(kind) or (await reader.readexactly(1))[0]
    await reader.readexactly(length + 2)


def _socks_address(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("idna")
        return b"\x03" + bytes([len(name)]) + name
    return (b"\x01" if address.version == 4 else b"\x04") + address.packed
