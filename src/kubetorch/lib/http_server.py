"""An HTTP/1.1 server for an ASGI application on a listening socket: httptools parses, we answer.

    bytes ──► httptools ──► _Connection ── one at a time ──► Cycle ──► application
                                 │                             │
                                 └── upgrade ──► WebSocket      └──► bytes

What is left out: TLS, HTTP/2, lifespan, proxies, logs of requests. `docs/design/dependencies.md`
says why this is not uvicorn.

Limits: the head of a request and the trailers of its body while they arrive, the body that waits to
be read, the time without a request, how many are connected. Pipelined requests wait, unparsed by
the application, until the one before is answered.

Strangers have no right to a connection: an application calls `scope["admit"]` when a request has
proved its sender, and where there are too many connections, those without such a request end.
`await scope["disconnected"]()` ends when the client does, for a request that waits with its body.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import unquote

import httptools

from kubetorch.lib import deadlines, sockets
from kubetorch.lib.http1 import (
    LAST_CHUNK,
    Header,
    MessageMeter,
    TooLongError,
    answer_head,
    chunk,
    connection_names,
    request_head,
    whole_answer,
)
from kubetorch.lib.tasks import cancel_all
from kubetorch.lib.tuning import LIMITS, TIMING

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

_PIECE = 16 * 1024

_log = logging.getLogger(__name__)
#: Statuses whose answers have no body.
_BODILESS = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Cycle:
    def __init__(self, connection: _Connection, scope: Message, *, keep_alive: bool) -> None:
        self._connection = connection
        self._scope = scope
        self._keep_alive = keep_alive
        self._body = bytearray()
        self._dropped = 0
        self._has_more = True
        self._is_read = False
        self._is_disconnected = False
        self._arrived = asyncio.Event()
        self._expects_continue = (b"expect", b"100-continue") in scope["headers"]
        self.has_begun = False
        self._is_chunked = False
        self._is_bodiless = scope["method"] == "HEAD"
        self._is_complete = False
        scope["disconnected"] = self.disconnected

    async def run(self, app: Application) -> None:
        try:
            await app(self._scope, self.receive, self.send)
        except Exception as error:  # noqa: BLE001  # one request must not end the server
            _log.warning("request failed", exc_info=error)
            if not self.has_begun:
                headers = [(b"content-length", b"0")]
                await self.send({"type": "http.response.start", "status": 500, "headers": headers})
                await self.send({"type": "http.response.body"})
        finally:
            # A client notices an incomplete answer by the end of the connection.
            self._connection.cycle_ended(keep_alive=self._keep_alive and self._is_complete)

    # ----------------------------------------------------------------------- from the connection

    def feed(self, body: bytes) -> None:
        """Take more of the body; it is dropped once the request is answered."""
        if self._is_complete:
            self._dropped += len(body) + LIMITS.dropped_piece_bytes
            if self._dropped > LIMITS.dropped_body_bytes:
                self._connection.shutdown()
            return
        self._body += body
        if self.is_full:
            self._connection.pause_reading()
        self._arrived.set()

    @property
    def is_full(self) -> bool:
        """True if so much of the body waits that no more is read for now."""
        return len(self._body) > LIMITS.waiting_body_bytes

    def end(self) -> None:
        """The body is complete."""
        self._has_more = False
        self._arrived.set()

    def disconnect(self) -> None:
        self._is_disconnected = True
        self._arrived.set()

    # ------------------------------------------------------------------------ for the application

    async def receive(self) -> Message:
        """Wait for more of the body, or for the end of the answer or the connection."""
        if self._expects_continue and not self.has_begun:
            self._expects_continue = False
            self._connection.write(_CONTINUE)
        # Wait until more of the body arrives, or its end.
        while not (self._is_disconnected or self._is_complete or self._body) and (
            self._has_more or self._is_read
        ):
            self._arrived.clear()
            await self._arrived.wait()
        if self._is_disconnected or self._is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._is_read = not self._has_more
        self._connection.resume_reading()
        return {"type": "http.request", "body": body, "more_body": self._has_more}

    async def disconnected(self) -> None:
        """Wait until the client disconnects, before the body is read.

        It is not noticed while so much of the body waits that no more is read.
        """
        while not self._is_disconnected:
            self._arrived.clear()
            await self._arrived.wait()

    async def send(self, message: Message) -> None:
        """Send a piece of the answer; dropped when the client is gone."""
        if self._is_disconnected:
            return
        if message["type"] == "http.response.start":
            self.has_begun = True
            self._is_bodiless |= message["status"] in _BODILESS
            self._connection.write(self._head(message["status"], message["headers"]))
            return
        is_last = not message.get("more_body", False)
        body = b"" if self._is_bodiless else message.get("body", b"")
        if self._is_chunked:
            body = chunk(body) + (LAST_CHUNK if is_last else b"")
        if body:
            self._connection.write(body)
        if is_last:
            self._is_complete = True
            self._arrived.set()
        await self._connection.drain()

    def _head(self, status: int, headers: list[Header]) -> bytes:
        if (b"connection", b"close") in headers or self._connection.is_closing:
            self._keep_alive = False
        sent = [header for header in headers if header[0] != b"connection"]
        has_length = any(name == b"content-length" for name, _ in headers)
        if not (has_length or self._is_bodiless):
            if self._scope["http_version"] == "1.1":
                self._is_chunked = True
                sent.append((b"transfer-encoding", b"chunked"))
            else:
                self._keep_alive = False
        if not self._keep_alive:
            sent.append((b"connection", b"close"))
        return answer_head(status, sent)


class Refusal(Exception):
    """Raised by an upgrader: answer the request with this response instead."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with status {status}")
        self.status = status
        self.body = body

    @property
    def answer(self) -> bytes:
        """The response, after which the connection is closed."""
        return whole_answer(self.status, self.body, "application/json")


