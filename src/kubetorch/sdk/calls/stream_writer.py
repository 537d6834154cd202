"""The calls that are under way on a stream, and its writing end, on which no caller waits.

    any thread ── operations ──┐
                               ├── drained by the holder of the lock ── socket
    large payloads ── chunks ──┘

A `PendingCall` is one call on one stream: its frames, its payload out, its value in. Frames go into
a queue, and the thread that gets the lock writes all of them, those of other threads, too: so no
caller waits for another caller's bytes, and small frames of many callers travel together. Writing
never blocks. When the kernel has no room, or a payload is longer than a frame, a writer thread goes
on; it exists only while there is something to write.
"""

from __future__ import annotations

import select
import socket
import threading
from _queue import Empty, SimpleQueue
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from kubetorch.errors import CallLostError, ProtocolError
from kubetorch.lib import memory_files, websocket_protocol
from kubetorch.lib.memory_files import FileSocket, MemoryFile
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import codecs, frames
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Kind, Outbox

_CHUNK_BYTES = wire_tuning.LIMITS.chunk_bytes
_JOINED_BYTES = LIMITS.joined_message_bytes

Buffer = bytes | bytearray | memoryview


class OutgoingFile(NamedTuple):
    """A memory file that is sent right before the frame that names its number.

    Attributes:
        on_unsent: Called if the file cannot be sent, so that the frame is not sent either.
    """

    socket: FileSocket
    number: int
    file: MemoryFile
    on_unsent: Callable[[], object]

    def send(self) -> bool:
        is_sent = self.socket.send(self.number, self.file)
        self.file.release()
        if not is_sent:
            self.on_unsent()
        return is_sent


class Frame:
    __slots__ = ("call", "file", "is_counted", "parts")

    def __init__(
        self,
        parts: Sequence[Buffer],
        *,
        is_counted: bool = True,
        call: PendingCall | None = None,
        file: OutgoingFile | None = None,
    ) -> None:
        self.parts = parts
        self.is_counted = is_counted
        self.call = call
        self.file = file


def message(head: bytes, pieces: Sequence[Buffer] = (), size: int = 0) -> Sequence[Buffer]:
    """The buffers of a binary message: a frame's header and meta, and `size` bytes of payload."""
    size += len(head)
    start = websocket_protocol.frame_header(websocket_protocol.BINARY, size, masked=True) + head
    if not pieces:
        return (start,)
    return (b"".join((start, *pieces)),) if size <= _JOINED_BYTES else (start, *pieces)


def control(opcode: int, payload: bytes = b"") -> Frame:
    """A PING, PONG or CLOSE frame of the WebSocket itself."""
    header = websocket_protocol.frame_header(opcode, len(payload), masked=True)
    return Frame((header + payload,), is_counted=False)


def credit(call: int, size: int) -> Frame:
    """Room for so many more bytes of payload of a call."""
    return Frame(message(frames.encode(frames.Kind.CREDIT, call, frames.Credit(size))))


#: Pieces of one chunk that go to the kernel as they are; more are joined first.
_PIECES = 64


class Upload:
    """The payload of one OPEN frame that is longer than a chunk."""

    def __init__(self, number: int, segments: Sequence[codecs.Segment], total: int) -> None:
        #: The number of frames of the stream up to the last chunk of this payload.
        self.frames = 0
        self.number = number
        self._segments = segments
        self._total = total
        self.rewind()

    def rewind(self) -> None:
        """Send all of it once more: the end that received the first bytes is gone."""
        self._pieces: Iterator[Buffer] = iter(codecs.join(self._segments))
        self._piece = memoryview(b"")
        self._remaining_bytes = self._total
        self._room_bytes = wire_tuning.LIMITS.window_bytes

    def forget(self) -> None:
        """Release the user's memory."""
        self._segments = ()
        self._pieces = iter(())
        self._piece = memoryview(b"")

    @property
    def is_done(self) -> bool:
        return self._remaining_bytes == 0

    @property
    def can_send(self) -> bool:
        """True if there is room for the next chunk."""
        return self._remaining_bytes > 0 and self._room_bytes >= min(
            _CHUNK_BYTES, self._remaining_bytes
        )

    def grant(self, size: int) -> None:
        self._room_bytes += size

    def take_chunk(self) -> list[Buffer]:
        missing_bytes = min(_CHUNK_BYTES, self._remaining_bytes)
        self._remaining_bytes -= missing_bytes
        self._room_bytes -= missing_bytes
        parts: list[Buffer] = []
        while missing_bytes:
            if not self._piece:
                self._piece = memoryview(next(self._pieces))
                continue
            part, self._piece = self._piece[:missing_bytes], self._piece[missing_bytes:]
            parts.append(part)
            missing_bytes -= len(part)
        return parts if len(parts) <= _PIECES else [b"".join(parts)]


