"""Several channels on one WebSocket, as Kubernetes does it: the first byte of a message says which.

What the peer sends is kept until it is read, up to a bound; then the connection is not read any
more, so that whoever writes in the pod has to wait.
"""

from __future__ import annotations

from collections import deque

from kubetorch.lib import connections, websocket
from kubetorch.lib.changes import Changes

#: Bytes that wait here before reading stops, and so few that it starts again.
HIGH, LOW = 1024 * 1024, 256 * 1024
#: Bytes of one message that is sent.
PIECE = 32 * 1024


class Channels:
    """The client's end (a `connections.Endpoint`). Belongs to one event loop.

    Attributes:
        reason: Why the connection is gone; `None` while it is there.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._connection: connections.Connection | None = None
        self._received: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._changes = Changes()

    @property
    def subprotocol(self) -> str | None:
        """What is spoken."""
        return self._connection.subprotocol if self._connection is not None else None

    async def receive(self) -> tuple[int, bytes] | None:
        """Channel and content of the next message; `None` when there will be none."""
        while not self._received:
            if self.reason is not None:
                return None
            await self._changes.wait()
        channel, data = self._received.popleft()
        self._size -= len(data)
        if self._size <= LOW and self._connection is not None:
            self._connection.read_on(True)
        return channel, data

    async def send(self, channel: int, data: bytes) -> None:
        """Send on a channel; returns when the connection takes more.

        Raises:
            ConnectionResetError: It is gone.
        """
        prefix = bytes([channel])
        for start in range(0, len(data), PIECE):
            connection = await self._writable()
            connection.send(prefix, data[start : start + PIECE])
        await self._writable()

    def send_now(self, channel: int, data: bytes) -> None:
        """Send a short message, even an empty one, without waiting; dropped if all is over."""
        if self._connection is not None:
            self._connection.send(bytes([channel]), data)

    def close(self) -> None:
        """Say goodbye."""
        if self._connection is not None:
            self._connection.read_on(True)
            self._connection.close()

    async def wait_closed(self) -> None:
        """Wait until the connection is gone; that has a deadline of its own."""
        while self.reason is None:
            await self._changes.wait()

    async def _writable(self) -> connections.Connection:
        while True:
            connection = self._connection
            if connection is None or not connection.is_open:
                raise ConnectionResetError(self.reason or "the connection is closed")
            if not connection.is_congested:
                return connection
            await self._changes.wait()

    # ------------------------------------------------------------------------ the connection calls

    def on_open(self, connection: connections.Connection) -> None:  # noqa: D102  # Endpoint's
        self._connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:  # noqa: D102  # Endpoint's
        if not payload:
            return
        self._received.append((payload[0], bytes(payload[1:])))
        self._size += len(payload) - 1
        if self._size > HIGH and self._connection is not None:
            self._connection.read_on(False)
        self._changes.notify()

    def on_large(self, head: memoryview, length: int) -> memoryview | None:  # noqa: D102
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # noqa: D102  # Endpoint's
        self.on_message(websocket.BINARY, memoryview(head + rest))

    def on_writable(self) -> None:  # noqa: D102  # Endpoint's
        self._changes.notify()

    def on_close(self, reason: str) -> None:  # noqa: D102  # Endpoint's
        self.reason = reason
        self._changes.notify()