class Upgrade:
    """A request for another protocol."""

    def __init__(self, url: bytes, headers: list[Header], source: str = "") -> None:
        parsed = httptools.parse_url(url)
        self.raw_path: bytes = parsed.path or b"/"
        self.path = unquote(self.raw_path.decode("ascii"))
        self.query: bytes = parsed.query or b""
        self.headers = headers
        #: Address of the client.
        self.source = source
        self.is_admitted = False

    def admit(self) -> None:
        """The request has proved its sender."""
        self.is_admitted = True


class Successor(Protocol):
    """Takes over a connection that changes its protocol."""

    def take_over(
        self, transport: asyncio.Transport, rest: bytes, connections: Connections
    ) -> None:
        """Become the protocol of the transport; be in `connections` while it is open."""

    def shutdown(self) -> None:
        """The server stops."""


#: Headers that say that a request has a body.
_BODY = (b"content-length", b"transfer-encoding")
#: The successor for a WebSocket; `None` where the request is an ordinary one.
Upgrader = Callable[[Upgrade], Successor | None]


class Connections(set[Any]):
    """The open connections, at most so many; `empty` is set when the last one closes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        #: Connections without a request that has proved its sender, the last used at the end.
        self._strangers: dict[Any, None] = {}
        self.empty = asyncio.Event()

    def add(self, connection: object) -> None:
        """Add a stranger's connection."""
        super().add(connection)
        self._strangers[connection] = None

    def admit(self, connection: object) -> None:
        """Keep a connection for as long as it is open: it is no stranger's any more."""
        self._strangers.pop(connection, None)

    def use(self, connection: object) -> None:
        """Note that a request came on a connection, or was answered."""
        if self._strangers.pop(connection, self) is None:
            self._strangers[connection] = None

    def discard(self, connection: object) -> None:
        super().discard(connection)
        self._strangers.pop(connection, None)
        if not self:
            self.empty.set()

    def make_room(self) -> bool:
        """Make room for one more connection, ending a stranger's if need be; false if it fails."""
        if len(self) < self._most:
            return True
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            oldest.abort()
        return oldest is not None


