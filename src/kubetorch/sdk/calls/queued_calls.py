"""The calls of one route that wait in the queues of pods: they move to pods that have room.

    QUEUED ── add ──► waits ── 0.1 s ──► taken back, and placed anew by its own caller
                        └── BEGUN ── discard

Calls are taken back until no pod has two more than another one, or a quarter more where there are
many: as if each had been placed when all pods were there. A call that has moved stays twice as long
in its next queue, so calls of several programs do not chase each other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kubetorch.sdk.calls.stream import Stream
from kubetorch.sdk.tuning import LIMITS, TIMING


class QueuedCall(Protocol):
    """A call that waits in the queue of a pod."""

    #: The number of times that it was taken back.
    moves: int

    def take_back(self) -> None:
        """Have it run by another pod, unless it has begun."""


class QueuedCalls:
    """See the module.

    Args:
        streams: The open streams to pods that take calls.
        slots: The calls that a pod runs at once; `None` if that is unknown, or any number.
        on_waiting: Called again and again while calls wait.
        closed: Set when the route sends nothing any more.
    """

    def __init__(
        self,
        streams: Callable[[], Sequence[Stream]],
        slots: Callable[[], int | None],
        on_waiting: Callable[[], object],
        closed: threading.Event,
    ) -> None:
        self._streams = streams
        self._slots = slots
        self._on_waiting = on_waiting
        self._closed = closed
        self._lock = threading.Lock()
        #: The stream to the pod in which each call waits, and since when, the oldest first.
        self._calls: dict[QueuedCall, tuple[Stream, float]] = {}
        #: The number of these calls, by stream.
        self._counts: Counter[Stream] = Counter()
        #: Calls that pods were asked to give back.
        self._requested: set[QueuedCall] = set()
        self._is_running = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: QueuedCall, stream: Stream) -> None:
        """Note that a call waits in the pod of a stream."""
        with self._lock:
            running = len(stream.calls) - self._counts[stream] - 1
            self._calls[call] = stream, time.monotonic()
            self._counts[stream] += 1
            is_starting, self._is_running = not self._is_running, True
        slots = self._slots()
        if slots is not None and running < slots:  # the pod is full with calls of other programs
            stream.note_load(max(stream.load, slots))
        self._on_waiting()
        if is_starting:
            self._start()

    def discard(self, call: QueuedCall) -> None:
        """Note that a call does not wait any more where it waited."""
        with self._lock:
            stream, _ = self._calls.pop(call, (None, 0.0))
            self._requested.discard(call)
            if stream is not None:
                self._counts[stream] -= 1
                if not self._counts[stream]:
                    del self._counts[stream]

    def balance(self) -> None:
        """Take back calls for pods that have room."""
        streams = self._streams()
        if len(streams) < 2:
            return
        with self._lock:
            movable_calls = self._movable(streams)
            self._requested.update(movable_calls)
        for call in movable_calls:
            call.moves += 1
            call.take_back()

    def _movable(self, streams: Sequence[Stream]) -> list[QueuedCall]:
        """Calls to take back until the pods have about as many calls each."""
        loads = {stream: stream.load for stream in streams}
        for call in self._requested:  # they go to the least busy pods
            stream, _ = self._calls[call]
            if stream in loads:
                loads[stream] -= 1
            loads[min(loads, key=loads.__getitem__)] += 1
        lines, movable_calls = self._lines(), []
        while lines:
            source = max(lines, key=lambda stream: loads.get(stream, 0))
            target = min(loads, key=loads.__getitem__)
            load = loads.get(source, 0)
            if load - loads[target] < max(2, load // LIMITS.uneven_share):
                break
            loads[source] -= 1
            loads[target] += 1
            line = lines[source]
            line.rotate(-1)  # the first in line is the most likely to begin in this moment
            movable_calls.append(line.popleft())
            if not line:
                del lines[source]
        return movable_calls

    def _lines(self) -> dict[Stream, deque[QueuedCall]]:
        """The calls that have waited long enough to move, by stream, the first one first."""
        now = time.monotonic()
        lines: dict[Stream, deque[QueuedCall]] = {}
        for call, (stream, since) in self._calls.items():
            patience = TIMING.queued_call_seconds * 2**call.moves
            if call not in self._requested and now - since >= patience and stream.accepts_calls:
                lines.setdefault(stream, deque()).append(call)
        return lines

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="kubetorch-queued", daemon=True).start()
        except RuntimeError:  # too many of them, or the program ends: calls stay where they are
            self._is_running = False

    def _run(self) -> None:
        idle_turns = 0
        while idle_turns < LIMITS.idle_turns or not self._ends():
            if self._closed.wait(TIMING.queued_call_seconds):
                return
            idle_turns += 1
            if self._calls:
                idle_turns = 0
                self._on_waiting()
                self.balance()

    def _ends(self) -> bool:
        with self._lock:
            self._is_running = bool(self._calls)
            return not self._is_running
