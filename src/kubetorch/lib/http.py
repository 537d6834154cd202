"""A small blocking HTTP/1.1 client for one server, on `http.client` of the standard library.

Connections are kept and reused by whichever thread asks next. When is a request sent twice? A kept
connection may have been closed by the server while nobody looked. So one that was idle for longer
than `IDLE_SECONDS` is not used again (servers keep theirs longer), and one that can be read before
anything was asked is already closed. What remains is a server that closes in the very moment in
which the request is on its way. If a kept connection breaks before the head of an answer, the
request is sent once more on a new connection when it is a GET or HEAD, which change nothing. Any
other may have been processed: its caller gets the error and decides. What was sent on a connection
that was new is never sent again.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from urllib.parse import urlsplit

from kubetorch.errors import ControllerUnavailableError

#: How long an idle connection is taken for alive; uvicorn closes after 5 s.
IDLE_SECONDS = 4.0
#: Idle connections that are kept, so that one client never holds more of a server's.
IDLE_LIMIT = 8
#: Longest line that `Response.iter_lines` takes, in bytes.
LINE_LIMIT = 64 * 1024**2

_PIECE = 256 * 1024
_SAFE = ("GET", "HEAD")
#: Answers that end before they are complete, or are no HTTP.
_BROKEN = (OSError, http.client.HTTPException)


class HttpClient:
    """Requests to one server.

    Safe to share between threads; a forked child opens connections of its own.

    Args:
        base_url: `http://host:port`, or `https://`, with an optional path in front of all others.
        token: Sent as `Authorization: Bearer` with every request.
        timeout: Seconds that a request may go without any progress: connecting, sending, or
            waiting for the next bytes of an answer. `None` waits for ever.
        hint: The user's next step when the server does not answer.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout: float | None = 30.0,
        hint: str | None = None,
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"not an http:// or https:// URL: {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._is_https = url.scheme == "https"
        self._host = url.hostname
        self._port = url.port or (443 if self._is_https else 80)
        self._prefix = url.path.rstrip("/")
        #: Sent with every request.
        self.token = token
        self._timeout = timeout
        self._hint = hint
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._process = os.getpid()
        self._is_closed = False

    def of(self, base_url: str) -> HttpClient:
        """A client of another server, with the same token."""
        return HttpClient(base_url, self.token, timeout=self._timeout, hint=self._hint)

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections; those of open responses close with them."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """Send a request and wait for the head of its answer.

        Args:
            method: `GET`, `POST`, ….
            path: What follows the base URL, quoted, with its query.
            body: The body, or its pieces, which then go out chunked as they are made.
            headers: Further headers.
            timeout: Instead of the client's own.

        Raises:
            ControllerUnavailableError: The server cannot be reached, or broke off. The cause is
                `ConnectionRefusedError` when nobody listens, so nothing was sent.
        """
        sent = dict(headers or {})
        if self.token is not None:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        limit = self._timeout if timeout is None else timeout
        content = body if body is None or isinstance(body, bytes) else _Pieces(body)
        kept = self._take_idle()
        try:
            return self._exchange(kept or self._connect(limit), method, path, content, sent, limit)
        except ControllerUnavailableError as error:
            if kept is None or method not in _SAFE or not _is_unanswered(error.__cause__):
                raise
        return self._exchange(self._connect(limit), method, path, content, sent, limit)

    # ------------------------------------------------------------------------------- connections

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        if self._is_https:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _take_idle(self) -> http.client.HTTPConnection | None:
        if self._process != os.getpid():  # a forked child must not write to its parent's sockets
            self._process = os.getpid()
            self._lock = threading.Lock()
            self._idle = []
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if time.monotonic() - since < IDLE_SECONDS and not _is_readable(connection):
                return connection
            connection.close()

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            fits = not self._is_closed and len(self._idle) < IDLE_LIMIT
            if fits and self._process == os.getpid():
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    # ---------------------------------------------------------------------------------- exchange

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
        timeout: float | None,
    ) -> Response:
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        try:
            self._send(connection, method, path, body, headers)
            raw = connection.getresponse()
            _check_head(raw)
        except BaseException as error:
            connection.close()
            if isinstance(body, _Pieces) and error is body.failure:
                raise
            if isinstance(error, _BROKEN):
                request = f"{method} {self.base_url}{path}"
                raise unavailable(request, error, self._hint) from error
            raise
        return Response(self, connection, raw, f"{method} {self.base_url}{path}")

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> None:
        try:
            connection.request(method, self._prefix + path, body=body, headers=headers)
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that refuses a body answers and closes before it has read all of it.
            is_own = isinstance(body, _Pieces) and error is body.failure
            if body is None or connection.sock is None or is_own:
                raise


def _check_head(raw: http.client.HTTPResponse) -> None:
    """Refuse an answer that broke off in its head, which `http.client` takes for an empty one.

    What then is missing is the length of the body. A server that leaves it out on purpose, to end
    the body by closing, has to say so.
    """
    says_close = "close" in (raw.getheader("connection") or "").lower()
    if raw.version == 11 and raw.length is None and not raw.chunked and not says_close:
        raw.close()
        raise http.client.IncompleteRead(b"")


class _Pieces:
    """The pieces of a body; remembers an error of whoever makes them, which is not the server's."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._pieces
        except Exception as error:
            self.failure = error
            raise


