"""A socket for a thread that blocks, whose bytes travel over a connection of an event loop.

    thread ── socket ═ socketpair ═ Pipe ── Far ── API server, or TLS

A byte is copied once on its way out, by reading it, and not at all on its way in if the thread
takes what comes. Each side is read only as fast as the other takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import Protocol

#: Bytes that are read at once from the thread.
PIECE = 128 * 1024
#: Bytes that wait for the thread before the far side is not read any more, and so few that it is
#: read again.
HIGH, LOW = 1024 * 1024, 256 * 1024


class Far(Protocol):
    """The connection behind a pipe."""

    def send(self, data: bytes) -> bool:
        """Send; false when no more should come until `Pipe.resume`."""

    def read_on(self, is_wanted: bool) -> None:
        """Whether more is taken now."""

    def close(self) -> None:
        """The thread has ended its side."""


class Pipe:
    """The loop's end of a socket pair. Belongs to the loop that it is made in.

    Args:
        near: The end; the other one is the thread's.
        far: Where it leads.
    """

    def __init__(self, near: socket.socket, far: Far) -> None:
        near.setblocking(False)
        self._near: socket.socket | None = near
        self._far = far
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._has_ended = False
        self._is_reading = False
        self.resume()

    # ------------------------------------------------------------------------- from the thread

    def resume(self) -> None:
        """The far side takes more."""
        if self._near is not None and not self._is_reading and not self._has_ended:
            self._is_reading = True
            self._loop.add_reader(self._near.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        assert self._near is not None
        try:
            data = self._near.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._far.close()
        elif not self._far.send(data):
            self._stop_reading()

    def _stop_reading(self) -> None:
        if self._near is not None and self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._near.fileno())

    # --------------------------------------------------------------------------- to the thread

    def deliver(self, data: memoryview) -> None:
        """Bytes for the thread; the memory is not used any more after this."""
        if self._near is None:
            return
        if not self._waiting:
            try:
                data = data[self._near.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self.close()
                self._far.close()
                return
            if not data:
                return
            self._loop.add_writer(self._near.fileno(), self._on_writable)
        self._waiting.append(memoryview(bytes(data)))
        self._size += len(data)
        if self._size > HIGH:
            self._far.read_on(False)

    def _on_writable(self) -> None:
        assert self._near is not None
        try:
            while self._waiting:
                piece = self._waiting[0]
                sent = self._near.send(piece)
                self._size -= sent
                if sent < len(piece):
                    self._waiting[0] = piece[sent:]
                    break
                self._waiting.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.close()
            self._far.close()
            return
        if not self._waiting:
            self._loop.remove_writer(self._near.fileno())
            if self._has_ended:
                self.close()
                return
        if self._size <= LOW:
            self._far.read_on(True)

    def end(self) -> None:
        """The far side has ended: so does the thread's, once it has taken what came before."""
        self._has_ended = True
        self._stop_reading()
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """End the thread's side at once."""
        near = self._near
        if near is None:
            return
        self._stop_reading()
        self._near = None
        self._waiting.clear()
        self._loop.remove_writer(near.fileno())
        # A forked child may have the socket too: closing alone would not tell the thread.
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
        near.close()
