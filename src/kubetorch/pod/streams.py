"""The streams of clients (`kubetorch.wire.frames`): one per client, over all its connections.

    Streams ── ClientStream ── StreamedCall ── kubetorch.pod.calls.Call

A stream belongs to the client, not to a connection: when one breaks, what was sent and not
acknowledged is sent again on the next (`kubetorch.wire.frames`), and calls go on meanwhile.

The frames of a call keep their order: once a frame waits, all later frames wait behind it. A frame
waits for the connection (congested, or broken and not back yet) or for the client's credit. The
memory for a slow reader is bounded: a generator is granted more values only when its values were
sent, lines beyond the client's window are dropped and counted, and the last report of progress
replaces earlier ones.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from kubetorch.errors import CallRefusedError, KubetorchError, ProtocolError, ResultExpiredError
from kubetorch.lib import websocket_protocol
from kubetorch.lib.asgi import refusal
from kubetorch.lib.memory_files import FileSocket, MemoryFile
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.calls import Call, Calls, join
from kubetorch.pod.http.auth import Guard, refused
from kubetorch.pod.logs import Line
from kubetorch.pod.memory_socket import MemorySocket
from kubetorch.pod.payloads import OwnedPayload, Payload
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.specs.logging import LEVELS
from kubetorch.specs.workload import Origin
from kubetorch.wire import frames, routes, tokens, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.calls import Outcome, Returned
from kubetorch.wire.frames import Body, Inbox, Kind, Outbox

_CHUNK_BYTES = wire_tuning.LIMITS.chunk_bytes
_META_BYTES = wire_tuning.LIMITS.meta_bytes

Buffer = bytes | bytearray | memoryview

#: Longest message: the largest meta and one chunk.
MESSAGE_LIMIT = frames.HEADER_BYTES + _META_BYTES + _CHUNK_BYTES
#: Credit that lines leave to results: they are less important than those.
LOG_RESERVE = _CHUNK_BYTES
#: Bytes of credit for arguments that are given together.
CREDIT_BYTES = wire_tuning.LIMITS.window_bytes // 4

_LOG_ROOM = wire_tuning.LIMITS.window_bytes // 8
_RANKS: dict[str, int] = {level: rank for rank, level in enumerate(LEVELS)}


_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESUME = re.compile(r"([A-Za-z0-9._-]{1,128}):(\d{1,18})")
# As plain numbers: these are compared for every call.
_DATA, _OPEN, _ACK = int(Kind.DATA), int(Kind.OPEN), int(Kind.ACK)
_FROM_CLIENT = frozenset(
    map(int, (Kind.OPEN, Kind.CANCEL, Kind.CREDIT, Kind.ACK, Kind.ATTACH, Kind.RELEASE))
)


class _QueuedFrame(msgspec.Struct):
    """A frame that waits to be sent, with a payload after it or in it."""

    head: bytes
    payload: Payload | None = None
    is_progress: bool = False
    is_yield: bool = False
    sent: int = 0
    #: Credit that it needs beside that for its payload.
    cost: int = 0


class StreamedCall:
    """The stream's end of one call."""

    def __init__(
        self, stream: ClientStream, number: int, *, pod_name: str, log_level: str | None
    ) -> None:
        self._stream = stream
        self._pod_name = pod_name
        self._level = None if log_level is None else _RANKS.get(log_level, 1)
        self._credit = wire_tuning.LIMITS.window_bytes
        self._queue: deque[_QueuedFrame] = deque()
        self._is_queued = False
        self._dropped = 0
        self._granted = 0
        # The memory of arguments that come in, and its bytes so far.
        self._memory: Payload | None = None
        self._filled = 0
        self._uncredited_bytes = 0
        #: Bytes of the client's memory file that has its arguments.
        self.file_bytes = 0
        self.number = number
        self.identity = stream.client
        self.call: Call | None = None
        #: True if the client wants BEGUN, and if it wants QUEUED before it.
        self.wants_queue_news = self.wants_queued = False
        self._is_begun = False

    # ------------------------------------------------------------------------------- arguments

    def receive_into(self, memory: Payload) -> None:
        """Receive the arguments, which follow in DATA frames, into memory."""
        self._memory = memory

    def next_memory(self, size: int) -> memoryview | None:
        """The memory for the next `size` bytes of arguments; `None` if the call has ended."""
        if self._memory is None:
            return None
        view = self._memory.view[self._filled : self._filled + size]
        if len(view) != size or not size:
            raise ProtocolError(f"call {self.number} gets other arguments than its OPEN announced")
        return view

    def on_filled(self, size: int) -> int:
        """Count bytes of arguments that have come in; returns the credit for the client."""
        memory = self._memory
        if memory is None:
            return 0
        self._filled += size
        if self._filled == len(memory.view):
            self._memory = None
            self.begin(memory)
            return 0
        self._uncredited_bytes += size
        if self._uncredited_bytes < CREDIT_BYTES:
            return 0
        credit, self._uncredited_bytes = self._uncredited_bytes, 0
        return credit

    def begin(self, arguments: Payload) -> None:
        """Begin the call, whose arguments are complete."""
        call = self.call
        if call is not None:
            call.begin(arguments)
            if call.is_recorded:
                self.confirm()
            if self.call is not None:
                self.report_origin(call.other_origin)

    def confirm(self) -> None:
        """Report to the client that the call is on disk."""
        self._send(frames.encode(Kind.ACCEPTED, self.number))

    def stop_receiving(self) -> None:
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    # ------------------------------------------------------------------------ the call, a Caller

    @property
    def takes_files(self) -> bool:  # Caller's
        return self._stream.has_files

    def on_queued(self) -> None:  # Caller's
        if self.wants_queued or self._is_begun:
            self._is_begun = False
            self._send(frames.encode(Kind.QUEUED, self.number))

    def on_begun(self) -> None:  # Caller's
        if self.wants_queue_news:
            self._is_begun = True
            self._send(frames.encode(Kind.BEGUN, self.number))

    def on_log(self, line: Line) -> None:  # Caller's
        if line.debug is not None:
            self._report_debugger(line, line.debug)
            return
        if self._level is None:
            return
        # Levels that users made up are shown.
        if line.level and _RANKS.get(line.level.lower(), len(LEVELS)) < self._level:
            return
        pod = line.pod or self._pod_name
        meta = frames.Log(line.text, pod, line.source, line.level, line.time, line.rank)
        # Once a line is dropped, the next ones are too until there is room for many: many small
        # gaps would be harder to read than a large one.
        reserve = LOG_RESERVE + _LOG_ROOM if self._dropped else LOG_RESERVE
        frame = frames.encode(Kind.LOG, self.number, meta)
        if self._credit - (len(frame) - frames.HEADER_BYTES) < reserve:
            self._dropped += 1
            return
        self._report_dropped()
        self._send_line(frame)

    def _report_debugger(self, line: Line, event: frames.DebugEvent) -> None:
        """Report a stop, of which the client has to know whatever lines it shows."""
        pod = line.pod or self._pod_name
        meta = frames.Log(line.text, pod, time=line.time, rank=line.rank, debug=event)
        self._send_line(frames.encode(Kind.LOG, self.number, meta))

    def on_replaced(self, notice: str, instance: str) -> None:  # Caller's
        meta = frames.Log(notice, self._pod_name, "logger", "WARNING", time.time(), None, instance)
        self._send_line(frames.encode(Kind.LOG, self.number, meta))

    def report_origin(self, origin: Origin | None) -> None:
        """Report the origin of the code that runs, if the caller means other code."""
        if origin is None:
            return
        text = f"now runs {origin}, which is not what this program deployed or found"
        meta = frames.Log(text, self._pod_name, time=time.time(), origin=origin.key)
        self._send_line(frames.encode(Kind.LOG, self.number, meta))

    def on_progress(self, report: frames.Progress) -> None:  # Caller's
        frame = frames.encode(Kind.PROGRESS, self.number, report)
        if self._queue and self._queue[-1].is_progress:
            self._queue[-1].head = frame
        else:
            self._send(frame, is_progress=True)

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:  # Caller's
        file = self._stream.send_file(payload)
        meta = frames.Yield(Body(codec, tuple(sizes), len(payload.view)), file)
        head = frames.encode(Kind.YIELD, self.number, meta)
        if file:
            cost = min(len(payload.view), wire_tuning.LIMITS.withheld_bytes)
            payload.release()
            self._queue.append(_QueuedFrame(head, is_yield=True, cost=cost))
            self._queue_turn()
        else:
            self._send_value(head, payload, is_yield=True)

    def on_result(self, result: Returned, payload: Payload | None) -> None:  # Caller's
        self._report_dropped()
        body = Body(result.codec, result.sizes, len(result.payload))
        payload = payload or OwnedPayload(result.payload)
        file = self._stream.send_file(payload)
        meta = frames.Result(body, result.generation, result.streamed, result.instance, file)
        head = frames.encode(Kind.RESULT, self.number, meta)
        self.call = None
        if file:
            payload.release()
            self._send(head)
        else:
            self._send_value(head, payload)
        self._forget_if_sent()

    def on_failure(self, failure: bytes) -> None:  # Caller's
        self._report_dropped()
        self.call = None
        self.stop_receiving()
        self._send(frames.pack_header(Kind.ERROR, self.number) + failure)
        self._forget_if_sent()

    def _send_line(self, frame: bytes) -> None:
        self._credit -= len(frame) - frames.HEADER_BYTES
        self._send(frame)

    def _report_dropped(self) -> None:
        if not self._dropped:
            return
        count, self._dropped = self._dropped, 0
        text = f"… {count} lines left out, because they were read too slowly; kt logs has them"
        meta = frames.Log(text, self._pod_name, frames.KUBETORCH)
        self._send(frames.encode(Kind.LOG, self.number, meta))

    # ------------------------------------------------------------------------------- sending

    def on_credit(self, size: int) -> None:
        self._credit += size
        if self._queue:
            self._queue_turn()

    def send_next(self) -> bool:
        """Send one waiting frame; true if more may be sent."""
        item = self._queue[0]
        piece: Buffer
        if item.payload is None:
            if self._credit < item.cost:
                self._is_queued = False
                return False
            self._credit -= item.cost
            self._stream.send(item.head)
            self._finish_frame(item)
        elif item.head and len(item.payload.view) > _CHUNK_BYTES:
            self._stream.send(item.head)
            item.head = b""
        else:
            view = item.payload.view
            piece = view[item.sent : item.sent + _CHUNK_BYTES]
            if self._credit < len(piece):
                self._is_queued = False
                return False
            self._credit -= len(piece)
            if item.sent + len(piece) == len(view):
                # A copy is kept until it is acknowledged: a view would keep the whole value.
                piece = bytes(piece)
            if item.head:
                self._stream.send(item.head + piece)
            else:
                self._stream.send(frames.pack_header(Kind.DATA, self.number), piece)
            item.sent += len(piece)
            if item.sent == len(view):
                self._finish_frame(item)
        self._is_queued = bool(self._queue)
        return self._is_queued

    def _send(self, frame: bytes, *, is_progress: bool = False) -> None:
        """Send a frame without payload, in order."""
        if not self._queue and self._stream.can_send:
            self._stream.send(frame)
            return
        self._queue.append(_QueuedFrame(frame, is_progress=is_progress))
        self._queue_turn()

    def _send_value(self, head: bytes, payload: Payload, *, is_yield: bool = False) -> None:
        """Send a frame with payload, in order."""
        size = len(payload.view)
        if (
            size <= _CHUNK_BYTES
            and size <= self._credit
            and not self._queue
            and self._stream.can_send
        ):
            self._credit -= size
            self._stream.send(head + payload.view)
            payload.release()
            if is_yield:
                self._grant()
            return
        self._queue.append(_QueuedFrame(head, payload, is_yield=is_yield))
        self._queue_turn()

    def _queue_turn(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._stream.queue(self)

    def _finish_frame(self, item: _QueuedFrame) -> None:
        self._queue.popleft()
        if item.payload is not None:
            item.payload.release()
        if item.is_yield:
            self._grant()
        if self.call is None:
            self._forget_if_sent()

    def _grant(self) -> None:
        self._granted += 1
        if self._granted >= LIMITS.granted_values and self.call is not None:
            granted, self._granted = self._granted, 0
            self.call.grant(granted)

    def _forget_if_sent(self) -> None:
        if not self._queue:
            self._stream.forget(self)

    # ------------------------------------------------------------------------------- its end

    def abandon(self) -> None:
        """The client is gone for good."""
        self.stop_receiving()
        for item in self._queue:
            if item.payload is not None:
                item.payload.release()
        self._queue.clear()
        call, self.call = self.call, None
        if call is not None:
            call.leave(self)

    def cancel(self, reason: str, *, unless_begun: bool = False) -> None:
        if self.call is None:
            return
        if unless_begun:
            self.call.take_back()
        else:
            self.call.cancel(self, reason)


class StreamedReference(StreamedCall):
    """The value of a reference that a client sends, to be answered once calls can use it."""

    def __init__(self, stream: ClientStream, number: int, pod_name: str, identity: str) -> None:
        super().__init__(stream, number, pod_name=pod_name, log_level=None)
        self._identity = identity

    def begin(self, arguments: Payload) -> None:
        references = self._stream.calls.references
        references.receive(self._identity, arguments, self._stream, self.end_receipt)

    def end_receipt(self, error: KubetorchError | None) -> None:
        """Report that the value is there, or why it is not."""
        if error is None:
            self.on_result(Returned("json", (0,), memoryview(b""), False, 0, None), None)
        else:
            calls = self._stream.calls
            self.on_failure(calls.describe(error, started=False).to_json())


class MemoryOffer(NamedTuple):
    """Where clients of this machine may pass memory files.

    Attributes:
        path: Of the socket, empty without one.
        share: Bytes that a client may have under way.
        accept: Accepts connections that wait at the socket.
    """

    path: str
    share: int
    accept: Callable[[], None]


NO_MEMORY = MemoryOffer("", 0, lambda: None)


class ClientStream(msgspec.Struct, Endpoint, eq=False, dict=True):
    """One client's stream; the endpoint of whichever connection it has."""

    client: str
    incarnation: str
    pod_name: str
    calls: Calls
    allocate: Callable[[int], Payload]
    on_over: Callable[[ClientStream], None]
    memory: MemoryOffer = NO_MEMORY

    def __post_init__(self) -> None:
        # The socket where the client passes memory files, and takes them.
        self._files: FileSocket | None = None
        self._connection: Connection | None = None
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._streamed: dict[int, StreamedCall] = {}
        # Numbers of calls that were opened by other clients, which may have left them.
        self._attached: set[int] = set()
        # True on the client's first connection: later ones lead past Knative's queue-proxy.
        self._is_first = True
        # Calls with frames to send, in turn.
        self._ready: deque[StreamedCall] = deque()
        # The number of frames that the client has, on a connection that is being opened.
        self._resume_at: int | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._is_over = False

    # ----------------------------------------------------------------------- the registry

    def expect(self, resume_at: int | None) -> None:
        """Prepare for a connection that is about to be opened."""
        if resume_at is not None:
            self._outbox.after(resume_at)
        self._resume_at = resume_at
        if self._connection is not None:
            # The client has left it, even if this end has not noticed yet.
            self._connection.abort("the client has opened another connection")
        self._wait_for_client()

    def stop_accepting(self, reason: str) -> None:
        """Tell the client that no more calls are accepted; running calls go on."""
        if self._connection is not None:
            self._connection.send(frames.encode(Kind.GOAWAY, 0, frames.Goaway(reason)))

    def end(self, code: int = websocket_protocol.GOING_AWAY, reason: str = "") -> None:
        """End the stream, and cancel its calls: the client is gone for good, or is sent away."""
        if self._is_over:
            return
        self._is_over = True
        if self._linger is not None:
            self._linger.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(code, reason)
        if self._files is not None:
            self._files.close()
            self._files = None
        streamed = list(self._streamed.values())
        self._streamed.clear()
        self._ready.clear()
        for call in reversed(streamed):  # else those that wait would begin in their turn
            call.abandon()
        self.calls.references.end_stream(self)
        self.on_over(self)

    def counted_calls(self) -> set[Call]:
        """The calls that Knative's queue-proxy counts: it sees the first connection alone."""
        if self._connection is None or not self._is_first:
            return set()
        calls_by_number = self._streamed.items()
        return {
            r.call for n, r in calls_by_number if r.call is not None and n not in self._attached
        }

    @property
    def is_delivered(self) -> bool:
        """True if a connected client has nearly all frames of calls that have ended.

        Frames that it is not bound to acknowledge yet are on their way.
        """
        is_acknowledged = self._outbox.kept_bytes < wire_tuning.LIMITS.acknowledged_bytes
        return self._connection is None or (is_acknowledged and not self._streamed)

    # ---------------------------------------------------------------------- memory files

    @property
    def has_files(self) -> bool:
        """True if the client is a process of this machine that takes memory files."""
        return self._files is not None

    def attach(self, files: FileSocket) -> bool:
        """Pass memory files on this socket from now on; false once the stream is over."""
        if self._is_over:
            return False
        if self._files is not None:
            self._files.close()
        self._files = files
        return True

    def send_file(self, payload: Payload) -> int:
        """Send a payload that is a memory file; 0 if it is none, or does not go."""
        if self._files is None or not isinstance(payload, MemoryFile):
            return 0
        number = self._files.next_number()
        return number if self._files.send(number, payload) else 0

    def _take_file(self, request: frames.Open) -> MemoryFile | OSError:
        """The arguments of a call; the error without a descriptor for them."""
        if self._files is None:
            self.memory.accept()
        if self._files is None:
            return OSError("they are in a memory file, and there is no connection for such files")
        size = request.body.total
        try:
            file = self._files.take(request.file, size)
        except OSError as error:
            return error
        used = [call.file_bytes for call in self._streamed.values() if call.call is not None]
        count = sum(map(bool, used))
        # Threads of a client may decide at the same time, so it is refused beyond twice the limit.
        most, share = 2 * wire_tuning.LIMITS.memory_file_calls, 2 * self.memory.share
        if count >= most or sum(used) + size > share:
            raise ProtocolError(f"{count} calls have memory files, of {sum(used) + size} bytes")
        return file

    def open_calls(self) -> set[Call]:
        return {streamed.call for streamed in self._streamed.values() if streamed.call is not None}

    # ----------------------------------------------------------------------- the connection

    def on_open(self, connection: Connection) -> None:  # Endpoint's
        self._connection = connection
        self._is_first = self._resume_at is None
        if self._linger is not None:
            self._linger.cancel()
        resume_at, self._resume_at = self._resume_at, None
        welcome = frames.Welcome(
            incarnation=self.incarnation,
            pod=self.pod_name,
            generation=self.calls.generation,
            protocol=versions.PROTOCOL,
            received=self._inbox.received,
            resumed=resume_at is not None,
            max_payload=wire_tuning.LIMITS.arguments_bytes,
            memory_socket=self.memory.path,
            memory_share=self.memory.share,
        )
        connection.send(frames.encode(Kind.WELCOME, 0, welcome))
        if resume_at is not None:
            for frame in self._outbox.after(resume_at):
                connection.send(*frame)
            self._send_waiting()

    def on_close(self, reason: str) -> None:  # Endpoint's
        connection = self._connection
        if connection is None or connection.is_open or self._is_over:
            return  # of a connection that was replaced
        if connection.close_code is None:
            self._wait_for_client()
        else:
            # The client has closed the stream, or broken the protocol.
            self.end()

    def _wait_for_client(self) -> None:
        """End the stream if the client opens no connection in time."""
        self._connection = None
        if self._linger is not None:
            self._linger.cancel()
        self._linger = asyncio.get_running_loop().call_later(TIMING.client_linger_seconds, self.end)

    def on_writable(self) -> None:  # Endpoint's
        self._send_waiting()

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        try:
            if opcode != websocket_protocol.BINARY:
                raise ProtocolError(f"a message of text: {bytes(payload[:80])!r}")
            kind, number, meta, rest = frames.split(payload)
            self._on_frame(kind, number, meta, rest)
            self._count(kind, len(payload))
        except ProtocolError as error:
            self._break(error)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        streamed = self._streamed.get(number)
        if kind != Kind.DATA or meta_length or streamed is None:
            return None
        try:
            return streamed.next_memory(length - len(head))
        except ProtocolError as error:
            self._break(error)
            return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # Endpoint's
        try:
            kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
            if meta_length > (0 if kind == _DATA else min(len(rest), _META_BYTES)):
                raise ProtocolError(f"a frame claims {meta_length} bytes of meta")
            if kind != _DATA:
                self._on_frame(kind, number, rest[:meta_length], rest[meta_length:])
            else:
                self._on_filled(number, len(rest))
            self._count(kind, len(head) + len(rest))
        except ProtocolError as error:
            self._break(error)

    def _break(self, error: ProtocolError) -> None:
        """End the stream of a client that breaks the protocol."""
        self.end(websocket_protocol.PROTOCOL_ERROR, error.message)

    # -------------------------------------------------------------------------------- frames in

    def _count(self, kind: int, size: int) -> None:
        if kind in frames.UNCOUNTED or self._is_over:
            return
        if self._inbox.count(size) and self._connection is not None:
            meta = frames.Ack(self._inbox.acknowledged())
            self._connection.send(frames.encode(Kind.ACK, 0, meta))

    def _on_frame(self, kind: int, number: int, meta: memoryview, payload: memoryview) -> None:
        if kind == _DATA:
            streamed = self._streamed.get(number)
            view = streamed.next_memory(len(payload)) if streamed is not None else None
            if view is not None:
                view[:] = payload
                self._on_filled(number, len(payload))
            return
        if kind not in _FROM_CLIENT:
            raise ProtocolError(f"a client may not send a frame of kind {kind}")
        content: Any = frames.decode_meta(kind, meta)
        if kind == _OPEN:
            self._on_open_frame(number, content, payload)
        elif kind == _ACK:
            self._outbox.ack(content.frames)
            if self._ready:
                self._send_waiting()
        elif kind == Kind.ATTACH:
            self._on_attach(number, content)
        elif kind == Kind.RELEASE:
            for identity in content.references:
                self.calls.references.release(identity, self)
        else:
            self._on_call_frame(kind, number, content)

    def _on_call_frame(self, kind: int, number: int, content: Any) -> None:  # noqa: ANN401  # by kind
        """A CREDIT or CANCEL of a call, unless it has ended meanwhile."""
        streamed = self._streamed.get(number)
        if streamed is None:
            return
        if kind == Kind.CREDIT:
            if content.bytes < 0:
                raise ProtocolError(f"a credit of {content.bytes} bytes")
            streamed.on_credit(content.bytes)
        else:
            streamed.cancel(content.reason, unless_begun=content.unless_begun)

    def _on_open_frame(self, number: int, request: frames.Open, payload: memoryview) -> None:
        size = request.body.total
        is_inline = size <= _CHUNK_BYTES and not request.file
        if len(payload) != (size if is_inline else 0):
            raise ProtocolError(f"an OPEN frame with {len(payload)} of {size} bytes")
        arguments = self._take_file(request) if request.file else None
        if request.reference:
            value = OwnedPayload(bytes(payload)) if is_inline else arguments
            self._on_reference(number, request, value)
            return
        if request.file:
            # The number means nothing on the streams to other pods that the request goes on to.
            request = structs.replace(request, file=0)
        streamed = self._new_call(number, request.log_level if request.stream_logs else None)
        streamed.wants_queue_news = request.queue_news
        streamed.wants_queued = request.queue_news and not request.is_item
        earlier = self.calls.find_earlier(request)
        try:
            if earlier is not None:
                if request.detached:
                    self.calls.add_twin(earlier, request)
                    streamed.confirm()
                streamed.call = join(earlier, streamed)
                return
            streamed.call = call = self.calls.open(request, streamed)
        except KubetorchError as error:
            # An earlier call that cannot be joined runs: to send the call again would not help.
            started = isinstance(earlier, Call)
            if not request.detached:  # a spawning client takes a line for the begin of the call
                streamed.report_origin(self.calls.other_origin(request))
            streamed.on_failure(self.calls.describe(error, started=started).to_json())
            return
        if is_inline:
            streamed.begin(OwnedPayload(bytes(payload)))
            return
        try:
            if isinstance(arguments, OSError):
                raise arguments
            if arguments is not None:
                streamed.file_bytes = size
                streamed.begin(arguments)
            else:
                streamed.receive_into(self.allocate(size))
        except (OSError, MemoryError) as error:
            full = KubetorchError(f"no memory for arguments of {size} bytes: {error}")
            call.fail(full, started=False)

    def _on_reference(
        self, number: int, request: frames.Open, payload: Payload | OSError | None
    ) -> None:
        """Take the value of a reference, which came with its frame or follows in DATA frames."""
        identity, body = request.reference, request.body
        references = self.calls.references
        streamed = StreamedReference(self, number, self.pod_name, identity)
        self._add(streamed)
        is_new = False
        try:
            if isinstance(payload, OSError):
                raise payload
            is_new = references.expect(identity, body.sizes, body.total, self)
            if is_new and payload is None:
                streamed.receive_into(self.allocate(body.total))
                return
        except KubetorchError as error:
            streamed.end_receipt(error)
        except (OSError, MemoryError) as error:
            references.give_up(identity, self)
            no_memory = f"no memory for a reference of {body.total} bytes: {error}"
            streamed.end_receipt(KubetorchError(no_memory))
        else:
            if not is_new:
                streamed.end_receipt(None)
        if isinstance(payload, (OwnedPayload, MemoryFile)):
            if is_new:
                streamed.begin(payload)
            else:
                payload.release()

    def _on_attach(self, number: int, meta: frames.Attach) -> None:
        streamed = self._new_call(number, "debug" if meta.stream_logs else None)
        self._attached.add(number)
        try:
            earlier: Call | Outcome | None
            if meta.serialization == "pickle":
                earlier = self.calls.kept_value(meta.id)
            else:
                earlier = self.calls.find(meta.id)
            if earlier is None:
                raise ResultExpiredError(f"pod {self.pod_name} knows no call {meta.id}")
            streamed.call = join(earlier, streamed)
        except KubetorchError as error:
            streamed.on_failure(self.calls.describe(error, started=True).to_json())

    def _on_filled(self, number: int, size: int) -> None:
        streamed = self._streamed.get(number)
        credit = streamed.on_filled(size) if streamed is not None else 0
        if credit:
            self.send(frames.encode(Kind.CREDIT, number, frames.Credit(credit)))

    def _new_call(self, number: int, level: str | None) -> StreamedCall:
        streamed = StreamedCall(self, number, pod_name=self.pod_name, log_level=level)
        self._add(streamed)
        return streamed

    def _add(self, streamed: StreamedCall) -> None:
        if streamed.number in self._streamed:
            raise ProtocolError(f"there is a call with the number {streamed.number} already")
        self._streamed[streamed.number] = streamed

    # ------------------------------------------------------------------------------- frames out

    @property
    def can_send(self) -> bool:
        connection = self._connection
        return (
            connection is not None
            and not connection.is_congested
            and self._outbox.kept_bytes < LIMITS.unacknowledged_bytes
        )

    def send(self, *parts: Buffer) -> None:
        """Send one counted frame; parts do not change any more."""
        self._outbox.keep(parts)
        if self._connection is not None:
            self._connection.send(*parts)

    def queue(self, streamed: StreamedCall) -> None:
        """Let a call that has frames to send take its turn."""
        self._ready.append(streamed)
        if len(self._ready) == 1:
            self._send_waiting()

    def forget(self, streamed: StreamedCall) -> None:
        """Forget a call that has ended."""
        self._streamed.pop(streamed.number, None)
        self._attached.discard(streamed.number)

    def _send_waiting(self) -> None:
        """Send waiting frames, one of each call in turn, as long as the client reads."""
        ready = self._ready
        while ready:
            if not self.can_send:
                return
            streamed = ready.popleft()
            if streamed.send_next():
                ready.append(streamed)


class Streams(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """Accepts the connections of clients."""

    incarnation: str
    pod_name: str
    calls: Calls
    guard: Guard
    allocate: Callable[[int], Payload]
    memory_path: Path | None = None
    memory_share: int = 0

    def __post_init__(self) -> None:
        self._memory = MemorySocket(self.memory_path, self.guard, self.attach)
        self._streams: dict[str, ClientStream] = {}
        self._draining: str | None = None

    def accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        """The stream for a request to upgrade; see `kubetorch.lib.websocket.Acceptor`."""
        try:
            self.guard.check_origin(headers.get("host"), headers.get("origin"))
            self.guard.check_token(headers.get(routes.AUTHORIZATION.lower()), tokens.CALL)
            if path != routes.STREAM:
                raise refusal(404, f"there is no stream at {path[:200]!r}")
            versions.check(
                _protocol(headers),
                peer="the client",
                fix_peer=versions.FIX_CLIENT,
                fix_self=versions.FIX_PODS,
            )
            client, resume_at = self._identify(headers)
            return self._stream(client, resume_at)
        except KubetorchError as error:
            raise refused(error, self.pod_name) from error

    def open(self) -> None:
        """Let clients of this machine pass memory files."""
        self._memory.open()

    def close(self) -> None:
        self._memory.close()

    @property
    def memory_socket(self) -> str:
        """The path of the socket for memory files; empty without one."""
        return self._memory.path

    def attach(self, proof: frames.StreamProof, files: FileSocket) -> bool:
        """Let a client pass memory files; false if it has no stream here."""
        stream = self._streams.get(proof.client)
        is_known = stream is not None and proof.incarnation == self.incarnation
        return is_known and stream is not None and stream.attach(files)

    def has_unseen_call(self) -> bool:
        """True if there is a call without a request that Knative counts.

        A client's first connection counts for its calls, and a `POST` for its call.
        """
        streams = list(self._streams.values())
        counted = {call for stream in streams for call in stream.counted_calls()}
        open_calls = {call for stream in streams for call in stream.open_calls()}
        return not counted.issuperset(open_calls | self.calls.detached())

    def stop_accepting(self, reason: str) -> None:
        """Accept no new clients, and send the present ones to other pods."""
        self._draining = reason
        for stream in self._streams.values():
            stream.stop_accepting(reason)

    @property
    def is_delivered(self) -> bool:
        """True if the connected clients have what was sent to them."""
        return all(stream.is_delivered for stream in self._streams.values())

    def _identify(self, headers: Mapping[str, str]) -> tuple[str, int | None]:
        """The client, and how many frames of this incarnation it has received."""
        client = headers.get(routes.CLIENT.lower(), "")
        if not _NAME.fullmatch(client):
            raise ProtocolError(f"{routes.CLIENT} is {client[:80]!r}; it must name the client")
        resume = headers.get(routes.RESUME.lower())
        if resume is None:
            return client, None
        match = _RESUME.fullmatch(resume)
        if match is None:
            raise ProtocolError(f"{routes.RESUME} is {resume[:80]!r}; it must be <name>:<number>")
        return client, int(match[2]) if match[1] == self.incarnation else None

    def _stream(self, client: str, resume_at: int | None) -> ClientStream:
        present_stream = self._streams.get(client)
        if present_stream is not None:
            try:
                if resume_at is not None:
                    present_stream.expect(resume_at)
                    return present_stream
            except ProtocolError:  # it lacks frames that are gone: it starts from scratch
                pass
            present_stream.end()
        if self._draining is not None:
            raise CallRefusedError(
                f"pod {self.pod_name} is being stopped: {self._draining}",
                hint="call again: another pod takes it",
            )
        if len(self._streams) >= LIMITS.clients:
            raise CallRefusedError(f"pod {self.pod_name} has {LIMITS.clients} clients")
        stream = ClientStream(
            client,
            incarnation=self.incarnation,
            pod_name=self.pod_name,
            calls=self.calls,
            allocate=self.allocate,
            on_over=self._forget,
            memory=MemoryOffer(self._memory.path, self.memory_share, self._memory.accept),
        )
        self._streams[client] = stream
        stream.expect(None)
        return stream

    def _forget(self, stream: ClientStream) -> None:
        if self._streams.get(stream.client) is stream:
            del self._streams[stream.client]


def _protocol(headers: Mapping[str, str]) -> int | None:
    value = headers.get(routes.PROTOCOL.lower(), "")
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None
