"""An HTTP/1.1 server for an ASGI application on a listening socket: httptools parses, we answer.

    bytes ──► httptools ──► _Connection ── one at a time ──► _Cycle ──► application
                                 │                             │
                                 └── upgrade ──► WebSocket      └──► bytes

uvicorn has the same parser under the same protocol. Importing it costs 30 ms of each start of the
service and of each pod, its `Server` wakes ten times a second to look whether it should stop, and
takes over the process's signals. What is left out here: TLS, HTTP/2, lifespan, proxies, logs of
requests.

Limits: the head of a request, the body that waits to be read, the time without a request. Pipelined
requests wait, unparsed by the application, until the one before is answered.
"""

from __future__ import annotations

import asyncio
import http
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import httptools

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

#: Bytes that the head of a request may have.
HEAD_LIMIT = 64 * 1024
#: Bytes of a body that wait until the application takes them; then nothing more is read.
BODY_WAITING = 256 * 1024
#: Pipelined requests that may wait on one connection.
PIPELINE_LIMIT = 16
_log = logging.getLogger(__name__)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


class Server:
    """Serves until it is closed.

    Args:
        app: The application.
        upgrade: What takes over WebSocket upgrades, see `kubetorch.lib.connections.upgrade_class`.
        keep_alive: Seconds that a connection is kept on which no request comes.
    """

    def __init__(
        self,
        app: Application,
        *,
        upgrade: type[asyncio.Protocol] | None = None,
        keep_alive: float = 75.0,
    ) -> None:
        self.app = app
        self.upgrade = upgrade
        self.keep_alive = keep_alive
        #: What is connected: connections of this server, and what took over from them.
        self.connections: set[Any] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections of a socket that listens already."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener)

    @property
    def open_requests(self) -> int:
        """Requests that are being answered."""
        return len(self.tasks)

    async def close(self, grace: float) -> None:
        """Take no more connections; requests that run have so many seconds to end."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.shutdown()
        tasks = [task for task in self.tasks if task is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class _Connection(asyncio.Protocol):
    """One connection, and the requests on it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._cycle: _Cycle | None = None
        self._waiting: deque[_Cycle] = deque()
        self._writable = asyncio.Event()
        self._writable.set()
        self._idle: asyncio.TimerHandle | None = None
        self._is_closing = False
        # Of the request that is being parsed.
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._is_in_head = False
        self._parsed: _Cycle | None = None

    # ------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        self._server.connections.add(self)
        self._watch_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.connections.discard(self)
        self._stop_idle()
        self._writable.set()
        for cycle in filter(None, (self._cycle, self._parsed, *self._waiting)):
            cycle.disconnect()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._take_over()
            return
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                _log.warning("request not understood", exc_info=error)
            self._refuse(b"this is no valid HTTP request")
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT:
                self._refuse(b"the head of the request is too long")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def shutdown(self) -> None:
        """Close, once what is being answered is answered."""
        self._is_closing = True
        if self._cycle is None and self._transport is not None:
            self._transport.close()

    # --------------------------------------------------------------------------------- parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._head_bytes = 0
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._parser.should_upgrade() and self._is_websocket():
            return
        self._stop_idle()
        cycle = _Cycle(self, self._scope(), keep_alive=self._parser.should_keep_alive())
        self._parsed = cycle
        if self._cycle is None:
            self._begin(cycle)
        else:
            self._waiting.append(cycle)
            if len(self._waiting) >= PIPELINE_LIMIT:
                self.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._parsed is not None:
            self._parsed.feed(body)

    def on_message_complete(self) -> None:
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
        }

    def _is_websocket(self) -> bool:
        wanted = [value.lower() for name, value in self._headers if name == b"upgrade"]
        return self._server.upgrade is not None and b"websocket" in wanted

    def _take_over(self) -> None:
        """Hand the connection to what serves WebSockets."""
        transport, upgrade = self._transport, self._server.upgrade
        if transport is None or upgrade is None or not self._is_websocket():
            # An upgrade that nobody knows is an ordinary request, and the last one: what follows
            # it is not parsed.
            self._is_closing = True
            return
        self._stop_idle()
        self._server.connections.discard(self)
        head = b"GET %s HTTP/1.1\r\n" % self._url
        head += b"".join(b"%s: %s\r\n" % header for header in self._headers) + b"\r\n"
        # The interface of uvicorn's WebSocket protocols.
        successor: Any = upgrade(None, self._server, {})  # type: ignore[call-arg]
        successor.connection_made(transport)
        successor.data_received(head)
        transport.set_protocol(successor)

    # ------------------------------------------------------------------------------- requests

    def _begin(self, cycle: _Cycle) -> None:
        self._cycle = cycle
        task = asyncio.get_running_loop().create_task(cycle.run(self._server.app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def cycle_ended(self, *, keep_alive: bool) -> None:
        """A request was answered: go on with the next one."""
        self._cycle = None
        if self._transport is None:
            return
        if not keep_alive or self._is_closing:
            self._transport.close()
            return
        if self._waiting:
            self._begin(self._waiting.popleft())
        else:
            self._watch_idle()
        self.resume_reading()

    def write(self, data: bytes) -> None:
        """Send bytes; dropped when the client is gone."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written."""
        await self._writable.wait()

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if len(self._waiting) >= PIPELINE_LIMIT:
            return
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def _refuse(self, reason: bytes) -> None:
        """Answer what is no request, and close."""
        if self._cycle is None:
            length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(reason)
            self.write(_STATUS_LINES[400] + b"content-type: text/plain\r\n" + length + reason)
        if self._transport is not None:
            self._transport.close()

    def _watch_idle(self) -> None:
        self._stop_idle()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self._server.keep_alive, self.shutdown)

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


class _Cycle:
    """One request and its answer."""

    def __init__(self, connection: _Connection, scope: Message, *, keep_alive: bool) -> None:
        self._connection = connection
        self._scope = scope
        self._keep_alive = keep_alive
        self._body = bytearray()
        self._has_more = True
        self._is_read = False
        self._is_gone = False
        self._arrived = asyncio.Event()
        self._expects_continue = (b"expect", b"100-continue") in scope["headers"]
        self._has_begun = False
        self._is_chunked = False
        self._is_complete = False

    async def run(self, app: Application) -> None:
        """Let the application answer."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception as error:  # noqa: BLE001  # one request must not end the server
            _log.warning("request failed", exc_info=error)
            if not self._has_begun:
                headers = [(b"content-length", b"0")]
                await self.send({"type": "http.response.start", "status": 500, "headers": headers})
                await self.send({"type": "http.response.body"})
        finally:
            # An answer without its end is told from a complete one by the end of the connection.
            self._connection.cycle_ended(keep_alive=self._keep_alive and self._is_complete)

    # ----------------------------------------------------------------------- from the connection

    def feed(self, body: bytes) -> None:
        """More of the body; nobody wants it once the request is answered."""
        if not self._is_complete:
            self._body += body
            if len(self._body) > BODY_WAITING:
                self._connection.pause_reading()
            self._arrived.set()

    def end(self) -> None:
        """The body is complete."""
        self._has_more = False
        self._arrived.set()

    def disconnect(self) -> None:
        """The client is gone."""
        self._is_gone = True
        self._arrived.set()

    # ------------------------------------------------------------------------ for the application

    async def receive(self) -> Message:
        """More of the body, or the news that the client is gone or has its answer."""
        if self._expects_continue and not self._has_begun:
            self._expects_continue = False
            self._connection.write(_CONTINUE)
        # Until there is something new of the body: more of it, or its end.
        while not (self._is_gone or self._is_complete or self._body) and (
            self._has_more or self._is_read
        ):
            self._arrived.clear()
            await self._arrived.wait()
        if self._is_gone or self._is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._is_read = not self._has_more
        self._connection.resume_reading()
        return {"type": "http.request", "body": body, "more_body": self._has_more}

    async def send(self, message: Message) -> None:
        """Send a piece of the answer; dropped when the client is gone."""
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self._has_begun = True
            self._connection.write(self._head(message["status"], message["headers"]))
            return
        is_last = not message.get("more_body", False)
        body = b"" if self._scope["method"] == "HEAD" else message.get("body", b"")
        if self._is_chunked:
            body = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            body += b"0\r\n\r\n" if is_last else b""
        if body:
            self._connection.write(body)
        if is_last:
            self._is_complete = True
            self._arrived.set()
        await self._connection.drain()

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        # Some that are in use have no place in the standard, such as 499.
        lines = [_STATUS_LINES.get(status, b"HTTP/1.1 %d Other\r\n" % status)]
        lines += [b"%s: %s\r\n" % header for header in headers]
        if not any(name == b"content-length" for name, _ in headers):
            if self._scope["http_version"] == "1.1":
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self._keep_alive = False
        if not self._keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])
