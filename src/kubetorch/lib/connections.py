"""WebSocket connections on an asyncio loop: one class for both ends, and the server's hook.

    socket ── transport ── Connection ── Endpoint (the owner: told of messages, sends)

`kubetorch.lib.upgrading` opens the client's end. The server's end comes from an HTTP server
(`kubetorch.lib.serving`), which parses the request and hands an upgrade to the class that
`upgrade_class` makes; plain HTTP on the same port stays with that server and its application.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from kubetorch.lib import deadlines, websocket

#: A peer that has not answered a ping for so long is gone, in seconds.
PING_INTERVAL = 10.0
PING_TIMEOUT = 20.0

#: A goodbye that the peer does not read is given up after so many seconds.
CLOSE_TIMEOUT = 5.0
#: Seconds that an acceptor has to decide about an upgrade.
DECISION_TIMEOUT = 20.0
#: Bytes that wait in the transport before the connection counts as congested: two chunks of a
#: large message, so that the socket never runs dry while the next one is prepared.
WRITE_BUFFER = 512 * 1024

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class Endpoint(Protocol):
    """Owner of a connection. Views are valid only during the call, but for placed memory."""

    def on_open(self, connection: Connection) -> None:
        """The handshake is done."""

    def on_message(self, opcode: int, payload: memoryview) -> None:
        """A whole message."""

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        """See `kubetorch.lib.websocket.Handler.on_large`."""

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        """See `kubetorch.lib.websocket.Handler.on_placed`."""

    def on_writable(self) -> None:
        """The peer reads again, after `Connection.is_congested` was true."""

    def on_close(self, reason: str) -> None:
        """The connection is gone, for whatever reason. Called once, after `on_open`."""


class Connection(asyncio.BufferedProtocol):
    """One WebSocket."""

    def __init__(self, endpoint: Endpoint, *, is_client: bool, max_message: int) -> None:
        self._endpoint = endpoint
        self._is_client = is_client
        self._parser = websocket.Parser(self, masked=not is_client, max_message=max_message)
        self._transport: asyncio.Transport | None = None
        self._reason = "the connection was closed"
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._is_paused = False
        #: The code of the first goodbye, whoever said it; `None` when there was none.
        self.close_code: int | None = None
        #: What both ends agreed to speak, if the client offered anything.
        self.subprotocol: str | None = None
        #: Seconds after which a peer that says nothing and answers no ping is given up.
        self.silence = PING_TIMEOUT
        #: Whether what is sent now would wait in memory, because the peer reads slowly.
        self.is_congested = False

    # ------------------------------------------------------------------------------- the owner

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._is_open

    def send(self, *parts: Buffer, opcode: int = websocket.BINARY) -> None:
        """Send one message made of these parts; dropped when the connection is gone.

        Parts are buffers of bytes. Those of a message longer than a few KiB are not copied: they
        must not change any more.
        """
        if not self._is_open or self._transport is None:
            return
        length = 0
        for part in parts:
            length += len(part)
        header = websocket.frame_header(opcode, length, masked=self._is_client)
        if length <= 4096:
            self._transport.write(b"".join((header, *parts)))
        else:
            # Not writelines(): asyncio's of Python 3.12 and 3.13 never says that it is congested.
            self._transport.write(header)
            for part in parts:
                self._transport.write(part)

    def close(self, code: int = websocket.NORMAL, reason: str = "") -> None:
        """Say goodbye and close once everything is written."""
        if self._is_open:
            self.close_code = code
            self.send(websocket.close_payload(code, reason), opcode=websocket.CLOSE)
            self._finish(reason or self._reason)

    def read_on(self, is_wanted: bool) -> None:
        """Whether more messages are taken now, or wait with the peer."""
        transport = self._transport
        if transport and not transport.is_closing() and self._is_paused == is_wanted:
            self._is_paused = not is_wanted
            self._heard = asyncio.get_running_loop().time()
            (transport.resume_reading if is_wanted else transport.pause_reading)()

    def abort(self, reason: str) -> None:
        """Close at once; what is not written is lost."""
        if self._transport is not None:
            self._reason = reason
            self._transport.abort()

    def start(self, transport: asyncio.Transport) -> None:
        """The handshake on this transport is done."""
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._is_open = True
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        self._timer = loop.call_later(PING_INTERVAL, self._check_peer)
        self._endpoint.on_open(self)

    def feed(self, data: Buffer) -> None:
        """Bytes that came with the handshake."""
        try:
            self._parser.feed(data)
        except websocket.WebSocketError as error:
            self._break(error)

    def _finish(self, reason: str) -> None:
        self._reason = reason
        self._is_open = False
        if self._transport is not None:
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CLOSE_TIMEOUT, self.abort, reason)

    def _break(self, error: websocket.WebSocketError) -> None:
        self.close(error.code, str(error))

    def _check_peer(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_paused and loop.time() - self._heard > self.silence:
            self.abort(f"the peer has been silent for {self.silence:.0f} s")
            return
        self.send(b"", opcode=websocket.PING)
        self._timer = loop.call_later(PING_INTERVAL, self._check_peer)

    # --------------------------------------------------------------------------- the transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: D102  # asyncio's
        return self._parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102  # asyncio's
        self._heard = asyncio.get_running_loop().time()
        try:
            self._parser.advance(nbytes)
        except websocket.WebSocketError as error:
            self._break(error)

    def eof_received(self) -> bool:  # noqa: D102  # asyncio's
        return False

    def pause_writing(self) -> None:  # noqa: D102  # asyncio's
        self.is_congested = True

    def resume_writing(self) -> None:  # noqa: D102  # asyncio's
        self.is_congested = False
        if self._is_open:
            self._endpoint.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102  # asyncio's
        if self._transport is None:
            return
        self._transport.close()  # Python 3.10's of TLS does not know that it is over
        self._transport = None
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._endpoint.on_close(str(exc) if exc else self._reason)

    # ------------------------------------------------------------------------------ the parser

    def on_message(self, opcode: int, payload: memoryview) -> None:  # noqa: D102  # Handler's
        if self._is_open:
            self._endpoint.on_message(opcode, payload)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:  # noqa: D102
        return self._endpoint.on_large(head, length) if self._is_open else None

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # noqa: D102  # Handler's
        if self._is_open:
            self._endpoint.on_placed(head, rest)

    def on_control(self, opcode: int, payload: bytes) -> None:  # noqa: D102  # Handler's
        if opcode == websocket.PING:
            self.send(payload, opcode=websocket.PONG)
        elif opcode == websocket.CLOSE and self._is_open:
            code, reason = websocket.parse_close(payload)
            self.close_code = code
            self.send(websocket.close_payload(code), opcode=websocket.CLOSE)
            self._finish(reason or f"closed by the peer with code {code}")


# --------------------------------------------------------------------------------------- server


class Refusal(Exception):
    """Raised by an acceptor: answer the upgrade with this response instead."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"refused with status {status}")
        self.status = status
        self.body = body
        self.content_type = content_type


