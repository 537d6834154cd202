"""The little of HTTP that the agent's routes need, on plain ASGI.

No framework: these routes need a dozen lines of one, and importing the smallest costs each pod
25 ms of its start and 4 MB.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from kubetorch.errors import ProtocolError
from kubetorch.wire.failures import Failure

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
NDJSON = "application/x-ndjson"


def refusal(status: int, message: str, *, hint: str | None = None) -> ProtocolError:
    """The error for a request that cannot be served, with the HTTP status of its answer."""
    error = ProtocolError(message, hint=hint)
    error.__dict__["status"] = status
    return error


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


class Request:
    """One request.

    Attributes:
        method: `GET`, `POST`, ….
        path: The path, decoded.
        query: The query, undecoded.
        headers: Headers by name in lower case; of a repeated one, the last.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._receive = receive

    async def body(self, limit: int) -> bytes:
        """The body, decompressed.

        Raises:
            ProtocolError: It has more than `limit` bytes, which are not read, or is compressed in
                an unknown way.
            ClientGoneError: It is not complete.
        """
        length = self.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > limit:
            raise refusal(413, f"a body of {length} bytes; {limit} are allowed")
        gzip = _gzip(self.headers.get("content-encoding", "identity").strip().lower())
        pieces = []
        left = limit
        is_last = False
        while not is_last:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece = message.get("body", b"")
            if gzip is not None:
                piece = _inflate(gzip, piece, left + 1)
            left -= len(piece)
            if left < 0:
                raise refusal(413, f"a body of more than the {limit} bytes that are allowed")
            pieces.append(piece)
            is_last = not message.get("more_body", False)
        if gzip is not None and not gzip.eof:
            raise refusal(400, "the body is cut: its gzip stream has no end")
        return b"".join(pieces)

    async def disconnected(self) -> None:
        """Wait until the client is gone; after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _gzip(encoding: str) -> zlib._Decompress | None:
    """A decompressor, if a body in this encoding needs one."""
    if encoding in ("", "identity"):
        return None
    if encoding != "gzip":
        raise refusal(415, f"the Content-Encoding {encoding[:40]!r} is not read here")
    return zlib.decompressobj(wbits=31)


def _inflate(gzip: zlib._Decompress, data: bytes, limit: int) -> bytes:
    """Decompress a piece into at most so many bytes; with more of them, it is refused anyway."""
    try:
        return gzip.decompress(data, limit)
    except zlib.error as error:
        raise refusal(400, f"the body is not gzip: {error}") from error


class Responder:
    """Answers one request."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = dict(headers)
        #: Whether the head of the answer was sent.
        self.has_begun = False

    async def begin(self, status: int, content_type: str, **headers: str) -> None:
        """Send the head of an answer."""
        self.has_begun = True
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
        """Send a whole answer."""
        await self.begin(status, content_type, content_length=str(len(body)), **headers)
        await self.write(body, more=False)

    async def answer_json(self, status: int, value: object) -> None:
        """Send a whole answer made of a JSON value."""
        await self.answer(status, json.dumps(value, ensure_ascii=False).encode())

    async def answer_failure(self, failure: Failure) -> None:
        """Send the one envelope that all errors have."""
        headers = {}
        if failure.status == 401:
            headers["www_authenticate"] = 'Bearer realm="kubetorch"'
        if failure.status == 413:
            # What still comes of the body is not read.
            headers["connection"] = "close"
        await self.answer(failure.status, failure.to_json(), **headers)
