"""Requests and upgraded connections that are passed on to another server, and their answers back.

    client ── http_server ── relay (a request) ───────────────── other server
                        └─── Tunnel (a WebSocket, by bytes) ═════════┘

No body is buffered: a sender that is faster than its receiver is not read until the receiver has
caught up. The end of one side ends the other. Headers that belong to one connection stay on it.
`Forwarder` is a listener on loopback that passes on all requests as they are: the other server
decides who may ask. Only requests of other sites' pages are refused here, where they can be
recognized.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from kubetorch.errors import ForeignOriginError
from kubetorch.lib import asgi, deadlines
from kubetorch.lib.http1 import (
    LAST_CHUNK,
    AnswerReader,
    BrokenError,
    Header,
    IncompleteError,
    answer_head,
    chunk,
    connection_names,
    request_head,
)
from kubetorch.lib.http_server import Connections, Message, Refusal, Server, Upgrade, Upgrader
from kubetorch.lib.tasks import cancel_all
from kubetorch.lib.tuning import LIMITS, TIMING

_log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LATE_HEAD = (
    f"the head of the answer is not complete {TIMING.proxy_head_seconds:.0f} s after its first byte"
)
_PIECE = 64 * 1024
#: Headers of one connection (RFC 9110, section 7.6.1), beside those that `Connection` names.
_CONNECTION_HEADERS = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te "
    b"trailer transfer-encoding upgrade".split()
)
_FORWARDED_HOST = b"x-forwarded-host"


class Mount(NamedTuple):
    """The place where the paths of a server appear.

    Attributes:
        outside: Prefix of the paths for the client.
        inside: Prefix of the paths at the server.
        browser_prefix: Prefix of the paths for a browser, if a proxy before the client named one.
    """

    outside: str
    inside: str
    browser_prefix: str = ""

    def has(self, path: bytes) -> bool:
        """True if a path, as the client has quoted it, belongs to the server."""
        # Each part is decoded by itself, so a quoted `/` separates nothing, here as in `enter`.
        parts = path.decode("latin-1").split("/")[: self.outside.count("/") + 1]
        return [unquote(part) for part in parts] == self.outside.split("/")

    def enter(self, path: bytes) -> bytes:
        """The path at the server, as the client has quoted it."""
        # By its parts: the prefix may be quoted, and so be longer than `outside`.
        parts = path.split(b"/", self.outside.count("/") + 1)
        rest = parts[self.outside.count("/") + 1 :]
        return b"".join((self.inside.encode(), *(b"/" + part for part in rest))) or b"/"

    def leave(self, location: bytes, host: bytes, server_host: bytes = b"") -> bytes:
        """A `Location` for the client, if it leads to the server itself."""
        parts = urlsplit(location)
        if server_host and parts.netloc == server_host:
            parts = parts._replace(scheme=b"", netloc=b"")
        if parts.netloc not in (b"", host) or not parts.path.startswith(b"/"):
            return location
        path = parts.path.decode("latin-1")
        if _is_below(path, self.outside) or _is_below(path, self.browser_prefix.rstrip("/")):
            return location  # the server knows its outside path
        if not path.startswith(f"{self.inside}/"):
            return location
        moved = self.outside + path[len(self.inside) :]
        return parts._replace(path=moved.encode("latin-1")).geturl()

    def scope(self, cookie: bytes) -> bytes:
        """A `Set-Cookie` for the client, whose path brings the cookie to this server alone."""
        parts: list[bytes] = []
        for part in cookie.split(b";"):
            name, _, value = part.partition(b"=")
            is_attribute, word = bool(parts), name.strip().lower()
            if is_attribute and word == b"domain":
                continue
            if is_attribute and word == b"path" and value.strip().startswith(b"/"):
                path = self._scope_path(value.strip().decode("latin-1"))
                part = b" Path=" + path.encode("latin-1")
            parts.append(part)
        return b";".join(parts)

    def _scope_path(self, path: str) -> str:
        browser_prefix = (self.browser_prefix or self.outside).rstrip("/")
        if not browser_prefix:
            return (path.removeprefix(self.inside) or "/") if _is_below(path, self.inside) else path
        return (
            path
            if _is_below(path, browser_prefix)
            else browser_prefix + ("" if path == "/" else path)
        )


def _is_below(path: str, prefix: str) -> bool:
    return bool(prefix) and (path == prefix or path.startswith(f"{prefix}/"))


class Target(NamedTuple):
    host: str
    port: int
    mount: Mount
    headers: tuple[Header, ...] = ()
    dial: Callable[[], Awaitable[socket.socket]] | None = None

    async def connect_arguments(self) -> dict[str, Any]:
        """The arguments with which `asyncio` connects."""
        if self.dial is None:
            return {"host": self.host, "port": self.port}
        return {"sock": await self.dial()}

    def passed(self, headers: Iterable[Header]) -> list[Header]:
        """The headers for the server: the client's that are passed on, and the target's own.

        A server whose `Host` the target replaces gets the client's in `X-Forwarded-Host`.
        """
        client_headers, target_names = end_to_end(headers), {name for name, _ in self.headers}
        client_values, more = dict(client_headers), []
        if (
            b"host" in target_names
            and b"host" in client_values
            and _FORWARDED_HOST not in client_values
        ):
            more = [(_FORWARDED_HOST, client_values[b"host"])]
        return [
            *(header for header in client_headers if header[0] not in target_names),
            *more,
            *self.headers,
        ]


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """The headers that a proxy passes on: those of the connection are left out."""
    all_headers = list(headers)
    connection_headers = connection_names(all_headers)
    return [
        header
        for header in all_headers
        if header[0] not in _CONNECTION_HEADERS and header[0] not in connection_headers
    ]


def _target(path: bytes, query: bytes) -> bytes:
    return path + (b"?" + query if query else b"")


async def relay(
    scope: Message, headers: Iterable[Header], receive: Receive, send: Send, target: Target
) -> None:
    """Pass a request on, and its answer back."""
    async with deadlines.timeout(TIMING.proxy_connect_seconds):
        reader, writer = await asyncio.open_connection(**await target.connect_arguments())
    passed = target.passed(headers)
    has_length = any(name == b"content-length" for name, _ in passed)
    is_chunked = not has_length and any(
        name == b"transfer-encoding" for name, _ in scope["headers"]
    )
    framing = [(b"transfer-encoding", b"chunked")] if is_chunked else []
    path = _target(target.mount.enter(scope["raw_path"]), scope["query_string"])
    head = request_head(scope["method"], path, [*passed, *framing, (b"connection", b"close")])
    upload = asyncio.ensure_future(_upload(receive, writer, head, is_chunked=is_chunked))
    try:
        await _download(reader, send, scope, target)
    finally:
        await cancel_all([upload])
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
                body = chunk(body) + (LAST_CHUNK if is_last else b"")
            writer.write(body)
            await writer.drain()
    except ConnectionError:
        return  # the server reads no more of the body; it may have answered nevertheless


async def _download(
    reader: asyncio.StreamReader, send: Send, scope: Message, target: Target
) -> None:
    answer = AnswerReader()
    while not answer.has_head:
        answer.feed(await reader.read(_PIECE))
        if answer.is_in_head:
            await _finish_head(reader, answer)
    headers = _answer_headers(answer, scope["headers"], target)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    is_bodiless = scope["method"] == "HEAD"
    while not is_bodiless:
        if body := answer.take():
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if answer.is_complete:
            break
        try:
            answer.feed(await reader.read(_PIECE))
        except IncompleteError:
            return  # the client sees by the missing end that the answer was cut
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _finish_head(reader: asyncio.StreamReader, answer: AnswerReader) -> None:
    try:
        async with deadlines.timeout(TIMING.proxy_head_seconds):
            while answer.is_in_head:
                answer.feed(await reader.read(_PIECE))
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise BrokenError(_LATE_HEAD) from error


def _answer_headers(
    answer: AnswerReader, request_headers: Iterable[Header], target: Target
) -> list[Header]:
    """The headers of an answer, for the client that sent the request headers."""
    host, target_host = _host(request_headers) or b"", _host(target.headers) or b""
    return [
        (name, target.mount.leave(value, host, target_host))
        if name == b"location"
        else (name, target.mount.scope(value) if name == b"set-cookie" else value)
        for name, value in end_to_end(answer.fields)
    ]


def _host(headers: Iterable[Header]) -> bytes | None:
    return next((value for name, value in headers if name == b"host"), None)


class Passage(NamedTuple):
    """The way of a request to upgrade.

    Attributes:
        target: The server that it goes to.
        headers: The headers that go with it.
        on_made: Called when the upgrade is made.
        on_end: Called when it is over, made or not.
    """

    target: Target
    headers: list[Header]
    on_made: Callable[[], object] = lambda: None
    on_end: Callable[[], object] = lambda: None


#: Waits until a client's request may pass. Raises `Refusal`.
Opener = Callable[[Upgrade], Awaitable[Passage]]


def tunnels(takes: Callable[[Upgrade], bool], opener: Opener, fallback: Upgrader) -> Upgrader:
    """Passes on the WebSockets that `takes` accepts, and leaves the others to another upgrader."""
    return lambda request: Tunnel(request, opener) if takes(request) else fallback(request)


class _Side(asyncio.Protocol):
    """One side of a tunnel. Bytes from its peer go to the `other_side`."""

    def __init__(self) -> None:
        self.other_side: _Side | None = None
        self._transport: asyncio.Transport | None = None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close once the peer has taken all bytes, or after `proxy_close_seconds`."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.close()
            asyncio.get_running_loop().call_later(TIMING.proxy_close_seconds, transport.abort)

    def pause(self, *, is_paused: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or transport.is_reading() != is_paused:
            return
        (transport.pause_reading if is_paused else transport.resume_reading)()

    def data_received(self, data: bytes) -> None:  # asyncio's
        if self.other_side is not None:
            self.other_side.write(data)

    def pause_writing(self) -> None:  # asyncio's
        if self.other_side is not None:
            self.other_side.pause(is_paused=True)

    def resume_writing(self) -> None:  # asyncio's
        if self.other_side is not None:
            self.other_side.pause(is_paused=False)

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        self._transport = None
        if self.other_side is not None:
            self.other_side.close()


class Tunnel(_Side):
    """The client's side; the server's side is opened once the request may pass."""

    def __init__(self, request: Upgrade, opener: Opener) -> None:
        super().__init__()
        self._request = request
        self._opener = opener
        self._connections: Connections
        self._opening: asyncio.Task[None] | None = None
        self._passage: Passage | None = None
        #: Bytes that the client sent before the upgrade was made; `None` from then on.
        self._early_data: bytes | None = b""

    def take_over(
        self, transport: asyncio.Transport, rest: bytes, connections: Connections
    ) -> None:
        """See `kubetorch.lib.http_server.Successor`."""
        self._transport = transport
        self._connections = connections
        connections.add(self)
        transport.set_write_buffer_limits(high=LIMITS.proxy_waiting_bytes)
        transport.set_protocol(self)
        # The client is read while it waits, so that its end is noticed.
        self._early_data = rest
        self.pause(is_paused=len(rest) > LIMITS.early_upgrade_bytes)
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        request = self._request
        try:
            self._passage = await self._opener(request)
            target, headers = self._passage.target, self._passage.headers
            if request.is_admitted:
                self._connections.admit(self)
            async with deadlines.timeout(TIMING.proxy_connect_seconds):
                loop = asyncio.get_running_loop()
                _, server_side = await loop.create_connection(
                    lambda: _ServerSide(self, target), **await target.connect_arguments()
                )
        except Refusal as refusal:
            self.refuse(refusal)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            # The server's address is not the client's business.
            self.refuse(Refusal(502, _body(error, type(error).__name__)))
        except Exception as error:  # noqa: BLE001  # one request must not end the server
            _log.warning("upgrade failed", exc_info=error)
            self.refuse(Refusal(500, b'{"error_type":"KubetorchError"}'))
        else:
            self.other_side = server_side
            path = _target(target.mount.enter(request.raw_path), request.query)
            upgrade_headers = [
                (n, v) for n, v in request.headers if n in (b"upgrade", b"connection")
            ]
            server_side.write(
                request_head("GET", path, [*target.passed(headers), *upgrade_headers])
            )

    def refuse(self, refusal: Refusal) -> None:
        """Answer that there will be no WebSocket."""
        self.write(refusal.answer)
        self.close()

    def answer(self, answer: AnswerReader, target: Target) -> None:
        """Pass on the head of an answer, and begin the tunnel if it makes the upgrade."""
        headers = _answer_headers(answer, self._request.headers, target)
        if not answer.is_upgraded:
            self.write(answer_head(answer.status, [*headers, (b"connection", b"close")]))
            self.pause(is_paused=True)
            return
        if self._passage is not None:
            self._passage.on_made()
        upgrade_headers = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        self.write(answer_head(answer.status, [*headers, *upgrade_headers]) + answer.rest)
        early_data, self._early_data = self._early_data, None
        if self.other_side is not None and early_data:
            self.other_side.write(early_data)
        self.pause(is_paused=False)

    def data_received(self, data: bytes) -> None:  # asyncio's
        if self._early_data is None:
            super().data_received(data)
            return
        # A server that makes no upgrade would take these bytes for another request.
        self._early_data += data
        self.pause(is_paused=len(self._early_data) > LIMITS.early_upgrade_bytes)

    def shutdown(self) -> None:
        self.close()

    def abort(self) -> None:
        self._connections.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        super().connection_lost(exc)
        if self._opening is not None:
            self._opening.cancel()
        if self._passage is not None:
            self._passage.on_end()
        self._connections.discard(self)


class _ServerSide(_Side):
    other_side: Tunnel

    def __init__(self, tunnel: Tunnel, target: Target) -> None:
        super().__init__()
        self.other_side = tunnel
        self._target = target
        self._answer: AnswerReader | None = AnswerReader(may_upgrade=True)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        transport.set_write_buffer_limits(high=LIMITS.proxy_waiting_bytes)  # type: ignore[attr-defined]  # as above

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.other_side.write(data)
            return
        had_head = answer.has_head
        try:
            answer.feed(data)
        except BrokenError as error:
            self._break(error)
            return
        if answer.has_head and not had_head:
            self.other_side.answer(answer, self._target)
        if answer.is_upgraded:
            self._answer = None
            self._set_deadline(None)
        elif answer.has_head:
            # An answer that refuses the upgrade is the last one that passes.
            self.other_side.write(answer.take())
            if answer.is_complete:
                self.other_side.close()
            elif not had_head:
                self._set_deadline(TIMING.proxy_refusal_seconds)
        elif not answer.is_in_head:
            self._set_deadline(None)
        elif self._timer is None:
            self._set_deadline(TIMING.proxy_head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        self._set_deadline(None)
        super().connection_lost(exc)

    def _set_deadline(self, seconds: float | None) -> None:
        """Give the answer up after so many seconds; `None` lifts the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._break, BrokenError(_LATE_HEAD))

    def _break(self, error: BrokenError) -> None:
        if self._answer is not None and not self._answer.has_head:
            self.other_side.refuse(Refusal(502, _body(error)))
        else:
            self.other_side.close()