class Uploads:
    """The payloads that a stream sends; those for which the other end has room take turns."""

    def __init__(self) -> None:
        self._by_number: dict[int, Upload] = {}
        self._ready: deque[Upload] = deque()

    @property
    def has_ready(self) -> bool:
        """True if a chunk can be taken."""
        return bool(self._ready)

    def begin(self, upload: Upload) -> None:
        self._by_number[upload.number] = upload
        self._ready.append(upload)

    def grant(self, number: int, size: int) -> None:
        """The other end has room for so many more bytes of this payload."""
        upload = self._by_number.get(number)
        if upload is not None:
            was_ready = upload.can_send
            upload.grant(size)
            if upload.can_send and not was_ready:
                self._ready.append(upload)

    def drop(self, number: int) -> None:
        """Send nothing more of this payload."""
        upload = self._by_number.pop(number, None)
        if upload is not None:
            if upload.can_send:
                self._ready.remove(upload)
            upload.forget()

    def next(self) -> Upload:
        """The payload whose turn it is; `end_turn` is to follow."""
        return self._ready.popleft()

    def end_turn(self, upload: Upload) -> None:
        if upload.can_send:
            self._ready.append(upload)
        elif upload.is_done:
            del self._by_number[upload.number]

    def clear(self) -> None:
        """Forget them all; a payload may begin again."""
        self._by_number.clear()
        self._ready.clear()


#: Kinds of events without a frame: the stream lost the call, the deadline of the call passed.
LOST, EXPIRED = -1, -2

#: Bytes of room that are granted together.
GRANT = wire_tuning.LIMITS.window_bytes // 4
_WITHHELD_BYTES = wire_tuning.LIMITS.withheld_bytes


class Event(NamedTuple):
    call: PendingCall
    kind: int
    meta: Any
    payload: Buffer | None
    weight: int


