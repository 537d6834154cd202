"""Streams to sibling agents, over which parts of distributed calls run on their ranks.

    RankGroup ── PeerCall ──┐
    RankGroup ── PeerCall ──┴─ PeerStream ══ WebSocket ══ ClientStream of the other agent

Each sibling has one stream, opened by the first call: many calls share it. The stream is the
client's end of `kubetorch.wire.frames`, with this agent's own token. When its connection breaks, it
connects again, and both ends resend frames that the other has not received. If the sibling's
process is another one by then, or has given the stream up, the calls on the stream are lost.
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

from kubetorch.errors import (
    AgentDiedError,
    CallLostError,
    KubetorchError,
    ProtocolError,
)
from kubetorch.lib import backoff, memory, websocket, websocket_protocol
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.lib.websocket_protocol import UpgradeRefusedError, WebSocketError
from kubetorch.pod.logs import Line
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.worker_process.worker import CallSink, OwnedPayload, Payload
from kubetorch.wire import codecs, frames, routes, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Inbox, Kind, Log, Open, Outbox
from kubetorch.wire.messages import Member

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
        self._allowance = LIMITS.peer_rounds_ahead
        # Bytes of rounds that are credited once the caller has taken earlier ones.
        self._withheld: deque[int] = deque()
        self._lines = 0
        # Arguments that are still to be sent, and the bytes that the sibling has room for.
        self._arguments: memoryview | None = None
        self._room = wire_tuning.LIMITS.window_bytes
        # A value that comes in, and its bytes so far.
        self._value: tuple[int, Any, Payload] | None = None
        self._filled = 0
        self.is_over = False

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
            if self._withheld:
                self._credit(self._withheld.popleft())
            else:
                self._allowance += 1

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
        self._room += size
        self.send_arguments()

    def send_arguments(self) -> None:
        """Send as much of the arguments as the sibling has room for."""
        while self._arguments is not None and self._stream.can_send:
            piece = self._arguments[:_CHUNK_BYTES]
            if self._room < len(piece):
                return
            self._room -= len(piece)
            rest = self._arguments[len(piece) :]
            self._arguments = rest if len(rest) else None
            self._stream.send(frames.pack_header(Kind.DATA, self.number), piece)

    # ---------------------------------------------------------------------------------- frames

    def on_log(self, log: Log, size: int) -> None:
        self._lines += size
        if self._lines >= _LINE_CREDIT_BYTES:
            lines, self._lines = self._lines, 0
            self._credit(lines)
        line = Line(log.text, log.source, log.level, log.time, None, log.rank, log.pod)
        self.sink.on_log(line)

    def on_news(self, kind: int, meta: Any) -> None:  # noqa: ANN401  # by kind
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
            raise ProtocolError(f"call {self.number} gets {total} bytes in other segments")
        if len(payload) != (total if is_whole else 0):
            raise ProtocolError(f"call {self.number} gets {len(payload)} bytes of {total} at once")
        if kind == Kind.RESULT:
            if not is_whole:  # else nothing follows that needs room
                self._credit(total)
        elif self._allowance:
            self._allowance -= 1
            self._credit(total)
        else:
            self._withheld.append(total)
        if is_whole:
            self._deliver(kind, meta, OwnedPayload(bytes(payload)))
            return
        self._value, self._filled = (kind, meta, _memory(total)), 0

    def next_memory(self, size: int) -> memoryview | None:
        """The memory for the next bytes of a value; `None` if no value is coming in."""
        if self._value is None:
            return None
        view = self._value[2].view[self._filled : self._filled + size]
        if len(view) != size or not size:
            raise ProtocolError(f"call {self.number} gets more than its value has")
        return view

    def on_filled(self, size: int) -> None:
        if self._value is None:
            return
        self._filled += size
        kind, meta, payload = self._value
        if self._filled == meta.body.total:
            self._value = None
            self._deliver(kind, meta, payload)

    def _deliver(self, kind: int, meta: Any, payload: Payload) -> None:  # noqa: ANN401  # by kind
        body = meta.body
        if kind == Kind.YIELD:
            self.sink.on_yield(body.codec, body.sizes, payload)
        elif self._stream.forget(self):
            self.sink.on_result(body.codec, body.sizes, payload, streamed=meta.streamed)

    def on_error(self, failure: bytes) -> None:
        if self._stream.forget(self):
            self.sink.on_error(failure)

    def lose(self, error: KubetorchError) -> None:
        if self._stream.forget(self):
            self.sink.on_lost(error)

    def drop(self) -> None:
        self.is_over = True
        self._arguments = None
        if self._value is not None:
            self._value[2].release()
            self._value = None


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
        self, member: Member, token: Callable[[], str | None], on_over: Callable[[PeerStream], None]
    ) -> None:
        self.member = member
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
        self._calls[call.number] = call
        call.begin(request, arguments)
        return call

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
        call.drop()
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
            except (
                UpgradeRefusedError,
                WebSocketError,
                OSError,
                asyncio.TimeoutError,
            ) as attempt_error:
                error = attempt_error
            if loop.time() + delay > deadline:
                break
            await asyncio.sleep(delay)
        _log.warning("sibling not reached pod=%s error=%s", self.member.pod, error)
        self._connecting = None
        self.end(AgentDiedError(self.member.pod, "AgentDied"))

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
            call.on_news(kind, content)


class _SiblingLostError(Exception):
    """The sibling's process, or its end of the stream, is not the one that calls were sent to."""

    def __init__(self, error: KubetorchError) -> None:
        super().__init__(error.message)
        self.error = error


class Peers:
    """The streams of one agent to its siblings."""

    def __init__(self, pod_name: str, token: Callable[[], str | None]) -> None:
        self.pod_name = pod_name
        self._token = token
        self._streams: dict[tuple[str, str], PeerStream] = {}

    def call(
        self, member: Member, request: Open, arguments: memoryview, sink: CallSink
    ) -> PeerCall:
        key = (member.pod, member.incarnation)
        stream = self._streams.get(key)
        if stream is None or stream.member.url != member.url:
            stream = self._streams[key] = PeerStream(member, self._token, self._forget)
        return stream.call(request, arguments, sink)

    def drop(self, member: Member, reason: str) -> None:
        """A sibling is gone: the calls on it are lost."""
        stream = self._streams.get((member.pod, member.incarnation))
        if stream is not None:
            stream.end(AgentDiedError(member.pod, reason))

    def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()

    def _forget(self, stream: PeerStream) -> None:
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
