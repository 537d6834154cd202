"""The client's end of one call stream: a WebSocket to one pod, shared by all callers of a process.

    caller ── start ──► Sender ──► socket ──► agent
    caller ◄── event ── PendingCall ◄── reading thread ◄── socket

There is no event loop: callers write to the socket themselves, and a blocking caller reads for
itself until its call has an answer, unless another thread reads; that saves a switch of threads.
Otherwise the stream's own thread reads: for coroutines, for many callers at once, and while no
caller waits, so that pings are answered and the end of a connection is noticed.

`kubetorch.wire.frames` describes how calls survive a broken connection.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import socket
import threading
import time
from _queue import Empty, SimpleQueue
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from msgspec.structs import replace

from kubetorch.errors import AgentDiedError, CallLostError, KubetorchError, ProtocolError
from kubetorch.lib import processes, websocket_protocol
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.lib.websocket_protocol import UpgradeRefusedError
from kubetorch.sdk.calls.stream_values import StreamFiles, StreamReferences
from kubetorch.sdk.calls.stream_writer import (
    AT_ONCE,
    Buffer,
    Event,
    Frame,
    PendingCall,
    Sender,
    Upload,
    control,
    credit,
    message,
)
from kubetorch.sdk.transport.pod_transport import DIRECT, PodTransport
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import calls, codecs, exceptions, frames, routes, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Inbox, Kind
from kubetorch.wire.references import VALUES, Content, Named

if TYPE_CHECKING:
    from kubetorch.sdk.transport.session import Session
    from kubetorch.wire.messages import PodView, WorkloadView

_CHUNK_BYTES = wire_tuning.LIMITS.chunk_bytes
_META_BYTES = wire_tuning.LIMITS.meta_bytes

# As plain numbers: this runs for every frame.
_DATA, _LOG, _RESULT, _ERROR, _YIELD, _PROGRESS, _ACCEPTED, _QUEUED, _BEGUN = map(
    int,
    (
        Kind.DATA,
        Kind.LOG,
        Kind.RESULT,
        Kind.ERROR,
        Kind.YIELD,
        Kind.PROGRESS,
        Kind.ACCEPTED,
        Kind.QUEUED,
        Kind.BEGUN,
    ),
)
_UNCOUNTED = frozenset(int(kind) for kind in frames.UNCOUNTED)


# ------------------------------------------------------------------------- one connection

#: Longest message that is taken, in bytes.
LONGEST = _CHUNK_BYTES + _META_BYTES + frames.HEADER_BYTES


def dial(
    base: str,
    path: str,
    headers: Mapping[str, str],
    *,
    timeout: float,
    transport: PodTransport = DIRECT,
) -> tuple[socket.socket, bytes]:
    """A blocking socket on which WebSocket frames follow, and their first bytes, read already."""
    parts = urlsplit(base)
    deadline = time.monotonic() + timeout
    sent = {**headers, **transport.headers(base)}
    handshake = websocket_protocol.ClientHandshake(
        sent.pop("Host", parts.netloc), parts.path.rstrip("/") + path, sent.items()
    )
    # The answer may take long, where a pod is made first; connecting to a host does not.
    connection = transport.connect(base, min(timeout, TIMING.stream_connect_seconds))
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


def dial_agent(
    session: Session,
    view: WorkloadView,
    pod: PodView,
    path: str,
    headers: Mapping[str, str] | None = None,
) -> tuple[socket.socket, bytes]:
    """As `dial`, to the agent of a pod, with the token for acts of the workload's owner in it."""
    token = session.own_token(view)
    url = session.address(view, pod)
    if not url:
        raise AgentDiedError(pod.name, "no agent of the pod answers")
    try:
        return dial(
            url,
            path,
            {routes.AUTHORIZATION: f"Bearer {token}", **(headers or {})},
            timeout=TIMING.shell_accept_seconds,
            transport=session.transport,
        )
    except UpgradeRefusedError as error:
        raise exceptions.rebuild(exceptions.parse_json(error.body)) from error


