"""An HTTP/1.1 client on an asyncio loop: connections that are kept, answers read as they come.

The caller decides about sending again: `transports.UnreachableError` says that nothing was sent,
`BrokenError` and `SilentError` that the server may have seen the request. A kept connection that
its server has closed is not used, so a request breaks on one only if the server closes the
connection in the very moment in which the request is on its way.

A reader that stops reading stops the server: no more than a few pieces of an answer are buffered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import SupportsIndex
from urllib.parse import urlsplit

import msgspec

from kubetorch.lib import deadlines, transports
from kubetorch.lib.http1 import AnswerReader, BrokenError, encoded, request_head
from kubetorch.lib.tuning import LIMITS, TIMING

_PIECE = 64 * 1024


class SilentError(TimeoutError):
    """The server sent nothing for too long; it may have processed the request."""


class TooLargeError(Exception):
    """An answer, or a line of one, has more bytes than the limit."""


class Request(msgspec.Struct, frozen=True):
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None


class HttpPool:
    """Connections to servers. Belongs to one event loop; `close` it there."""

    def __init__(self, *, connect_timeout: float = 10.0) -> None:
        self._connect_timeout = connect_timeout
        self._idle: dict[transports.Route, list[_Connection]] = {}
        self._all: set[_Connection] = set()
        self._is_closed = False

    async def send(
        self, route: transports.Route, request: Request, *, timeout: float | None
    ) -> Answer:
        """Send a request, and wait for the head of its answer."""
        if self._is_closed:
            raise transports.UnreachableError("the client is closed")
        connection = self._take_idle(route) or await self._connect(route)
        try:
            connection.write(request)
            async with deadlines.timeout(timeout):
                head = await connection.read_head()
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, TimeoutError):
                raise SilentError(f"no answer within {timeout:g} s") from error
            raise
        return Answer(self, connection, head)

    async def close(self) -> None:
        """Close every connection, those of answers that are being read too."""
        self._is_closed = True
        connections = list(self._all)
        for connection in connections:
            self._drop(connection)
        for connection in connections:
            await connection.wait_closed()

    async def _connect(self, route: transports.Route) -> _Connection:
        reader = _Reader(limit=_PIECE)
        transport, protocol = await transports.dial(
            route, lambda: asyncio.StreamReaderProtocol(reader), timeout=self._connect_timeout
        )
        loop = asyncio.get_running_loop()
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        connection = _Connection(route, reader, writer)
        self._all.add(connection)
        return connection

    def _take_idle(self, route: transports.Route) -> _Connection | None:
        idle = self._idle.get(route, [])
        while idle:
            connection = idle.pop()
            if connection.timer is not None:
                connection.timer.cancel()
            if connection.is_reusable:
                return connection
            self._drop(connection)
        return None

    def _give_back(self, connection: _Connection) -> None:
        connection.stop_expecting()
        idle = self._idle.setdefault(connection.route, [])
        is_full = sum(map(len, self._idle.values())) >= LIMITS.pooled_connections
        if self._is_closed or is_full or not connection.is_reusable:
            self._drop(connection)
            return
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(TIMING.pooled_connection_seconds, self._drop, connection)
        idle.append(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
        idle = self._idle.get(connection.route, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.route, None)
        self._all.discard(connection)
        connection.abort()


class _Reader(asyncio.StreamReader):
    """Notices data that the server sends while no request is under way."""

    is_expecting = False
    has_unexpected_data = False

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.has_unexpected_data |= not self.is_expecting
        super().feed_data(data)


class _Connection:
    """One connection, one exchange at a time."""

    def __init__(
        self, route: transports.Route, reader: _Reader, writer: asyncio.StreamWriter
    ) -> None:
        self.route = route
        self.timer: asyncio.TimerHandle | None = None
        self._reader = reader
        self._writer = writer
        self._answer = AnswerReader()

    @property
    def is_reusable(self) -> bool:
        """True if another request may follow the answer, which was read to its end.

        The server has neither closed the connection nor sent anything unasked.
        """
        reader = self._reader
        is_over = self._writer.is_closing() or reader.at_eof() or reader.exception()
        return self._answer.allows_reuse and not (is_over or reader.has_unexpected_data)

    def write(self, request: Request) -> None:
        self._answer = AnswerReader()
        self._reader.is_expecting = True
        headers = [("Host", transports.host_header(self.route)), *request.headers]
        if request.body is not None:
            headers.append(("Content-Length", str(len(request.body))))
        head = request_head(request.method, request.target, encoded(headers))
        self._writer.write(head + (request.body or b""))

    async def read_head(self) -> AnswerReader:
        while not self._answer.has_head:
            await self._feed()
        return self._answer

    async def read_piece(self) -> bytes:
        """The next bytes of the body; empty once it has ended."""
        while not (piece := self._answer.take()) and not self._answer.is_complete:
            await self._feed()
        return piece

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(_PIECE)
        except OSError as error:
            raise BrokenError(error.strerror or str(error) or type(error).__name__) from error
        self._answer.feed(data)

    def stop_expecting(self) -> None:
        """Expect nothing from the server until the next request."""
        self._reader.is_expecting = False

    def abort(self) -> None:
        self._writer.transport.abort()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Answer:
    """An answer, whose body is read as it comes; an asynchronous context manager."""

    def __init__(self, pool: HttpPool, connection: _Connection, head: AnswerReader) -> None:
        self._pool = pool
        self._connection: _Connection | None = connection
        self.status = head.status
        self.headers = head.headers

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the rest of the answer, with the connection unless the answer was read whole."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool._drop(connection)

    async def read(self, limit: int, *, timeout: float) -> bytes:
        pieces: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while piece := await self._piece(max(0.0, deadline - loop.time())):
            size += len(piece)
            if size > limit:
                self.close()
                raise TooLargeError(f"an answer of more than {limit} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def pieces(self, *, timeout: float | None) -> AsyncGenerator[bytes, None]:
        """Pieces of the body, each as soon as it arrives."""
        while piece := await self._piece(timeout):
            yield piece

    async def lines(self, *, limit: int, timeout: float | None) -> AsyncGenerator[bytes, None]:
        """Lines of the body without their ends, each as soon as it is complete."""
        pending = bytearray()
        while piece := await self._piece(timeout):
            pending += piece
            if b"\n" in piece:
                *lines, rest = bytes(pending).split(b"\n")
                pending = bytearray(rest)
                for line in lines:
                    yield line
            if len(pending) > limit:
                self.close()
                raise TooLargeError(f"a line of more than {limit} bytes")
        if pending:
            yield bytes(pending)

    async def _piece(self, timeout: float | None) -> bytes:
        connection = self._connection
        if connection is None:
            return b""
        try:
            async with deadlines.timeout(timeout):
                piece = await connection.read_piece()
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise SilentError(f"no more of the answer within {timeout:g} s") from error
            raise
        if not piece:
            self._connection = None
            self._pool._give_back(connection)
        return piece


@contextlib.asynccontextmanager
async def fetch(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    connect_timeout: float,
    timeout: float | None,
) -> AsyncGenerator[Answer, None]:
    """The answer to a request on a connection of its own, once its head has arrived."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    request = Request(method, target, tuple(headers.items()), body or None)
    pool = HttpPool(connect_timeout=connect_timeout)
    try:
        yield await pool.send(
            transports.Route(parts.hostname or "", parts.port or 80), request, timeout=timeout
        )
    finally:
        await pool.close()
