"""Frames between an agent and its worker, on a Unix stream socket.

     0      1          2       4             8           12            20                28
    +------+----------+-------+-------------+-----------+-------------+-----------------+---
    | kind | reserved | flags | meta length | argument  | call number | payload length  | …
    | u8   | u8       | u16   | u32         | u32       | u64         | u64             |
    +------+----------+-------+-------------+-----------+-------------+-----------------+---

Then meta and payload; little-endian. Agent and worker are of one version (the worker is run from
the agent's own files), so nothing here is negotiated.

    agent   LOAD           (CALL | BATCH | CANCEL | GRANT | RELEASE | TRIM | PREEMPT | DUMP
                           | ASK | DEBUG | REFERENCE | DROP)*  STOP
    worker         LOADED | FAILED     (YIELD | PROGRESS | RESULT | ERROR | RELEASE | FORGET
                                        | PREEMPTED | RETURNED | WAITS)*    EXITS?

With LOAD comes the descriptor of the file that the stacks of all threads are written to: at DUMP,
which says in `call` until when (milliseconds of the monotonic clock), or at the signal `STACKS`.

A payload up to `inline_bytes` follows its frame. A longer one lies in a *memory file*, known to
both ends by a number (`argument`, chosen by the end that made the file); its descriptor comes with
the first frame that names it (`DESCRIPTOR`). RELEASE says that this end does not look at a memory
file any more, so its owner may use it again; FORGET that it will never be used again.
A payload that a process of this machine sends the agent, or that it takes from the agent, lies in a
sealed file (`SEALED`, see `kubetorch.lib.memory_files`), which has no number and is used once.

Codec and sizes of a payload's segments (`kubetorch.wire.codecs`) are in `flags` and, when there is
more than one segment, at the beginning of meta. The rest of a CALL's meta is the length of the
method's name (u32, 0xffffffff for none), the name, the length of the chain, the chain
(`kubetorch.wire.frames.Chain`), and the identity of the request, in UTF-8.

Calls that are `IN_LINE` run one after the other. One of them that has not begun comes back, as
RETURNED, when a CANCEL says `UNLESS_BEGUN`.
Calls that are `IN_BATCH` run together once a BATCH names them, as so many numbers (u64); each ends
with a RESULT or ERROR of its own. A CANCEL of one of them interrupts them all.
LOADED has the names of the methods that the event loop runs, and those of batched methods, as JSON.
With an ERROR may come the descriptor of a file that has the value of the call, pickled: one that
could not travel.

REFERENCE has the value of a reference (`kubetorch.wire.references`), with its identity at the end
of meta and a number in `call`, ahead of the first CALL that names it; DROP says that the agent has
it no more.

The agent trusts no worker: user code may write to the socket. A frame that no worker of ours sends
(`Receiver`) ends the worker.

Records in the pipe of output: what tells a call's print from bytes that anything else wrote.

     0        16      17       18          20         24       28          36        44
    +--------+-------+--------+-----------+----------+--------+-----------+---------+------+
    | nonce  | source| flags  | level len | text len | writer | call      | time    | …
    | 16 B   | u8    | u8     | u16       | u32      | u32    | u64       | f64     |
    +--------+-------+--------+-----------+----------+--------+-----------+---------+------+

Then the name of the level and the text, which is a piece of a stream, not a line: lines are put
together by the reader, for each writer (process), call and source. A record has at most `PIPE_BUF`
bytes and is written at once, so the records of several processes never mix. The nonce is the
worker's own, random: output that happens to look like a record of another worker is text.

The worker's end of the socket: frames out from any thread, payloads in and out.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Final, NamedTuple, NoReturn

from kubetorch.errors import ProtocolError, SerializationError
from kubetorch.lib import memory, memory_files, processes
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.memory import Lending, Mappings, Memory
from kubetorch.lib.memory_files import MemoryFile, Share
from kubetorch.pod.user_process.tuning import LIMITS, TIMING
from kubetorch.specs.batching import BatchSpec
from kubetorch.wire import codecs, references
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.references import Content, PlainBytes, SharedBytes

Buffer = bytes | bytearray | memoryview


LOAD: Final = 1
CALL: Final = 2
CANCEL: Final = 3
GRANT: Final = 4
STOP: Final = 5
#: Give the memory of unused memory files back to the system.
TRIM: Final = 6
RELEASE: Final = 7
FORGET: Final = 8
#: The pod is about to end: run the callbacks of user code; PREEMPTED is sent after them.
PREEMPT: Final = 9
#: Write the stacks of all threads.
DUMP: Final = 10
#: Say which calls wait for calls of their own, and for what: WAITS is the answer.
ASK: Final = 11
#: Run calls together.
BATCH: Final = 12
#: Debug a call, whose CALL follows if the argument is 1, else one that runs. Meta is JSON.
DEBUG: Final = 13
REFERENCE: Final = 14
DROP: Final = 15
LOADED: Final = 16
FAILED: Final = 17
RESULT: Final = 18
ERROR: Final = 19
YIELD: Final = 20
PROGRESS: Final = 21
PREEMPTED: Final = 22
#: The code of a call has called `os._exit`.
EXITS: Final = 23
#: A call comes back that has not begun.
RETURNED: Final = 24
#: The calls that calls wait for, by the waiting calls' numbers, as JSON.
WAITS: Final = 25


#: Bytes of meta, and of payload in the stream, that a frame of each kind from a worker may have.
_FROM_WORKER: Final = {
    **dict.fromkeys(
        (RESULT, YIELD), (wire_tuning.LIMITS.segment_sizes_bytes, LIMITS.inline_fallback_bytes)
    ),
    **dict.fromkeys((ERROR, FAILED), (0, wire_tuning.LIMITS.failure_json_bytes)),
    PROGRESS: (0, 8 * LIMITS.progress_message_bytes),
    LOADED: (0, LIMITS.method_names_bytes),
    WAITS: (0, LIMITS.waiting_calls * (6 * LIMITS.waited_call_characters + 50)),
    **dict.fromkeys((RELEASE, FORGET, PREEMPTED, EXITS, RETURNED), (0, 0)),
}

#: The function that `breakpoint()` calls in a pod, which has no terminal, by default.
BREAKPOINT = ("PYTHONBREAKPOINT", "kubetorch.deep_breakpoint")
#: The signal at which a worker that does not read writes the stacks of its threads: one that no
#: library uses. On Linux it is near the end of the real-time signals, on macOS it is SIGINFO.
STACKS: Final[int | None] = (
    signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGINFO", None)
)

_CODECS: Final = (*codecs.CODECS, codecs.VALUES)
_CODEC_NUMBERS: Final = {codec: number for number, codec in enumerate(_CODECS)}
_CODEC_BITS: Final = 0x03
#: Meta begins with the sizes of the segments; else there is one segment.
_SIZES: Final = 0x04
#: The payload lies in the memory file with the number `argument`.
FILE: Final = 0x08
#: A descriptor comes with this frame.
DESCRIPTOR: Final = 0x10
#: RESULT: the call was a generator.
STREAMED: Final = 0x20
#: CALL: other processes look at the memory file too.
SHARED: Final = 0x20
#: CANCEL: because its time is over.
TIMED_OUT: Final = 0x40
#: CALL: it runs when those before it that are in line have ended.
IN_LINE: Final = 0x40
#: CALL: it runs with others, when a BATCH says so.
IN_BATCH: Final = 0x80
#: CANCEL: only if it has not begun.
UNLESS_BEGUN: Final = 0x80
#: RELEASE: the memory file must not be used again.
SPENT: Final = 0x80
#: The payload lies in the sealed file that comes with this frame.
SEALED: Final = 0x100
#: CALL: its values go to a process of this machine, which takes them in sealed files.
TAKES_FILES: Final = 0x200

_HEADER: Final = struct.Struct("<BxHIIQQ")
HEADER_BYTES: Final = _HEADER.size
_COUNT: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<I")
_NO_TEXT: Final = _LENGTH.pack(0xFFFFFFFF)
_EMPTY: Final = _LENGTH.pack(0)
_CHUNK: Final = 64 * 1024
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize
_ANCILLARY: Final = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
# Plain numbers: operations on the enumerations of `socket` cost as much as a system call.
_CLOSE_ON_EXEC: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
NONCE_BYTES: Final = 16
_RECORD_HEADER: Final = struct.Struct("<16sBBHIIQd")
RECORD_HEADER_BYTES: Final = _RECORD_HEADER.size
#: Bytes of a record, header included.
RECORD_LIMIT: Final = min(select.PIPE_BUF, 4096)
STDOUT: Final = 1
STDERR: Final = 2
LOGGER: Final = 3
SOURCES: Final = {STDOUT: "stdout", STDERR: "stderr", LOGGER: "logger"}
#: The last piece: what the stream has of an unfinished line is to be delivered.
END_OF_MESSAGE: Final = 0x01


class Methods(NamedTuple):
    """Methods of what a worker has loaded; `None` stands for the callable itself.

    Attributes:
        on_loop: Those that the event loop runs.
        batched: Those whose calls run together.
    """

    on_loop: frozenset[str | None] = frozenset()
    batched: Mapping[str | None, BatchSpec] = MappingProxyType({})


class Frame(NamedTuple):
    kind: int
    flags: int
    argument: int
    call: int
    meta: bytes
    length: int
    payload: bytearray
    descriptor: int | None


class FrameError(Exception):
    """A frame that no worker sends by itself: user code wrote to the socket."""


def sealed_file(frame: Frame) -> MemoryFile:
    """The sealed file that comes with a frame; `OSError` if its descriptor was lost."""
    if frame.descriptor is None:
        raise memory_files.lost()
    try:
        return MemoryFile.receive(frame.descriptor, frame.length)
    except ProtocolError as error:
        raise FrameError(error.message) from error


# ------------------------------------------------------------------------------- codec and sizes


def pack_sizes(codec: str, sizes: Sequence[int]) -> tuple[int, bytes]:
    """Flags, and what goes before the rest of meta."""
    flags = _CODEC_NUMBERS[codec]
    if len(sizes) == 1:
        return flags, b""
    return flags | _SIZES, struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)


def unpack_sizes(frame: Frame) -> tuple[str, tuple[int, ...], bytes]:
    """Codec, sizes of the segments, rest of meta."""
    codec = _CODECS[frame.flags & _CODEC_BITS]
    if not frame.flags & _SIZES:
        return codec, (frame.length,), frame.meta
    try:
        (count,) = _COUNT.unpack_from(frame.meta)
        end = _COUNT.size + 8 * count
        sizes = struct.unpack_from(f"<{count}Q", frame.meta[:end], _COUNT.size)
    except struct.error as error:
        raise FrameError(f"sizes of segments in {len(frame.meta)} bytes: {error}") from error
    if codecs.layout(sizes)[1] != frame.length:
        raise FrameError(f"a payload of {frame.length} bytes in other segments")
    return codec, sizes, frame.meta[end:]


def unpack_progress(frame: Frame) -> tuple[float, float | None, str | None]:
    """The progress of a call: the current number, the total, the message."""
    try:
        current, total, message = json.loads(frame.payload)
        str.encode(message or "")
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"a report of progress: {error}") from error
    is_number = type(current) is float and isinstance(total, (float, NoneType))
    if not is_number or not isinstance(message, (str, NoneType)):
        raise FrameError("a report of progress of other types")
    return current, total, message


def pack_methods(methods: Methods) -> bytes:
    """The payload of LOADED; without any names if they are too many."""
    batched = [[name, spec.max_size, spec.wait] for name, spec in methods.batched.items()]
    payload = json.dumps([[*methods.on_loop], batched]).encode()
    return payload if len(payload) <= LIMITS.method_names_bytes else b""


def unpack_methods(payload: bytes) -> Methods:
    """The methods in LOADED, which comes from a process that runs the user's code."""
    if not payload:
        return Methods()
    try:
        on_loop, batched = json.loads(payload)
        specs = {_checked_name(name): BatchSpec(size, wait) for name, size, wait in batched}
        return Methods(frozenset(map(_checked_name, on_loop)), specs)
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"names of methods: {error}") from error


