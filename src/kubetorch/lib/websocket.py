"""WebSocket connections on an asyncio loop: one class for both ends.

    socket ── transport ── Connection ── Endpoint (the owner: receives messages, and sends)

The client's end comes from `connect`, `upgrade` and `adopt`. The server's end comes from an HTTP
server (`kubetorch.lib.http_server`), which parses the request and hands it to an `upgrader`; plain
HTTP on the same port stays with that server and its application.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from urllib.parse import urlsplit

from kubetorch.lib import deadlines, transports, websocket_protocol
from kubetorch.lib.http1 import answer_head
from kubetorch.lib.http_server import Connections, Refusal, Upgrade, Upgrader
from kubetorch.lib.tuning import LIMITS, TIMING, Timing
from kubetorch.lib.websocket_protocol import ClientHandshake, UpgradeRefusedError

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class Endpoint:
    """Owner of a connection, which overrides the methods that matter to it.

    Views are valid only during the call, but for placed memory.
    """

    def on_open(self, connection: Connection) -> None:
        """The handshake is done."""

    def on_message(self, opcode: int, payload: memoryview) -> None:
        """A whole message."""

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        """See `kubetorch.lib.websocket_protocol.Handler.on_large`."""
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        """See `kubetorch.lib.websocket_protocol.Handler.on_placed`; by default a whole message."""
        self.on_message(websocket_protocol.BINARY, memoryview(head + rest))

    def on_writable(self) -> None:
        """The peer reads again, after `Connection.is_congested` was true."""

    def on_close(self, reason: str) -> None:
        """The connection has ended, for any reason. Called once, after `on_open`."""


class Connection(asyncio.BufferedProtocol):
    def __init__(
        self,
        endpoint: Endpoint,
        *,
        is_client: bool,
        max_message: int,
        connections: Connections | None = None,
        timing: Timing = TIMING,
    ) -> None:
        self._endpoint = endpoint
        self._timing = timing
        self._connections = connections
        self._is_client = is_client
        self._parser = websocket_protocol.Parser(
            self, masked=not is_client, max_message=max_message
        )
        self._transport: asyncio.Transport | None = None
        self._reason = "the connection was closed"
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_received = 0.0
        self._is_paused = False
        #: The code of the first close frame, of either end; `None` when there was none.
        self.close_code: int | None = None
        #: The subprotocol that the server chose of those that the client offered.
        self.subprotocol: str | None = None
        #: Seconds after which a peer that sends nothing, not even a pong, is given up.
        self.silence = timing.websocket_silence_seconds
        #: True if a message sent now would wait in memory, because the peer reads slowly.
        self.is_congested = False

    # ------------------------------------------------------------------------------- the owner

    @property
    def is_open(self) -> bool:
        return self._is_open

    def send(self, *parts: Buffer, opcode: int = websocket_protocol.BINARY) -> None:
        """Send one message made of these parts; dropped when the connection is gone.

        Parts are buffers of bytes. Those of a message longer than a few KiB are not copied: they
        must not change any more.
        """
        if not self._is_open or self._transport is None:
            return
        length = 0
        for part in parts:
            length += len(part)
        header = websocket_protocol.frame_header(opcode, length, masked=self._is_client)
        if length <= 4096:
            self._transport.write(b"".join((header, *parts)))
        else:
            # Not writelines(): asyncio's of Python 3.12 and 3.13 never says that it is congested.
            self._transport.write(header)
            for part in parts:
                self._transport.write(part)

    def close(
        self,
        code: int = websocket_protocol.NORMAL,
        reason: str = "",
        *,
        is_peer_first: bool = False,
    ) -> None:
        """Send a close frame, and close once everything is written.

        With `is_peer_first` the peer closes first, when it has read everything: to close while the
        peer still sends would discard what the system has not handed over yet.
        """
        if self._is_open:
            self.close_code = code
            self.send(
                websocket_protocol.close_payload(code, reason), opcode=websocket_protocol.CLOSE
            )
            self._finish(reason or self._reason, is_peer_first=is_peer_first)

    def limit(self, max_message: int) -> None:
        """Take messages of so many bytes from now on."""
        self._parser.limit(max_message)

    def read_on(self, is_wanted: bool) -> None:
        """Take more messages, or leave them with the peer."""
        transport = self._transport
        if transport and not transport.is_closing() and self._is_paused == is_wanted:
            self._is_paused = not is_wanted
            self._last_received = asyncio.get_running_loop().time()
            (transport.resume_reading if is_wanted else transport.pause_reading)()

    def abort(self, reason: str) -> None:
        """Close at once; what is not written is lost."""
        if self._transport is not None:
            self._reason = reason
            self._transport.abort()

    def shutdown(self) -> None:
        self.close(websocket_protocol.GOING_AWAY, "the server stops", is_peer_first=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # asyncio's
        """The handshake on this transport is done."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        transport.set_write_buffer_limits(high=LIMITS.websocket_waiting_bytes)  # type: ignore[attr-defined]  # as above
        self._is_open = True
        if self._connections is not None:
            self._connections.add(self)
            self._connections.admit(self)
        loop = asyncio.get_running_loop()
        self._last_received = loop.time()
        self._timer = loop.call_later(self._timing.websocket_ping_seconds, self._check_peer)
        self._endpoint.on_open(self)

    def feed(self, data: Buffer) -> None:
        """Bytes that came with the handshake."""
        try:
            self._parser.feed(data)
        except websocket_protocol.WebSocketError as error:
            self._break(error)

    def _finish(self, reason: str, *, is_peer_first: bool = False) -> None:
        self._reason = reason
        self._is_open = False
        if self._transport is not None:
            if is_peer_first and self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timing.websocket_close_seconds, self.abort, reason)

    def _break(self, error: websocket_protocol.WebSocketError) -> None:
        self.close(error.code, str(error))

    def _check_peer(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_paused and loop.time() - self._last_received > self.silence:
            self.abort(f"the peer has been silent for {self.silence:.0f} s")
            return
        self.send(b"", opcode=websocket_protocol.PING)
        self._timer = loop.call_later(self._timing.websocket_ping_seconds, self._check_peer)

    # --------------------------------------------------------------------------- the transport

    def get_buffer(self, sizehint: int) -> memoryview:  # asyncio's
        return self._parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:  # asyncio's
        self._last_received = asyncio.get_running_loop().time()
        try:
            self._parser.advance(nbytes)
        except websocket_protocol.WebSocketError as error:
            self._break(error)

    def pause_writing(self) -> None:  # asyncio's
        self.is_congested = True

    def resume_writing(self) -> None:  # asyncio's
        self.is_congested = False
        if self._is_open:
            self._endpoint.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        if self._transport is None:
            return
        self._transport.close()  # Python 3.10's of TLS does not know that it is over
        self._transport = None
        self._is_open = False
        self._parser.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._connections is not None:
            self._connections.discard(self)
        self._endpoint.on_close(str(exc) if exc else self._reason)

    # ------------------------------------------------------------------------------ the parser

    def on_message(self, opcode: int, payload: memoryview) -> None:
        if self._is_open:
            self._endpoint.on_message(opcode, payload)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return self._endpoint.on_large(head, length) if self._is_open else None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        if self._is_open:
            self._endpoint.on_placed(head, rest)

    def on_control(self, opcode: int, payload: bytes) -> None:
        if opcode == websocket_protocol.PING:
            if self.is_congested:  # a peer that reads no answers gets none
                return
            self.send(payload, opcode=websocket_protocol.PONG)
        elif opcode == websocket_protocol.CLOSE and self._is_open:
            code, reason = websocket_protocol.parse_close(payload)
            self.close_code = code
            self.send(websocket_protocol.close_payload(code), opcode=websocket_protocol.CLOSE)
            self._finish(reason or f"closed by the peer with code {code}")


# --------------------------------------------------------------------------------------- server


#: Returns the endpoint for a path and headers (names in lower case), or raises `Refusal`. While an
#: awaitable endpoint is undecided, the connection is not read.
Acceptor = Callable[[str, Mapping[str, str]], Endpoint | Awaitable[Endpoint]]


def upgrader(acceptor: Acceptor, *, max_message: int, timing: Timing = TIMING) -> Upgrader:
    """The upgrader for `kubetorch.lib.http_server.Server` that makes WebSockets of connections."""
    return lambda request: _ServerHandshake(request, acceptor, max_message, timing)


class _ServerHandshake(asyncio.Protocol):
    """The connection of a client until its request is accepted or refused."""

    def __init__(
        self, request: Upgrade, acceptor: Acceptor, max_message: int, timing: Timing
    ) -> None:
        self._request = request
        self._acceptor = acceptor
        self._max_message = max_message
        self._timing = timing
        self._transport: asyncio.Transport
        self._connections: Connections
        self._deciding: asyncio.Task[None] | None = None
        self._rest = b""

    def take_over(
        self, transport: asyncio.Transport, rest: bytes, connections: Connections
    ) -> None:
        """See `kubetorch.lib.http_server.Successor`."""
        self._transport = transport
        self._connections = connections
        self._rest = rest
        transport.set_protocol(self)
        connections.add(self)
        headers = {
            name.decode("latin-1"): value.decode("latin-1").strip()
            for name, value in self._request.headers
        }
        key = headers.get("sec-websocket-key")
        try:
            if key is None or headers.get("sec-websocket-version") != "13":
                raise Refusal(400, b'{"error_type":"ProtocolError","message":"no WebSocket"}')
            accepted = self._acceptor(self._request.path, headers)
        except Refusal as refusal:
            self._refuse(refusal)
            return
        if isinstance(accepted, Awaitable):
            transport.pause_reading()
            loop = asyncio.get_running_loop()
            self._deciding = loop.create_task(self._decide(key, accepted))
        else:
            self._begin(key, accepted)

    async def _decide(self, key: str, accepted: Awaitable[Endpoint]) -> None:
        try:
            async with deadlines.timeout(self._timing.upgrade_decision_seconds):
                endpoint = await accepted
        except Refusal as refusal:
            self._refuse(refusal)
        except Exception:  # noqa: BLE001  # one request must not end the server
            _log.exception("upgrade failed")
            self._refuse(Refusal(500, b'{"error_type":"ControllerError"}'))
        else:
            self._begin(key, endpoint)

    def _begin(self, key: str, endpoint: Endpoint) -> None:
        transport = self._transport
        accept = websocket_protocol.accept_key(key).encode()
        headers = [
            (b"Upgrade", b"websocket"),
            (b"Connection", b"Upgrade"),
            (b"Sec-WebSocket-Accept", accept),
        ]
        transport.write(answer_head(101, headers))
        connection = Connection(
            endpoint,
            is_client=False,
            max_message=self._max_message,
            connections=self._connections,
            timing=self._timing,
        )
        transport.set_protocol(connection)
        connection.connection_made(transport)
        self._connections.discard(self)
        connection.feed(self._rest)
        if self._deciding is not None:
            transport.resume_reading()

    def _refuse(self, refusal: Refusal) -> None:
        self._connections.discard(self)
        self._transport.write(refusal.answer)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        self._connections.discard(self)
        if self._deciding is not None:
            self._deciding.cancel()

    def abort(self) -> None:
        self._connections.discard(self)
        self._transport.abort()

    #: The server stops.
    shutdown = abort


# --------------------------------------------------------------------------------------- client


async def connect(
    url: str,
    endpoint: Endpoint,
    *,
    headers: Mapping[str, str],
    max_message: int,
    timeout: float = 10.0,
    dial_timeout: float | None = None,
) -> Connection:
    """Open a WebSocket to `url` (`http://` or `ws://`)."""
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    return await upgrade(
        transports.Route(parts.hostname, parts.port or 80),
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
    """Go on with a connection that was upgraded elsewhere."""
    loop = asyncio.get_running_loop()
    upgraded.setblocking(False)
    _, connection = await loop.create_connection(
        lambda: Connection(endpoint, is_client=True, max_message=max_message), sock=upgraded
    )
    connection.feed(rest)
    return connection


async def upgrade(
    route: transports.Route,
    target: str,
    endpoint: Endpoint,
    *,
    headers: Iterable[tuple[str, str]],
    max_message: int,
    timeout: float,
    dial_timeout: float | None = None,
) -> Connection:
    """Open a WebSocket on a new connection."""
    handshake = ClientHandshake(transports.host_header(route), target, headers)
    transport, protocol = await transports.dial(
        route, lambda: _ClientHandshaking(handshake), timeout=dial_timeout or timeout
    )
    transport.write(handshake.request)
    try:
        async with deadlines.timeout(timeout):
            await protocol.done
    except BaseException:
        transport.abort()
        raise
    connection = Connection(endpoint, is_client=True, max_message=max_message)
    connection.subprotocol = handshake.subprotocol
    transport.set_protocol(connection)
    connection.connection_made(transport)
    connection.feed(handshake.rest)
    return connection


class _ClientHandshaking(asyncio.Protocol):
    """Reads the answer to an upgrade."""

    def __init__(self, handshake: ClientHandshake) -> None:
        self._handshake = handshake
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        if exc is None or self._handshake.is_refused:
            self.data_received(b"")
        elif not self.done.done():
            self.done.set_exception(exc)

    def data_received(self, data: bytes) -> None:  # asyncio's
        try:
            is_done = self._handshake.feed(data)
        except (OSError, websocket_protocol.WebSocketError, UpgradeRefusedError) as error:
            if not self.done.done():
                self.done.set_exception(error)
                self.done.exception()  # retrieved: nobody may be waiting
        else:
            if is_done and not self.done.done():
                self.done.set_result(None)
