"""An event loop in a thread of its own, and sockets for threads that block on its connections."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kubetorch.lib import processes
from kubetorch.lib.tasks import cancel_all
from kubetorch.sdk.tuning import LIMITS, TIMING

_T = TypeVar("_T")
#: Rounds of the loop after which closed connections inside TLS are gone.
_ROUNDS = 5
#: Loops of parent processes, which must not be collected in a forked child.
_inherited: list[object] = []


class Background:
    """A loop that starts when it is needed, and runs `finish` before it stops. Threads share it."""

    def __init__(self, finish: Callable[[], Awaitable[None]] | None = None) -> None:
        #: The connections behind the sockets of `dial`.
        self.ends: set[FarEnd] = set()
        self._finish = finish
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        processes.at_fork(self.abandon)
        processes.at_exit(self.close)

    def run(self, coroutine: Coroutine[Any, Any, _T], timeout: float | None) -> _T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # the coroutine's own error
            raise TimeoutError(f"nothing came of it within {timeout:g} s") from error
        finally:
            future.cancel()

    def dial(
        self, connect: Callable[[socket.socket], Coroutine[Any, Any, None]], timeout: float | None
    ) -> socket.socket:
        """A blocking socket, whose other end a coroutine has connected."""
        caller_socket, near = socket.socketpair()
        try:
            self.run(connect(near), timeout)
        except BaseException:
            caller_socket.close()  # the loop closes the other end
            raise
        return caller_socket

    def close(self) -> None:
        """End the loop, and every connection with it."""
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(TIMING.background_end_seconds)

    def abandon(self) -> None:
        """Release everything, in a forked child."""
        _inherited.append((self._loop, self._thread, self.ends))
        self._lock = threading.Lock()
        self.ends = set()
        self._loop = self._thread = None

    def _running(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is not None:
            return loop
        with self._lock:
            if self._loop is None:
                new_loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(new_loop,), name="kubetorch-reach", daemon=True
                )
                self._thread.start()
                self._loop = new_loop
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.run_until_complete(self._end_all())
        loop.close()

    async def _end_all(self) -> None:
        """Cancel the running tasks, and wait until closed connections are gone."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await cancel_all(tasks)
        for end in list(self.ends):
            end.abandon()
        if self._finish is not None:
            await self._finish()
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)


#: Bytes that are read at once from the thread.
READ_BYTES = 128 * 1024


class FarEnd(ABC):
    """The connection behind a pipe; it is one of `ends` until it is lost."""

    def __init__(self, near: socket.socket, ends: set[FarEnd]) -> None:
        self.pipe: Pipe | None = None
        self._near = near
        self._ends = ends
        ends.add(self)

    @abstractmethod
    def send(self, data: bytes) -> bool:
        """Send; false when no more should come until `Pipe.resume`."""

    @abstractmethod
    def read_on(self, is_wanted: bool) -> None:
        """Go on reading, or pause."""

    @abstractmethod
    def close(self) -> None:
        """The thread has ended its side."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once."""

    def begin(self) -> None:
        self.pipe = Pipe(self._near, self)

    def abandon(self) -> None:
        self._ends.discard(self)
        self.abort()
        (self._near if self.pipe is None else self.pipe).close()

    def lose(self) -> None:
        self._ends.discard(self)
        if self.pipe is not None:
            self.pipe.end()


class Pipe:
    """The loop's end of a socket pair. Belongs to the loop that it is made in."""

    def __init__(self, near: socket.socket, far: FarEnd) -> None:
        near.setblocking(False)
        self._near: socket.socket | None = near
        self._far_end = far
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._has_ended = False
        self._is_reading = False
        self.resume()

    def resume(self) -> None:
        """The far side takes more."""
        if self._near is not None and not self._is_reading and not self._has_ended:
            self._is_reading = True
            self._loop.add_reader(self._near.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        assert self._near is not None
        try:
            data = self._near.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._far_end.close()
        elif not self._far_end.send(data):
            self._stop_reading()

    def _stop_reading(self) -> None:
        if self._near is not None and self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._near.fileno())

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
                self._far_end.close()
                return
            if not data:
                return
            self._loop.add_writer(self._near.fileno(), self._on_writable)
        self._waiting.append(memoryview(bytes(data)))
        self._size += len(data)
        if self._size > LIMITS.tunnel_pause_bytes:
            self._far_end.read_on(False)

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
            self._far_end.close()
            return
        if not self._waiting:
            self._loop.remove_writer(self._near.fileno())
            if self._has_ended:
                self.close()
                return
        if self._size <= LIMITS.tunnel_resume_bytes:
            self._far_end.read_on(True)

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
        # A forked child may have the socket too: closing alone would not wake the thread.
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
        near.close()
