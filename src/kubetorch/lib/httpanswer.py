"""One answer of an HTTP/1.1 server, parsed as its bytes come: by clients that block, or do not.

One that says in two ways how long it is (`Content-Length` twice, or beside chunks) is refused.
"""

from __future__ import annotations

import httptools

#: Bytes that the head of an answer may have.
HEAD_LIMIT = 64 * 1024


class BrokenError(ConnectionError):
    """The server broke off, or sent what is no HTTP; it may have processed the request."""


class UnansweredError(BrokenError):
    """The connection was closed before the first byte of an answer."""


class IncompleteError(BrokenError):
    """The connection was closed in the middle of the answer."""


class HttpAnswer:
    """What of an answer has come.

    Attributes:
        status: The HTTP status, once there is a head.
        headers: The headers, names in lower case; of repeated ones the last.
        has_head: Whether the head is complete.
        is_complete: Whether all of it has come.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_head = False
        self.is_complete = False
        self._told = _Told()
        self._parser = httptools.HttpResponseParser(self._told)
        self._told.parser = self._parser
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take what was read; nothing is the end of the connection.

        Raises:
            BrokenError: It is no answer, or not all of one.
        """
        if not data:
            self._end()
            return
        self._size += len(data)
        told = self._told
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise BrokenError("the server changes to another protocol, unasked") from error
        except httptools.HttpParserError as error:
            if not told.is_complete:
                raise BrokenError(f"not an HTTP answer: {error}") from error
            told.has_excess = True
        if not self.has_head and told.has_head:
            self.has_head = True
            self.status = told.status
            self.headers = told.headers
        if not self.has_head and self._size > HEAD_LIMIT:
            raise BrokenError("the head of the answer has no end")
        self.is_complete = told.is_complete

    def take(self) -> bytes:
        """What came of the body since the last time."""
        pieces = self._told.pieces
        taken = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return taken

    @property
    def is_taken(self) -> bool:
        """Whether all of it has come, and was taken."""
        return self.is_complete and not self._told.pieces

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing but the end of the connection says where the body ends."""
        has_no_body = self.status in (204, 304)
        says_length = self.headers.keys() & {"content-length", "transfer-encoding"}
        return not (has_no_body or says_length)

    @property
    def is_persistent(self) -> bool:
        """Whether the server lets another request follow on the same connection."""
        closes = "close" in self.headers.get("connection", "").lower()
        return not closes and self._parser.get_http_version() == "1.1"

    @property
    def lets_follow(self) -> bool:
        """Whether another request may follow: the answer is complete, and nothing came after it."""
        is_whole = self.is_complete and not self._told.has_excess
        return is_whole and not self.ends_with_connection and self.is_persistent

    def _end(self) -> None:
        if not self._size:
            raise UnansweredError("the connection was closed before an answer came")
        if not (self.has_head and self.ends_with_connection):
            raise IncompleteError("the connection was closed in the middle of the answer")
        self.is_complete = True


class _Told:
    """What the parser tells. Interim answers (`103 Early Hints`) are passed over."""

    def __init__(self) -> None:
        self.parser: httptools.HttpResponseParser | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.has_head = False
        self.is_complete = False
        self.has_excess = False

    def on_message_begin(self) -> None:
        self.has_excess = self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not (self.has_head or self.has_excess):  # else it is a trailer, or of another answer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.parser is not None:
            self.status = self.parser.get_status_code()
            self.has_head = not self._is_interim

    def on_body(self, body: bytes) -> None:
        if not self.has_excess:
            self.pieces.append(body)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self.headers = {}
        else:
            self.is_complete = True
            self.parser = None  # which leads back here

    @property
    def _is_interim(self) -> bool:
        return 100 <= self.status < 200 and self.status != 101
