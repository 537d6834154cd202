"""A GET request on an asyncio loop whose answer is read as it comes; HTTP/1.1 without TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
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
        self.has_head = False
        self.is_complete = False

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


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
    parts = urlsplit(url)
    query = f"?{parts.query}" if parts.query else ""
    lines = [
        f"GET {parts.path}{query} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    async with deadlines.timeout(timeout):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        async with deadlines.timeout(timeout):
            while not answer.has_head:
                await _feed(parser, reader)
        if parser.get_status_code() != 200:
            raise FetchError(f"{url} answered {parser.get_status_code()}")
        yield b""
        while True:
            pieces, answer.pieces = answer.pieces, []
            for piece in pieces:
                yield piece
            if answer.is_complete:
                return
            await _feed(parser, reader)
    finally:
        writer.close()


async def _feed(parser: httptools.HttpResponseParser, reader: asyncio.StreamReader) -> None:
    data = await reader.read(_PIECE)
    if not data:
        raise ConnectionResetError("the connection was closed before the answer was complete")
    try:
        parser.feed_data(data)
    except httptools.HttpParserError as error:
        raise ConnectionError(f"not an HTTP answer: {error}") from error
