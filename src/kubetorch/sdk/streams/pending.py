"""A call that is under way on a stream, seen from the reading thread: where its frames go."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kubetorch.errors import ProtocolError
from kubetorch.sdk.streams.frame import Frame
from kubetorch.sdk.streams.upload import Upload
from kubetorch.wire import frames
from kubetorch.wire.frames import Kind

Buffer = bytes | bytearray | memoryview

#: Kinds of events that no frame stands for: the stream lost the call, its deadline passed, its
#: payload is on its way.
LOST, EXPIRED, SENT = -1, -2, -3

#: Bytes of room that are granted together.
GRANT = frames.WINDOW // 4
#: Bytes of one yielded value that are granted only when the program takes the value.
_HELD = frames.WINDOW // 2
#: A payload from this size on lies in memory of its own, aligned as pages are.
_MAPPED = 1024 * 1024
#: Reports of progress that wait for their reader; the oldest go first.
_REPORTS = 256


class Event(NamedTuple):
    """Something that happened to a call.

    Attributes:
        call: The call.
        kind: Kind of the frame, or `LOST`, `EXPIRED`, `SENT`.
        meta: Meta of the frame; the error for `LOST`.
        payload: Whole payload of a RESULT, YIELD or ERROR.
        weight: Bytes that the agent may send again once this was taken.
    """

    call: PendingCall
    kind: int
    meta: Any
    payload: Buffer | None
    weight: int


class PendingCall:
    """One call on one stream.

    Attributes:
        number: Its number on the stream.
        deliver: Told of every event, by the thread that reads.
        context: Whatever the owner of the call wants to find in an event.
        opening: The frame that opened it, once it was sent or is kept to be sent.
        upload: Its arguments, when they are long.
        was_written: Something of it may have reached an agent.
        is_abandoned: Nobody waits for it any more; what still comes is dropped.
        reports: Reports of progress that were not taken yet, one event each.
    """

    # Defaults lie in the class: most calls are short, and every assignment costs.
    opening: Frame | None = None
    upload: Upload | None = None
    was_written = False
    is_abandoned = False
    reports: deque[frames.Progress] | None = None
    _buffer: memoryview | None = None
    _filled = 0
    _kind = 0
    _meta: Any = None
    # Bytes not granted again yet: what the reader took in, and what the program took out.
    _granting = 0
    _taken = 0

    def __init__(self, number: int, deliver: Callable[[Event], None], context: Any = None) -> None:  # noqa: ANN401  # the owner's
        self.number = number
        self.deliver = deliver
        self.context = context

    # ---------------------------------------------------------------------- the reading thread

    def begin(self, kind: int, meta: frames.Result | frames.Yield, payload: memoryview) -> bool:
        """A RESULT or YIELD frame; whether its value is complete."""
        total = meta.body.total
        if len(payload) == total:
            if not self.is_abandoned:
                self.deliver(Event(self, kind, meta, bytearray(payload), min(total, _HELD)))
            return True
        if payload or total <= 0:
            raise ProtocolError(f"a frame with {len(payload)} of {total} bytes of payload")
        self._kind, self._meta, self._filled = kind, meta, 0
        self._buffer = _allocate(total)
        return False

    def place(self, size: int) -> memoryview | None:
        """Where the next bytes of payload belong; `None` when there was no memory for them."""
        buffer = self._buffer
        if buffer is None and self.is_abandoned:
            return None
        if buffer is None or self._filled + size > len(buffer):
            raise ProtocolError(f"{size} bytes of payload that do not belong to a value")
        return buffer[self._filled : self._filled + size]

    def placed(self, size: int) -> tuple[bool, int]:
        """That many bytes of payload arrived: whether the value is complete, and what to grant."""
        if self._buffer is None:
            return False, 0
        held = 0 if self._kind == Kind.RESULT else min(_HELD, len(self._buffer))
        before = max(self._filled, held)
        self._filled += size
        self._granting += max(self._filled - before, 0)
        grant = self._take_grant()
        if self._filled < len(self._buffer):
            return False, grant
        buffer, self._buffer = self._buffer, None
        if not self.is_abandoned:
            self.deliver(Event(self, self._kind, self._meta, buffer, held))
        self._meta = None
        return True, grant

    @property
    def is_result(self) -> bool:
        """Whether the value that is being put together is the result."""
        return self._kind == Kind.RESULT

    def report(self, progress: frames.Progress) -> None:
        """A PROGRESS frame."""
        if self.is_abandoned:
            return
        if self.reports is None:
            self.reports = deque(maxlen=_REPORTS)
        # A full queue drops its oldest report, whose event then stands for the next one.
        is_full = len(self.reports) == _REPORTS
        self.reports.append(progress)
        if not is_full:
            self.deliver(Event(self, Kind.PROGRESS, None, None, 0))

    def lose(self, error: Exception) -> None:
        """The stream cannot say any more how the call ends."""
        if not self.is_abandoned:
            self.deliver(Event(self, LOST, error, None, 0))

    def _take_grant(self) -> int:
        if self._granting < GRANT:
            return 0
        grant, self._granting = self._granting, 0
        return grant

    # ------------------------------------------------------------------------------- the owner

    def take(self, weight: int) -> int:
        """The program took an event of this weight; what to grant."""
        self._taken += weight
        if self._taken < GRANT:
            return 0
        grant, self._taken = self._taken, 0
        return grant


def _allocate(size: int) -> memoryview:
    if size < _MAPPED:
        return memoryview(bytearray(size))
    try:
        memory = mmap.mmap(-1, size)
    except OSError as error:
        raise MemoryError(f"no memory for a value of {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
