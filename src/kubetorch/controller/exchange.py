"""One HTTP request and its answer, over plain ASGI.

There are some twenty routes, with JSON in and out; a framework would add more to the start of the
local service than it would take from these files.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from kubetorch.controller.access import Asker
from kubetorch.errors import ControllerError, KubetorchError, ProtocolError
from kubetorch.wire import messages, routes

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
NDJSON = "application/x-ndjson"

#: Bytes that the body of a request may have, where nothing else is said.
BODY_LIMIT = 4 * 1024 * 1024

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_T = TypeVar("_T")


class DisconnectedError(Exception):
    """The client is gone before its request was complete."""


class Exchange:
    """A request, and the means to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._query_string: bytes = scope["query_string"]
        self._receive = receive
        self._send = send
        self._is_complete = False
        self._asker: Asker | None = None
        self.request_id = _request_id(self.headers.get(routes.REQUEST_ID.lower(), ""))
        #: Where it comes from, as far as this process can see: a proxy, for what comes through one.
        self.source: str = (scope.get("client") or ("",))[0]
        #: Told the status of the answer before it is sent.
        self.on_status: Callable[[int], None] = _ignore
        self.has_begun = False

    @property
    def asker(self) -> Asker:
        """Who sends it."""
        if self._asker is None:
            raise ControllerError(f"{self.method} {self.path} was let in by nobody")
        return self._asker

    @asker.setter
    def asker(self, asker: Asker) -> None:
        self._asker = asker

    # ----------------------------------------------------------------------------- the request

    def query(self, name: str, default: str = "") -> str:
        """A parameter of the URL; the last one if it is there more than once."""
        pairs = parse_qsl(self._query_string.decode("latin-1"), keep_blank_values=True)
        return dict(pairs).get(name, default)

    def flag(self, name: str) -> bool:
        """A parameter that is `true` or `false`, which it is when it is missing.

        Raises:
            ProtocolError: It is something else.
        """
        value = self.query(name, "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise ProtocolError(f"{name} is {value!r}; it must be true or false")
        return value in ("true", "1")

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """A parameter that is a number within bounds.

        Raises:
            ProtocolError: It is not.
        """
        text = self.query(name)
        try:
            value = float(text) if text else default
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise ProtocolError(f"{name} is {text!r}; it must be a number from {least} to {most}")
        return value

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            DisconnectedError: It ended too early.
        """
        while not self._is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            self._is_complete = not message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    async def body(self, limit: int = BODY_LIMIT) -> bytes:
        """The whole body.

        Raises:
            ProtocolError: It is longer than `limit`.
        """
        if int(self.headers.get("content-length", "0")) > limit:
            raise too_large(limit)
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > limit:
                raise too_large(limit)
        return bytes(body)

    async def message(self, kind: type[_T]) -> _T:
        """The body as a message of this type; an empty one is `{}`.

        Raises:
            ProtocolError: It is not one.
        """
        return messages.decode(kind, await self.body() or b"{}")

    # ------------------------------------------------------------------------------ the answer

    async def respond(self, body: bytes, *, status: int = 200, content_type: str = JSON) -> None:
        """Answer with a body."""
        length = str(len(body)).encode()
        await self._begin(status, content_type, (b"content-length", length))
        await self._send({"type": "http.response.body", "body": body})

    async def respond_message(self, message: object, *, status: int = 200) -> None:
        """Answer with a message, or a list of them."""
        await self.respond(messages.encode(message), status=status)

    async def respond_stream(self, chunks: AsyncIterator[bytes], *, content_type: str) -> None:
        """Answer with chunks as they come; they are closed when the client goes away."""
        await self._begin(200, content_type)
        sending = asyncio.ensure_future(self._send_chunks(chunks))
        watching = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def _begin(self, status: int, content_type: str, *headers: tuple[bytes, bytes]) -> None:
        self.has_begun = True
        self.on_status(status)
        identity = (routes.REQUEST_ID.lower().encode(), self.request_id.encode())
        lines = [(b"content-type", content_type.encode()), identity, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": lines})

    async def _send_chunks(self, chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _request_id(given: str) -> str:
    """The client's own name of a request if it can be repeated everywhere, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


def _ignore(status: int) -> None:
    """Nobody wants to know."""


def too_large(limit: int) -> KubetorchError:
    """The error for a body that is longer than it may be."""
    return with_status(ProtocolError(f"the body is longer than the {limit} bytes allowed"), 413)


def with_status(error: KubetorchError, status: int) -> KubetorchError:
    """`error`, answered with another status than that of its class."""
    error.__dict__["status"] = status
    return error
