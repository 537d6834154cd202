"""Requests and upgraded connections that are passed on to another server, and their answers back.

    client ── http_server ── relay (a request) ───────────────── other server
                        └─── Tunnel (a WebSocket, by bytes) ═════════┘

No body is kept: a sender that is faster than its receiver is not read until that has caught up.
Whatever ends one side ends the other. Headers that belong to one connection stay on it. `Forwarder`
is a listener on loopback that passes on what comes, and adds nothing: who may ask is for the other
server to say. Only pages of other sites are refused here, where it is known which these are.
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

_log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Seconds until the other server has taken the connection.
CONNECT_TIMEOUT = 10.0
#: Seconds in which the head of an answer is complete, from its first byte on: until then the other
#: server may compute for as long as it likes.
HEAD_TIMEOUT = 30.0
_LATE = f"the head of the answer is not complete {HEAD_TIMEOUT:.0f} s after its first byte"
_PIECE = 64 * 1024
#: Headers of one connection (RFC 9110, section 7.6.1), beside those that `Connection` names.
_OF_CONNECTION = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te "
    b"trailer transfer-encoding upgrade".split()
)
_FORWARDED_HOST = b"x-forwarded-host"


class Mount(NamedTuple):
    """The place where the paths of a server appear.

    Attributes:
        outside: What they begin with for the client.
        inside: What they begin with at the server.
        seen: What they begin with for a browser, if whoever is before the client said so.
    """

    outside: str
    inside: str
    seen: str = ""

    def has(self, path: bytes) -> bool:
        """True if a path, as the client has quoted it, belongs to the server."""
        # Each part is decoded by itself, so a quoted `/` separates nothing, here as in `enter`.
        parts = path.decode("latin-1").split("/")[: self.outside.count("/") + 1]
        return [unquote(part) for part in parts] == self.outside.split("/")

    def enter(self, path: bytes) -> bytes:
        """The path at the server, as the client has quoted it."""
        # By its parts: what it begins with may be quoted, and so be longer than `outside`.
        parts = path.split(b"/", self.outside.count("/") + 1)
        rest = parts[self.outside.count("/") + 1 :]
        return b"".join((self.inside.encode(), *(b"/" + part for part in rest))) or b"/"

    def leave(self, location: bytes, host: bytes, own: bytes = b"") -> bytes:
        """A `Location` for the client, if it leads to the server itself."""
        parts = urlsplit(location)
        if own and parts.netloc == own:
            parts = parts._replace(scheme=b"", netloc=b"")
        if parts.netloc not in (b"", host) or not parts.path.startswith(b"/"):
            return location
        path = parts.path.decode("latin-1")
        if _is_below(path, self.outside) or _is_below(path, self.seen.rstrip("/")):
            return location  # the server knows where it appears
        if not path.startswith(f"{self.inside}/"):
            return location
        moved = self.outside + path[len(self.inside) :]
        return parts._replace(path=moved.encode("latin-1")).geturl()

    def scope(self, cookie: bytes) -> bytes:
        """A `Set-Cookie` for the client, which brings the cookie back to this server alone."""
        kept: list[bytes] = []
        for part in cookie.split(b";"):
            name, _, value = part.partition(b"=")
            is_attribute, word = bool(kept), name.strip().lower()
            if is_attribute and word == b"domain":
                continue
            if is_attribute and word == b"path" and value.strip().startswith(b"/"):
                path = self._scope_path(value.strip().decode("latin-1"))
                part = b" Path=" + path.encode("latin-1")
            kept.append(part)
        return b";".join(kept)

    def _scope_path(self, path: str) -> str:
        seen = (self.seen or self.outside).rstrip("/")
        if not seen:
            return (path.removeprefix(self.inside) or "/") if _is_below(path, self.inside) else path
        return path if _is_below(path, seen) else seen + ("" if path == "/" else path)


def _is_below(path: str, prefix: str) -> bool:
    return bool(prefix) and (path == prefix or path.startswith(f"{prefix}/"))


class Target(NamedTuple):
    host: str
    port: int
    mount: Mount
    headers: tuple[Header, ...] = ()
    dial: Callable[[], Awaitable[socket.socket]] | None = None

    async def place(self) -> dict[str, Any]:
        """The arguments with which `asyncio` connects."""
        if self.dial is None:
            return {"host": self.host, "port": self.port}
        return {"sock": await self.dial()}

    def passed(self, headers: Iterable[Header]) -> list[Header]:
        """The headers of a client that go on, and those that are needed.

        A server that is called by another name than the client knows it by gets that name.
        """
        found, own = end_to_end(headers), {name for name, _ in self.headers}
        known, more = dict(found), []
        if b"host" in own and b"host" in known and _FORWARDED_HOST not in known:
            more = [(_FORWARDED_HOST, known[b"host"])]
        return [*(one for one in found if one[0] not in own), *more, *self.headers]


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """The headers that are passed on."""
    found = list(headers)
    named = connection_names(found)
    return [item for item in found if item[0] not in _OF_CONNECTION and item[0] not in named]


def _target(path: bytes, query: bytes) -> bytes:
    return path + (b"?" + query if query else b"")


async def relay(
    scope: Message, headers: Iterable[Header], receive: Receive, send: Send, target: Target
) -> None:
    """Pass a request on, and its answer back."""
    async with deadlines.timeout(CONNECT_TIMEOUT):
        reader, writer = await asyncio.open_connection(**await target.place())
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
        return  # it wants no more of the body; its answer may be there nevertheless


async def _download(
    reader: asyncio.StreamReader, send: Send, scope: Message, target: Target
) -> None:
    answer = AnswerReader()
    while not answer.has_head:
        answer.feed(await reader.read(_PIECE))
        if answer.is_in_head:
            await _finish_head(reader, answer)
    headers = _answered(answer, scope["headers"], target)
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
        async with deadlines.timeout(HEAD_TIMEOUT):
            while answer.is_in_head:
                answer.feed(await reader.read(_PIECE))
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise BrokenError(_LATE) from error


def _answered(answer: AnswerReader, asked: Iterable[Header], target: Target) -> list[Header]:
    """The headers of an answer for the client that asked with these."""
    host, own = _host(asked) or b"", _host(target.headers) or b""
    return [
        (name, target.mount.leave(value, host, own))
        if name == b"location"
        else (name, target.mount.scope(value) if name == b"set-cookie" else value)
        for name, value in end_to_end(answer.fields)
    ]


def _host(headers: Iterable[Header]) -> bytes | None:
    return next((value for name, value in headers if name == b"host"), None)


#: Seconds that an end has to take what the other one sent last.
CLOSE_TIMEOUT = 5.0
#: Bytes that wait for an end before the other one is not read any more.
WRITE_BUFFER = 256 * 1024
#: Bytes that a client may send before its upgrade is made; then it is not read.
HELD_LIMIT = 64 * 1024
#: Seconds for a refusal of the upgrade to arrive.
REFUSAL_TIMEOUT = 30.0


class Passage(NamedTuple):
    """The way of a request to upgrade.

    Attributes:
        target: Where it goes.
        headers: What goes with it.
        on_made: Called when the upgrade is made.
        on_end: Called when it is over, made or not.
    """

    target: Target
    headers: list[Header]
    on_made: Callable[[], object] = lambda: None
    on_end: Callable[[], object] = lambda: None


#: Given a client's request, waits until it may pass. Raises `Refusal`.
Opener = Callable[[Upgrade], Awaitable[Passage]]


def tunnels(takes: Callable[[Upgrade], bool], opener: Opener, others: Upgrader) -> Upgrader:
    """Passes on the WebSockets that are taken, and leaves the others to another upgrader."""
    return lambda request: Tunnel(request, opener) if takes(request) else others(request)


class _Side(asyncio.Protocol):
    """One side of a tunnel. Bytes from its peer go to the `other` side."""

    def __init__(self) -> None:
        self.other: _Side | None = None
        self._transport: asyncio.Transport | None = None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close once the peer has taken everything, or time is over."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.close()
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT, transport.abort)

    def pause(self, *, is_paused: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or transport.is_reading() != is_paused:
            return
        (transport.pause_reading if is_paused else transport.resume_reading)()

    def data_received(self, data: bytes) -> None:  # asyncio's
        if self.other is not None:
            self.other.write(data)

    def pause_writing(self) -> None:  # asyncio's
        if self.other is not None:
            self.other.pause(is_paused=True)

    def resume_writing(self) -> None:  # asyncio's
        if self.other is not None:
            self.other.pause(is_paused=False)

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        self._transport = None
        if self.other is not None:
            self.other.close()


class Tunnel(_Side):
    """The client's side; the server's side is opened once the request may pass."""

    def __init__(self, request: Upgrade, opener: Opener) -> None:
        super().__init__()
        self._request = request
        self._opener = opener
        self._connections: Connections
        self._opening: asyncio.Task[None] | None = None
        self._passage: Passage | None = None
        #: What the client sent before the upgrade was made; `None` from then on.
        self._held: bytes | None = b""

    def take_over(
        self, transport: asyncio.Transport, rest: bytes, connections: Connections
    ) -> None:
        """See `kubetorch.lib.http_server.Successor`."""
        self._transport = transport
        self._connections = connections
        connections.add(self)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        transport.set_protocol(self)
        # It is read while it waits, so that its end is noticed.
        self._held = rest
        self.pause(is_paused=len(rest) > HELD_LIMIT)
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        request = self._request
        try:
            self._passage = await self._opener(request)
            target, headers = self._passage.target, self._passage.headers
            if request.is_admitted:
                self._connections.admit(self)
            async with deadlines.timeout(CONNECT_TIMEOUT):
                loop = asyncio.get_running_loop()
                _, other = await loop.create_connection(
                    lambda: _ServerSide(self, target), **await target.place()
                )
        except Refusal as refusal:
            self.refuse(refusal)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            # Where the server is, is not the client's business.
            self.refuse(Refusal(502, _body(error, type(error).__name__)))
        except Exception as error:  # noqa: BLE001  # one request must not end the server
            _log.warning("upgrade failed", exc_info=error)
            self.refuse(Refusal(500, b'{"error_type":"KubetorchError"}'))
        else:
            self.other = other
            path = _target(target.mount.enter(request.raw_path), request.query)
            kept = [(n, v) for n, v in request.headers if n in (b"upgrade", b"connection")]
            other.write(request_head("GET", path, [*target.passed(headers), *kept]))

    def refuse(self, refusal: Refusal) -> None:
        """Answer that there will be no WebSocket."""
        self.write(refusal.answer)
        self.close()

    def answer(self, answer: AnswerReader, target: Target) -> None:
        """Pass on the head of an answer, and begin if it makes the upgrade."""
        headers = _answered(answer, self._request.headers, target)
        if not answer.is_upgraded:
            self.write(answer_head(answer.status, [*headers, (b"connection", b"close")]))
            self.pause(is_paused=True)
            return
        if self._passage is not None:
            self._passage.on_made()
        made = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        self.write(answer_head(answer.status, [*headers, *made]) + answer.rest)
        held, self._held = self._held, None
        if self.other is not None and held:
            self.other.write(held)
        self.pause(is_paused=False)

    def data_received(self, data: bytes) -> None:  # asyncio's
        if self._held is None:
            super().data_received(data)
            return
        # Sent to a server that makes no upgrade, this would be another request.
        self._held += data
        self.pause(is_paused=len(self._held) > HELD_LIMIT)

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
    other: Tunnel

    def __init__(self, tunnel: Tunnel, target: Target) -> None:
        super().__init__()
        self.other = tunnel
        self._target = target
        self._answer: AnswerReader | None = AnswerReader(may_upgrade=True)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        transport.set_write_buffer_limits(high=WRITE_BUFFER)  # type: ignore[attr-defined]  # as above

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.other.write(data)
            return
        had_head = answer.has_head
        try:
            answer.feed(data)
        except BrokenError as error:
            self._break(error)
            return
        if answer.has_head and not had_head:
            self.other.answer(answer, self._target)
        if answer.is_upgraded:
            self._answer = None
            self._wait(None)
        elif answer.has_head:
            # The answer that refuses the upgrade is the last that passes.
            self.other.write(answer.take())
            if answer.is_complete:
                self.other.close()
            elif not had_head:
                self._wait(REFUSAL_TIMEOUT)
        elif not answer.is_in_head:
            self._wait(None)
        elif self._timer is None:
            self._wait(HEAD_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:  # asyncio's
        self._wait(None)
        super().connection_lost(exc)

    def _wait(self, seconds: float | None) -> None:
        """Give the answer up after so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._break, BrokenError(_LATE))

    def _break(self, error: BrokenError) -> None:
        if self._answer is not None and not self._answer.has_head:
            self.other.refuse(Refusal(502, _body(error)))
        else:
            self.other.close()


# ------------------------------------------------------------------------------------- listener

#: Seconds that open requests have once the listener is closed.
GOODBYE = 0.5

#: The server that a path leads to; asked anew (`True`) when the one before could not be reached.
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
                await relay(scope, _of_program(headers, target), receive, send_on, target)
            except ConnectionRefusedError:  # nothing of the request was sent
                target = await self._find(scope["raw_path"], True)
                await relay(scope, _of_program(headers, target), receive, send_on, target)
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
        return Passage(target, _of_program(headers, target))


def _check_page(headers: Iterable[Header], method: str) -> None:
    known = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    asgi.check_link(known, method)
    asgi.check_local(known.get("host"), known.get("origin"))


def _of_program(headers: list[Header], target: Target) -> list[Header]:
    """The headers as a program sends them, where the page's own host is not the server's."""
    if not any(name == b"host" for name, _ in target.headers):
        return headers
    return [one for one in headers if one[0] != b"origin" and not one[0].startswith(b"sec-fetch-")]


async def _refuse(send: Send, error: Exception, status: int) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _body(error)})


def _body(error: Exception, message: str = "") -> bytes:
    message = message or str(error) or type(error).__name__
    return json.dumps({"error_type": type(error).__name__, "message": message}).encode()