class PendingCall:
    # Defaults lie in the class: most calls are short, and every assignment costs.
    opening: Frame | None = None
    upload: Upload | None = None
    #: Bytes of the memory file that has its arguments.
    file_bytes = 0
    #: True if it was cancelled before it was opened.
    is_withdrawn = False
    was_written = False
    is_abandoned = False
    reports: deque[frames.Progress] | None = None
    _buffer: memoryview | None = None
    _filled = 0
    _kind = 0
    _meta: Any = None
    # Bytes that are not granted again yet: received ones, and ones that the program took.
    _granting = 0
    _taken = 0

    def __init__(self, number: int, deliver: Callable[[Event], None]) -> None:
        self.number = number
        self.deliver = deliver

    # ---------------------------------------------------------------------- the reading thread

    def begin(self, kind: int, meta: frames.Result | frames.Yield, payload: memoryview) -> bool:
        """Begin the value of a RESULT or YIELD frame; true if it is complete.

        The payload of a frame is copied, that in a memory file is the caller's.
        """
        total = meta.body.total
        if len(payload) == total:
            if not self.is_abandoned:
                value = payload if meta.file else bytearray(payload)
                self.deliver(Event(self, kind, meta, value, min(total, _WITHHELD_BYTES)))
            return True
        if payload or total <= 0:
            raise ProtocolError(f"a frame with {len(payload)} of {total} bytes of payload")
        self._kind, self._meta, self._filled = kind, meta, 0
        self._buffer = _allocate(total)
        return False

    def next_memory(self, size: int) -> memoryview | None:
        """The memory for the next bytes of payload; `None` without memory for them."""
        buffer = self._buffer
        if buffer is None and self.is_abandoned:
            return None
        if buffer is None or self._filled + size > len(buffer):
            raise ProtocolError(f"{size} bytes of payload that do not belong to a value")
        return buffer[self._filled : self._filled + size]

    def note_received(self, size: int) -> tuple[bool, int]:
        """Note received bytes; returns whether the value is complete, and the bytes to grant."""
        if self._buffer is None:
            return False, 0
        withheld_bytes = 0 if self._kind == Kind.RESULT else min(_WITHHELD_BYTES, len(self._buffer))
        before = max(self._filled, withheld_bytes)
        self._filled += size
        self._granting += max(self._filled - before, 0)
        grant = 0
        if self._granting >= GRANT:
            grant, self._granting = self._granting, 0
        if self._filled < len(self._buffer):
            return False, grant
        buffer, self._buffer = self._buffer, None
        if not self.is_abandoned:
            self.deliver(Event(self, self._kind, self._meta, buffer, withheld_bytes))
        self._meta = None
        return True, grant

    @property
    def is_result(self) -> bool:
        """True if the value that is being received is the result."""
        return self._kind == Kind.RESULT

    def report(self, progress: frames.Progress) -> None:
        if self.is_abandoned:
            return
        if self.reports is None:
            self.reports = deque(maxlen=LIMITS.progress_reports)
        # A full queue drops its oldest report, whose event then stands for the next one.
        is_full = len(self.reports) == LIMITS.progress_reports
        self.reports.append(progress)
        if not is_full:
            self.deliver(Event(self, Kind.PROGRESS, None, None, 0))

    def lose(self, error: Exception) -> None:
        """The stream will not receive the end of the call."""
        if not self.is_abandoned:
            self.deliver(Event(self, LOST, error, None, 0))

    # ------------------------------------------------------------------------------- the owner

    def note_taken(self, weight: int) -> int:
        """The program took an event of this weight; returns the bytes to grant."""
        self._taken += weight
        if self._taken < GRANT:
            return 0
        grant, self._taken = self._taken, 0
        return grant


def _allocate(size: int) -> memoryview:
    if size < LIMITS.mapped_payload_bytes:
        return memoryview(bytearray(size))
    try:
        return memoryview(memory_files.anonymous(size))
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for a value of {size} bytes") from error


_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
#: Buffers that one system call takes.
_BATCH = 512

#: Arguments of a lock's `acquire` that does not wait.
AT_ONCE = (False,)


