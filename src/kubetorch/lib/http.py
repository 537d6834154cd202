"""A small blocking HTTP/1.1 client for one server, with the parser of `httptools`.

Connections are kept and reused by whichever thread asks next. When is a request sent twice? A kept
connection may have been closed by the server while nobody looked. So one that was idle for longer
than `IDLE_SECONDS` is not used again (servers keep theirs longer), and one that can be read before
anything was asked is already closed. What remains is a server that closes in the very moment in
which the request is on its way. If a kept connection breaks before the head of an answer, the
request is sent once more on a new connection when it is a GET, which changes nothing. Any other may
have been processed: its caller gets the error and decides. What was sent on a connection that was
new is never sent again.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType, TracebackType
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from kubetorch.errors import (
    ControllerUnavailableError,
    KubernetesUnavailableError,
    KubetorchError,
)
from kubetorch.lib import tcp
from kubetorch.lib.answers import Response, is_unanswered, unavailable
from kubetorch.lib.httpconnection import HttpConnection, is_target

#: How long an idle connection is taken for alive; uvicorn closes after 5 s.
IDLE_SECONDS = 4.0
#: Idle connections that are kept, so that one client never holds more of a server's.
IDLE_LIMIT = 8

#: Errors of a dialler that mean no more than that nobody was reached.
_AWAY = (ControllerUnavailableError, KubernetesUnavailableError)
_AUTHORIZATION = "Authorization"

#: A connection to the server, made within so many seconds.
Dialler = Callable[[float | None], socket.socket]


class Credential(Protocol):
    """A token that changes: it ends, and another takes its place. Threads share it."""

    def token(self, path: str) -> str:
        """The token for a request to this path, good for a while."""

    def reject(self, token: str) -> bool:
        """The server does not take this token: whether another may be had."""


class HttpClient:
    """Requests to one server.

    Safe to share between threads; a forked child opens connections of its own.

    Args:
        base_url: `http://host:port`, or `https://`, with an optional path in front of all others.
        token: Sent as `Authorization: Bearer` with every request. One that changes is asked for
            anew when the server answers 401, and the request sent once more if its body can be.
        timeout: Seconds that a request may go without any progress: connecting, sending, or
            waiting for the next bytes of an answer. `None` waits for ever, but not for a server
            that is gone: TCP notices that.
        hint: The user's next step when the server does not answer.
        headers: Sent with every request.
        dialler: Makes the connections, where they do not simply go to host and port.
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
        self._idle: list[tuple[HttpConnection, float]] = []
        self._process = os.getpid()
        self._is_closed = False

    @property
    def token(self) -> str | None:
        """The token that never changes, if it is such a one."""
        return self._token if isinstance(self._token, str) else None

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
        timeout: float | EllipsisType | None = ...,
    ) -> Response:
        """Send a request and wait for the head of its answer.

        Args:
            method: `GET`, `POST`, …, but not `HEAD`, whose answers promise a body without one.
            path: What follows the base URL, quoted, with its query.
            body: The body, or its pieces, which then go out chunked as they are made.
            headers: Further headers.
            timeout: Instead of the client's own; `None` waits for ever, as there.

        Raises:
            ControllerUnavailableError: The server cannot be reached, or broke off. The cause is
                `ConnectionRefusedError` when nobody listens, so nothing was sent.
        """
        sent = {**self._headers, **(headers or {})}
        limit = self._timeout if timeout is ... else timeout
        content = body if body is None or isinstance(body, bytes) else _Pieces(body)
        changing = self._token
        if changing is None or _AUTHORIZATION in sent:
            return self._request(method, path, content, sent, limit)
        token = changing if isinstance(changing, str) else changing.token(path)
        answer = self._request(
            method, path, content, {_AUTHORIZATION: f"Bearer {token}", **sent}, limit
        )
        if answer.status != 401 or isinstance(changing, str) or isinstance(content, _Pieces):
            return answer
        if not changing.reject(token):
            return answer
        answer.close()
        fresh = {_AUTHORIZATION: f"Bearer {changing.token(path)}", **sent}
        return self._request(method, path, content, fresh, limit)

    def _request(
        self,
        method: str,
        path: str,
        content: bytes | _Pieces | None,
        sent: Mapping[str, str],
        limit: float | None,
    ) -> Response:
        kept = self._take_idle()
        try:
            return self._exchange(kept, method, path, content, sent, limit)
        except ControllerUnavailableError as error:
            if kept is None or method != "GET" or not is_unanswered(error.__cause__):
                raise
        return self._exchange(None, method, path, content, sent, limit)

    # ------------------------------------------------------------------------------- connections

    def _connect(self, timeout: float | None) -> HttpConnection:
        if self._dialler is not None:
            return HttpConnection(self._dialler(timeout), self._authority)
        sock = tcp.connect(self._host, self._port, timeout)
        if self._is_https:
            sock = _encrypted(sock, self._host)
        return HttpConnection(sock, self._authority)

    def _take_idle(self) -> HttpConnection | None:
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

    def _give_back(self, connection: HttpConnection) -> None:
        with self._lock:
            fits = not self._is_closed and len(self._idle) < IDLE_LIMIT
            if fits and self._process == os.getpid():
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    # ---------------------------------------------------------------------------------- exchange

    def _exchange(
        self,
        kept: HttpConnection | None,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
        timeout: float | None,
    ) -> Response:
        connection = kept
        request = f"{method} {self.base_url}{path}"
        try:
            connection = kept or self._connect(timeout)
            connection.sock.settimeout(timeout)
            self._send(connection, method, path, body, headers)
            connection.read_head()
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(body, _Pieces) and error is body.failure:
                raise
            if isinstance(error, KubetorchError) and not isinstance(error, _AWAY):
                raise  # whoever dials knows better what is wrong
            if isinstance(error, OSError):
                raise unavailable(request, error, self._hint) from error
            raise
        return Response(connection, request, self._give_back, self._hint)

    def _send(
        self,
        connection: HttpConnection,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> None:
        try:
            connection.send(method, self._prefix + path, headers, body)
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that refuses a body answers and closes before it has read all of it.
            is_own = isinstance(body, _Pieces) and error is body.failure
            if body is None or is_own:
                raise


def authority(url: SplitResult) -> str:
    """Host and port, as the `Host` header has them."""
    named = url.netloc.rpartition("@")[2]
    return named if named.isascii() else named.encode("idna").decode()


def _encrypted(sock: socket.socket, host: str) -> socket.socket:
    import ssl  # noqa: PLC0415  # few servers need it, and it takes 5 ms

    try:
        return ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


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


def _is_readable(connection: HttpConnection) -> bool:
    """Whether an idle connection has bytes, or its end, to read: it cannot be used again."""
    if hasattr(select, "poll"):  # select() refuses file descriptors above 1023
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([connection.sock], [], [], 0)[0])