class Response:
    """An answer, whose body is read as it comes.

    Leaving the context, or `close`, gives the connection back when the body was read to its end,
    and closes it otherwise.

    Attributes:
        status: The HTTP status.
        headers: The headers, names in lower case.
    """

    def __init__(
        self,
        client: HttpClient,
        connection: http.client.HTTPConnection,
        raw: http.client.HTTPResponse,
        request: str,
    ) -> None:
        self._client = client
        self._connection: http.client.HTTPConnection | None = connection
        self._raw = raw
        self._request = request
        self.status = raw.status
        self.headers = {name.lower(): value for name, value in raw.getheaders()}
        self._finish_if_read()

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read(self) -> bytes:
        """The rest of the body."""
        return b"".join(self.iter_bytes())

    def iter_bytes(self) -> Iterator[bytes]:
        """Pieces of the body, each as soon as it is there.

        Raises:
            ControllerUnavailableError: The body ended before it was complete, or stalled.
        """
        while self._connection is not None:
            try:
                piece = self._raw.read1(_PIECE)
                if not piece and self._raw.length:
                    raise http.client.IncompleteRead(b"", self._raw.length)
            except _BROKEN as error:
                self.close()
                raise unavailable(self._request, error, self._client._hint) from error
            except BaseException:
                self.close()
                raise
            if not piece:
                self._raw.close()
            self._finish_if_read()
            if piece:
                yield piece

    def iter_lines(self) -> Iterator[bytes]:
        """Lines of the body without their ends, each as soon as it is complete."""
        pending = bytearray()
        for piece in self.iter_bytes():
            pending += piece
            if b"\n" in piece:
                *lines, rest = bytes(pending).split(b"\n")
                pending = bytearray(rest)
                yield from lines
            elif len(pending) > LINE_LIMIT:
                self.close()
                error = http.client.LineTooLong(f"{len(pending)} bytes")
                raise unavailable(self._request, error, self._client._hint) from error
        if pending:
            yield bytes(pending)

    def close(self) -> None:
        """Be done with this answer; what was not read is dropped with the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._raw.close()
            connection.close()

    def abort(self) -> None:
        """Break off, from another thread; whoever reads gets `ControllerUnavailableError`."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _finish_if_read(self) -> None:
        """Give the connection back once nothing of the body is left on it."""
        connection = self._connection
        if connection is None or not (self._raw.isclosed() or self._raw.length == 0):
            return
        self._connection = None
        self._raw.close()
        if self._raw.will_close:
            connection.close()
        else:
            self._client._give_back(connection)


def unavailable(request: str, error: BaseException, hint: str | None) -> ControllerUnavailableError:
    """The error for a request that got no whole answer."""
    if isinstance(error, TimeoutError):
        why = "timed out"
    elif isinstance(error, ConnectionRefusedError):
        why = "nobody listens there"
    elif _is_unanswered(error):
        why = "the connection was closed before an answer came"
    elif isinstance(error, http.client.IncompleteRead):
        why = "the connection was closed in the middle of the answer"
    else:
        why = str(error) or type(error).__name__
    return ControllerUnavailableError(f"{request}: {why}", hint=hint)


def _is_unanswered(error: BaseException | None) -> bool:
    """Whether a connection ended before the first byte of an answer."""
    # http.client raises BadStatusLine for garbage, and its subclass for an answer of no byte.
    return isinstance(
        error, (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
    )


def _is_readable(connection: http.client.HTTPConnection) -> bool:
    """Whether an idle connection has bytes, or its end, to read: it cannot be used again."""
    if connection.sock is None:
        return True
    if hasattr(select, "poll"):  # select() refuses file descriptors above 1023
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([connection.sock], [], [], 0)[0])
