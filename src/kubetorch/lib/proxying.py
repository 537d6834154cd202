"""One HTTP request passed on to another server, and its answer back: both as streams.

Neither body is kept: a sender that is faster than its receiver is not read until that has caught
up. Whatever ends one side ends the other. Headers that belong to one connection stay on it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from kubetorch.lib import deadlines

Header = tuple[bytes, bytes]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Seconds until the other server has taken the connection.
CONNECT_TIMEOUT = 10.0
_PIECE = 64 * 1024
#: Headers of one connection (RFC 9110, section 7.6.1), beside those that `Connection` names.
_OF_CONNECTION = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te "
    b"trailer transfer-encoding upgrade".split()
)
_FORWARDED_HOST = b"x-forwarded-host"


class Mount(NamedTuple):
    """Where the paths of a server appear.

    Attributes:
        outside: What paths begin with for clients, such as `/http`.
        inside: What they begin with for the server.
    """

    outside: str
    inside: str

    def has(self, path: str) -> bool:
        """Whether a client's path belongs to the server."""
        return path == self.outside or path.startswith(f"{self.outside}/")

    def enter(self, path: bytes) -> bytes:
        """The path at the server, as the client has quoted it."""
        # By its parts: what it begins with may be quoted, and so be longer than `outside`.
        parts = path.split(b"/", self.outside.count("/") + 1)
        rest = parts[self.outside.count("/") + 1 :]
        return b"".join((self.inside.encode(), *(b"/" + part for part in rest))) or b"/"

    def leave(self, location: bytes, host: bytes, own: bytes = b"") -> bytes:
        """A `Location` for the client, if it leads to the server itself.

        Args:
            location: As the server has it.
            host: The server's name for the client.
            own: Its name for itself, where that is another one.
        """
        parts = urlsplit(location)
        if own and parts.netloc == own:
            parts = parts._replace(scheme=b"", netloc=b"")
        if parts.netloc not in (b"", host) or not parts.path.startswith(b"/"):
            return location
        path = parts.path.decode("latin-1")
        if self.outside and self.has(path):
            return location  # the server knows where it appears
        if not path.startswith(f"{self.inside}/"):
            return location
        moved = self.outside + path[len(self.inside) :]
        return parts._replace(path=moved.encode("latin-1")).geturl()


class Target(NamedTuple):
    """The other server.

    Attributes:
        host, port: Where it listens.
        mount: Where it appears.
        headers: What requests need to get there, in place of what clients say.
        dial: Makes the connections, where they do not simply go to host and port.
    """

    host: str
    port: int
    mount: Mount
    headers: tuple[Header, ...] = ()
    dial: Callable[[], Awaitable[socket.socket]] | None = None

    async def place(self) -> dict[str, Any]:
        """What `asyncio` is to connect to."""
        if self.dial is None:
            return {"host": self.host, "port": self.port}
        return {"sock": await self.dial()}

    def passed(self, headers: Iterable[Header]) -> list[Header]:
        """The headers of a client that go on, and those that are needed.

        A server that is called by another name than the client knows it by is told that one.
        """
        found, own = end_to_end(headers), {name for name, _ in self.headers}
        known, more = dict(found), []
        if b"host" in own and b"host" in known and _FORWARDED_HOST not in known:
            more = [(_FORWARDED_HOST, known[b"host"])]
        return [*(one for one in found if one[0] not in own), *more, *self.headers]


class BrokenAnswerError(ConnectionError):
    """The other server closed the connection before it had answered."""


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """The headers that are passed on."""
    found = list(headers)
    named = {
        name.strip().lower()
        for key, value in found
        if key == b"connection"
        for name in value.split(b",")
    }
    return [item for item in found if item[0] not in _OF_CONNECTION and item[0] not in named]


