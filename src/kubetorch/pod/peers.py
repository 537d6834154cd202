"""Streams to sibling agents, over which parts of distributed calls run on their ranks.

    RankGroup ── PeerCall ──┐
    RankGroup ── PeerCall ──┴─ PeerStream ══ WebSocket ══ ClientStream of the other agent

Each sibling has one stream, opened by the first call: many calls share it. The stream is the
client's end of `kubetorch.wire.frames`, with this agent's own token. When its connection breaks, it
connects again, and both ends resend frames that the other has not received. If another process of
the sibling answers, or one that has given the stream up, the calls on the stream are lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kubetorch.errors import AgentDiedError, CallLostError, KubetorchError, ProtocolError
from kubetorch.lib import backoff, memory, websocket, websocket_protocol
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.logs import Line
from kubetorch.pod.memory_references import Reference, References
from kubetorch.pod.payloads import OwnedPayload, Payload
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.worker_process.worker import CallSink
from kubetorch.wire import codecs, frames, routes, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.calls import new_call_id
from kubetorch.wire.frames import Inbox, Kind, Log, Open, Outbox
from kubetorch.wire.messages import Member
from kubetorch.wire.references import VALUES

_CHUNK_BYTES = wire_tuning.LIMITS.chunk_bytes

#: Bytes of lines that are credited together.
_LINE_CREDIT_BYTES = _CHUNK_BYTES
_MESSAGE_LIMIT = frames.HEADER_BYTES + wire_tuning.LIMITS.meta_bytes + _CHUNK_BYTES

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class PeerCall:
    """A part of a call on a sibling."""

    def __init__(self, stream: PeerStream, number: int, sink: CallSink) -> None:
        self._stream = stream
        self.number = number
        self.sink = sink
        self._allowed_rounds = LIMITS.peer_rounds_ahead
        # By round: bytes that are credited once the caller has taken earlier rounds.
        self._withheld_credits: deque[int] = deque()
        self._line_bytes = 0
        # Arguments that are still to be sent, and the bytes of them that the sibling has room for.
        self._arguments: memoryview | None = None
        self._argument_room = wire_tuning.LIMITS.window_bytes
        # A value that comes in, and its bytes so far.
        self._incoming: tuple[int, Any, Payload] | None = None
        self._incoming_bytes = 0
        self.is_over = False
        #: Identities of the references that its arguments name.
        self.references: tuple[str, ...] = ()

    @property
    def is_connected(self) -> bool:
        return self._stream.is_connected

    def cancel(self, reason: str) -> None:
        """Ask the sibling to end the call, whose result then says how it ended."""
        if not self.is_over:
            self._arguments = None
            self._stream.send(frames.encode(Kind.CANCEL, self.number, frames.Cancel(reason)))

    def grant(self, count: int) -> None:
        """Let the sibling send as many more rounds: the caller has read so many."""
        for _ in range(count):
            if self._withheld_credits:
                self._credit(self._withheld_credits.popleft())
            else:
                self._allowed_rounds += 1

    def _credit(self, size: int) -> None:
        if size and not self.is_over:
            meta = frames.Credit(size)
            self._stream.send(frames.encode(Kind.CREDIT, self.number, meta))

    # ------------------------------------------------------------------------------- arguments

    def begin(self, request: Open, arguments: memoryview) -> None:
        head = frames.encode(Kind.OPEN, self.number, request)
        if len(arguments) <= _CHUNK_BYTES:
            self._stream.send(head + arguments)
        else:
            self._stream.send(head)
            self._arguments = arguments
            self.send_arguments()

    def on_credit(self, size: int) -> None:
        self._argument_room += size
        self.send_arguments()

    def send_arguments(self) -> None:
        """Send as much of the arguments as the sibling has room for."""
        while self._arguments is not None and self._stream.can_send:
            piece = self._arguments[:_CHUNK_BYTES]
            if self._argument_room < len(piece):
                return
            self._argument_room -= len(piece)
            rest = self._arguments[len(piece) :]
            self._arguments = rest if len(rest) else None
            self._stream.send(frames.pack_header(Kind.DATA, self.number), piece)

    # ---------------------------------------------------------------------------------- frames

    def on_log(self, log: Log, size: int) -> None:
        self._line_bytes += size
        if self._line_bytes >= _LINE_CREDIT_BYTES:
            size, self._line_bytes = self._line_bytes, 0
            self._credit(size)
        line = Line(log.text, log.source, log.level, log.time, None, log.rank, log.pod, log.debug)
        self.sink.on_log(line)

    def on_state(self, kind: int, meta: Any) -> None:  # noqa: ANN401  # by kind
        if kind == Kind.PROGRESS:
            self.sink.on_progress(meta)
        elif kind == Kind.QUEUED:
            self.sink.on_queued()
        elif kind == Kind.BEGUN:
            self.sink.on_begun()

    def on_value(self, kind: int, meta: Any, payload: memoryview) -> None:  # noqa: ANN401  # by kind
        """A RESULT or YIELD frame, with all of its payload or none."""
        sizes, total = meta.body.sizes, meta.body.total
        is_whole = total <= _CHUNK_BYTES
        if min(sizes, default=0) < 0 or codecs.layout(sizes)[1] != total:
            raise ProtocolError(f"call {self.number} gets {total} bytes in segments of {sizes}")
        if len(payload) != (total if is_whole else 0):
            raise ProtocolError(f"call {self.number} gets {len(payload)} bytes of {total} at once")
        if kind == Kind.RESULT:
            if not is_whole:  # else nothing follows that needs room
                self._credit(total)
        elif self._allowed_rounds:
            self._allowed_rounds -= 1
            self._credit(total)
        else:
            self._withheld_credits.append(total)
        if is_whole:
            self._deliver(kind, meta, OwnedPayload(bytes(payload)))
            return
        self._incoming, self._incoming_bytes = (kind, meta, _memory(total)), 0

    def next_memory(self, size: int) -> memoryview | None:
        """The memory for the next bytes of a value; `None` if no value is coming in."""
        if self._incoming is None:
            return None
        view = self._incoming[2].view[self._incoming_bytes : self._incoming_bytes + size]
        if len(view) != size or not size:
            raise ProtocolError(f"call {self.number} gets more bytes than its value has")
        return view

    def on_filled(self, size: int) -> None:
        if self._incoming is None:
            return
        self._incoming_bytes += size
        kind, meta, payload = self._incoming
        if self._incoming_bytes == meta.body.total:
            self._incoming = None
            self._deliver(kind, meta, payload)

    def _deliver(self, kind: int, meta: Any, payload: Payload) -> None:  # noqa: ANN401  # by kind
        body = meta.body
        if kind == Kind.YIELD:
            self.sink.on_yield(body.codec, body.sizes, payload)
        elif self._stream.forget(self):
            self.sink.on_result(body.codec, body.sizes, payload, streamed=meta.streamed)

    def on_error(self, failure: bytes) -> None:
        self._stream.forget_sent(self.references)
        if self._stream.forget(self):
            self.sink.on_error(failure)

    def lose(self, error: KubetorchError) -> None:
        if self._stream.forget(self):
            self.sink.on_lost(error)

    def release(self) -> None:
        self.is_over = True
        self._arguments = None
        if self._incoming is not None:
            self._incoming[2].release()
            self._incoming = None


class PeerReference(PeerCall):
    """The value of a reference, on its way to a sibling; calls that name it report its failure."""

    def on_value(self, kind: int, meta: Any, payload: memoryview) -> None:  # noqa: ANN401  # by kind
        self._stream.forget(self)

    def on_error(self, failure: bytes) -> None:
        self._stream.forget_sent(self.references)
        self._stream.forget(self)

    def lose(self, error: KubetorchError) -> None:
        self._stream.forget(self)


def _memory(size: int) -> Payload:
    """Memory for an announced value; the system provides its pages as the value comes in."""
    if size < LIMITS.peer_memory_file_bytes:
        return OwnedPayload(bytearray(size))
    try:
        return memory.allocate(size)
    except (OSError, OverflowError) as error:  # for example no descriptor is left
        try:
            return OwnedPayload(memoryview(mmap.mmap(-1, size)))
        except (OSError, OverflowError):
            raise ProtocolError(f"a value of {size} bytes: {error}") from error


class PeerStream(Endpoint):
    """The stream to one process of a sibling's agent, over all its connections."""

    def __init__(
        self,
        member: Member,
        token: Callable[[], str | None],
        on_over: Callable[[PeerStream], None],
        references: References,
    ) -> None:
        self.member = member
        self._references = references
        # Identities of the references whose values were sent on this stream.
        self._sent: set[str] = set()
        self._token = token
        self._on_over = on_over
        self._client = os.urandom(16).hex()
        self._numbers = itertools.count(1)
        self._calls: dict[int, PeerCall] = {}
        self._connection: Connection | None = None
        #: True if frames go out now.
        self.is_connected = False
        self._incarnation = ""
        self._outbox, self._inbox = Outbox(), Inbox()
        self._is_over = False
        self._idle: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connect()

    @property
    def can_send(self) -> bool:
        """True if a large frame would go out now."""
        connection = self._connection
        return self.is_connected and connection is not None and not connection.is_congested

    # ----------------------------------------------------------------------------------- calls

    def call(self, request: Open, arguments: memoryview, sink: CallSink) -> PeerCall:
        """Open a call. The memory of its arguments stays until they have arrived."""
        call = PeerCall(self, next(self._numbers), sink)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        for reference in self._references.present(request.references):
            if reference.identity not in self._sent:
                self._send_reference(reference, sink)
        call.references = request.references
        self._calls[call.number] = call
        call.begin(request, arguments)
        return call

    def _send_reference(self, reference: Reference, sink: CallSink) -> None:
        """Send a value ahead of the first call that names its reference."""
        memory_of_value = reference.memory
        if memory_of_value is None:
            return
        self._sent.add(reference.identity)
        put = PeerReference(self, next(self._numbers), sink)
        put.references = (reference.identity,)
        self._calls[put.number] = put
        body = frames.Body(VALUES, reference.sizes, reference.size)
        request = Open(new_call_id(), "", body, reference=reference.identity)
        if isinstance(memory_of_value, MemoryFile):
            put.begin(request, memory_of_value.view)
        else:
            put.begin(request, memoryview(memory_of_value))

    def forget_sent(self, identities: Sequence[str]) -> None:
        """Send these values again with the next call that names them: the sibling may lack them."""
        self._sent.difference_update(identities)

    def drop_reference(self, reference: Reference) -> None:
        if reference.identity in self._sent:
            self._sent.discard(reference.identity)
            meta = frames.Release((reference.identity,))
            self.send(frames.encode(Kind.RELEASE, 0, meta))

    def send(self, *parts: Buffer) -> None:
        """Send one counted frame, now or when there is a connection."""
        if self._is_over:
            return
        self._outbox.keep(parts)
        if self.is_connected and self._connection is not None:
            self._connection.send(*parts)

    def forget(self, call: PeerCall) -> bool:
        """Forget a call that ends; false if it had ended before."""
        if self._calls.pop(call.number, None) is None:
            return False
        call.release()
        if not self._calls and not self._is_over:
            self._idle = asyncio.get_running_loop().call_later(TIMING.peer_idle_seconds, self.close)
        return True

    def close(self) -> None:
        self.end(CallLostError(f"the stream to pod {self.member.pod} was closed"))

    def end(self, error: KubetorchError) -> None:
        """End the stream: its calls are lost."""
        if self._is_over:
            return
        self._is_over = True
        self.is_connected = False
        for handle in (self._idle, self._connecting):
            if handle is not None:
                handle.cancel()
        if self._connection is not None:
            self._connection.close(websocket_protocol.NORMAL)
        self._on_over(self)
        for call in list(self._calls.values()):
            call.lose(error)

    # ------------------------------------------------------------------------- the connection

    def _connect(self) -> None:
        self._connection, self.is_connected = None, False
        if self._connecting is None or self._connecting.done():
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect_until_deadline())

    async def _connect_until_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TIMING.peer_reconnect_seconds
        error: Exception | None = None
        for delay in backoff.exponential(
            first=TIMING.peer_first_delay_seconds, limit=TIMING.peer_longest_delay_seconds
        ):
            try:
                await self._try_once()
                return
            except Exception as attempt_error:  # noqa: BLE001  # else its calls would wait for ever
                error = attempt_error
            if loop.time() + delay > deadline:
                break
            await asyncio.sleep(delay)
        _log.warning("sibling not reached pod=%s error=%s", self.member.pod, error)
        self._connecting = None
        cause = str(error) or type(error).__name__
        reason = "AgentDied" if self._incarnation else f"unreachable from this pod: {cause}"
        self.end(AgentDiedError(self.member.pod, reason))

    async def _try_once(self) -> None:
        headers = {
            routes.PROTOCOL: str(versions.PROTOCOL),
            routes.CLIENT: self._client,
            routes.AUTHORIZATION: f"Bearer {self._token() or ''}",
        }
        if self._incarnation:
            headers[routes.RESUME] = f"{self._incarnation}:{self._inbox.received}"
        self._connection = await websocket.connect(
            self.member.url + routes.STREAM,
            self,
            headers=headers,
            max_message=_MESSAGE_LIMIT,
            timeout=TIMING.peer_connect_seconds,
        )

    def on_open(self, connection: Connection) -> None:  # Endpoint's
        self._connection = connection

    def on_close(self, reason: str) -> None:  # Endpoint's
        if not self._is_over:
            self._connect()

    def on_writable(self) -> None:  # Endpoint's
        for call in list(self._calls.values()):
            call.send_arguments()

    def _on_welcome(self, welcome: frames.Welcome) -> None:
        member = self.member
        if member.incarnation and welcome.incarnation != member.incarnation:
            raise _SiblingLostError(AgentDiedError(member.pod, "AgentRestarted"))
        if self._incarnation and not welcome.resumed:
            raise _SiblingLostError(
                CallLostError(f"pod {member.pod} has given up this pod's stream")
            )
        assert self._connection is not None
        self._incarnation = welcome.incarnation
        self.is_connected = True
        for frame in self._outbox.after(welcome.received):
            self._connection.send(*frame)
        self.on_writable()

    # ---------------------------------------------------------------------------------- frames

    def on_message(self, opcode: int, payload: memoryview) -> None:  # Endpoint's
        try:
            if opcode != websocket_protocol.BINARY:
                raise ProtocolError(f"a message of text: {bytes(payload[:80])!r}")
            kind, number, meta, rest = frames.split(payload)
            self._on_frame(kind, number, meta, rest)
            self._count(kind, len(payload))
        except ProtocolError as error:
            self._break(error)
        except _SiblingLostError as loss:
            self.end(loss.error)

    def _break(self, error: ProtocolError) -> None:
        self.end(ProtocolError(f"pod {self.member.pod} broke the protocol: {error.message}"))

    def on_large(self, head: memoryview, length: int) -> memoryview | None:  # Endpoint's
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        call = self._calls.get(number)
        if kind != Kind.DATA or meta_length or call is None:
            return None
        try:
            return call.next_memory(length - len(head))
        except ProtocolError as error:
            self._break(error)
            return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # Endpoint's
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        if kind != Kind.DATA or meta_length:
            self.on_message(websocket_protocol.BINARY, memoryview(head + rest))
            return
        call = self._calls.get(number)
        if call is not None:
            call.on_filled(len(rest))
        self._count(kind, len(head) + len(rest))

    def _count(self, kind: int, size: int) -> None:
        if kind in frames.UNCOUNTED or self._is_over:
            return
        if self._inbox.count(size) and self._connection is not None:
            meta = frames.Ack(self._inbox.acknowledged())
            self._connection.send(frames.encode(Kind.ACK, 0, meta))

    def _on_frame(self, kind: int, number: int, meta: memoryview, payload: memoryview) -> None:
        content: Any = frames.decode_meta(kind, meta)
        if kind == Kind.WELCOME:
            self._on_welcome(content)
        elif kind == Kind.ACK:
            self._outbox.ack(content.frames)
        call = self._calls.get(number)
        if call is None:
            return
        if kind in (Kind.RESULT, Kind.YIELD):
            call.on_value(kind, content, payload)
        elif kind == Kind.DATA:
            view = call.next_memory(len(payload))
            if view is not None:
                view[:] = payload
                call.on_filled(len(payload))
        elif kind == Kind.ERROR:
            call.on_error(bytes(payload))
        elif kind == Kind.LOG:
            call.on_log(content, len(meta))
        elif kind == Kind.CREDIT:
            call.on_credit(content.bytes)
        else:
            call.on_state(kind, content)


