"""One HTTP request and its answer, between a connection and an ASGI application."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

#: Bytes of a body that wait until the application takes them; then nothing more is read.
BODY_WAITING = 256 * 1024
#: Bytes of a body that are read and dropped after the answer, so that the client can read that.
DROPPED_LIMIT = 4 * 1024 * 1024

_log = logging.getLogger(__name__)
#: Statuses whose answers have no body.
_BODILESS = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


def status_line(status: int) -> bytes:
    """The first line of an answer. Some statuses that are in use have no name, such as 499."""
    return _STATUS_LINES.get(status, b"HTTP/1.1 %d Other\r\n" % status)


class Carrier(Protocol):
    """What a request needs of its connection."""

    def write(self, data: bytes) -> None:
        """Send bytes; dropped when the client is gone."""

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written."""

    def pause_reading(self) -> None:
        """Read nothing more for now."""

    def resume_reading(self) -> None:
        """Read on."""

    def cycle_ended(self, *, keep_alive: bool) -> None:
        """The request was answered."""

    def shutdown(self) -> None:
        """Close, once what is being answered is answered."""


class Cycle:
    """One request and its answer.

    Args:
        connection: What it came on.
        scope: What it asks for, as ASGI has it.
        keep_alive: Whether the client wants to ask again on the connection.
    """

    def __init__(self, connection: Carrier, scope: Message, *, keep_alive: bool) -> None:
        self._connection = connection
        self._scope = scope
        self._keep_alive = keep_alive
        self._body = bytearray()
        self._dropped = 0
        self._has_more = True
        self._is_read = False
        self._is_gone = False
        self._arrived = asyncio.Event()
        self._expects_continue = (b"expect", b"100-continue") in scope["headers"]
        self._has_begun = False
        self._is_chunked = False
        self._is_bodiless = scope["method"] == "HEAD"
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
        if self._is_complete:
            self._dropped += len(body)
            if self._dropped > DROPPED_LIMIT:
                self._connection.shutdown()
            return
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
            self._is_bodiless |= message["status"] in _BODILESS
            self._connection.write(self._head(message["status"], message["headers"]))
            return
        is_last = not message.get("more_body", False)
        body = b"" if self._is_bodiless else message.get("body", b"")
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
        lines = [status_line(status)]
        lines += [b"%s: %s\r\n" % header for header in headers if header[0] != b"connection"]
        if (b"connection", b"close") in headers:
            self._keep_alive = False
        has_length = any(name == b"content-length" for name, _ in headers)
        if not (has_length or self._is_bodiless):
            if self._scope["http_version"] == "1.1":
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self._keep_alive = False
        if not self._keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])