#: Given the path and headers (names in lower case), the endpoint to serve, or raises `Refusal`.
#: Until an awaitable one is decided, nothing is read of the connection.
Acceptor = Callable[[str, Mapping[str, str]], Endpoint | Awaitable[Endpoint]]


class _Upgrade(Connection):
    """An upgrade that the server handed over."""

    acceptor: Acceptor
    max_message: int

    def __init__(
        self,
        config: Any,  # noqa: ANN401  # uvicorn's
        server_state: Any,  # noqa: ANN401  # uvicorn's
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._connections: set[Any] = server_state.connections
        self._pending: asyncio.Transport | None = None
        self._deciding: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._pending = transport  # type: ignore[assignment]  # uvloop's has no common base

    def data_received(self, data: bytes) -> None:
        transport = self._pending
        assert transport is not None
        path, headers = _parse_request(data)
        try:
            key = headers.get("sec-websocket-key")
            if key is None or headers.get("sec-websocket-version") != "13":
                raise Refusal(400, b'{"error_type":"ProtocolError","message":"no WebSocket"}')
            accepted = type(self).acceptor(path, headers)
        except Refusal as refusal:
            _answer(transport, refusal)
            return
        if isinstance(accepted, Awaitable):
            transport.pause_reading()
            self._connections.add(self)
            loop = asyncio.get_running_loop()
            self._deciding = loop.create_task(self._decide(transport, key, accepted))
        else:
            self._begin(transport, key, accepted)
            # After the server has made this object the transport's protocol.
            asyncio.get_running_loop().call_soon(self.start, transport)

    async def _decide(
        self, transport: asyncio.Transport, key: str, accepted: Awaitable[Endpoint]
    ) -> None:
        try:
            async with deadlines.timeout(DECISION_TIMEOUT):
                endpoint = await accepted
        except Refusal as refusal:
            self._connections.discard(self)
            _answer(transport, refusal)
        except Exception:  # noqa: BLE001  # one request must not end the server
            _log.exception("upgrade failed")
            self._connections.discard(self)
            _answer(transport, Refusal(500, b'{"error_type":"ControllerError"}'))
        else:
            self._begin(transport, key, endpoint)
            # At once: what the client sends to this answer may be read before anything else runs.
            self.start(transport)
            transport.resume_reading()

    def _begin(self, transport: asyncio.Transport, key: str, endpoint: Endpoint) -> None:
        Connection.__init__(self, endpoint, is_client=False, max_message=self.max_message)
        transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + websocket.accept_key(key).encode() + b"\r\n\r\n"
        )
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._deciding is not None:
            self._deciding.cancel()
        if getattr(self, "_parser", None) is not None:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called when the server stops."""
        if getattr(self, "_parser", None) is not None:
            self.close(websocket.GOING_AWAY, "the server stops")
        elif self._pending is not None:
            self._pending.abort()


def upgrade_class(acceptor: Acceptor, *, max_message: int) -> type[asyncio.Protocol]:
    """The class to give to `kubetorch.lib.serving.Server`, or to `uvicorn.Config(ws=...)`.

    The server makes one for each upgrade, gives it the request, and makes it the protocol.
    """
    members = {"acceptor": staticmethod(acceptor), "max_message": max_message}
    made: type[asyncio.Protocol] = type("Upgrade", (_Upgrade,), members)  # what it calls is there
    return made


def _parse_request(data: bytes) -> tuple[str, dict[str, str]]:
    lines = data.decode("latin-1").split("\r\n")
    path = lines[0].split(" ")[1].partition("?")[0]
    pairs = (line.partition(":") for line in lines[1:] if line)
    return path, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _answer(transport: asyncio.Transport, refusal: Refusal) -> None:
    phrase = http.HTTPStatus(refusal.status).phrase
    transport.write(
        f"HTTP/1.1 {refusal.status} {phrase}\r\nContent-Type: {refusal.content_type}\r\n"
        f"Content-Length: {len(refusal.body)}\r\nConnection: close\r\n\r\n".encode()
        + refusal.body
    )
    transport.close()
