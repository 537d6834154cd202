"""One connection of a stream, as its reader sees it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from kubetorch.lib import websocket
from kubetorch.sdk.streams.incoming import LONGEST
from kubetorch.sdk.streams.polling import Poller

#: Seconds for which a peer that was heard is taken for alive.
_RECENT = 0.005
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


class Link:
    """Reads a WebSocket. One thread at a time may.

    Args:
        connection: A blocking socket that was upgraded.
        handler: Told of every message.
        ping: Asks the peer for a sign of life.
        ping_after: Seconds of silence after which to ask; after twice as many the peer is gone.

    Attributes:
        is_waiting: Nothing was read yet: a signal handler that raises now does no harm.
    """

    def __init__(
        self,
        connection: socket.socket,
        handler: websocket.Handler,
        ping: Callable[[], None],
        ping_after: float,
    ) -> None:
        self._connection = connection
        self._parser = websocket.Parser(handler, masked=False, max_message=LONGEST)
        self._poller = Poller(connection)
        self._ping = ping
        self._ping_after = ping_after
        self._heard = self._pinged = time.monotonic()
        self.is_waiting = False

    def begin(self, rest: bytes, is_done: Callable[[], bool], *, timeout: float) -> None:
        """Read until something has happened.

        Args:
            rest: What was read before.
            is_done: Whether it has.
            timeout: Seconds that each wait may take.

        Raises:
            OSError, WebSocketError: The connection ended, or it did not happen in time.
        """
        self._connection.settimeout(timeout)
        self._parser.feed(rest)
        while not is_done():
            size = self._connection.recv_into(self._parser.get_buffer())
            self._take(size)
        self._connection.settimeout(None)

    def read(self, timeout: float, *, may_stay_awake: bool = False) -> None:
        """Read what is there, or comes in time.

        Args:
            timeout: Seconds.
            may_stay_awake: As in `Poller.wait`.

        Raises:
            OSError, WebSocketError: The connection ended, or is to end.
        """
        self.is_waiting = True
        is_readable = self._poller.wait(timeout, may_stay_awake=may_stay_awake)
        self.is_waiting = False
        if not is_readable:
            self._check_silence()
            return
        try:
            size = self._connection.recv_into(self._parser.get_buffer(), 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        self._heard = time.monotonic()
        self._take(size)

    def has_ended(self) -> bool:
        """Whether the peer closed the connection, if a while has passed since it was heard."""
        if time.monotonic() - self._heard < _RECENT:
            return False
        try:
            return not self._connection.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _take(self, size: int) -> None:
        if not size:
            raise ConnectionResetError("the agent closed the connection")
        self._parser.advance(size)

    def _check_silence(self) -> None:
        now = time.monotonic()
        silence = now - self._heard
        if silence >= 2 * self._ping_after:
            raise TimeoutError(f"the agent has been silent for {silence:.0f} s")
        if now - max(self._heard, self._pinged) >= self._ping_after:
            self._pinged = now
            self._ping()
