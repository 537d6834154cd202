"""A connection of a blocking HTTP/1.1 client: one exchange at a time."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping

from kubetorch.lib.httpanswer import HttpAnswer, IncompleteError

_PIECE = 256 * 1024
#: Bodies up to this size go out with the head, in one packet.
_SMALL = 16 * 1024
# What would end a request line, or a header, too early.
_IMPOSSIBLE_TARGET = re.compile(r"[\x00-\x20\x7f]|[^\x00-\x7f]")
_IMPOSSIBLE_HEADER = re.compile(r"[\r\n\x00]")
#: Methods whose requests have a body; without one they say so.
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class HttpConnection:
    """Sends requests, and reads their answers.

    Args:
        sock: Connected to the server, by TLS if need be.
        authority: Host and port, as the `Host` header has them.

    Attributes:
        sock: The socket; its timeout is that of each step.
        answer: The one that is read, or was last.
    """

    def __init__(self, sock: socket.socket, authority: str) -> None:
        self.sock = sock
        self.answer = HttpAnswer()
        self._defaults = (("Host", authority), ("Accept-Encoding", "identity"))

    def send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] | None,
    ) -> None:
        """Send a request.

        Args:
            method: `GET`, `POST`, ….
            target: Path and query, quoted.
            headers: Those of the request; what frames the body is added.
            body: The body, or its pieces, which are sent chunked.

        Raises:
            ValueError: Target or headers have characters that cannot be sent.
            OSError: The connection broke.
        """
        self.answer = HttpAnswer()
        head = self._head(method, target, headers, body)
        if body is None:
            self.sock.sendall(head)
        elif isinstance(body, bytes):
            if len(body) <= _SMALL:
                self.sock.sendall(head + body)
            else:
                self.sock.sendall(head)
                self.sock.sendall(body)
        else:
            self.sock.sendall(head)
            for piece in body:
                if piece:
                    self.sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.sock.sendall(b"0\r\n\r\n")

    def read_head(self) -> HttpAnswer:
        """The answer, when its head has come.

        Raises:
            OSError: The connection broke, or what came is no answer.
        """
        answer = self.answer
        while not answer.has_head:
            answer.feed(self.sock.recv(_PIECE))
        # A server that ends a body by closing on purpose has to say so: else the head broke off.
        is_cut = answer.ends_with_connection and answer.is_persistent
        if is_cut and not answer.is_complete:
            raise IncompleteError("the head of the answer does not say how long it is")
        return answer

    def read_piece(self) -> bytes:
        """The next bytes of the body; none when it has ended.

        Raises:
            OSError: The connection broke, or what came is no answer.
        """
        answer = self.answer
        while not (piece := answer.take()) and not answer.is_complete:
            answer.feed(self.sock.recv(_PIECE))
        return piece

    def close(self) -> None:
        """Close it."""
        self.sock.close()

    def _head(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] | None,
    ) -> bytes:
        if not is_target(target):
            raise ValueError(f"{target!r} is no target of a request: it has to be quoted")
        given = {name.lower() for name in headers}
        lines = [f"{method} {target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._defaults if name.lower() not in given]
        for name, value in headers.items():
            if _IMPOSSIBLE_HEADER.search(f"{name}{value}"):
                raise ValueError(f"the header {name} cannot be {value!r}: it has a line break")
            lines.append(f"{name}: {value}")
        if isinstance(body, bytes):
            lines.append(f"Content-Length: {len(body)}")
        elif body is not None:
            lines.append("Transfer-Encoding: chunked")
        elif method in _WITH_BODY:
            lines.append("Content-Length: 0")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def is_target(text: str) -> bool:
    """Whether a request line can have it as its target: quoted, without blanks."""
    return _IMPOSSIBLE_TARGET.search(text) is None
