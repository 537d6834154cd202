"""One connection of a stream, as its reader sees it."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from kubetorch.lib import websocket
from kubetorch.sdk.streams.incoming import LONGEST

#: Seconds for which a peer that was heard is taken for alive.
_RECENT = 0.005
#: Seconds for which an answer is watched for before its reader sleeps.
WATCH = 0.0005
# On one core, whoever watches keeps the others from answering.
_HAS_CORES = (os.cpu_count() or 1) > 1
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
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._ping = ping
        self._ping_after = ping_after
        self._heard = self._pinged = time.monotonic()
        self.is_waiting = False
        self._is_quick = False

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

    def read(self, timeout: float, *, is_alone: bool = False) -> None:
        """Read what is there, or comes in time.

        Args:
            timeout: Seconds.
            is_alone: Nobody else in this process waits for this connection.

        Raises:
            OSError, WebSocketError: The connection ended, or is to end.
        """
        self.is_waiting = True
        is_readable = (is_alone and self._watch()) or self._wait(timeout)
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

    def _watch(self) -> bool:
        """Whether something comes so soon that it is not worth to sleep.

        To wake a core from its sleep takes longer than what is between two messages of quick
        calls. Where answers took longer the last time, nothing is watched.
        """
        if not self._is_quick:
            return False
        poll, until = self._poller.poll, time.monotonic() + WATCH
        while not (found := poll(0)) and time.monotonic() < until:
            pass
        self._is_quick = bool(found)
        return self._is_quick

    def _wait(self, timeout: float) -> bool:
        begun = time.monotonic()
        is_readable = bool(self._poller.poll(timeout * 1000))
        self._is_quick = _HAS_CORES and time.monotonic() - begun < WATCH
        return is_readable

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
