"""Opening a WebSocket from a thread, without an event loop."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from kubetorch.lib import websocket
from kubetorch.sdk.reach.way import DIRECT, Way

#: Seconds for the connection alone.
CONNECT_TIMEOUT = 10.0
#: Bytes that the head of an answer may have.
_HEAD_LIMIT = 64 * 1024
#: Bytes of a refusal's body that are read.
_BODY_LIMIT = 1024 * 1024


class RefusedError(Exception):
    """The server answered an upgrade with an ordinary response.

    Attributes:
        status: HTTP status.
        body: The response's body.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the upgrade was answered with status {status}")
        self.status = status
        self.body = body


def dial(
    base: str, path: str, headers: Mapping[str, str], *, timeout: float, way: Way = DIRECT
) -> tuple[socket.socket, bytes]:
    """A blocking socket on which WebSocket frames follow, and what was read of them already.

    Args:
        base: Base URL of the server, as the way has it.
        path: Where to upgrade.
        headers: To send with the request.
        timeout: Seconds for all of it.
        way: Makes the connection.

    Raises:
        RefusedError: The server said no.
        OSError, WebSocketError: There is no connection; `TimeoutError` is an `OSError`.
    """
    parts = urlsplit(base)
    deadline = time.monotonic() + timeout
    sent = {**headers, **way.headers(base)}
    request, accept = websocket.upgrade_request(
        sent.pop("Host", parts.netloc), parts.path.rstrip("/") + path, sent.items()
    )
    # The answer may take long, where a pod is made first; a host that is there takes connections.
    connection = way.connect(base, min(timeout, CONNECT_TIMEOUT))
    try:
        connection.settimeout(timeout)
        connection.sendall(request)
        head, rest = _read_head(connection, deadline)
        status, answer = websocket.parse_response(head, accept)
        if status != 101:
            length = answer.get("content-length", "0")
            size = min(int(length), _BODY_LIMIT) if length.isdigit() else 0
            raise RefusedError(status, _read_body(connection, rest, size, deadline))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, rest


def _receive(connection: socket.socket, deadline: float) -> bytes:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the server did not answer in time")
    connection.settimeout(left)
    data = connection.recv(65536)
    if not data:
        raise ConnectionResetError("the connection was closed during the handshake")
    return data


def _read_head(connection: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > _HEAD_LIMIT:
            raise websocket.WebSocketError("the answer to the upgrade has a head without an end")
        data += _receive(connection, deadline)
    return data[: end + 4], data[end + 4 :]


def _read_body(connection: socket.socket, data: bytes, size: int, deadline: float) -> bytes:
    try:
        while len(data) < size:
            data += _receive(connection, deadline)
    except OSError:
        return data
    return data