class Sender:
    """Writes the frames of one stream, in order, on the connection that it has at the time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: deque[Frame | Callable[[], None]] = deque()
        self._outbox = Outbox()
        self._socket: socket.socket | None = None
        #: Bytes that the kernel had no room for.
        self._backlog: deque[memoryview] = deque()
        self._uploads = Uploads()
        self._has_thread = False
        #: Wakes the writer thread.
        self._signals: SimpleQueue[None] = SimpleQueue()
        #: The error of all calls, once the stream sends nothing more.
        self._end: Exception | None = None

    @property
    def is_retired(self) -> bool:
        return self._end is not None

    @property
    def is_detached(self) -> bool:
        """True without a connection to write on."""
        return self._socket is None

    # --------------------------------------------------------------------- from any thread

    def submit(self, operation: Frame | Callable[[], None]) -> None:
        """Send a frame, or run an operation between two frames. Never blocks."""
        self._operations.append(operation)
        self._settle()

    def grant(self, number: int, size: int) -> None:
        def grant() -> None:
            self._uploads.grant(number, size)
            self._kick_if_busy()

        self.submit(grant)

    def cancel(self, call: PendingCall, frame: Frame, on_unsent: Callable[[], object]) -> None:
        """Send no more payload of a call, but a frame that cancels the call."""

        def cancel() -> None:
            # The frame that opens the call was queued before this, if at all.
            if call.opening is None:
                call.is_withdrawn = True
                on_unsent()
                return
            self._uploads.drop(call.number)
            self._operations.append(frame)

        self.submit(cancel)

    def drop_upload(self, number: int) -> None:
        self.submit(lambda: self._uploads.drop(number))

    def release(self, upload: Upload) -> None:
        """The call has a result: send no more of its payload, and let go of the user's memory.

        All of the payload has arrived, unless the call was one that the pod ran already.
        """
        outbox = self._outbox

        def release() -> None:
            if upload.is_done and outbox is self._outbox:
                outbox.ack(upload.frames)
            self._uploads.drop(upload.number)
            upload.forget()

        self.submit(release)

    def acknowledge(self, received: int) -> None:
        outbox = self._outbox

        def acknowledge() -> None:
            if received <= outbox.sent:
                outbox.ack(received)
            else:
                self._detach()  # the other end counts wrong, which resuming will show

        self.submit(acknowledge)

    # ------------------------------------------------------------ from the thread that connects

    def attach(
        self, connection: socket.socket, received: int, calls: Mapping[int, PendingCall]
    ) -> None:
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

    def restart(self, calls: MutableMapping[int, PendingCall]) -> None:
        """Forget all sent frames, but send these calls from their beginning to a new end.

        Calls whose arguments went to the former end in memory files are lost unsent, so that their
        callers make them again.
        """
        with self._lock:
            self._forget()
            for call in list(calls.values()):
                if call.opening is None:
                    continue  # still to be admitted
                if call.file_bytes:
                    calls.pop(call.number, None)
                    call.lose(_unsent())
                    continue
                self._outbox.keep(call.opening.parts)
                if call.upload is not None:
                    call.upload.rewind()
                    self._uploads.begin(call.upload)

    def detach(self) -> None:
        """The connection is gone; frames wait for the next one."""
        with self._lock:
            self._detach()

    def retire(self, end: Exception, *, unless: Callable[[], object] | None = None) -> bool:
        """Never send again: calls that are opened from now on get `end`, at once."""
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
            acquisitions: list[bool] = []
            try:
                # A signal handler that raises runs between two instructions of Python, never inside
                # this one: so the lock is never held without being noted.
                acquisitions.extend(map(self._lock.acquire, AT_ONCE))
                if not acquisitions[0]:
                    return  # its holder looks at the queue after letting go
                self._drain()
            finally:
                if acquisitions and acquisitions[0]:
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
            # A signal handler raised: resuming will show which bytes were written.
            first = operations[0] if operations else None
            if isinstance(first, Frame) and self._outbox.last is first.parts:
                operations.popleft()
            self._detach()
            raise
        finally:
            for call in opened:
                call.was_written = is_sent

    def _admit(self, frame: Frame, buffers: list[Buffer], opened: list[PendingCall]) -> None:
        call = frame.call
        if self._end is not None:
            if call is not None:
                call.lose(self._end)
            return
        if call is not None and call.is_withdrawn:
            return
        if frame.file is not None and not frame.file.send():
            if call is not None:
                call.lose(_unsent())
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
        """Write the buffers now or later; false if none of their bytes can have been written."""
        if self._socket is None:
            return False
        if self._backlog:
            self._backlog.extend(map(memoryview, buffers))
            return True
        if len(buffers) > 1 and sum(map(len, buffers)) <= _JOINED_BYTES:
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
        """Write the backlog; true if all of it is written."""
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
                # The reading thread sees the end of the connection, and connects again.
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
                is_full = not self._flush()
                if not is_full:
                    self._send_chunk()
                    is_full = bool(self._backlog)
                connection = self._socket
                is_idle = self._is_idle
            self._settle()
            if is_full and connection is not None:
                _wait_for_room(connection)
            elif self._end is not None:
                return
            elif is_idle:
                try:
                    self._signals.get(timeout=TIMING.writer_idle_seconds)
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
        pieces = upload.take_chunk()
        size = sum(map(len, pieces))
        parts = message(frames.pack_header(frames.Kind.DATA, upload.number), pieces, size)
        upload.frames = self._outbox.keep(parts)
        self._backlog.extend(map(memoryview, parts))
        self._flush()
        self._uploads.end_turn(upload)


def _unsent() -> CallLostError:
    return CallLostError("the pod did not take the arguments of the call in a memory file")


def _wait_for_room(connection: socket.socket) -> None:
    waiter = select.poll()
    try:
        waiter.register(connection.fileno(), select.POLLOUT)
    except ValueError:  # closed meanwhile
        return
    waiter.poll(TIMING.writer_room_milliseconds)
