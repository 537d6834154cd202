"""Answers of HTTP servers to a blocking client, read as they come; and what is said without one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from types import TracebackType

from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib.httpanswer import BrokenError, UnansweredError
from kubetorch.lib.httpconnection import HttpConnection

#: Longest line that `Response.iter_lines` takes, in bytes.
LINE_LIMIT = 64 * 1024**2


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
        connection: HttpConnection,
        request: str,
        give_back: Callable[[HttpConnection], None],
        hint: str | None,
    ) -> None:
        self._give_back = give_back
        self._hint = hint
        self._connection: HttpConnection | None = connection
        self._request = request
        self.status = connection.answer.status
        self.headers = connection.answer.headers
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
                piece = self._connection.read_piece()
            except OSError as error:
                self.close()
                raise unavailable(self._request, error, self._hint) from error
            except BaseException:
                self.close()
                raise
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
                error = BrokenError(f"a line of more than {LINE_LIMIT} bytes")
                raise unavailable(self._request, error, self._hint) from error
        if pending:
            yield bytes(pending)

    def close(self) -> None:
        """Be done with this answer; what was not read is dropped with the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Break off, from another thread; whoever reads gets `ControllerUnavailableError`."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _finish_if_read(self) -> None:
        """Give the connection back once nothing of the body is left on it."""
        connection = self._connection
        if connection is None or not connection.answer.is_taken:
            return
        self._connection = None
        if connection.answer.lets_follow:
            self._give_back(connection)
        else:
            connection.close()


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
    """Whether a connection ended before the first byte of an answer."""
    return isinstance(error, (UnansweredError, ConnectionResetError, BrokenPipeError))