class _SiblingLostError(Exception):
    """The sibling's process, or its end of the stream, is not the one that calls were sent to."""

    def __init__(self, error: KubetorchError) -> None:
        super().__init__(error.message)
        self.error = error


class Peers:
    """The streams of one agent to its siblings."""

    def __init__(
        self, pod_name: str, token: Callable[[], str | None], references: References | None = None
    ) -> None:
        self.pod_name = pod_name
        self._token = token
        self._references = references or References()
        self._references.on_drop.append(self._drop_reference)
        self._streams: dict[tuple[str, str], PeerStream] = {}

    def call(
        self, member: Member, request: Open, arguments: memoryview, sink: CallSink
    ) -> PeerCall:
        key = (member.pod, member.incarnation)
        stream = self._streams.get(key)
        if stream is not None and stream.member.url != member.url:
            stream.end(CallLostError(f"pod {member.pod} has the new address {member.url}"))
            stream = None
        if stream is None:
            stream = self._streams[key] = PeerStream(
                member, self._token, self._remove, self._references
            )
        return stream.call(request, arguments, sink)

    def _drop_reference(self, reference: Reference) -> None:
        for stream in self._streams.values():
            stream.drop_reference(reference)

    def drop(self, member: Member, reason: str) -> None:
        """Lose the calls on a sibling that is gone."""
        stream = self._streams.get((member.pod, member.incarnation))
        if stream is not None:
            stream.end(AgentDiedError(member.pod, reason))

    def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()

    def _remove(self, stream: PeerStream) -> None:
        key = (stream.member.pod, stream.member.incarnation)
        if self._streams.get(key) is stream:
            del self._streams[key]


def fan_out(nodes: Sequence[int], fanout: int) -> list[tuple[int, ...]]:
    """Divide nodes into as many parts of equal size as `fanout` allows.

    The first node of each part gets the call, for itself and for the rest of its part.
    """
    count = min(fanout, len(nodes))
    bounds = [len(nodes) * index // count for index in range(count + 1)] if count else []
    return [tuple(nodes[start:end]) for start, end in itertools.pairwise(bounds)]
