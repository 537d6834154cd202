"""One call on one stream: its arguments on their way in, all that it produces on its way out.

What is sent keeps its order: once something waits, everything after it waits behind it. It waits
for the connection (congested, or broken and not back yet) or for the client's credit. What waits
for a slow reader is bounded: a generator is granted more values only when its values were sent,
lines beyond the client's window are dropped and counted, and of reports of progress the last stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kubetorch.errors import ProtocolError
from kubetorch.pod.calls.call import Call
from kubetorch.pod.workers.host import OwnedPayload, Payload
from kubetorch.pod.workers.lines import Line
from kubetorch.specs.logging import LEVELS
from kubetorch.wire import frames
from kubetorch.wire.calls import Outcome, Raised, Returned
from kubetorch.wire.frames import CHUNK, WINDOW, Body, Kind, Open

Buffer = bytes | bytearray | memoryview

#: Credit that lines leave to results: they are less important than those.
LOG_RESERVE = CHUNK
#: Values of a generator that are granted together.
GRANT_COUNT = 8
#: Bytes of credit for arguments that are given together.
CREDIT_BYTES = WINDOW // 4

_LOG_ROOM = WINDOW // 8
_RANKS: dict[str, int] = {level: rank for rank, level in enumerate(LEVELS)}


class Link(Protocol):
    """The stream that a relay belongs to."""

    @property
    def can_send(self) -> bool:
        """Whether a frame would go out now."""

    def send(self, *parts: Buffer) -> None:
        """Send one counted frame; parts do not change any more."""

    def is_ready(self, relay: Relay) -> None:
        """The relay has something to send and may send it when the stream can."""

    def is_over(self, relay: Relay) -> None:
        """Nothing comes from the relay any more."""


class Relay:
    """The stream's end of one call.

    Args:
        link: The stream.
        number: Number of the call on it.
        pod_name: Named in lines.
        log_level: Lowest level of loggers whose lines are wanted; `None` for no lines at all.
    """

    __slots__ = (
        "_credit",
        "_dropped",
        "_filled",
        "_granted",
        "_is_queued",
        "_level",
        "_link",
        "_memory",
        "_pod_name",
        "_queue",
        "_taken",
        "call",
        "number",
    )

    def __init__(self, link: Link, number: int, *, pod_name: str, log_level: str | None) -> None:
        self._link = link
        self._pod_name = pod_name
        self._level = None if log_level is None else _RANKS.get(log_level, 1)
        self._credit = WINDOW
        self._queue: deque[_Item] = deque()
        self._is_queued = False
        self._dropped = 0
        self._granted = 0
        # Arguments that are on their way.
        self._memory: Payload | None = None
        self._filled = 0
        self._taken = 0
        self.number = number
        self.call: Call | None = None

    # ------------------------------------------------------------------------------- arguments

    def receive_into(self, memory: Payload) -> None:
        """Arguments follow in DATA frames."""
        self._memory = memory

    def place(self, size: int) -> memoryview | None:
        """Where the next `size` bytes of arguments belong; `None` when the call has ended.

        Raises:
            ProtocolError: They are more than was said.
        """
        if self._memory is None:
            return None
        view = self._memory.view[self._filled : self._filled + size]
        if len(view) != size or not size:
            raise ProtocolError(f"call {self.number} gets other arguments than its OPEN announced")
        return view

    def placed(self, size: int) -> int:
        """So many bytes are where they belong; returns the credit to give."""
        memory = self._memory
        if memory is None:
            return 0
        self._filled += size
        if self._filled == len(memory.view):
            self._memory = None
            if self.call is not None:
                self.call.begin(memory)
            return 0
        self._taken += size
        if self._taken < CREDIT_BYTES:
            return 0
        taken, self._taken = self._taken, 0
        return taken

    def stop_receiving(self) -> None:
        """What still comes of the arguments is dropped."""
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    # ------------------------------------------------------------------------ the call, a Caller

    def on_log(self, line: Line) -> None:  # noqa: D102  # Caller's
        if self._level is None or self._is_below(line):
            return
        meta = frames.Log(line.text, self._pod_name, line.source, line.level, line.time)
        frame = frames.encode(Kind.LOG, self.number, meta)
        size = len(frame) - frames.HEADER_BYTES
        # Once lines are dropped they are until there is room for many: a gap here and there would
        # be harder to read than one.
        reserve = LOG_RESERVE + _LOG_ROOM if self._dropped else LOG_RESERVE
        if self._credit - size < reserve:
            self._dropped += 1
            return
        if self._dropped:
            self._tell_dropped()
        self._credit -= size
        self._send(frame)

    def on_progress(  # noqa: D102  # Caller's
        self, current: float, total: float | None, message: str | None
    ) -> None:
        frame = frames.encode(Kind.PROGRESS, self.number, frames.Progress(current, total, message))
        if self._queue and self._queue[-1].is_progress:
            self._queue[-1].head = frame
        else:
            self._send(frame, is_progress=True)

    def on_yield(  # noqa: D102  # Caller's
        self, codec: str, sizes: Sequence[int], payload: Payload
    ) -> None:
        meta = frames.Yield(Body(codec, tuple(sizes), len(payload.view)))
        self._send_value(frames.encode(Kind.YIELD, self.number, meta), payload, is_yield=True)

    def on_result(self, result: Returned, payload: Payload | None) -> None:  # noqa: D102  # Caller's
        if self._dropped:
            self._tell_dropped()
        body = Body(result.codec, result.sizes, len(result.payload))
        meta = frames.Result(body, result.generation, result.streamed)
        head = frames.encode(Kind.RESULT, self.number, meta)
        self.call = None
        self._send_value(head, payload or OwnedPayload(result.payload))
        self._finish()

    def on_failure(self, failure: bytes) -> None:  # noqa: D102  # Caller's
        if self._dropped:
            self._tell_dropped()
        self.call = None
        self.stop_receiving()
        self._send(frames.pack_header(Kind.ERROR, self.number) + failure)
        self._finish()

    def on_outcome(self, outcome: Outcome) -> None:
        """As `on_result` or `on_failure`, for a call that ended earlier."""
        if isinstance(outcome, Raised):
            self.on_failure(outcome.failure.to_json())
        else:
            self.on_result(outcome, None)

    def _is_below(self, line: Line) -> bool:
        if line.level is None or self._level is None:
            return False
        # Levels that users made up are shown.
        return _RANKS.get(line.level.lower(), len(LEVELS)) < self._level

    def _tell_dropped(self) -> None:
        count, self._dropped = self._dropped, 0
        text = f"… {count} lines left out, because they were read too slowly; kt logs has them"
        meta = frames.Log(text, self._pod_name, "stderr")
        self._send(frames.encode(Kind.LOG, self.number, meta))

    # ------------------------------------------------------------------------------- sending

    def on_credit(self, size: int) -> None:
        """The client takes so many more bytes."""
        self._credit += size
        if self._queue:
            self._ask()

    def send_next(self) -> bool:
        """Send one frame of what waits; whether there may be more to send."""
        self._is_queued = self._send_next() and bool(self._queue)
        return self._is_queued

    def _send_next(self) -> bool:
        """False when the first thing that waits needs more credit."""
        item = self._queue[0]
        view = item.view
        if view is None:
            self._link.send(item.head)
            self._done(item)
            return True
        if item.head and len(view) > CHUNK:
            self._link.send(item.head)
            item.head = b""
            return True
        piece = view[item.sent : item.sent + CHUNK]
        if self._credit < len(piece):
            return False
        self._credit -= len(piece)
        if item.head:
            self._link.send(item.head + piece)
        else:
            self._link.send(frames.pack_header(Kind.DATA, self.number), piece)
        item.sent += len(piece)
        if item.sent == len(view):
            self._done(item)
        return True

    def _send(self, frame: bytes, *, is_progress: bool = False) -> None:
        """Send a frame without payload, in order."""
        if not self._queue and self._link.can_send:
            self._link.send(frame)
            return
        self._queue.append(_Item(frame, None, None, is_progress=is_progress))
        self._ask()

    def _send_value(self, head: bytes, payload: Payload, *, is_yield: bool = False) -> None:
        """Send a frame with payload, in order."""
        view = payload.view
        size = len(view)
        if size <= CHUNK and size <= self._credit and not self._queue and self._link.can_send:
            self._credit -= size
            self._link.send(head + view)
            payload.release()
            if is_yield:
                self._grant()
            return
        self._queue.append(_Item(head, view, payload, is_yield=is_yield))
        self._ask()

    def _ask(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._link.is_ready(self)

    def _done(self, item: _Item) -> None:
        self._queue.popleft()
        if item.payload is not None:
            item.payload.release()
        if item.is_yield:
            self._grant()
        if not self._queue and self.call is None:
            self._link.is_over(self)

    def _grant(self) -> None:
        self._granted += 1
        if self._granted >= GRANT_COUNT and self.call is not None:
            granted, self._granted = self._granted, 0
            self.call.grant(granted)

    def _finish(self) -> None:
        if not self._queue:
            self._link.is_over(self)

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

    def cancel(self, reason: str) -> None:
        """The client does not want the call any more."""
        if self.call is not None:
            self.call.cancel(self, reason)


class _Item:
    """Something that waits to be sent: a frame, and a payload after it or in it."""

    __slots__ = ("head", "is_progress", "is_yield", "payload", "sent", "view")

    def __init__(
        self,
        head: bytes,
        view: memoryview | None,
        payload: Payload | None,
        *,
        is_progress: bool = False,
        is_yield: bool = False,
    ) -> None:
        self.head = head
        self.view = view
        self.payload = payload
        self.sent = 0
        self.is_progress = is_progress
        self.is_yield = is_yield


def log_level(request: Open) -> str | None:
    """The level of lines that the caller wants; `None` for none."""
    return request.log_level if request.stream_logs else None
