"""HTTP/1.1 on a connection: writing heads, reading answers, and their limits.

All readers of this package count the bytes outside of the body while they arrive: a `MessageMeter`
gives them to the parser in pieces, so that an endless head, or endless trailers, end early.
"""

from __future__ import annotations

import http
from collections.abc import Iterable

import httptools

from kubetorch.lib.tuning import LIMITS

Header = tuple[bytes, bytes]

#: Bytes that a parser is given at once: a message is refused that many bytes too late at most.
_PIECE = 16 * 1024

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in http.HTTPStatus
}
LAST_CHUNK = b"0\r\n\r\n"


#: Headers that define the end of a message, and its host: `Connection` may not name them, since a
#: proxy leaves out the headers that it names.
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host"})


class BrokenError(ConnectionError):
    """The server broke off, or sent no valid HTTP; it may have processed the request."""


class UnansweredError(BrokenError):
    """The connection was closed before the first byte of an answer."""


class IncompleteError(BrokenError):
    """The connection was closed in the middle of the answer."""


class TooLongError(Exception):
    """A head, or trailers, beyond the limit. `status` is that of the answer to such a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


# ---------------------------------------------------------------------------------------- writing


def request_head(method: str, target: str | bytes, headers: Iterable[Header]) -> bytes:
    """The head of a request. Raises `ValueError` for a target or header that would break it up."""
    line = target.encode() if isinstance(target, str) else target
    if not line.isascii() or any(code <= 32 or code == 127 for code in line):
        raise ValueError(f"{target!r} is no target of a request: it has to be quoted")
    return _head(b"%s %s HTTP/1.1" % (method.encode("ascii"), line), headers)


def answer_head(status: int, headers: Iterable[Header]) -> bytes:
    """The head of an answer. Some statuses that are in use have no name, such as 499."""
    return _head(_STATUS_LINES.get(status, b"HTTP/1.1 %d Other" % status), headers)


def whole_answer(status: int, body: bytes, content_type: str) -> bytes:
    """An answer after which the connection is closed."""
    headers = [
        (b"content-type", content_type.encode("latin-1")),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    return answer_head(status, headers) + body


def encoded(headers: Iterable[tuple[str, str]]) -> list[Header]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def chunk(body: bytes) -> bytes:
    """A piece of a chunked body; nothing for an empty piece, which would end the body."""
    return b"%x\r\n%s\r\n" % (len(body), body) if body else b""


def _head(first: bytes, headers: Iterable[Header]) -> bytes:
    lines = [first, *(b"%s: %s" % header for header in headers)]
    head = b"\r\n".join(lines)
    ends = len(lines) - 1
    if head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head:
        raise ValueError("a header has a line break, or a zero, in it")
    return head + b"\r\n\r\n"


# ---------------------------------------------------------------------------------------- reading


def connection_names(headers: Iterable[Header]) -> set[bytes]:
    """The names in the header `Connection`. Raises `ValueError` for headers of the framing."""
    values = [value for name, value in headers if name == b"connection"]
    names = {name.strip().lower() for value in values for name in value.split(b",")}
    if framing := names & _FRAMING:
        raise ValueError(f"Connection names {framing.pop().decode()}")
    return names


class MessageMeter:
    """Counts the bytes of a message outside of its body. Its owner forwards the parser's events."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._is_in_head = True
        self._arrived = 0
        self._body = 0

    def end_head(self) -> None:
        self._is_in_head = False
        self._arrived = 0

    def add_body(self, size: int) -> None:
        self._body += size

    def feed(
        self, parser: httptools.HttpRequestParser | httptools.HttpResponseParser, data: bytes
    ) -> bytes | None:
        """Parse; returns what follows where the message changes the protocol, else `None`.

        Raises `TooLongError` for a message beyond its limits.
        """
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            try:
                parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                return data[start + upgrade.args[0] :]
            self._arrived += len(piece)
            if self._is_in_head:
                # The first piece may also hold the end of the message before.
                if self._arrived > LIMITS.http_head_bytes + _PIECE:
                    raise TooLongError("the head is too long", 431)
            else:
                framed_bytes = (1 + LIMITS.chunk_framing_bytes) * self._body
                if self._arrived > LIMITS.http_trailers_bytes + _PIECE + framed_bytes:
                    raise TooLongError("there is too much around the body", 400)
        return None


class AnswerReader:
    """Parses an answer as its bytes come. Interim answers (`103 Early Hints`) are skipped.

    An answer that says in two ways how long it is (`Content-Length` twice, or beside chunks) is
    refused.
    """

    def __init__(self, *, may_upgrade: bool = False) -> None:
        self.status = 0
        self.reason = b""
        #: As they came, names in lower case.
        self.fields: list[Header] = []
        #: The last one of each name.
        self.headers: dict[str, str] = {}
        self.has_head = False
        self.is_complete = False
        self.is_upgraded = False
        #: Whether a head has begun to arrive, of an interim answer also, and is not complete.
        self.is_in_head = False
        #: Bytes after the answer that changed the protocol.
        self.rest = b""
        self._may_upgrade = may_upgrade
        self._version = ""
        self._pieces: list[bytes] = []
        self._has_begun = False
        self._has_excess = False
        self._meter = MessageMeter()
        #: Refers back here, so it goes when the answer is complete.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse bytes of the connection; no bytes are its end."""
        if not data:
            self._end()
            return
        self._has_begun = True
        if self.is_upgraded:
            self.rest += data
            return
        if self._parser is None:
            self._has_excess = True
            return
        try:
            rest = self._meter.feed(self._parser, data)
        except (httptools.HttpParserError, TooLongError) as error:
            if not self.is_complete:
                why = error.__context__ or error
                raise BrokenError(f"not an HTTP answer: {why}") from error
            self._has_excess = True
            return
        if rest is not None:
            if not self._may_upgrade:
                raise BrokenError("the server changes to another protocol, unasked")
            self.is_upgraded = True
            self.rest = rest

    def take(self) -> bytes:
        """Return the part of the body that came since the last time."""
        pieces = self._pieces
        taken = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return taken

    @property
    def ends_with_connection(self) -> bool:
        """True if only the end of the connection ends the body."""
        has_no_body = self.status in (204, 304)
        says_length = self.headers.keys() & {"content-length", "transfer-encoding"}
        return not (has_no_body or says_length)

    @property
    def allows_reuse(self) -> bool:
        """True if another request may follow: the answer is complete, and no byte came after it."""
        closes = "close" in self.headers.get("connection", "").lower()
        is_whole = self.is_complete and not self._has_excess and not self.ends_with_connection
        return is_whole and not closes and self._version == "1.1"

    def _end(self) -> None:
        if not self._has_begun:
            raise UnansweredError("the connection was closed before an answer came")
        if not (self.has_head and (self.is_complete or self.ends_with_connection)):
            raise IncompleteError("the connection was closed in the middle of the answer")
        self.is_complete = True
        self._parser = None

    # ----------------------------------------------------------------------------- the parser's

    def on_message_begin(self) -> None:
        self._has_excess = self.is_complete
        self.is_in_head = not self.has_head

    def on_status(self, status: bytes) -> None:
        if not self.has_head:
            self.reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it is a trailer, or of another answer
            self.fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser is None or self.has_head:
            return
        self.is_in_head = False
        connection_names(self.fields)
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200 and self.status != 101:
            self.fields, self.reason = [], b""
            return
        self.has_head = True
        self._version = self._parser.get_http_version()
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in self.fields
        }
        self._meter.end_head()

    def on_body(self, body: bytes) -> None:
        if not self._has_excess:
            self._meter.add_body(len(body))
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = True
            self._parser = None
