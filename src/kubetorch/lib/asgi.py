"""The little of HTTP that the routes of agent and controller need, on plain ASGI.

No framework: these routes need a dozen lines of one, and importing the smallest costs each pod
25 ms of its start and 4 MB.

Checks of `Host` and `Origin` headers, for servers that only this machine may use: a page of another
site can make a browser send requests to loopback addresses, under a name of its own that resolves
to one (DNS rebinding). The page can set neither header.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from kubetorch.errors import ForeignOriginError, KubetorchError, ProtocolError
from kubetorch.lib.tasks import cancel_all
from kubetorch.lib.tuning import LIMITS

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
NDJSON = "application/x-ndjson"


_Error = TypeVar("_Error", bound=KubetorchError)


def refusal(status: int, message: str, *, hint: str | None = None) -> ProtocolError:
    """The error for a request that cannot be served, with the HTTP status of its answer."""
    return with_status(ProtocolError(message, hint=hint), status)


def with_status(error: _Error, status: int) -> _Error:
    """`error`, answered with another status than that of its class."""
    error.__dict__["status"] = status
    return error


def request_id(name: str, *, size: int = 5) -> str:
    """The client's own name of a request if it is short and printable, else a new one."""
    name = name.strip()
    return name if name.isprintable() and 0 < len(name) <= 200 else os.urandom(size).hex()


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


class Request:
    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        #: To be called once the request has proved its sender.
        self.admit: Callable[[], None] = scope.get("admit", lambda: None)
        self.source: str = (scope.get("client") or ("",))[0]
        self.scope = scope
        self._query: bytes = scope["query_string"]
        self._receive = receive
        self._is_complete = False
        self._body: bytes | None = None

    def query(self, name: str, default: str = "") -> str:
        """A parameter of the URL; of several with that name, the last."""
        value = self.parameter(name)
        return default if value is None else value

    def parameter(self, name: str) -> str | None:
        """As `query`; `None` if the URL has no such parameter."""
        pairs = parse_qsl(self._query.decode("latin-1"), keep_blank_values=True)
        return dict(pairs).get(name)

    async def chunks(self) -> AsyncIterator[bytes]:
        while not self._is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self._is_complete = not message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    async def body(self, limit: int) -> bytes:
        """The body, decompressed; the same each time."""
        if self._body is not None:
            return self._body
        length = self.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > limit:
            raise refusal(413, f"a body of {length} bytes; {limit} are allowed")
        is_gzip = _is_gzip(self.headers.get("content-encoding", "identity").strip().lower())
        pieces = []
        remaining_bytes = limit
        async for piece in self._inflated() if is_gzip else self.chunks():
            remaining_bytes -= len(piece)
            if remaining_bytes < 0:
                raise refusal(413, f"a body of more than the {limit} bytes that are allowed")
            pieces.append(piece)
        self._body = b"".join(pieces)
        return self._body

    def replay(self) -> tuple[list[tuple[bytes, bytes]], Receive]:
        """Its headers and what comes of it, for another server, also once its body was read."""
        body, headers = self._body, dict(self.headers)
        if body is None:
            return _encoded(headers), self._receive
        headers.pop("content-encoding", None)
        headers["content-length"] = str(len(body))
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            return next(messages, None) or await self._receive()

        return _encoded(headers), receive

    async def _inflated(self) -> AsyncIterator[bytes]:
        """The body in pieces so small that other requests have their turn between them."""
        gzip = zlib.decompressobj(wbits=31)
        received_bytes = inflated_bytes = 0
        subject = "the body"
        async for data in self._small_chunks():
            received_bytes += len(data)
            is_full = True
            while data or is_full:  # zlib may have read all input, and hold more output
                if gzip.eof:  # another member follows
                    gzip, subject = zlib.decompressobj(wbits=31), "what follows gzip in the body"
                try:
                    piece = gzip.decompress(data, LIMITS.inflated_turn_bytes)
                except zlib.error as error:
                    raise refusal(400, f"{subject} is not gzip: {error}") from error
                inflated_bytes += len(piece)
                if inflated_bytes > max(
                    LIMITS.inflated_free_bytes, LIMITS.inflated_bytes_per_byte * received_bytes
                ):
                    raise refusal(
                        413,
                        f"a body of {inflated_bytes} bytes and more in {received_bytes} of gzip; "
                        f"at most {LIMITS.inflated_bytes_per_byte} times as many are allowed",
                        hint="send it without Content-Encoding",
                    )
                yield piece
                data = gzip.unused_data if gzip.eof else gzip.unconsumed_tail
                is_full = not gzip.eof and len(piece) == LIMITS.inflated_turn_bytes
                await asyncio.sleep(0)
        if not gzip.eof:
            raise refusal(400, "the body is cut: its gzip stream has no end")

    async def _small_chunks(self) -> AsyncIterator[bytes]:
        """The body in short chunks: zlib copies the rest of one at the end of each gzip member."""
        async for chunk in self.chunks():
            for start in range(0, len(chunk), LIMITS.deflated_turn_bytes):
                yield chunk[start : start + LIMITS.deflated_turn_bytes]

    async def disconnected(self) -> None:
        """Wait until the client disconnects; call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _is_gzip(encoding: str) -> bool:
    """True if a body in this encoding is to be decompressed."""
    if encoding not in ("", "identity", "gzip"):
        raise refusal(415, f"the Content-Encoding {encoding[:40]!r} is not read here")
    return encoding == "gzip"


class Responder:
    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = dict(headers)
        self.has_begun = False
        self.on_status: Callable[[int], None] | None = None

    def add_header(self, name: str, value: str) -> None:
        """Add a header to the answer, which has to be ASCII."""
        self._headers[name.lower()] = value

    async def begin(self, status: int, content_type: str, **headers: str) -> None:
        self.has_begun = True
        if self.on_status is not None:
            self.on_status(status)
        pairs = {"content-type": content_type, **self._headers, **headers}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (name.replace("_", "-").encode("latin-1"), value.encode("latin-1"))
                    for name, value in pairs.items()
                ],
            }
        )

    async def write(self, data: bytes | memoryview, *, more: bool = True) -> None:
        """Send a piece of the body; waits until the client has taken earlier ones."""
        body = data if isinstance(data, bytes) else bytes(data)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(
        self, status: int, body: bytes | memoryview, content_type: str = JSON, **headers: str
    ) -> None:
        await self.begin(status, content_type, content_length=str(len(body)), **headers)
        await self.write(body, more=False)

    async def answer_json(self, status: int, value: object) -> None:
        await self.answer(status, json.dumps(value, ensure_ascii=False).encode())

    async def refuse(self, status: int, failure: bytes) -> None:
        """Send an error in the envelope that all errors have."""
        headers = {}
        if status == 401:
            headers["www_authenticate"] = 'Bearer realm="kubetorch"'
        if status == 429:
            headers["retry_after"] = "1"
        if status == 413:
            # The rest of the body is not read.
            headers["connection"] = "close"
        await self.answer(status, failure, **headers)

    async def stream(
        self, chunks: AsyncIterator[bytes], content_type: str, disconnection: Awaitable[None]
    ) -> None:
        """Send an answer in chunks as they come, until their end or the client's disconnection."""
        await self.begin(200, content_type)

        async def send_all() -> None:
            async for chunk in chunks:
                await self.write(chunk)
            await self.write(b"", more=False)

        sending = asyncio.ensure_future(send_all())
        watching = asyncio.ensure_future(disconnection)
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await cancel_all((sending, watching))