# ------------------------------------------------------------------------------------- listener


#: The server that a path leads to; called with `True` when the former target was not reached.
Finder = Callable[[bytes, bool], Awaitable[Target]]


class NoTargetError(Exception):
    """There is no server to forward to; the message says why."""


class Forwarder:
    def __init__(self, find: Finder, headers: list[Header]) -> None:
        self._find = find
        self._headers = headers
        self.server = Server(self._answer, upgrade=lambda request: Tunnel(request, self._open))

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        headers = [*scope["headers"], *self._headers]
        scope["admit"]()
        try:
            _check_page(headers, scope["method"])
            try:
                target = await self._find(scope["raw_path"], False)
                await relay(scope, _program_headers(headers, target), receive, send_on, target)
            except ConnectionRefusedError:  # nothing of the request was sent
                target = await self._find(scope["raw_path"], True)
                await relay(scope, _program_headers(headers, target), receive, send_on, target)
        except ForeignOriginError as error:
            await _refuse(send, error, 403)
        except NoTargetError as error:
            await _refuse(send, error, 503)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            if not has_begun:
                await _refuse(send, error, 502)

    async def _open(self, upgrade: Upgrade) -> Passage:
        headers = [*upgrade.headers, *self._headers]
        try:
            upgrade.admit()
            _check_page(headers, "POST")
            target = await self._find(upgrade.raw_path, True)
        except ForeignOriginError as error:
            raise Refusal(403, _body(error)) from error
        except NoTargetError as error:
            raise Refusal(503, _body(error)) from error
        return Passage(target, _program_headers(headers, target))


def _check_page(headers: Iterable[Header], method: str) -> None:
    values = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    asgi.check_link(values, method)
    asgi.check_local(values.get("host"), values.get("origin"))


def _program_headers(headers: list[Header], target: Target) -> list[Header]:
    """The headers without a browser's own, where the page's host is not the server's."""
    if not any(name == b"host" for name, _ in target.headers):
        return headers
    return [
        header
        for header in headers
        if header[0] != b"origin" and not header[0].startswith(b"sec-fetch-")
    ]


async def _refuse(send: Send, error: Exception, status: int) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _body(error)})


def _body(error: Exception, message: str = "") -> bytes:
    message = message or str(error) or type(error).__name__
    return json.dumps({"error_type": type(error).__name__, "message": message}).encode()
