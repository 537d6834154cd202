"""The writing end of a stream: whoever has something to send writes it, and nobody waits to.

    any thread ── operations ──┐
                               ├── drained by whoever holds the lock ── socket
    large payloads ── chunks ──┘

What is to be sent goes into a queue, and whoever gets the lock writes all of it, the others' too:
so no caller waits for another one's bytes, and small frames of many callers travel together.
Writing never blocks. When the kernel has no room, or a payload is longer than a frame, a writer
thread goes on; it exists only while there is something left to write.
"""

from __future__ import annotations

import select
import socket
import threading
from _queue import Empty, SimpleQueue  # `queue` adds classes that nobody needs here
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Mapping

from kubetorch.sdk.streams.frame import JOINED, Frame, message
from kubetorch.sdk.streams.pending import PendingCall
from kubetorch.sdk.streams.upload import Upload, Uploads
from kubetorch.wire import frames
from kubetorch.wire.channel import Outbox

Buffer = bytes | bytearray | memoryview

_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
#: Buffers that one system call takes.
_BATCH = 512
#: Seconds that the writer thread stays without work.
_LINGER = 5.0
#: Milliseconds after which a wait for room looks again whether the connection is still the same.
_ROOM_WAIT = 1000

_AT_ONCE = (False,)


class Sender:
    """Writes the frames of one stream, in order, on the connection that it has at the time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: deque[Frame | Callable[[], None]] = deque()
        self._outbox = Outbox()
        self._socket: socket.socket | None = None
        # What the kernel had no room for.
        self._backlog: deque[memoryview] = deque()
        self._uploads = Uploads()
        self._has_thread = False
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._end: Exception | None = None

    @property
    def is_retired(self) -> bool:
        """Whether nothing is ever sent again."""
        return self._end is not None

    # --------------------------------------------------------------------- from any thread

    def submit(self, operation: Frame | Callable[[], None]) -> None:
        """Send a frame, or run an operation between two frames. Never blocks."""
        self._operations.append(operation)
        self._settle()

    def grant(self, number: int, size: int) -> None:
        """The other end has room for more payload of this call."""

        def grant() -> None:
            self._uploads.grant(number, size)
            self._kick_if_busy()

        self.submit(grant)

    def cancel(self, call: PendingCall, frame: Frame, on_unsent: Callable[[], object]) -> None:
        """Send no more payload of a call, and a frame that says so.

        Args:
            call: The call.
            frame: The frame.
            on_unsent: Called instead of sending it when the call was never opened.
        """

        def cancel() -> None:
            # What opens the call was queued before this, if it ever was.
            if call.opening is None:
                on_unsent()
                return
            self._uploads.drop(call.number)
            self._operations.append(frame)

        self.submit(cancel)

    def drop_upload(self, number: int) -> None:
        """Send no more payload of this call."""
        self.submit(lambda: self._uploads.drop(number))

    def release(self, upload: Upload) -> None:
        """The call has a result, so all of its payload has arrived: let go of the user's memory."""
        outbox = self._outbox

        def release() -> None:
            if upload.is_done and outbox is self._outbox:
                outbox.ack(upload.frames)
            upload.forget()

        self.submit(release)

    def acknowledge(self, received: int) -> None:
        """The other end has so many frames."""
        outbox = self._outbox

        def acknowledge() -> None:
            if received <= outbox.sent:
                outbox.ack(received)
            else:
                self._detach()  # it counts wrong, which resuming finds out

        self.submit(acknowledge)

    # --------------------------------------------------------------------- from who connects

    def attach(
        self, connection: socket.socket, received: int, calls: Mapping[int, PendingCall]
    ) -> None:
        """Go on with this connection.

        Args:
            connection: The socket.
            received: Frames that the other end has.
            calls: Those that are pending: from now on they may have reached the other end.

        Raises:
            ConnectionAbortedError: Nothing is to be sent any more.
            ProtocolError: The other end has what was never sent, or lacks what is gone.
        """
        with self._lock:
            if self._end is not None:
                raise ConnectionAbortedError("the stream has ended meanwhile")
            self._backlog.clear()
            for parts in self._outbox.after(received):
                self._backlog.extend(map(memoryview, parts))
            for call in list(calls.values()):
                call.was_written = True
            self._socket = connection
            self._kick_if_busy()
        self._settle()

    def restart(self, calls: Mapping[int, PendingCall]) -> None:
        """Forget all that was sent, but for these calls, which a new end is to get from scratch."""
        with self._lock:
            self._forget()
            for call in list(calls.values()):
                if call.opening is None:
                    continue  # still to be admitted
                self._outbox.keep(call.opening.parts)
                if call.upload is not None:
                    call.upload.rewind()
                    self._uploads.begin(call.upload)

    def detach(self) -> None:
        """The connection is gone; what is sent from now on waits for the next one."""
        with self._lock:
            self._detach()

    def retire(self, end: Exception, *, unless: Callable[[], object] | None = None) -> bool:
        """Never send again: calls that are opened from now on get `end`, at once.

        Args:
            end: Why.
            unless: Asked under the lock; if it returns something true, nothing happens.

        Returns:
            Whether it is so now, or was before.
        """
        with self._lock:
            if self._end is not None:
                return True
            if unless is not None and (unless() or self._operations):
                return False
            self._end = end
            self._detach()
            self._forget()
            self._signals.put(None)
        self._settle()
        return True

    def abandon(self, end: Exception) -> None:
        """Touch neither connection nor lock again, which belong to the process that forked."""
        self._lock = threading.Lock()
        self._socket = None
        self._has_thread = False
        self._end = end
        self._operations.clear()
        self._forget()

    # ------------------------------------------------------------------------- with the lock

    def _settle(self) -> None:
        while self._operations:
            held: list[bool] = []
            try:
                # A signal handler that raises runs between two instructions of Python, never inside
                # this one: so the lock is never held without being noted.
                held.extend(map(self._lock.acquire, _AT_ONCE))
                if not held[0]:
                    return  # its holder looks at the queue after letting go
                self._drain()
            finally:
                if held and held[0]:
                    self._lock.release()

    def _drain(self) -> None:
        operations = self._operations
        buffers: list[Buffer] = []
        opened: list[PendingCall] = []
        is_sent = True
        try:
            while operations:
                operation = operations[0]
                if type(operation) is Frame:
                    self._admit(operation, buffers, opened)
                else:
                    operation()  # type: ignore[operator]  # no Frame
                operations.popleft()
            if buffers:
                is_sent = self._write(buffers)
        except BaseException:
            # A signal handler raised: what of it was written is unknown, and found out by resuming.
            if operations and self._is_kept(operations[0]):
                operations.popleft()
            self._detach()
            raise
        finally:
            for call in opened:
                call.was_written = is_sent

    def _is_kept(self, operation: Frame | Callable[[], None]) -> bool:
        return isinstance(operation, Frame) and self._outbox.last is operation.parts

    def _admit(self, frame: Frame, buffers: list[Buffer], opened: list[PendingCall]) -> None:
        call = frame.call
        if self._end is not None:
            if call is not None:
                call.lose(self._end)
            return
        if frame.is_counted:
            self._outbox.keep(frame.parts)
        if self._socket is not None:
            buffers += frame.parts
        if call is not None:
            call.opening = frame
            if self._socket is not None:
                opened.append(call)
            if call.upload is not None:
                self._uploads.begin(call.upload)
                self._kick_if_busy()

    def _write(self, buffers: list[Buffer]) -> bool:
        """Write now or later; false when nothing of it can have been written."""
        if self._socket is None:
            return False
        if self._backlog:
            self._backlog.extend(map(memoryview, buffers))
            return True
        if len(buffers) > 1 and sum(map(len, buffers)) <= JOINED:
            buffers = [b"".join(buffers)]
        if len(buffers) == 1:
            try:
                sent = self._socket.send(buffers[0], _FLAGS)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._detach()
                return False
            if sent == len(buffers[0]):
                return True
            self._backlog.append(memoryview(buffers[0])[sent:])
        else:
            self._backlog.extend(map(memoryview, buffers))
            if self._flush():
                return True
        self._kick()
        return True

    def _flush(self) -> bool:
        """Write what waits; whether all of it is written."""
        backlog = self._backlog
        while backlog and self._socket is not None:
            batch = [backlog[index] for index in range(min(len(backlog), _BATCH))]
            try:
                sent = self._socket.sendmsg(batch, (), _FLAGS)
            except BlockingIOError:
                return False
            except OSError:
                self._detach()
                return True
            while sent:
                first = backlog[0]
                if sent < len(first):
                    backlog[0] = first[sent:]
                    break
                sent -= len(first)
                backlog.popleft()
        return not backlog

    def _forget(self) -> None:
        self._backlog.clear()
        self._uploads.clear()
        self._outbox = Outbox()

    def _detach(self) -> None:
        connection, self._socket = self._socket, None
        self._backlog.clear()
        if connection is not None:
            try:
                # Whoever reads finds the end of the stream, and connects again.
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    # --------------------------------------------------------------------- the writer thread

    def _kick_if_busy(self) -> None:
        if not self._is_idle:
            self._kick()

    def _kick(self) -> None:
        if self._signals.empty():
            self._signals.put(None)
        if not self._has_thread:
            self._has_thread = True
            # `threading` waits for the start, which a signal handler that raises would break.
            start_new_thread(self._run, ())

    def _run(self) -> None:
        while True:
            with self._lock:
                full = not self._flush()
                if not full:
                    self._send_chunk()
                    full = bool(self._backlog)
                connection = self._socket
                is_idle = self._is_idle
            self._settle()
            if full and connection is not None:
                _wait_for_room(connection)
            elif self._end is not None:
                return
            elif is_idle:
                try:
                    self._signals.get(timeout=_LINGER)
                except Empty:
                    with self._lock:
                        if self._signals.empty() and self._is_idle:
                            self._has_thread = False
                            return

    @property
    def _is_idle(self) -> bool:
        return self._socket is None or not (self._backlog or self._uploads.has_ready)

    def _send_chunk(self) -> None:
        if self._socket is None or not self._uploads.has_ready:
            return
        upload = self._uploads.next()
        pieces = upload.take()
        size = sum(map(len, pieces))
        parts = message(frames.pack_header(frames.Kind.DATA, upload.number), pieces, size)
        upload.frames = self._outbox.keep(parts)
        self._backlog.extend(map(memoryview, parts))
        self._flush()
        self._uploads.end_turn(upload)


def _wait_for_room(connection: socket.socket) -> None:
    waiter = select.poll()
    try:
        waiter.register(connection.fileno(), select.POLLOUT)
    except ValueError:  # closed meanwhile
        return
    waiter.poll(_ROOM_WAIT)
