"""An upgraded connection passed on to another server byte by byte, such as a WebSocket.

    client ══ Tunnel ══ other server

Request and answer of the upgrade are HTTP; what follows belongs to the two ends. Each side is read
only as fast as the other takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import httptools

from kubetorch.lib import deadlines
from kubetorch.lib.cycles import status_line
from kubetorch.lib.proxying import CONNECT_TIMEOUT, Header, Target, request_head

#: Seconds that an end has to take what the other one sent last.
CLOSE_TIMEOUT = 5.0
#: Bytes that wait for an end before the other one is not read any more.
WRITE_BUFFER = 256 * 1024
#: Seconds for a refusal of the upgrade to arrive.
REFUSAL_TIMEOUT = 30.0

_log = logging.getLogger(__name__)


class Refused(Exception):
    """Raised by whoever opens the way: answer the client with this instead."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"refused with status {status}")
        self.status = status
        self.body = body
        self.content_type = content_type


class Upgrade:
    """The request of a client.

    Attributes:
        path: The path, undecoded.
        query: The query, undecoded.
        headers: Its headers, names in lower case.
    """

    def __init__(self, head: bytes) -> None:
        self.path, self.query = b"/", b""
        self.headers: list[Header] = []
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            return

    def on_url(self, url: bytes) -> None:  # noqa: D102  # the parser's
        parsed = httptools.parse_url(url)
        self.path, self.query = parsed.path or b"/", parsed.query or b""

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102  # the parser's
        self.headers.append((name.lower(), value))


#: Given a client's request, waits until it may pass: where it goes, the headers that go with it,
#: and what to call when it is over. Raises `Refused`.
Opener = Callable[[Upgrade], Awaitable[tuple[Target, list[Header], Callable[[], None]]]]


class Tunnel(asyncio.Protocol):
    """The client's side; the server's side is opened once the request is there.

    Args:
        opener: Decides about the request.
        on_lost: Told of the end of the client's connection.
    """

    def __init__(self, opener: Opener, on_lost: Callable[[Tunnel], None]) -> None:
        self._opener = opener
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._other: _Other | None = None
        self._opening: asyncio.Task[None] | None = None
        self._finish: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102  # asyncio's
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        transport.set_write_buffer_limits(high=WRITE_BUFFER)  # type: ignore[attr-defined]  # as above

    def data_received(self, data: bytes) -> None:  # noqa: D102  # asyncio's
        if self._opening is None:
            assert self._transport is not None
            self._transport.pause_reading()
            loop = asyncio.get_running_loop()
            self._opening = loop.create_task(self._open(Upgrade(data)))
        elif self._other is not None:
            self._other.write(data)

    async def _open(self, upgrade: Upgrade) -> None:
        try:
            target, headers, self._finish = await self._opener(upgrade)
            async with deadlines.timeout(CONNECT_TIMEOUT):
                loop = asyncio.get_running_loop()
                _, other = await loop.create_connection(
                    lambda: _Other(self), **await target.place()
                )
        except Refused as refused:
            self._refuse(refused)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            text = f'{{"error_type":"ConnectionError","message":"{type(error).__name__}"}}'
            self._refuse(Refused(502, text.encode()))
        else:
            if self._transport is None:
                other.close()
                return
            self._other = other
            path = target.mount.enter(upgrade.path)
            kept = [(n, v) for n, v in upgrade.headers if n in (b"upgrade", b"connection")]
            passed = [*target.passed(headers), *kept]
            other.write(request_head("GET", path, upgrade.query, passed))
            self._transport.resume_reading()

    def _refuse(self, refused: Refused) -> None:
        if self._transport is None:
            return
        head = status_line(refused.status)
        head += b"content-type: %s\r\n" % refused.content_type.encode("latin-1")
        head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(refused.body)
        self._transport.write(head + refused.body)
        self.close()

    def write(self, data: bytes) -> None:
        """Send to the client."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close once the client has taken everything, or time is over."""
        _close(self._transport)

    def shutdown(self) -> None:
        """The server stops."""
        self.close()

    def pause(self, *, is_paused: bool) -> None:
        """Whether the client is not read for now."""
        _pause(self._transport, is_paused=is_paused)

    def pause_writing(self) -> None:  # noqa: D102  # asyncio's
        if self._other is not None:
            self._other.pause(is_paused=True)

    def resume_writing(self) -> None:  # noqa: D102  # asyncio's
        if self._other is not None:
            self._other.pause(is_paused=False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102  # asyncio's
        self._transport = None
        if self._opening is not None:
            self._opening.cancel()
        if self._other is not None:
            self._other.close()
        if self._finish is not None:
            self._finish()
        self._on_lost(self)


class _Other(asyncio.Protocol):
    """The other server's side."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        transport.set_write_buffer_limits(high=WRITE_BUFFER)  # type: ignore[attr-defined]  # as above

    def data_received(self, data: bytes) -> None:
        self._tunnel.write(data)
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._parser = None
        except httptools.HttpParserError:
            self._tunnel.close()

    def on_headers_complete(self) -> None:
        """The answer to the upgrade: one that refuses it is the last that passes."""
        assert self._parser is not None
        if self._parser.get_status_code() == 101:
            return
        self._tunnel.pause(is_paused=True)
        asyncio.get_running_loop().call_later(REFUSAL_TIMEOUT, self.close)

    def on_message_complete(self) -> None:
        if self._parser is not None and self._parser.get_status_code() >= 200:
            self._tunnel.close()

    def write(self, data: bytes) -> None:
        """Send to the server."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close once the server has taken everything, or time is over."""
        _close(self._transport)

    def pause(self, *, is_paused: bool) -> None:
        """Whether the server is not read for now."""
        _pause(self._transport, is_paused=is_paused)

    def pause_writing(self) -> None:
        self._tunnel.pause(is_paused=True)

    def resume_writing(self) -> None:
        self._tunnel.pause(is_paused=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._tunnel.close()


def _close(transport: asyncio.Transport | None) -> None:
    if transport is not None and not transport.is_closing():
        transport.close()
        asyncio.get_running_loop().call_later(CLOSE_TIMEOUT, transport.abort)


def _pause(transport: asyncio.Transport | None, *, is_paused: bool) -> None:
    if transport is None or transport.is_closing():
        return
    if is_paused and transport.is_reading():
        transport.pause_reading()
    elif not is_paused and not transport.is_reading():
        transport.resume_reading()