_NAME_AND_PORT = re.compile(r"^(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::\d{1,5})?$")
_IPV4 = re.compile(r"127(?:\.\d{1,3}){3}")


def check_local(host: str | None, origin: str | None) -> None:
    """Refuse a request whose `Host` is no name of the loopback interface, or of a page elsewhere.

    A request without an `Origin` comes from no page.
    """
    if not is_loopback(host_of(host)):
        raise ForeignOriginError(f"the Host header {host!r} is not one of this machine")
    if origin is not None and not is_loopback(host_of_origin(origin)):
        raise ForeignOriginError(f"requests of pages from {origin[:200]!r} are refused")


def check_link(headers: Mapping[str, str], method: str, *, may_be_beside: bool = True) -> None:
    """Refuse a request that a page of another site made a browser send, other than by a link.

    Hosts below one domain are one site: `may_be_beside` says whether their pages may ask, too.
    """
    site, frame = headers.get("sec-fetch-site"), headers.get("sec-fetch-dest", "document")
    is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if site == "cross-site":
        is_refused = not is_link
    else:
        # A frame in a page of that site would load this page with the user's cookie.
        is_refused = site == "same-site" and not may_be_beside
        is_refused = is_refused and not (is_link and frame == "document")
    if is_refused:
        raise ForeignOriginError("requests of pages from other sites are refused")


def host_of(header: str | None) -> str:
    """The name in a `Host` header, without port and brackets; empty when it is malformed."""
    match = _NAME_AND_PORT.match(header.strip()) if header else None
    return (match[1] or match[2]).lower() if match else ""


def host_of_origin(header: str) -> str:
    """The name in an `Origin` header; empty when there is none."""
    try:
        parts = urlsplit(header)
        return (parts.hostname or "") if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or _IPV4.fullmatch(host) is not None
