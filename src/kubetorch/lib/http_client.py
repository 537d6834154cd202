"""A blocking HTTP/1.1 client for one server: a pool of connections around `http.client`.

Idle connections are kept and used again by the next request of any thread. When is a request sent
twice? The server may have closed an idle connection meanwhile. So a connection that was idle for
longer than `client_idle_connection_seconds` is not used again (servers keep theirs longer), and an
idle connection with bytes to read is already closed. What remains is a server that closes in the
very moment in which the request is on its way. If an idle connection breaks before the head of an
answer, a GET is sent once more on a new connection, since it changes nothing. Any other request may
have been processed: its caller gets the error and decides. A request that was sent on a new
connection is never sent again.

Errors of sockets, TLS and `http.client` become `ControllerUnavailableError`, which has them as
cause.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import os
import re
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, urlsplit

from kubetorch.errors import ControllerUnavailableError, KubernetesUnavailableError, KubetorchError
from kubetorch.lib import sockets
from kubetorch.lib.tuning import LIMITS, TIMING

_PIECE = 256 * 1024
# Characters that would end a request line, or a header, too early.
_IMPOSSIBLE_TARGET = re.compile(r"[\x00-\x20\x7f]|[^\x00-\x7f]")
_IMPOSSIBLE_HEADER = re.compile(r"[\r\n\x00]")


def is_target(text: str) -> bool:
    """True if the text can be the target of a request line: quoted, without blanks."""
    return _IMPOSSIBLE_TARGET.search(text) is None


class _HttpResponse(http.client.HTTPResponse):
    """An answer. Interim ones (`103 Early Hints`) are passed over."""

    _heads = 0

    def begin(self) -> None:
        super().begin()
        while 100 <= self.status < 200:
            if self.status == http.HTTPStatus.SWITCHING_PROTOCOLS:
                raise ConnectionError("the server changes to another protocol, unasked")
            self.headers = self.msg = None  # type: ignore[assignment]  # as before it began
            super().begin()
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) > 1 or (lengths and self.chunked):
            raise ConnectionError("the answer says in two ways how long it is")
        # A server that ends a body by closing on purpose has to say so: else the head broke off.
        says_close = "close" in self.headers.get("Connection", "").lower()
        if self.length is None and not self.chunked and self.version == 11 and not says_close:
            raise ConnectionError("the head of the answer does not say how long it is")

    # `http.client` bounds the length of a line, but neither trailers nor the number of interim
    # answers.

    def _read_status(self) -> tuple[str, int, str]:
        self._heads += 1
        if self._heads > LIMITS.interim_answers:
            raise ConnectionError("the server sends one interim answer after the other")
        return super()._read_status()  # type: ignore[misc,no-any-return]  # not in its stubs

    def _read_and_discard_trailer(self) -> None:
        remaining_bytes = LIMITS.http_trailers_bytes
        while (line := self.fp.readline(remaining_bytes + 1)) not in (b"\r\n", b"\n", b""):
            remaining_bytes -= len(line)
            if remaining_bytes < 0:
                raise ConnectionError("the trailers of the answer are too long")


class _Connection(http.client.HTTPConnection):
    """One exchange at a time, on a socket that was connected before."""

    response_class = _HttpResponse
    auto_open = 0

    def __init__(self, sock: socket.socket, authority: str) -> None:
        super().__init__("connected")
        # `HTTPConnection` lets go of a socket whose last answer has begun.
        self.sock = self.socket = sock
        self._authority = authority

    def send_request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] | None,
    ) -> None:
        if not is_target(target):
            raise ValueError(f"{target!r} is no target of a request: it has to be quoted")
        for name, value in headers.items():
            if _IMPOSSIBLE_HEADER.search(f"{name}{value}"):
                raise ValueError(f"the header {name} cannot be {value!r}: it has a line break")
        has_host = any(name.lower() == "host" for name in headers)
        sent = headers if has_host else {"Host": self._authority, **headers}
        self.request(method, target, body, sent, encode_chunked=True)

    def close(self) -> None:
        super().close()
        self.socket.close()


class Response:
    """An answer, whose body is read as it comes.

    Leaving the context, or `close`, gives the connection back when the body was read to its end,
    and closes it otherwise.
    """

    def __init__(
        self,
        connection: _Connection,
        answer: http.client.HTTPResponse,
        request: str,
        give_back: Callable[[_Connection], None],
        hint: str | None,
    ) -> None:
        self._give_back = give_back
        self._hint = hint
        self._connection: _Connection | None = connection
        self._answer = answer
        self._request = request
        self.status = answer.status
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        if answer.length == 0:
            self._finish()

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, most_bytes: int = sys.maxsize) -> bytes:
        """The body, or its beginning: hardly more than so many bytes."""
        pieces, size = [], 0
        for piece in self.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > most_bytes:
                break
        return b"".join(pieces)

    def iter_bytes(self) -> Iterator[bytes]:
        """Pieces of the body, each as soon as it arrives."""
        while self._connection is not None:
            try:
                piece = self._read_piece()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                raise unavailable(self._request, error, self._hint) from error
            except BaseException:
                self.close()
                raise
            if piece:
                yield piece

    def _read_piece(self) -> bytes:
        answer = self._answer
        piece = answer.read1(_PIECE)
        if not piece and answer.length:
            raise ConnectionError("the connection was closed in the middle of the answer")
        if not piece or answer.length == 0:
            self._finish()
        return piece

    def iter_lines(self) -> Iterator[bytes]:
        """Lines of the body without their ends, each as soon as it is complete."""
        pending = bytearray()
        for piece in self.iter_bytes():
            pending += piece
            if b"\n" in piece:
                *lines, rest = bytes(pending).split(b"\n")
                pending = bytearray(rest)
                yield from lines
            elif len(pending) > LIMITS.answer_line_bytes:
                self.close()
                error = ConnectionError(f"a line of more than {LIMITS.answer_line_bytes} bytes")
                raise unavailable(self._request, error, self._hint) from error
        if pending:
            yield bytes(pending)

    def close(self) -> None:
        """Drop the rest of the answer, with the connection unless the answer was read whole."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Break off, from another thread; the reader gets `ControllerUnavailableError`."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.socket.shutdown(socket.SHUT_RDWR)

    def _finish(self) -> None:
        """Give the connection back once the body was read whole."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        answer = self._answer
        has_excess = False
        if not answer.isclosed():
            timeout = connection.socket.gettimeout()
            connection.socket.settimeout(0.0)
            with contextlib.suppress(OSError):
                has_excess = bool(answer.fp.peek(1))
            connection.socket.settimeout(timeout)
            answer.close()
        if answer.will_close or has_excess:
            connection.close()
        else:
            self._give_back(connection)


def unavailable(request: str, error: BaseException, hint: str | None) -> ControllerUnavailableError:
    """The error for a request that got no whole answer."""
    if isinstance(error, TimeoutError):
        why = "timed out"
    elif isinstance(error, ConnectionRefusedError):
        why = "nobody listens there"
    elif is_unanswered(error):
        why = "the connection was closed before an answer came"
    else:
        why = str(error) or type(error).__name__
    return ControllerUnavailableError(f"{request}: {why}", hint=hint)


def is_unanswered(error: BaseException | None) -> bool:
    """True if the connection ended before the first byte of an answer."""
    return isinstance(error, (ConnectionResetError, BrokenPipeError))


#: Errors of a dialler that mean only that the server was not reached.
_AWAY = (ControllerUnavailableError, KubernetesUnavailableError)
_AUTHORIZATION = "Authorization"

#: A connection to the server, made within so many seconds.
Dialler = Callable[[float | None], socket.socket]


class Credential(Protocol):
    """A token that changes: it ends, and another takes its place. Threads share it."""

    def token(self, path: str) -> str:
        """The token for a request to this path, good for a while."""

    def reject(self, token: str) -> bool:
        """Note that the server refuses this token; return whether another token is possible."""


class HttpClient:
    """Requests to one server.

    Safe to share between threads; a forked child opens connections of its own.
    """

    def __init__(
        self,
        base_url: str,
        token: str | Credential | None = None,
        *,
        timeout: float | None = 30.0,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
        dialler: Dialler | None = None,
    ) -> None:
        url = urlsplit(base_url)
        is_http = url.scheme in ("http", "https") and url.hostname
        if not url.hostname or not is_http or not is_target(url.path or "/"):
            raise ValueError(f"not an http:// or https:// URL: {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._is_https = url.scheme == "https"
        self._host = url.hostname
        self._port = url.port or (443 if self._is_https else 80)
        self._authority = authority(url)
        self._prefix = url.path.rstrip("/")
        self._token = token
        self._headers = dict(headers or {})
        self._dialler = dialler
        self._timeout = timeout
        self._hint = hint
        self._lock = threading.Lock()
        self._idle: list[tuple[_Connection, float]] = []
        self._process = os.getpid()
        self._is_closed = False

    @property
    def token(self) -> str | None:
        """The token if it never changes, else `None`."""
        return self._token if isinstance(self._token, str) else None

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
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
        timeout: float | EllipsisType | None = ...,
    ) -> Response:
        """Send a request and wait for the head of its answer."""
        sent = {**self._headers, **(headers or {})}
        limit = self._timeout if timeout is ... else timeout
        content = body if body is None or isinstance(body, bytes) else _Pieces(body)
        credential = self._token
        request = _Request(method, path, sent, content, limit)
        if credential is None or _AUTHORIZATION in sent:
            return self._send(request)
        token = credential if isinstance(credential, str) else credential.token(path)
        answer = self._send(request._replace(headers=_with_token(token, sent)))
        if answer.status != 401 or isinstance(credential, str) or isinstance(content, _Pieces):
            return answer
        if not credential.reject(token):
            return answer
        answer.close()
        return self._send(request._replace(headers=_with_token(credential.token(path), sent)))

    def _send(self, request: _Request) -> Response:
        idle_connection = self._take_idle()
        try:
            return self._exchange(idle_connection, request)
        except ControllerUnavailableError as error:
            if (
                idle_connection is None
                or request.method != "GET"
                or not is_unanswered(error.__cause__)
            ):
                raise
        return self._exchange(None, request)

    # ------------------------------------------------------------------------------- connections

    def _connect(self, timeout: float | None) -> _Connection:
        if self._dialler is not None:
            return _Connection(self._dialler(timeout), self._authority)
        sock = sockets.connect(self._host, self._port, timeout)
        if self._is_https:
            sock = _encrypted(sock, self._host)
        return _Connection(sock, self._authority)

    def _take_idle(self) -> _Connection | None:
        if self._process != os.getpid():  # a forked child must not write to its parent's sockets
            self._process = os.getpid()
            self._lock = threading.Lock()
            self._idle = []
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if (
                time.monotonic() - since < TIMING.client_idle_connection_seconds
                and not _is_readable(connection)
            ):
                return connection
            connection.close()

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            fits = not self._is_closed and len(self._idle) < LIMITS.client_idle_connections
            if fits and self._process == os.getpid():
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    # ---------------------------------------------------------------------------------- exchange

    def _exchange(self, idle_connection: _Connection | None, request: _Request) -> Response:
        connection = idle_connection
        method, path, headers, body, timeout = request
        name = f"{method} {self.base_url}{path}"
        try:
            connection = idle_connection or self._connect(timeout)
            connection.socket.settimeout(timeout)
            try:
                connection.send_request(method, self._prefix + path, headers, body)
            except (BrokenPipeError, ConnectionResetError) as error:
                # A server that refuses a body answers and closes before it has read all of it.
                if body is None or (isinstance(body, _Pieces) and error is body.failure):
                    raise
            answer = connection.getresponse()
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(body, _Pieces) and error is body.failure:
                raise
            if isinstance(error, KubetorchError) and not isinstance(error, _AWAY):
                raise  # the dialler knows better what is wrong
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise unavailable(name, error, self._hint) from error
            raise
        return Response(connection, answer, name, self._give_back, self._hint)


class _Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | _Pieces | None
    timeout: float | None


def _with_token(token: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    return {_AUTHORIZATION: f"Bearer {token}", **headers}


def authority(url: SplitResult) -> str:
    """Host and port, as the `Host` header has them."""
    named = url.netloc.rpartition("@")[2]
    return named if named.isascii() else named.encode("idna").decode()


def _encrypted(sock: socket.socket, host: str) -> socket.socket:
    try:
        return ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


class _Pieces:
    """The pieces of a body; remembers an error of the code that makes them."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._pieces
        except Exception as error:
            self.failure = error
            raise


def _is_readable(connection: _Connection) -> bool:
    """True if an idle connection has bytes, or its end, to read: it cannot be used again."""
    if hasattr(select, "poll"):  # select() refuses file descriptors above 1023
        poll = select.poll()
        poll.register(connection.socket, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([connection.socket], [], [], 0)[0])
