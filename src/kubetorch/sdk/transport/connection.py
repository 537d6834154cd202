"""One WebSocket connection: opened without an event loop, read by one thread at a time."""

from __future__ import annotations

import functools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final
from urllib.parse import urlsplit

from kubetorch.lib import processes, websocket_protocol
from kubetorch.sdk.transport.pod_transport import DIRECT, PodTransport
from kubetorch.wire import frames

#: Seconds for the connection alone.
CONNECT_TIMEOUT = 10.0
#: Longest message that is taken, in bytes.
LONGEST = frames.CHUNK + frames.META_LIMIT + frames.HEADER_BYTES


def dial(
    base: str,
    path: str,
    headers: Mapping[str, str],
    *,
    timeout: float,
    transport: PodTransport = DIRECT,
) -> tuple[socket.socket, bytes]:
    """A blocking socket on which WebSocket frames follow, and what was read of them already."""
    parts = urlsplit(base)
    deadline = time.monotonic() + timeout
    sent = {**headers, **transport.headers(base)}
    handshake = websocket_protocol.ClientHandshake(
        sent.pop("Host", parts.netloc), parts.path.rstrip("/") + path, sent.items()
    )
    # The answer may take long, where a pod is made first; a host that is there takes connections.
    connection = transport.connect(base, min(timeout, CONNECT_TIMEOUT))
    try:
        connection.settimeout(timeout)
        connection.sendall(handshake.request)
        while not handshake.feed(_receive(connection, deadline, handshake)):
            pass
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, handshake.rest


def _receive(
    connection: socket.socket, deadline: float, handshake: websocket_protocol.ClientHandshake
) -> bytes:
    left = deadline - time.monotonic()
    try:
        if left <= 0:
            raise TimeoutError("the server did not answer in time")
        connection.settimeout(left)
        return connection.recv(65536)
    except OSError:
        if handshake.is_refused:
            return b""  # what came of the refusal says enough
        raise


#: Seconds for which to stay awake.
AWAKE: Final = 0.0004
#: Most waits in a row that sleep at once.
MOST_ASLEEP: Final = 1023


class SpinHistory:
    """Decides if staying awake is worth it, judged by how it went so far.

    Each time that it was in vain doubles how many waits then sleep at once, each time that it was
    not halves it. So what takes long costs next to nothing, and so does a machine that is too busy.
    """

    def __init__(self) -> None:
        self._penalty = 0
        self._asleep = 0

    def is_favourable(self) -> bool:
        """True if this wait is worth staying awake; to be asked once at each wait."""
        if not self._asleep:
            return True
        self._asleep -= 1
        return False

    def learn(self, *, was_in_vain: bool) -> None:
        """Learn from the last wait."""
        if was_in_vain:
            self._penalty = min(2 * self._penalty + 1, MOST_ASLEEP)
            self._asleep = self._penalty
        else:
            self._penalty >>= 1


class Poller:
    """Waits until a socket can be read.

    A small call to a pod near by takes hardly longer than the kernel takes to wake all that it goes
    through: tens of µs each, more on a core that is idle. A caller that stays awake need not be
    woken, and keeps its core from idling. Others that want the core go first (`sched_yield`). Of a
    program's threads one at a time stays awake, since they share the interpreter's lock.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._history = SpinHistory()

    def wait(self, timeout: float, *, may_stay_awake: bool) -> bool:
        """True if there is something to read within `timeout` seconds."""
        is_tried = may_stay_awake and _has_room() and self._history.is_favourable()
        if is_tried and _turn.acquire(blocking=False):
            try:
                has_come = self._stay_awake(timeout)
            finally:
                _turn.release()
            self._history.learn(was_in_vain=not has_come)
            if has_come:
                return True
        return bool(self._poll.poll(timeout * 1000))

    def _stay_awake(self, timeout: float) -> bool:
        end = perf_counter() + min(AWAKE, timeout)
        while not self._poll.poll(0):
            if perf_counter() >= end:
                return False
            os.sched_yield()
        return True


@functools.cache
def _has_room() -> bool:
    """True if the answering process can run at the same time, and has a share of the time left."""
    return len(processes.usable()) > 1 and processes.quota() >= 1


#: Held by the thread that stays awake. A child that is forked meanwhile does without.
_turn = threading.Lock()


#: Seconds for which a peer that has sent something is taken for alive.
_RECENT = 0.005
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


class Link:
    """Reads a WebSocket. One thread at a time may."""

    def __init__(
        self,
        connection: socket.socket,
        handler: websocket_protocol.Handler,
        ping: Callable[[], None],
        ping_after: float,
    ) -> None:
        self._connection = connection
        self._parser = websocket_protocol.Parser(handler, masked=False, max_message=LONGEST)
        self._poller = Poller(connection)
        self._ping = ping
        self._ping_after = ping_after
        self._heard = self._pinged = time.monotonic()
        self.is_waiting = False

    def begin(self, rest: bytes, is_done: Callable[[], bool], *, timeout: float) -> None:
        """Read until something has happened."""
        self._connection.settimeout(timeout)
        self._parser.feed(rest)
        while not is_done():
            size = self._connection.recv_into(self._parser.get_buffer())
            self._take(size)
        self._connection.settimeout(None)

    def read(self, timeout: float, *, may_stay_awake: bool = False) -> None:
        """Read what is there, or comes in time."""
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
        """True if the peer closed the connection and has sent nothing for a while."""
        if time.monotonic() - self._heard < _RECENT:
            return False
        try:
            return not self._connection.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
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