def _receive(
    connection: socket.socket, deadline: float, handshake: websocket_protocol.ClientHandshake
) -> bytes:
    seconds_left = deadline - time.monotonic()
    try:
        if seconds_left <= 0:
            raise TimeoutError("the server did not answer in time")
        connection.settimeout(seconds_left)
        return connection.recv(65536)
    except OSError:
        if handshake.is_refused:
            return b""  # the received part of the refusal is enough
        raise


class SpinHistory:
    """Decides if staying awake is worth it, judged by earlier waits.

    A wait that stayed awake in vain doubles the number of waits that sleep at once from then on, a
    successful one halves it. So long calls cost next to nothing, and so do calls on a busy machine.
    """

    def __init__(self) -> None:
        self._penalty = 0
        self._asleep = 0

    def is_favourable(self) -> bool:
        """True if this wait is to stay awake; to be called once for each wait."""
        if not self._asleep:
            return True
        self._asleep -= 1
        return False

    def learn(self, *, was_in_vain: bool) -> None:
        if was_in_vain:
            self._penalty = min(2 * self._penalty + 1, LIMITS.sleeping_waits)
            self._asleep = self._penalty
        else:
            self._penalty >>= 1


class Poller:
    """Waits until a socket can be read.

    A small call to a pod near by takes hardly longer than the kernel takes to wake the processes on
    its way: tens of µs each, more on an idle core. A caller that stays awake need not be woken, and
    keeps its core from idling. Other processes that want the core go first (`sched_yield`). One
    thread of a program at a time stays awake, since threads share the interpreter's lock.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._history = SpinHistory()

    def wait(self, timeout: float, *, may_stay_awake: bool) -> bool:
        """True if there are bytes to read within `timeout` seconds."""
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
        end = perf_counter() + min(TIMING.reader_awake_seconds, timeout)
        while not self._poll.poll(0):
            if perf_counter() >= end:
                return False
            os.sched_yield()
        return True


@functools.cache
def _has_room() -> bool:
    """True if the answering process can run at the same time, and has a share of the time left."""
    return len(processes.usable()) > 1 and processes.quota() >= 1


#: Held by the thread that stays awake. A child that is forked meanwhile never stays awake.
_turn = threading.Lock()


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
        self._last_received = self._pinged = time.monotonic()
        self.is_waiting = False

    def begin(self, rest: bytes, is_done: Callable[[], bool], *, timeout: float) -> None:
        """Read until `is_done`."""
        self._connection.settimeout(timeout)
        self._parser.feed(rest)
        while not is_done():
            size = self._connection.recv_into(self._parser.get_buffer())
            self._parse(size)
        self._connection.settimeout(None)

    def read(self, timeout: float, *, may_stay_awake: bool = False) -> None:
        """Read the bytes that have arrived, or arrive in time."""
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
        self._last_received = time.monotonic()
        self._parse(size)

    def was_closed(self) -> bool:
        """True if the peer closed the connection and has sent nothing for a while."""
        if time.monotonic() - self._last_received < TIMING.live_peer_seconds:
            return False
        try:
            return not self._connection.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._connection.close()

    def _parse(self, size: int) -> None:
        if not size:
            raise ConnectionResetError("the agent closed the connection")
        self._parser.advance(size)

    def _check_silence(self) -> None:
        now = time.monotonic()
        silence = now - self._last_received
        if silence >= 2 * self._ping_after:
            raise TimeoutError(f"the agent has been silent for {silence:.0f} s")
        if now - max(self._last_received, self._pinged) >= self._ping_after:
            self._pinged = now
            self._ping()


# ------------------------------------------------------------------------- what arrives on it


class Incoming:
    """The `kubetorch.lib.websocket_protocol.Handler` of a stream."""

    def __init__(self, sender: Sender, stream: Stream) -> None:
        self.calls: dict[int, PendingCall] = {}
        self.inbox = Inbox()
        #: True if a large value has just become complete, which is acknowledged at once.
        self._is_due = False
        self._sender = sender
        self._stream = stream

    # ------------------------------------------------------------------------------- messages

    def on_message(self, opcode: int, payload: memoryview) -> None:
        if opcode != websocket_protocol.BINARY:
            raise ProtocolError(f"a message of text: {bytes(payload[:80])!r}")
        kind, number, meta, rest = frames.split(payload)
        self._dispatch(kind, number, meta, rest)
        if kind not in _UNCOUNTED and (self.inbox.count(len(payload)) or self._is_due):
            self._acknowledge()

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        call = self.calls.get(number)
        if kind != _DATA or meta_length or call is None:
            return None
        return call.next_memory(length - len(head))

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        if meta_length > (0 if kind == _DATA else min(len(rest), _META_BYTES)):
            raise ProtocolError(f"a frame of {len(rest)} bytes claims {meta_length} of meta")
        call = self.calls.get(number)
        if kind != _DATA:
            self._dispatch(kind, number, rest[:meta_length], rest[meta_length:])
        elif call is not None:
            self._note_received(call, len(rest))
        size = len(head) + len(rest)
        if kind not in _UNCOUNTED and (self.inbox.count(size) or self._is_due):
            self._acknowledge()

    def on_control(self, opcode: int, payload: bytes) -> None:
        if opcode == websocket_protocol.PING:
            self._sender.submit(control(websocket_protocol.PONG, payload))
        elif opcode == websocket_protocol.CLOSE:
            code, reason = websocket_protocol.parse_close(payload)
            raise ConnectionResetError(f"the agent closed the connection ({code}): {reason}")

    # --------------------------------------------------------------------------------- frames

    def _dispatch(self, kind: int, number: int, meta: memoryview, payload: memoryview) -> None:
        call = self.calls.get(number)
        if call is None:
            self._control(kind, number, meta)
        elif kind in (_RESULT, _YIELD):
            self._value(call, kind, meta, payload)
        elif kind == _ERROR:
            if not call.is_abandoned:
                call.deliver(Event(call, kind, None, bytes(payload), 0))
            self._end(call)
        elif kind == _LOG:
            if not call.is_abandoned:
                call.deliver(Event(call, kind, frames.decode_meta(kind, meta), None, len(meta)))
        elif kind == _DATA:
            memory = call.next_memory(len(payload))
            if memory is not None:
                memory[:] = payload
                self._note_received(call, len(payload))
        elif kind in (_ACCEPTED, _QUEUED, _BEGUN):
            self._report_state(call, kind)
        elif kind == _PROGRESS:
            report: Any = frames.decode_meta(kind, meta)
            call.report(report)
        else:
            self._control(kind, number, meta)

    def _value(self, call: PendingCall, kind: int, meta: memoryview, payload: memoryview) -> None:
        described: Any = frames.decode_meta(kind, meta)
        try:
            if described.file:
                payload = self._stream.files.take(described.file, described.body.total)
            is_over = call.begin(kind, described, payload) and kind == _RESULT
        except (MemoryError, OSError) as error:
            call.lose(_untaken(error, described.body.total))
            self._stream.cancel(call, "the caller has no memory for the value")
            is_over = kind == _RESULT
        if is_over:
            self._release(call)
            self._end(call)

    def _report_state(self, call: PendingCall, kind: int) -> None:
        """Report that a call was accepted, was queued or has begun."""
        if kind == _ACCEPTED:
            self._release(call)
        if not call.is_abandoned:
            call.deliver(Event(call, kind, None, None, 0))

    def _control(self, kind: int, number: int, meta: memoryview) -> None:
        decoded: Any = frames.decode_meta(kind, meta)
        if kind == Kind.CREDIT:
            self._sender.grant(number, decoded.bytes)
        elif kind == Kind.ACK:
            self._sender.acknowledge(decoded.frames)
        elif kind == Kind.GOAWAY:
            self._stream.on_goaway()
        elif kind == Kind.WELCOME:
            self._stream.on_welcome(decoded)
        elif kind in (_RESULT, _YIELD):  # of a call that was given up
            if decoded.file:
                with contextlib.suppress(OSError):
                    self._stream.files.take(decoded.file, decoded.body.total)
        elif kind not in frames.KINDS:
            raise ProtocolError(f"a frame of unknown kind {kind}")

    def _note_received(self, call: PendingCall, size: int) -> None:
        is_whole, grant = call.note_received(size)
        # The agent keeps the value until it is acknowledged, so this does not wait for more frames.
        self._is_due = is_whole
        if is_whole and call.is_result:
            self._release(call)
            self._end(call)
        elif grant:
            self._sender.submit(credit(call.number, grant))

    def _release(self, call: PendingCall) -> None:
        if call.upload is not None:
            self._sender.release(call.upload)

    def _end(self, call: PendingCall) -> None:
        self.calls.pop(call.number, None)
        if call.upload is not None:
            # A refused call does not need the rest of its arguments.
            self._sender.drop_upload(call.number)

    def _acknowledge(self) -> None:
        self._is_due = False
        meta = frames.Ack(self.inbox.acknowledged())
        self._sender.submit(Frame(message(frames.encode(Kind.ACK, 0, meta)), is_counted=False))


def _untaken(error: MemoryError | OSError, size: int) -> Exception:
    """The error of a call whose value came and cannot be taken."""
    if isinstance(error, MemoryError):
        return error
    return KubetorchError(
        f"a value of {size} bytes came that this program cannot take: {error}",
        hint="ulimit -n says how many files it may have open; arrays that it keeps may be files",
    )


# ---------------------------------------------------------------------------------- the stream


_T = TypeVar("_T")


def _opening(
    call: PendingCall, meta: frames.Open | frames.Attach, segments: Sequence[codecs.Segment]
) -> Frame:
    """The frame that opens a call; arguments that are longer than a chunk follow it."""
    pieces: Sequence[Buffer] = ()
    size = 0
    kind = Kind.ATTACH
    if type(meta) is frames.Open:
        kind = Kind.OPEN
        size = meta.body.total
        if size > _CHUNK_BYTES:
            call.upload = Upload(call.number, segments, size)
            size = 0
        else:
            pieces = list(codecs.join(segments))
    return Frame(message(frames.encode(kind, call.number, meta), pieces, size), call=call)


class Stream:
    """Calls on one connection after the other to the agent of one pod.

    A stream that `is_single` is closed with its only call.
    """

    def __init__(
        self,
        reconnect: Callable[[Stream], None],
        *,
        ping_after: float = TIMING.stream_ping_seconds,
        is_single: bool = False,
    ) -> None:
        self.is_single = is_single
        self.id = os.urandom(16).hex()
        #: The header that opened the connection, and the memory files beside it.
        self.authorization = ""
        self.files = StreamFiles()
        self.accepts_calls = False
        self.pod = ""
        self.incarnation = ""
        #: The number of calls that the pod reported, those of other programs included, and when.
        self._load, self._load_said = 0, 0.0
        self._reconnect = reconnect
        self._ping_after = ping_after
        self._numbers = itertools.count(1)
        self._sender = Sender()
        self.references = StreamReferences(self._send_reference, self._sender.submit)
        self._incoming = Incoming(self._sender, self)
        self.calls = self._incoming.calls
        self._link: Link | None = None
        self._is_closing = False
        #: A connection without a WELCOME of the agent yet.
        self._candidate: socket.socket | None = None
        self._has_thread = False
        #: Held by the thread that reads.
        self._reading = threading.Lock()
        self._turns = 0
        self._has_waiting_caller = False
        self._wake: SimpleQueue[None] = SimpleQueue()

    # --------------------------------------------------------------------------------- callers

    @property
    def load(self) -> int:
        """The number of calls that the pod has, as far as is known."""
        own_calls = len(self.calls)
        is_known = time.monotonic() - self._load_said < TIMING.pod_load_seconds
        return max(own_calls, self._load) if is_known else own_calls

    def note_load(self, calls: int) -> None:
        """Note the number of calls that the pod reported."""
        self._load, self._load_said = calls, time.monotonic()

    def prepare(self, deliver: Callable[[Event], None]) -> PendingCall:
        """A call that is not opened yet."""
        return PendingCall(next(self._numbers), deliver)

    def start(
        self,
        call: PendingCall,
        meta: frames.Open | frames.Attach,
        segments: Sequence[codecs.Segment] = (),
        *,
        reads: bool = False,
        named: Iterable[Named] = (),
        file: MemoryFile | None = None,
    ) -> None:
        """Open a call, or attach to one. Whatever this raises, the call can be cancelled.

        The stream's own thread reads the answer, unless the caller `reads`. The references among
        its arguments are `named`. The arguments may lie in a `file` already.
        """
        frame = None
        size = meta.body.total if type(meta) is frames.Open else 0
        if size > _CHUNK_BYTES and self.files.can_send(size, self.calls):
            call.file_bytes = size
        else:
            frame = _opening(call, meta, segments)
        link = self._link
        if link is not None and not self._reading.locked() and link.was_closed():
            # No thread read, so none noticed it. Frames that are sent now would be lost.
            self._sender.detach()
        self.calls[call.number] = call
        if named:
            self.references.send_missing(named)
        if frame is not None:
            self._sender.submit(frame)
        elif reads or file is not None or size <= LIMITS.memory_file_at_once_bytes:
            self._start_with_file(call, meta, segments, file)
        else:  # an event loop has more to do
            start_new_thread(self._start_in_thread, (call, meta, segments))
        if not reads:
            self.watch()

    def _start_with_file(
        self,
        call: PendingCall,
        meta: Any,  # noqa: ANN401  # an OPEN's
        segments: Sequence[codecs.Segment],
        file: MemoryFile | None = None,
    ) -> None:
        """Open a call whose arguments go in a memory file, if there is room for it."""

        def on_unsent() -> None:
            self.calls.pop(call.number, None)

        if file is None:
            outgoing = self.files.write(segments, call.file_bytes, on_unsent)
        else:
            outgoing = self.files.share(file, on_unsent)
        if outgoing is None:
            call.file_bytes = 0
            self._sender.submit(_opening(call, meta, segments))
            return
        opening = frames.encode(Kind.OPEN, call.number, replace(meta, file=outgoing.number))
        self._sender.submit(Frame(message(opening), call=call, file=outgoing))

    def _send_reference(self, content: Content, deliver: Callable[[Event], None]) -> None:
        """Send the value of a reference, as the body of an OPEN frame."""
        memory = content.memory
        body = frames.Body(VALUES, content.sizes, memory.size)
        meta = frames.Open(calls.new_call_id(), "", body, reference=content.identity)
        file = memory if isinstance(memory, MemoryFile) else None
        self.start(self.prepare(deliver), meta, [memory.view], reads=True, file=file)

    def _start_in_thread(
        self,
        call: PendingCall,
        meta: Any,  # noqa: ANN401  # an OPEN's
        segments: Sequence[codecs.Segment],
    ) -> None:
        try:
            self._start_with_file(call, meta, segments)
        except BaseException as error:  # noqa: BLE001  # its caller waits in another thread
            if self.calls.pop(call.number, None) is None:
                return
            if not isinstance(error, Exception):
                error = KubetorchError(f"the call could not be sent: {error!r}")
            call.lose(error)

    def watch(self) -> None:
        """Read in the stream's own thread, if no other thread reads."""
        if not self._reading.locked():
            self._wake.put(None)

    def wait(
        self, call: PendingCall, events: SimpleQueue[_T], deadline: float | None = None
    ) -> _T | None:
        """The next event of a call that delivers to `events`; `None` at the deadline."""
        acquisitions: list[bool] = []
        try:
            # See `Sender`: a lock is never held without being noted.
            acquisitions.extend(map(self._reading.acquire, AT_ONCE))
            if acquisitions[0]:
                self._turns += 1
                self._read_until(events, deadline)
            else:
                self._has_waiting_caller = True
        finally:
            if acquisitions and acquisitions[0]:
                self._reading.release()
                if self._link is None or len(self.calls) > (call.number in self.calls):
                    self._wake.put(None)
        if deadline is None:
            return events.get()
        try:
            return events.get(timeout=max(deadline - time.monotonic(), 0.0))
        except Empty:
            return None

    def end_wait(self) -> None:
        """Have the reading thread check its events: the agent answers this ping."""
        self._ping()

    def note_taken(self, event: Event) -> None:
        """Note that the caller has an event; from time to time the agent gets credit for more."""
        grant = event.call.note_taken(event.weight)
        if grant:
            self._sender.submit(credit(event.call.number, grant))

    def cancel(self, call: PendingCall, reason: str = "", *, abandons: bool = True) -> None:
        """Have a call end in its pod; with `abandons` its further events are dropped."""
        if call.is_abandoned or call.number not in self.calls:
            return
        call.is_abandoned = abandons
        meta = frames.Cancel(reason) if reason else frames.Cancel()
        frame = Frame(message(frames.encode(Kind.CANCEL, call.number, meta)))
        self._sender.cancel(call, frame, lambda: self.calls.pop(call.number, None))

    def take_back(self, call: PendingCall) -> None:
        """Have a call refused by its pod, unless it has begun. Any thread may."""
        if call.is_abandoned or self.calls.get(call.number) is not call:
            return
        meta = frames.Cancel(unless_begun=True)
        frame = Frame(message(frames.encode(Kind.CANCEL, call.number, meta)))
        self._sender.submit(frame)

    # ------------------------------------------------------------------------- its life

    @property
    def received(self) -> int:
        """The number of counted frames from this incarnation of the agent."""
        return self._incoming.inbox.received

    @property
    def has_ended(self) -> bool:
        """True if the stream will never have a connection again."""
        return self._is_closing or self._sender.is_retired

    def open(self, connection: socket.socket, rest: bytes, *, timeout: float) -> None:
        """Go on with this connection, a blocking socket that was upgraded."""
        link = Link(connection, self._incoming, self._ping, self._ping_after)
        self._candidate = connection
        try:
            link.begin(rest, lambda: self._candidate is None, timeout=timeout)
        except BaseException:  # Ctrl-C too: the connection has no owner
            self._sender.detach()
            link.close()
            raise
        finally:
            self._candidate = None
        self._link = link
        self.accepts_calls = not self.has_ended
        self._wake.put(None)
        if not self._has_thread:
            self._has_thread = True
            start_new_thread(self._run, ())  # see `Sender`

    def on_welcome(self, welcome: frames.Welcome) -> None:
        """The agent's first frame on a connection."""
        connection, self._candidate = self._candidate, None
        if connection is None:
            raise ProtocolError("a second WELCOME on one connection")
        versions.check(
            welcome.protocol,
            peer="the pod's agent",
            fix_peer=versions.FIX_PODS,
            fix_self=versions.FIX_CLIENT,
        )
        is_known = welcome.incarnation == self.incarnation
        is_resumed = is_known and welcome.resumed
        if not is_resumed:
            self._lose_written(is_known=is_known)
            self.incarnation = welcome.incarnation
            self._incoming.inbox = Inbox()
            self._sender.restart(self.calls)
            self.files.close()
            self.references.forget_all()
        self.pod = welcome.pod
        self._sender.attach(connection, welcome.received if is_known else 0, self.calls)
        if not (is_resumed or self.is_single):
            self.files.open(welcome, self.authorization, self.id)
            if self.has_ended:  # meanwhile, by another thread
                self.files.close()

    def on_goaway(self) -> None:
        """Open no more calls here, as the agent asks; running calls go on."""
        self.accepts_calls = False

    def _lose_written(self, *, is_known: bool) -> None:
        """Fail the calls that were sent to an agent that does not have them any more."""
        for call in list(self.calls.values()):
            if not (call.was_written or call.is_abandoned):
                continue
            del self.calls[call.number]
            if is_known:
                call.lose(
                    CallLostError(
                        f"this program was silent for so long that pod {self.pod} has cancelled "
                        "its calls: the program was stopped, its machine slept, or the network "
                        "was away",
                        hint="a call of fn.spawn(...) goes on without the program; "
                        "kt calls result ID prints its result",
                    )
                )
            else:
                call.lose(AgentDiedError(self.pod, "AgentRestarted"))

    def end(self, error: Exception) -> None:
        """Open no more calls, and fail pending calls with `error`."""
        self.accepts_calls = False
        self._sender.retire(error)
        self.files.close()
        for number in list(self.calls):
            call = self.calls.pop(number, None)
            if call is not None:
                call.lose(error)
        self._disconnect()

    def close(self, error: Exception | None = None) -> None:
        """Close: the agent cancels this client's calls, which end with `error`."""
        if self.calls:
            # A connection that just broke may be made again at once, for the farewell.
            self._wait_while(lambda: self._link is None or self._sender.is_detached)
        # The agent's answer to the farewell is no reason to connect again.
        self._is_closing = True
        self._sender.submit(
            control(
                websocket_protocol.CLOSE,
                websocket_protocol.close_payload(websocket_protocol.NORMAL),
            )
        )
        self._wake.put(None)
        if self.calls and error is None:
            # To close a socket that has bytes to read resets the connection. The agent would lose
            # what it has not read, such as the cancellations of calls, and wait for this client.
            self._wait_while(lambda: self._link is not None)
        self.end(error or CallLostError("the connection was closed by this program"))

    def _wait_while(self, is_open: Callable[[], bool]) -> None:
        """Wait for a moment, in which the stream's thread reads."""
        # Not with an Event: a signal handler that raises in its methods can leave it locked.
        end = time.monotonic() + TIMING.stream_farewell_seconds
        while is_open() and time.monotonic() < end:
            time.sleep(TIMING.stream_farewell_poll_seconds)

    def abandon(self) -> None:
        """Release everything, in a forked child: the connection is the parent's."""
        link, self._link = self._link, None
        self.accepts_calls = False
        error = CallLostError("the process was forked; its calls stay with the parent")
        self._reading = threading.Lock()
        self._sender.abandon(error)
        self.files.close()
        if link is not None:
            link.close()
        for call in list(self.calls.values()):
            call.lose(error)
        self.calls.clear()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            if self.accepts_calls:
                self.end(KubetorchError("the thread that reads a stream ended"))

    def _serve(self) -> bool:
        """Read as long as it is this thread's turn; false when the stream has ended."""
        self._stand_by()
        try:
            while self._read_some(self._ping_after):
                if self._has_waiting_caller and not self.calls:
                    # The next caller can read for itself.
                    self._has_waiting_caller = False
                    return True
        finally:
            self._reading.release()
        idle = CallLostError("the agent closed the connection")
        if self.has_ended or self._sender.retire(idle, unless=lambda: self.calls):
            self.accepts_calls = False
            self.files.close()
            return False
        self._reconnect(self)
        return self._link is not None

    def _stand_by(self) -> None:
        """Wait until this thread has to read, since no caller does."""
        turns = -1
        while turns != self._turns:
            turns = self._turns
            try:
                self._wake.get(timeout=TIMING.reader_idle_seconds)
                break
            except Empty:
                continue
        self._reading.acquire()  # `_serve` releases it
        while not self._wake.empty():
            self._wake.get()

    # --------------------------------------------------------------------------------- reading

    def _read_until(self, events: SimpleQueue[_T], deadline: float | None) -> None:
        while events.empty():
            timeout = self._ping_after
            if deadline is not None:
                timeout = min(deadline - time.monotonic(), timeout)
                if timeout <= 0:
                    return
            is_alone = len(self.calls) == 1 and not self.is_single
            if not self._read_some(timeout, may_stay_awake=is_alone):
                return

    def _read_some(self, timeout: float, *, may_stay_awake: bool = False) -> bool:
        """Read the bytes that arrive in time; false when there is no connection any more."""
        link = self._link
        if link is None:
            return False
        try:
            link.read(timeout, may_stay_awake=may_stay_awake)
        except OSError:
            self._disconnect()
        except (websocket_protocol.WebSocketError, ProtocolError) as error:
            self.end(ProtocolError(f"the agent broke the protocol: {error}"))
        except BaseException:
            # A signal handler raised: the bytes that were read are lost; resuming repeats them.
            if not link.is_waiting:
                self._disconnect()
            raise
        if self.is_single and not self.calls and not self.has_ended:
            self.close()
        return self._link is not None

    def _ping(self) -> None:
        self._sender.submit(control(websocket_protocol.PING))

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        self._sender.detach()
        if link is not None:
            link.close()
