"""Batches: calls of one method that run together, in one slot.

    open ──┬── join ──┬── close ── run ── end of each call ── over
           │          │
           └── leave ─┘   without calls it is over at once

The call that gets a slot opens a batch, which takes the slot over. Calls of the same method that
wait for a slot join it, and so do those that come, until it is full or its first call has waited
long enough. Its process runs the function once and ends each call by itself; until the last of them
has ended the batch has the slot.

A call may leave at any time. As long as others are left the run goes on without it: what its
process says of the call then concerns nobody. The last one does not leave a run: it interrupts it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kubetorch.errors import KubetorchError
from kubetorch.pod.logs import Line
from kubetorch.pod.payloads import Payload
from kubetorch.pod.slots import Slots
from kubetorch.pod.tuning import LIMITS
from kubetorch.pod.worker_process.worker import CallSink
from kubetorch.specs.batching import BatchSpec
from kubetorch.wire.frames import Chain, Open, Progress


class BatchedCall(CallSink, Protocol):
    """A call of the pod, as its batch uses it: a `kubetorch.pod.calls.Call`."""

    request: Open
    tag: str
    slots: Slots | None


_CallT = TypeVar("_CallT", bound=BatchedCall)


class Batch(Generic[_CallT]):
    """Calls that run together.

    Attributes:
        calls: The calls that have not left or ended, in the order in which they joined.
        tag, slots: Those of the call that opened it: its slot.
        is_closed: No further calls join it.
    """

    def __init__(self, call: _CallT, spec: BatchSpec, process: int, chain: str) -> None:
        self.method = call.request.method
        self.process = process
        self.tag, self.slots = call.tag, call.slots
        self.is_closed = False
        #: Until it closes.
        self.timer: asyncio.TimerHandle | None = None
        self.calls: dict[_CallT, None] = {}
        self._chain = Chain.parse(chain)
        self._ancestors = Chain()
        self._most = spec.max_size
        # Calls that its process has not ended yet, whether they have left or not.
        self._running: set[Member[_CallT]] = set()

    @property
    def room(self) -> int:
        return self._most - len(self.calls)

    @property
    def chain(self) -> str:
        """What calls that it makes are sent with: all that wait for one of its calls wait for them.

        A chain has a bounded length; the batch itself is the nearest ancestor.
        """
        if not self._ancestors:
            return self._chain.render()
        ancestors = dict.fromkeys((*self._ancestors, *self._chain))
        return Chain([*ancestors][-LIMITS.named_ancestor_slots :]).render()

    def join(self, call: _CallT) -> None:
        if self.calls and call.request.chain:
            self._ancestors = Chain((*self._ancestors, *Chain.parse(call.request.chain)))
        self.calls[call] = None

    def begin(self, member: Member[_CallT]) -> None:
        """Note that its process has got a call."""
        self._running.add(member)

    def leave(self, call: _CallT) -> bool:
        """Remove a call that ends or waits elsewhere; true if the batch is over by that."""
        self.calls.pop(call, None)
        return not self.calls and not self._running

    def can_spare(self, call: _CallT) -> bool:
        """True if the run goes on when this call leaves, for others."""
        return call in self.calls and len(self.calls) > 1

    def end(self, member: Member[_CallT]) -> bool:
        """Note that its process has ended a call; true if the batch is over by that."""
        self._running.discard(member)
        return not self._running


class Member(Generic[_CallT]):
    """The sink of one call of a batch, see `kubetorch.pod.worker_process.worker.CallSink`.

    What the function prints and reports is that of the first call that has not left.
    """

    def __init__(
        self, batch: Batch[_CallT], call: _CallT, on_over: Callable[[Batch[_CallT]], None]
    ) -> None:
        self._batch = batch
        self._call = call
        self._on_over = on_over

    @property
    def _has_left(self) -> bool:
        return self._call not in self._batch.calls

    def on_queued(self) -> None:
        """Nothing: it has its slot."""

    def on_begun(self) -> None:
        """Nothing: it has begun."""

    def on_log(self, line: Line) -> None:
        for call in self._batch.calls:
            call.on_log(line)
            return

    def on_progress(self, report: Progress) -> None:
        for call in self._batch.calls:
            call.on_progress(report)
            return

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        if self._has_left:
            payload.release()
        else:
            self._call.on_yield(codec, sizes, payload)

    def on_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        if self._has_left:
            payload.release()
        else:
            self._call.on_result(codec, sizes, payload, streamed=streamed)
        self._end()

    def on_kept(self, descriptor: int) -> None:
        if self._has_left:
            os.close(descriptor)
        else:
            self._call.on_kept(descriptor)

    def on_error(self, failure: bytes) -> None:
        if not self._has_left:
            self._call.on_error(failure)
        self._end()

    def on_failing(self, failure: bytes) -> None:
        if not self._has_left:
            self._call.on_failing(failure)

    def on_returned(self) -> None:
        """Nothing: a call in a batch is not taken back."""

    def on_lost(self, error: KubetorchError) -> None:
        if not self._has_left:
            self._call.on_lost(error)
        self._end()

    def _end(self) -> None:
        if self._batch.end(self):
            self._on_over(self._batch)