def _checked_name(name: object) -> str | None:
    if not isinstance(name, (str, NoneType)):
        raise TypeError(f"a name of type {type(name).__name__}")
    return name


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """The calls in BATCH."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(meta: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(meta) // 8}Q", meta)


def unpack_waits(payload: bytes) -> dict[int, str]:
    """The calls that calls wait for, by the waiting calls' numbers."""
    try:
        decoded = json.loads(payload)
        waits = {int(number): str.encode(text).decode() for number, text in decoded.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FrameError(f"what calls wait for: {error}") from error
    return {number: text[: LIMITS.waited_call_characters] for number, text in waits.items()}


def pack(
    kind: int,
    call: int = 0,
    *,
    flags: int = 0,
    argument: int = 0,
    meta: bytes = b"",
    length: int = 0,
) -> bytes:
    """Header and meta of a frame."""
    return _HEADER.pack(kind, flags, len(meta), argument, call, length) + meta


def pack_call(
    method: str | None, request_id: str, chain: str, retry_on: Sequence[str] = ()
) -> bytes:
    """Pack method, chain, errors and request; JSON would take longer than the system call."""
    texts = _pack_text(method) + _pack_text(chain) + _pack_text("\n".join(retry_on))
    return texts + request_id.encode(errors="surrogatepass")


def unpack_call(meta: bytes) -> tuple[str | None, str, str, list[str]]:
    """Method, identity of the request, chain, and the errors after which it runs again."""
    method, end = _unpack_text(meta, 0)
    chain, end = _unpack_text(meta, end)
    named, end = _unpack_text(meta, end)
    request_id = meta[end:].decode(errors="surrogatepass")
    return method, request_id, chain or "", named.split("\n") if named else []


def _pack_text(text: str | None) -> bytes:
    if not text:
        return _NO_TEXT if text is None else _EMPTY
    data = text.encode(errors="surrogatepass")
    return _LENGTH.pack(len(data)) + data


def _unpack_text(meta: bytes, start: int) -> tuple[str | None, int]:
    """A text, and where it ends."""
    begin = start + _LENGTH.size
    if meta.startswith(_NO_TEXT, start):
        return None, begin
    end = begin + _LENGTH.unpack_from(meta, start)[0]
    return meta[begin:end].decode(errors="surrogatepass"), end


# ------------------------------------------------------------------------------------- receiving


class _LongPayload(bytearray):
    """The bytes of a long frame, whose end is noticed."""

    __slots__ = ("__weakref__",)


class StreamMemory:
    """The memory of long frames from all workers of a pod, until their payloads are passed on."""

    def __init__(self, limit: int) -> None:
        #: Bytes that the pod may use: no worker has more to send.
        self.limit = limit
        self._used_bytes = 0

    def hold(self, size: int) -> _LongPayload:
        """An empty buffer that counts for so many bytes until it is garbage."""
        if self._used_bytes + size > self.limit:
            raise FrameError(
                f"frames of {self._used_bytes + size} bytes, of a pod that may use {self.limit}"
            )
        self._used_bytes += size
        payload = _LongPayload()
        weakref.finalize(payload, self._free, size).atexit = False
        return payload

    def _free(self, size: int) -> None:
        self._used_bytes -= size


class Receiver:
    """Frames out of the agent's end of a socket.

    A header may claim any length: memory is allocated as the bytes come.
    """

    def __init__(self, sock: socket.socket, stream_memory: StreamMemory) -> None:
        self._socket = sock
        self._stream_memory = stream_memory
        self._buffer = bytearray(_CHUNK)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        self._descriptors: deque[int | None] = deque()
        # A frame that is longer than the buffer, of which `_filled` of `_total` bytes are there.
        self._long: _LongPayload | None = None
        self._filled = self._total = 0

    def receive(self) -> bool:
        """Read the bytes that the socket has. False at its end."""
        if self._long is not None:
            if self._filled == len(self._long):
                self._grow(self._long)
            room = memoryview(self._long)[self._filled :]
        else:
            if self._begin:
                rest = self._end - self._begin
                self._buffer[:rest] = self._buffer[self._begin : self._end]
                self._begin, self._end = 0, rest
            room = self._view[self._end :]
        count, ancillary, flags, _ = self._socket.recvmsg_into([room], _ANCILLARY, _CLOSE_ON_EXEC)
        if ancillary or flags & _TRUNCATED:
            self._descriptors.extend(_descriptors_or_loss(ancillary))
        if self._long is not None:
            self._filled += count
        else:
            self._end += count
        return count > 0

    def next(self) -> Frame | None:
        """The next whole frame of what was received."""
        if self._long is not None:
            return self._next_long(self._long)
        begin = self._begin
        available = self._end - begin
        if available < HEADER_BYTES:
            self._check_descriptors()
            return None
        kind, flags, meta_length, argument, call, length = _HEADER.unpack_from(self._buffer, begin)
        inline = 0 if flags & FILE else length
        self._check(kind, flags, meta_length, length)
        total = HEADER_BYTES + meta_length + inline
        if available < total:
            self._check_descriptors()
            if total > _CHUNK:
                self._long, self._total = self._stream_memory.hold(total), total
                self._long += self._view[begin : self._end]
                self._filled = available
                self._begin = self._end = 0
            return None
        self._begin = begin + total
        if self._begin == self._end:
            self._begin = self._end = 0
        middle = begin + HEADER_BYTES + meta_length
        meta = bytes(self._buffer[begin + HEADER_BYTES : middle]) if meta_length else b""
        payload = self._buffer[middle : middle + inline]
        descriptor = self._descriptor() if flags & DESCRIPTOR else None
        return Frame(kind, flags, argument, call, meta, length, payload, descriptor)

    def close(self) -> None:
        """Free an unfinished frame, and close descriptors that belong to no frame."""
        self._long = None
        for descriptor in self._descriptors:
            if descriptor is not None:
                socket.close(descriptor)
        self._descriptors.clear()

    def _check(self, kind: int, flags: int, meta_length: int, length: int) -> None:
        most_meta, most = _FROM_WORKER.get(kind, (-1, 0))
        is_file = bool(flags & FILE)
        if is_file and kind in (RESULT, YIELD):
            most = self._stream_memory.limit
        elif is_file or (flags & DESCRIPTOR and kind != ERROR):
            most_meta = -1
        if meta_length > most_meta or length > most:
            raise FrameError(f"a frame of kind {kind} that claims {meta_length} and {length} bytes")

    def _check_descriptors(self) -> None:
        if len(self._descriptors) > 1:  # one belongs to the unfinished frame
            raise FrameError("descriptors without a frame")

    def _descriptor(self) -> int | None:
        if not self._descriptors:
            raise FrameError("a frame that announces a descriptor and has none")
        return self._descriptors.popleft()

    def _grow(self, frame: _LongPayload) -> None:
        """Double the room of a frame."""
        frame += bytes(
            min(self._total - len(frame), max(len(frame), LIMITS.long_frame_first_bytes))
        )

    def _next_long(self, frame: _LongPayload) -> Frame | None:
        if self._filled < self._total:
            self._check_descriptors()
            return None
        self._long = None
        kind, flags, meta_length, argument, call, length = _HEADER.unpack_from(frame)
        middle = HEADER_BYTES + meta_length
        meta = bytes(frame[HEADER_BYTES:middle])
        del frame[:middle]
        descriptor = self._descriptor() if flags & DESCRIPTOR else None
        return Frame(kind, flags, argument, call, meta, length, frame, descriptor)


def descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> Sequence[int]:
    """The descriptors that came beside bytes."""
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
    return received


def _descriptors_or_loss(ancillary: Sequence[tuple[int, int, bytes]]) -> Sequence[int | None]:
    # Each frame brings at most one descriptor; one that is announced and not there was lost
    # because this process may not open another.
    return descriptors(ancillary) or (None,)


def rights(*descriptors: int) -> list[tuple[int, int, array.array[int]]]:
    """Ancillary data that sends descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


class Origin(NamedTuple):
    nonce: bytes
    writer: int
    call: int
    source: int
    level: bytes = b""


def pack_record(origin: Origin, text: bytes | memoryview, *, time: float, flags: int = 0) -> bytes:
    nonce, writer, call, source, level = origin
    head = _RECORD_HEADER.pack(nonce, source, flags, len(level), len(text), writer, call, time)
    return b"".join((head, level, text))


def unpack_record(
    data: bytes | bytearray, offset: int
) -> tuple[int, int, int, int, int, int, float]:
    """Source, flags, level length, text length, writer, call, time of the record at `offset`."""
    return _RECORD_HEADER.unpack_from(data, offset)[1:]


#: Buffers that one system call takes; Linux and macOS allow 1024.
_MOST_PARTS = 512


def _waiter(sock: socket.socket) -> Callable[[], object]:
    """A function that waits until the socket can be read.

    On Linux, of several functions only one returns: the first that was made, if it is called at
    that time.
    """
    if sys.platform != "linux":
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll
    epoll = select.epoll()
    epoll.register(sock, select.EPOLLIN | select.EPOLLEXCLUSIVE)
    return lambda: epoll.poll(-1, 1)


class AgentSocket:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._head = memoryview(bytearray(HEADER_BYTES))
        # Descriptors come with the first frame of those that were sent at once.
        self._descriptors: deque[int | None] = deque()
        self._wait = _waiter(sock)
        #: Waits until there is a frame that no thread waits for in `read`.
        self.wait_for_unread = _waiter(sock)
        self._mappings = Mappings()
        self._lending = Lending()
        # The values of references that the agent has, by their numbers.
        self._references: dict[int, Content] = {}
        #: How much memory of callers the process maps; set with LOAD.
        self.share = Share(0)
        #: In the environment of all processes that this one starts; set with LOAD.
        self.marker = ""
        #: Called in the thread that is about to write the end of a call.
        self.before_end: Callable[[], None] = lambda: None
        # A child that user code forks shares the socket: it must neither write to it nor keep it
        # open when this process ends.
        os.register_at_fork(after_in_parent=self._mappings.on_fork, after_in_child=sock.close)

    # ------------------------------------------------------------------------------- receiving

    def read(self) -> Frame:
        """Wait for the next frame, in one thread at a time; end when the agent is gone."""
        while True:
            frame = self._receive()
            if frame is None:
                continue
            if frame.kind == RELEASE:
                with self._lock:
                    is_spent = bool(frame.flags & SPENT)
                    self._lending.take_back(frame.argument, is_spent=is_spent)
            elif frame.kind == FORGET:
                self._mappings.forget(frame.argument)
            elif frame.kind == REFERENCE:
                self._keep_reference(frame)
            elif frame.kind == DROP:
                self._references.pop(frame.call, None)
            elif frame.kind == TRIM:
                memory.trim(lib_tuning.TIMING.idle_memory_file_seconds)
                self._write([])
            else:
                return frame

    def _receive(self) -> Frame | None:
        # Waiting in `recv` instead, this thread would be woken by the agent's reading as well: the
        # peer of a Unix socket is notified that there is room again.
        try:
            self._wait()
        except BaseException:  # noqa: BLE001  # what the user's handler of a signal raised
            traceback.print_exc()
            return None
        try:
            return self._next()
        except (OSError, EOFError):
            self.end()

    def _next(self) -> Frame:
        """Read one frame and no more: as long as there is another, the socket can be read."""
        count, ancillary, flags, _ = self._socket.recvmsg_into(
            [self._head], _ANCILLARY, _CLOSE_ON_EXEC
        )
        if count < HEADER_BYTES:
            self._fill(self._head[count:])
        if ancillary or flags & _TRUNCATED:
            self._descriptors.extend(_descriptors_or_loss(ancillary))
        kind, flags, meta_length, argument, call, length = _HEADER.unpack_from(self._head)
        data = bytearray(meta_length + (0 if flags & FILE else length))
        self._fill(memoryview(data))
        meta = bytes(data[:meta_length])
        descriptor = self._descriptors.popleft() if flags & DESCRIPTOR else None
        return Frame(kind, flags, argument, call, meta, length, data[meta_length:], descriptor)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]

    def _keep_reference(self, frame: Frame) -> None:
        """Keep the value of a reference; without a descriptor, calls report that it lacks."""
        _, sizes, identity = unpack_sizes(frame)
        memory: SharedBytes
        if frame.flags & FILE:
            try:
                memory = sealed_file(frame)
            except OSError:
                return
        else:
            memory = PlainBytes(frame.payload)
        content = Content(identity.decode(), sizes, memory)
        self._references[frame.call] = references.contents.setdefault(content.identity, content)

    def payload(self, frame: Frame) -> Buffer:
        """The payload of a frame; to be called in the order of the frames."""
        if not frame.flags & FILE:
            return frame.payload
        if frame.flags & SEALED:
            return self.share.map(sealed_file(frame))
        is_private = frame.kind == CALL and bool(frame.flags & SHARED)
        return self._mappings.open(
            frame.argument, frame.length, frame.descriptor, is_private=is_private
        )

    # --------------------------------------------------------------------------------- sending

    def send(self, kind: int, call: int = 0, payload: bytes = b"", *, argument: int = 0) -> None:
        """Send a frame with an inline payload."""
        head = pack(kind, call, argument=argument, length=len(payload))
        if kind == ERROR:
            self.before_end()
        self._write([head, payload] if payload else [head])

    def send_failure_with_value(self, call: int, failure: bytes, descriptor: int) -> None:
        """Send the failure of a call whose value lies in a file."""
        head = pack(ERROR, call, flags=DESCRIPTOR, length=len(failure))
        self.before_end()
        self._write([head, failure], descriptor)

    def send_value(
        self,
        kind: int,
        call: int,
        codec: str,
        value: object,
        flags: int = 0,
        *,
        takes_files: bool = False,
    ) -> None:
        segments = _encode(codec, value, "result" if kind == RESULT else "yielded")
        sizes = [len(segment) for segment in segments]
        packed, meta = pack_sizes(codec, sizes)
        flags |= packed
        if len(segments) == 1:
            length = sizes[0]
        else:
            _, length = codecs.layout(sizes)
        file = None
        if takes_files and length > LIMITS.inline_bytes:
            with contextlib.suppress(OSError):
                file = MemoryFile.write(codecs.join(segments), length)
        if file is not None:
            if kind == RESULT:
                self.before_end()
            flags |= FILE | SEALED | DESCRIPTOR
            self._write([pack(kind, call, flags=flags, meta=meta, length=length)], file.descriptor)
            file.release()
            return
        stored = self._store(segments, sizes, length) if length > LIMITS.inline_bytes else None
        if stored is None and length > LIMITS.inline_fallback_bytes:
            raise SerializationError(
                f"no room for a value of {length} bytes: there is no memory or no descriptor left"
            )
        if kind == RESULT:
            self.before_end()
        if stored is not None:
            self._send_memory(kind, call, flags, meta, stored, length)
            return
        head = pack(kind, call, flags=flags, meta=meta, length=length)
        self._write([head, *codecs.join(segments)])

    def _store(
        self, segments: Sequence[codecs.Segment], sizes: Sequence[int], length: int
    ) -> Memory | None:
        """Put a payload into a memory file; `None` when there is no room for one."""
        try:
            stored = memory.allocate(length)
        except OSError:
            return None
        offsets, _ = codecs.layout(sizes)
        try:
            for offset, segment in zip(offsets, segments, strict=True):
                for piece in codecs.join([segment]):
                    stored.write(offset, piece)
                    offset += len(piece)  # behind the piece
        except OSError:
            return None
        return stored

    def _send_memory(
        self, kind: int, call: int, flags: int, meta: bytes, stored: Memory, length: int
    ) -> None:
        with self._lock:
            number, descriptor = self._lending.lend(stored)
            stored.release()
            flags |= FILE | (0 if descriptor is None else DESCRIPTOR)
            head = pack(kind, call, flags=flags, argument=number, meta=meta, length=length)
            self._write_locked([head], descriptor)

    def _write(self, parts: list[Buffer], descriptor: int | None = None) -> None:
        if os.getpid() != self._pid:  # a fork of user code; another thread of its parent may
            os._exit(0)  # have held the lock
        with self._lock:
            self._write_locked(parts, descriptor)

    def _write_locked(self, parts: list[Buffer], descriptor: int | None = None) -> None:
        for number, is_spent in self._mappings.returned():
            flags = SPENT if is_spent else 0
            parts.insert(0, pack(RELEASE, flags=flags, argument=number))
        for number in self._lending.forgotten():
            parts.insert(0, pack(FORGET, argument=number))
        if not parts:
            return
        if len(parts) > _MOST_PARTS:
            parts = [b"".join(parts)]
        try:
            if descriptor is None:
                sent = self._socket.sendmsg(parts)
            else:
                sent = self._socket.sendmsg(parts, rights(descriptor))
            total = sum(map(len, parts))
            if sent < total:
                self._socket.sendall(memoryview(b"".join(parts))[sent:])
        except OSError:
            self.end()

    def report_exit(self, call: int) -> None:
        """Report that a call ends this process. The user's signal handler may have the lock."""
        if os.getpid() != self._pid or not self._lock.acquire(timeout=TIMING.exit_frame_seconds):
            return
        with contextlib.suppress(OSError):
            self._socket.send(pack(EXITS, call))

    def end(self) -> NoReturn:
        """End this process and all that it started: the agent is gone."""
        processes.kill_session(os.getpid(), marker=self.marker)
        os._exit(1)


def _encode(codec: str, value: object, root: str) -> list[codecs.Segment]:
    """As `kubetorch.wire.codecs.encode`; in `none`, raw content keeps its type beside it.

    With `none`, bytes, text, and web responses (whatever has a `body` of bytes) travel as two
    segments: the content, and its content type. All else is JSON, one segment.
    """
    if codec != "none":
        return codecs.encode(codec, value, root)
    if isinstance(value, str):
        return [value.encode(errors="surrogatepass"), b"text/plain; charset=utf-8"]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return [bytes(value), b"application/octet-stream"]
    body = getattr(value, "body", None)
    if isinstance(body, bytes):
        kind = getattr(value, "media_type", None)
        headers = getattr(value, "headers", None)
        with contextlib.suppress(Exception):
            kind = headers["content-type"] if headers else kind
        text = str(kind or "application/octet-stream")
        return [body, text.encode("ascii", "replace")[: LIMITS.content_type_bytes]]
    return codecs.encode(codec, value)
