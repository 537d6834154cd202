"""A request on an asyncio loop whose answer is read as it comes; HTTP/1.1 without TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from urllib.parse import urlsplit

import httptools

from kubetorch.lib import deadlines

_PIECE = 64 * 1024


class FetchError(Exception):
    """The server answered with something else than 200."""


class _Answer:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.has_head = False
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class Exchange:
    """A request and its answer: `async with`, which connects, then `send`, then the body.

    All of it raises `OSError` or `TimeoutError` when there is no answer, or not all of it.

    Args:
        method: Of the request.
        url: What it asks for, `http://…`.
        headers: Of the request.
        body: Of the request.
        timeout: Seconds that the connection may take.
    """

    def __init__(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        timeout: float,
    ) -> None:
        self._parts = parts = urlsplit(url)
        query = f"?{parts.query}" if parts.query else ""
        lines = [
            f"{method} {parts.path}{query} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: close",
            *([f"Content-Length: {len(body)}"] if body else []),
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
        self._timeout = timeout
        self._answer = _Answer()
        self._parser = httptools.HttpResponseParser(self._answer)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def status(self) -> int:
        """Status of the answer."""
        return int(self._parser.get_status_code())

    @property
    def content_type(self) -> str:
        """Type of its body."""
        return self._answer.headers.get("content-type", "")

    async def __aenter__(self) -> Exchange:
        async with deadlines.timeout(self._timeout):
            self._reader, self._writer = await asyncio.open_connection(
                self._parts.hostname, self._parts.port or 80
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    async def send(self, timeout: float | None = None) -> None:
        """Send the request, and wait for the head of the answer.

        Args:
            timeout: Seconds for that.
        """
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(self._request)
        async with deadlines.timeout(timeout):
            while not self._answer.has_head:
                await self._feed(self._reader)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body of the answer, as it comes."""
        assert self._reader is not None
        answer = self._answer
        while True:
            pieces, answer.pieces = answer.pieces, []
            for piece in pieces:
                yield piece
            if answer.is_complete:
                return
            await self._feed(self._reader)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The lines of the body, as they come, without their ends."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line
        if rest:
            yield rest

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def _feed(self, reader: asyncio.StreamReader) -> None:
        data = await reader.read(_PIECE)
        if not data:
            raise ConnectionResetError("the connection was closed before the answer was complete")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"not an HTTP answer: {error}") from error


async def stream(
    url: str, headers: Mapping[str, str], *, timeout: float
) -> AsyncGenerator[bytes, None]:
    """The body of the answer in pieces, the first one empty: then the head has come.

    Args:
        url: What to get, `http://…`.
        headers: Of the request.
        timeout: Seconds until the head of the answer; the body may take as long as it likes.

    Raises:
        FetchError: The status is not 200.
        OSError, TimeoutError: There is no answer, or not all of it.
    """
    async with Exchange("GET", url, headers, timeout=timeout) as exchange:
        await exchange.send(timeout)
        if exchange.status != 200:
            raise FetchError(f"{url} answered {exchange.status}")
        yield b""
        async for piece in exchange.pieces():
            yield piece
