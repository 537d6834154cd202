"""Answers of HTTP servers to a blocking client, read as they come; and what is said without one."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable, Iterator
from types import TracebackType

from kubetorch.errors import ControllerUnavailableError

#: Longest line that `Response.iter_lines` takes, in bytes.
LINE_LIMIT = 64 * 1024**2
#: Answers that end before they are complete, or are no HTTP.
BROKEN = (OSError, http.client.HTTPException)
_PIECE = 256 * 1024


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
        connection: http.client.HTTPConnection,
        raw: http.client.HTTPResponse,
        request: str,
        give_back: Callable[[http.client.HTTPConnection], None],
        hint: str | None,
    ) -> None:
        self._give_back = give_back
        self._hint = hint
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
            except BROKEN as error:
                self.close()
                raise unavailable(self._request, error, self._hint) from error
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
                raise unavailable(self._request, error, self._hint) from error
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
            self._give_back(connection)


def unavailable(request: str, error: BaseException, hint: str | None) -> ControllerUnavailableError:
    """The error for a request that got no whole answer."""
    if isinstance(error, TimeoutError):
        why = "timed out"
    elif isinstance(error, ConnectionRefusedError):
        why = "nobody listens there"
    elif is_unanswered(error):
        why = "the connection was closed before an answer came"
    elif isinstance(error, http.client.IncompleteRead):
        why = "the connection was closed in the middle of the answer"
    else:
        why = str(error) or type(error).__name__
    return ControllerUnavailableError(f"{request}: {why}", hint=hint)


def is_unanswered(error: BaseException | None) -> bool:
    """Whether a connection ended before the first byte of an answer."""
    # http.client raises BadStatusLine for garbage, and its subclass for an answer of no byte.
    return isinstance(
        error, (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
    )
