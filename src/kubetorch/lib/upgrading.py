"""The client's end of a WebSocket: a connection, the request to upgrade it, and the answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from kubetorch.lib import deadlines, dialing, websocket
from kubetorch.lib.connections import Connection, Endpoint

#: Bytes that the head of an answer to an upgrade, or the body of a refusal, may have.
ANSWER_LIMIT = 64 * 1024


class UpgradeRefusedError(Exception):
    """The server answered an upgrade with an ordinary response.

    Attributes:
        status: HTTP status.
        body: The response's body.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the upgrade was answered with status {status}")
        self.status = status
        self.body = body


async def connect(
    url: str,
    endpoint: Endpoint,
    *,
    headers: Mapping[str, str],
    max_message: int,
    timeout: float = 10.0,
    dial_timeout: float | None = None,
) -> Connection:
    """Open a WebSocket to `url` (`http://` or `ws://`).

    Args:
        url: Where.
        endpoint: Told of the messages.
        headers: Of the request.
        max_message: Longest message that is taken, in bytes.
        timeout: Seconds until the answer.
        dial_timeout: Seconds until the connection is there, if that is to be noticed earlier.

    Raises:
        UpgradeRefusedError: The server said no.
        OSError, TimeoutError, WebSocketError: There is no connection.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    return await upgrade(
        dialing.Route(parts.hostname, parts.port or 80),
        parts.path or "/",
        endpoint,
        headers=headers.items(),
        max_message=max_message,
        timeout=timeout,
        dial_timeout=dial_timeout,
    )


async def adopt(
    upgraded: socket.socket, rest: bytes, endpoint: Endpoint, *, max_message: int
) -> Connection:
    """Go on with a connection that was upgraded elsewhere.

    Args:
        upgraded: Its socket.
        rest: What was read of it after the answer's head.
        endpoint: Told of the messages.
        max_message: Bytes that a message may have.
    """
    loop = asyncio.get_running_loop()
    upgraded.setblocking(False)
    _, connection = await loop.create_connection(
        lambda: _Adopted(endpoint, is_client=True, max_message=max_message), sock=upgraded
    )
    connection.feed(rest)
    return connection


class _Adopted(Connection):
    """A connection that is open once it has its transport."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.start(transport)  # type: ignore[arg-type]  # uvloop's has no common base


async def upgrade(
    route: dialing.Route,
    target: str,
    endpoint: Endpoint,
    *,
    headers: Iterable[tuple[str, str]],
    max_message: int,
    timeout: float,
    dial_timeout: float | None = None,
) -> Connection:
    """Open a WebSocket on a new connection.

    Args:
        route: The server.
        target: Path and query, quoted.
        endpoint: Told of the messages.
        headers: Of the request.
        max_message: Longest message that is taken, in bytes.
        timeout: Seconds until the connection is there, and then until its answer.
        dial_timeout: Seconds until the connection is there, instead.

    Raises:
        UpgradeRefusedError: The server said no.
        dialing.UnreachableError: There is no connection, so nothing was sent.
        OSError, TimeoutError, WebSocketError: There is no answer.
    """
    request, accept = websocket.upgrade_request(dialing.host_header(route), target, headers)
    transport, protocol = await dialing.dial(route, _Handshake, timeout=dial_timeout or timeout)
    transport.write(request)
    try:
        async with deadlines.timeout(timeout):
            status, answer = websocket.parse_response(await protocol.head, accept)
            if status != 101:
                raise UpgradeRefusedError(status, await protocol.body(answer))
    except BaseException:
        transport.abort()
        raise
    connection = Connection(endpoint, is_client=True, max_message=max_message)
    connection.subprotocol = answer.get("sec-websocket-protocol")
    transport.set_protocol(connection)
    connection.start(transport)
    connection.feed(protocol.rest)
    return connection


class _Handshake(asyncio.Protocol):
    """Reads the head of a response, and a body after it when the upgrade was refused.

    Attributes:
        head: The head, up to and with its empty line.
        rest: What has come after it.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[bytes] = loop.create_future()
        self.rest = bytearray()
        self._need: int | None = None
        self._body: asyncio.Future[bytes] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        self.rest += data
        if not self.head.done():
            end = self.rest.find(b"\r\n\r\n")
            if end >= 0:
                self.head.set_result(bytes(self.rest[: end + 4]))
                del self.rest[: end + 4]
            elif len(self.rest) > ANSWER_LIMIT:
                error = websocket.WebSocketError("the answer to the upgrade has no end")
                self.head.set_exception(error)
        self._finish_body()

    async def body(self, headers: Mapping[str, str]) -> bytes:
        """The body of a refusal, as far as it is of any interest."""
        length = headers.get("content-length", "")
        self._need = min(int(length), ANSWER_LIMIT) if length.isascii() and length.isdigit() else 0
        self._finish_body()
        return await self._body

    def _finish_body(self) -> None:
        if self._need is not None and len(self.rest) >= self._need and not self._body.done():
            self._body.set_result(bytes(self.rest[: self._need]))

    def connection_lost(self, exc: Exception | None) -> None:
        lost = exc or ConnectionResetError("the connection was closed during the handshake")
        if not self.head.done():
            self.head.set_exception(lost)
            self.head.exception()  # retrieved: nobody may be waiting
        if not self._body.done():
            self._body.set_result(bytes(self.rest))