class Server:
    def __init__(
        self,
        app: Application,
        *,
        upgrade: Upgrader | None = None,
        keep_alive: float = 75.0,
        most: int | None = None,
    ) -> None:
        self.app = app
        self.upgrade = upgrade
        self.keep_alive = keep_alive
        #: The connections of this server, and the successors that took over some of them.
        self.connections = Connections(sockets.limit() * 3 // 4 if most is None else most)
        self.tasks: set[asyncio.Task[None]] = set()
        #: True if each connection ends with a request.
        self.is_closing = False
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections of a socket that listens already."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener)

    @property
    def open_requests(self) -> int:
        return len(self.tasks)

    def stop_keeping_alive(self) -> None:
        """End each connection with its present request, or the next one; end idle ones now."""
        self.is_closing = True
        for connection in list(self.connections):
            if isinstance(connection, _Connection):
                connection.shutdown()

    async def close(self, grace: float) -> None:
        """Take no more connections, and let clients read what was sent to them."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.shutdown()
        tasks = [task for task in self.tasks if task is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            await cancel_all(late)
        if self.connections:
            self.connections.empty.clear()
            await deadlines.wait_at_most(grace, self.connections.empty.wait())


class _Body:
    """What a parser tells that is to read the body alone of a request."""

    def __init__(self, connection: _Connection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete


class _Connection(asyncio.Protocol):
    """One connection, and the requests on it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._cycle: Cycle | None = None
        self._waiting: deque[Cycle] = deque()
        self._writable = asyncio.Event()
        self._writable.set()
        self._timer: asyncio.TimerHandle | None = None
        #: True if the connection ends with the present request, or the next one.
        self.is_closing = server.is_closing
        self._peer: Any = None
        # Parts of the request that is being parsed.
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._meter = MessageMeter()
        #: Bytes that were read and not parsed, and the parts that were parsed in this turn.
        self._unparsed = b""
        self._parts = 0
        self._is_in_head = False
        self._parsed: Cycle | None = None
        self._successor: Successor | None = None
        #: Bytes that are dropped before a refused connection is cut; `None` until it is refused.
        self._droppable: int | None = None

    # ------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        self._peer = transport.get_extra_info("peername")
        if not self._server.connections.make_room():
            self.abort()
            return
        self._server.connections.add(self)
        self._start_idle_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._unparsed, self._headers = b"", []
        self._server.connections.discard(self)
        self._cancel_timer()
        self._writable.set()
        for cycle in filter(None, (self._cycle, self._parsed, *self._waiting)):
            cycle.disconnect()

    def data_received(self, data: bytes) -> None:
        if self._droppable is not None:
            self._droppable -= len(data)
            if self._droppable < 0:
                self.abort()
            return
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse the bytes that were read, until it is the turn of other connections."""
        data, start, self._parts = self._unparsed, 0, 0
        while (
            start < len(data)
            and len(self._waiting) < LIMITS.pipelined_requests
            and self._parts < LIMITS.parts_per_turn
        ):
            piece = data[start : start + _PIECE]
            start += len(piece)
            try:
                rest = self._meter.feed(self._parser, piece)
            except TooLongError as error:
                self._refuse(error.status, f"of the request, {error}".encode())
                return
            except httptools.HttpParserError as error:
                cause = error.__context__
                # Faults of clients are not logged, only our own.
                if not isinstance(cause, (type(None), ValueError, httptools.HttpParserError)):
                    _log.warning("request not understood", exc_info=error)
                self._refuse(400, b"this is no valid HTTP request")
                return
            if rest is not None:
                self._unparsed = b""
                self._change_protocol(rest + data[start:])
                return
        self._unparsed = data[start:]
        if self._unparsed:
            self.pause_reading()
            asyncio.get_running_loop().call_soon(self._parse_on)

    def _parse_on(self) -> None:
        """Parse the rest of a read, then read on."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._unparsed and len(self._waiting) < LIMITS.pipelined_requests:
            self._parse()
        self.resume_reading()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def abort(self) -> None:
        self._server.connections.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def admit(self) -> None:
        self._server.connections.admit(self)

    def shutdown(self) -> None:
        """Close the connection, once the present request is answered."""
        self.is_closing = True
        if self._cycle is None and self._transport is not None:
            self._transport.close()

    # --------------------------------------------------------------------------------- parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._meter.begin()
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parts += 1
        if self._is_in_head:  # trailers are not checked, so they are no headers
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._parts += 1
        self._meter.end_head()
        if sum(name == b"host" for name, _ in self._headers) > 1:
            raise ValueError("a request with several hosts")
        connection_names(self._headers)
        if len(self._waiting) >= LIMITS.pipelined_requests_of_piece:
            raise ValueError("too many requests at once")
        if self._parser.should_upgrade() and self._is_websocket():
            assert self._server.upgrade is not None
            source = (self._peer or ("",))[0]
            self._successor = self._server.upgrade(Upgrade(self._url, self._headers, source))
            if self._successor is not None:
                return
        self._cancel_timer()
        self._server.connections.use(self)
        cycle = Cycle(self, self._scope(), keep_alive=self._parser.should_keep_alive())
        self._parsed = cycle
        if self._cycle is None:
            self._begin(cycle)
        else:
            self._waiting.append(cycle)
            if len(self._waiting) >= LIMITS.pipelined_requests:
                self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._parts += 1
        self._meter.add_body(len(body))
        if self._parsed is not None:
            self._parsed.feed(body)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and self._body_headers():
            return  # the parser takes it for one without a body
        cycle, self._parsed = self._parsed, None
        if cycle is not None:
            cycle.end()

    def _scope(self) -> Message:
        parsed = httptools.parse_url(self._url)
        raw_path = parsed.path or b"/"
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": parsed.query or b"",
            "root_path": "",
            "headers": self._headers,
            "client": self._peer,
            "admit": self.admit,
        }

    def _is_websocket(self) -> bool:
        """True for a WebSocket handshake, a `GET` without a body (RFC 6455, section 4.1)."""
        protocols = [value.lower() for name, value in self._headers if name == b"upgrade"]
        is_websocket = b"websocket" in protocols and self._server.upgrade is not None
        return is_websocket and self._parser.get_method() == b"GET" and not self._body_headers()

    def _body_headers(self) -> list[Header]:
        """The headers that say that the request has a body, and where it ends."""
        return [(name, value) for name, value in self._headers if name in _BODY and value != b"0"]

    def _change_protocol(self, rest: bytes) -> None:
        if self._successor is None or self._transport is None:
            # A request for an unknown protocol is an ordinary request, and the last one: bytes
            # after it are not parsed.
            self.is_closing = True
            if framing := self._body_headers():
                self._parser = httptools.HttpRequestParser(_Body(self))
                self._unparsed = request_head("POST", "/", framing) + rest
                self._parse()
            return
        self._cancel_timer()
        self._server.connections.discard(self)
        self._successor.take_over(self._transport, rest, self._server.connections)

    # ------------------------------------------------------------------------------- requests

    def _begin(self, cycle: Cycle) -> None:
        self._cycle = cycle
        task = asyncio.get_running_loop().create_task(cycle.run(self._server.app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def cycle_ended(self, *, keep_alive: bool) -> None:
        """A request was answered: go on with the next one."""
        self._cycle = None
        if self._transport is None or self._droppable is not None:
            return
        self._server.connections.use(self)
        if not keep_alive or self.is_closing:
            self._transport.close()
            return
        if self._waiting:
            self._begin(self._waiting.popleft())
        else:
            self._start_idle_timer()
        self._parse_on()

    def write(self, data: bytes) -> None:
        """Send bytes; dropped when the client is gone."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written."""
        await self._writable.wait()

    def pause_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._unparsed or len(self._waiting) >= LIMITS.pipelined_requests:
            return
        if self._parsed is not None and self._parsed.is_full:
            return
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def _refuse(self, status: int, reason: bytes) -> None:
        """Answer an invalid request, and close once the client has read the answer."""
        self._droppable = LIMITS.dropped_body_bytes
        parsed = self._parsed
        if self._cycle is None or (self._cycle is parsed and not parsed.has_begun):
            self.write(whole_answer(status, reason, "text/plain"))
        for cycle in filter(None, (self._cycle, parsed, *self._waiting)):
            cycle.disconnect()
        self._waiting.clear()
        # The connection and its parser refer to each other, so they may live on for a while: the
        # headers of a refused head are many.
        self._unparsed, self._headers = b"", []
        self._cancel_timer()
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self.resume_reading()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TIMING.http_refusal_seconds, self.abort)

    def _start_idle_timer(self) -> None:
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._server.keep_alive, self.shutdown)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