def request_head(
    method: str, path: bytes, query: bytes, headers: Iterable[Header], *more: Header
) -> bytes:
    """The head of a request."""
    target = path + (b"?" + query if query else b"")
    lines = [b"%s %s HTTP/1.1" % (method.encode("ascii"), target)]
    lines += [b"%s: %s" % header for header in (*headers, *more)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def relay(
    scope: Message, headers: Iterable[Header], receive: Receive, send: Send, target: Target
) -> None:
    """Pass a request on, and its answer back.

    Args:
        scope: The request, as ASGI has it.
        headers: Its headers, of which those of the connection are left out.
        receive: As ASGI has it.
        send: As ASGI has it.
        target: The other server.

    Raises:
        BrokenAnswerError: It closed the connection without an answer.
        OSError, TimeoutError: It cannot be reached.
    """
    async with deadlines.timeout(CONNECT_TIMEOUT):
        reader, writer = await asyncio.open_connection(**await target.place())
    passed = target.passed(headers)
    has_length = any(name == b"content-length" for name, _ in passed)
    is_chunked = not has_length and any(
        name == b"transfer-encoding" for name, _ in scope["headers"]
    )
    framing = [(b"transfer-encoding", b"chunked")] if is_chunked else []
    path = target.mount.enter(scope["raw_path"])
    head = request_head(
        scope["method"],
        path,
        scope["query_string"],
        passed,
        *framing,
        (b"connection", b"close"),
    )
    upload = asyncio.ensure_future(_upload(receive, writer, head, is_chunked=is_chunked))
    try:
        await _download(reader, send, scope, target)
    finally:
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        writer.transport.abort()


async def _upload(
    receive: Receive, writer: asyncio.StreamWriter, head: bytes, *, is_chunked: bool
) -> None:
    """Send head and body; then wait for the client's end, and let the server notice it."""
    writer.write(head)
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                writer.transport.abort()
                return
            body, is_last = message.get("body", b""), not message.get("more_body", False)
            if is_chunked:
                body = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
                body += b"0\r\n\r\n" if is_last else b""
            writer.write(body)
            await writer.drain()
    except ConnectionError:
        return  # it wants no more of the body; its answer may be there nevertheless


class _Answer:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.pieces: list[bytes] = []
        self.has_head = False
        self.is_complete = False

    def on_message_begin(self) -> None:
        # After an interim answer another one follows.
        self.headers, self.has_head, self.is_complete = [], False, False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def _download(
    reader: asyncio.StreamReader, send: Send, scope: Message, target: Target
) -> None:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    while not answer.has_head or parser.get_status_code() < 200:
        if not await _feed(parser, reader):
            raise BrokenAnswerError("the connection was closed before there was an answer")
    host = _host(scope["headers"]) or b""
    own = _host(target.headers) or b""
    await send(
        {
            "type": "http.response.start",
            "status": parser.get_status_code(),
            "headers": [
                (name, target.mount.leave(value, host, own) if name == b"location" else value)
                for name, value in end_to_end(answer.headers)
            ],
        }
    )
    # Without a length the body ends with the connection.
    is_counted = any(
        name in (b"content-length", b"transfer-encoding") for name, _ in answer.headers
    )
    is_bodiless = scope["method"] == "HEAD"
    while True:
        pieces, answer.pieces = answer.pieces, []
        if pieces and not is_bodiless:
            body = b"".join(pieces)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if answer.is_complete or is_bodiless:
            break
        if not await _feed(parser, reader):
            if is_counted:
                return  # the client sees by the missing end that the answer was cut
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _host(headers: Iterable[Header]) -> bytes | None:
    return next((value for name, value in headers if name == b"host"), None)


async def _feed(parser: httptools.HttpResponseParser, reader: asyncio.StreamReader) -> bool:
    """Read once; false at the end of the connection."""
    try:
        data = await reader.read(_PIECE)
        if data:
            parser.feed_data(data)
    except httptools.HttpParserUpgrade as error:
        raise BrokenAnswerError("the answer upgrades, which was not asked for") from error
    except httptools.HttpParserError as error:
        raise BrokenAnswerError(f"not an HTTP answer: {error}") from error
    except ConnectionError:
        return False
    return bool(data)
