"""An HTTP/1.1 server for an ASGI application on a listening socket: httptools parses, we answer.

    bytes ──► httptools ──► _Connection ── one at a time ──► Cycle ──► application
                                 │                             │
                                 └── upgrade ──► WebSocket      └──► bytes

uvicorn has the same parser under the same protocol. Importing it costs 30 ms of each start of the
service and of each pod, its `Server` wakes ten times a second to look whether it should stop, and
takes over the process's signals. What is left out here: TLS, HTTP/2, lifespan, proxies, logs of
requests.

Limits: the head of a request, the body that waits to be read, the time without a request, how many
are connected. Pipelined requests wait, unparsed by the application, until the one before is
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

import httptools

from kubetorch.lib import deadlines, descriptors
from kubetorch.lib.cycles import Application, Cycle, Message, status_line
from kubetorch.lib.tunnels import Opener, Tunnel

#: Bytes that the head of a request may have.
HEAD_LIMIT = 64 * 1024
#: Pipelined requests that may wait on one connection.
PIPELINE_LIMIT = 16

_log = logging.getLogger(__name__)


class _Connections(set[Any]):
    """The open connections; says when there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = asyncio.Event()

    def discard(self, connection: object) -> None:
        super().discard(connection)
        if not self:
            self.empty.set()


class Tunnels(NamedTuple):
    """Which upgrades are passed on to another server.

    Attributes:
        takes: Whether a path is one of them.
        opener: Decides about them, and knows where they go.
    """

    takes: Callable[[str], bool]
    opener: Opener


class Server:
    """Serves until it is closed.

    Args:
        app: The application.
        upgrade: What takes over WebSocket upgrades, see `kubetorch.lib.connections.upgrade_class`.
        tunnels: The upgrades that are not taken over but passed on.
        keep_alive: Seconds that a connection is kept on which no request comes.
        most: Connections at one time; three quarters of what the process may have open if not
            given. Beyond that the oldest goes on which no request has come yet, or the new one.
    """

    def __init__(
        self,
        app: Application,
        *,
        upgrade: type[asyncio.Protocol] | None = None,
        tunnels: Tunnels | None = None,
        keep_alive: float = 75.0,
        most: int | None = None,
    ) -> None:
        self.app = app
        self.upgrade = upgrade
        self.tunnels = tunnels
        self.keep_alive = keep_alive
        #: What is connected: connections of this server, and what took over from them.
        self.connections = _Connections()
        self.tasks: set[asyncio.Task[None]] = set()
        self._most = descriptors.limit() * 3 // 4 if most is None else most
        #: Connections on which no request has come yet, oldest first.
        self.unused: dict[_Connection, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections of a socket that listens already."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener)

    @property
    def open_requests(self) -> int:
        """Requests that are being answered."""
        return len(self.tasks)

    def make_room(self) -> bool:
        """Whether one more connection may be kept; an unused one ends for it if need be."""
        if len(self.connections) < self._most:
            return True
        if not self.unused:
            return False
        next(iter(self.unused)).abort()
        return True

    async def close(self, grace: float) -> None:
        """Take no more connections, and let clients read what was sent to them.

        Args:
            grace: Seconds that requests have to end, and clients to read.
        """
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
        if self.connections:
            self.connections.empty.clear()
            with contextlib.suppress(TimeoutError):
                async with deadlines.timeout(grace):
                    await self.connections.empty.wait()


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
        self._idle: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._peer: Any = None
        # Of the request that is being parsed.
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._is_in_head = False
        self._parsed: Cycle | None = None

    # ------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        self._peer = transport.get_extra_info("peername")
        if not self._server.make_room():
            self.abort()
            return
        self._server.connections.add(self)
        self._server.unused[self] = None
        self._watch_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._leave()
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

    def abort(self) -> None:
        """End it now."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self._server.connections.discard(self)
        self._server.unused.pop(self, None)

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
        if self._is_in_head:  # what comes after the body has been checked by nobody
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if sum(name == b"host" for name, _ in self._headers) > 1:
            raise ValueError("a request with several hosts")
        if self._parser.should_upgrade() and self._is_websocket():
            return
        self._stop_idle()
        self._server.unused.pop(self, None)
        cycle = Cycle(self, self._scope(), keep_alive=self._parser.should_keep_alive())
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
            "client": self._peer,
        }

    def _is_websocket(self) -> bool:
        wanted = [value.lower() for name, value in self._headers if name == b"upgrade"]
        return b"websocket" in wanted and (self._is_tunnelled() or self._server.upgrade is not None)

    def _is_tunnelled(self) -> bool:
        path = httptools.parse_url(self._url).path or b"/"
        tunnels = self._server.tunnels
        return tunnels is not None and tunnels.takes(unquote(path.decode("ascii")))

    def _take_over(self) -> None:
        """Hand the connection to what serves WebSockets."""
        transport = self._transport
        if transport is None or not self._is_websocket():
            # An upgrade that nobody knows is an ordinary request, and the last one: what follows
            # it is not parsed.
            self._is_closing = True
            return
        self._stop_idle()
        self._leave()
        head = b"GET %s HTTP/1.1\r\n" % self._url
        head += b"".join(b"%s: %s\r\n" % header for header in self._headers) + b"\r\n"
        successor = self._successor()
        successor.connection_made(transport)
        successor.data_received(head)
        transport.set_protocol(successor)

    def _successor(self) -> Any:  # noqa: ANN401  # a protocol that can be shut down
        server = self._server
        if server.tunnels is not None and self._is_tunnelled():
            tunnel = Tunnel(server.tunnels.opener, server.connections.discard)
            server.connections.add(tunnel)
            return tunnel
        assert server.upgrade is not None
        # The interface of uvicorn's WebSocket protocols.
        return server.upgrade(None, server, {})  # type: ignore[call-arg]

    # ------------------------------------------------------------------------------- requests

    def _begin(self, cycle: Cycle) -> None:
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
            self.write(status_line(400) + b"content-type: text/plain\r\n" + length + reason)
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
