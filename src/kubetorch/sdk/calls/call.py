"""One call under way: a future that the thread that reads its stream completes.

    new ─► connecting ─► running ─► over          events wait in a queue;
              ▲             │                     `handle_event` takes them
              └── paused ◄──┘

The thread or coroutine that waits for the result handles the events: in `Call.next`, in
`Call.next_async`, and for many calls in `CallSet`. Values are decoded, lines printed and callbacks
called there, and not in the thread that reads.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import sys
import time
from _queue import Empty, SimpleQueue
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

from kubetorch.errors import CallCancelledError, CallRefusedError, KubetorchError
from kubetorch.sdk.calls.attempts import Done, Invocation, RankValues, RetryAfter, Yielded
from kubetorch.sdk.calls.route import Connected, Request
from kubetorch.sdk.calls.stream import Stream
from kubetorch.sdk.calls.stream_writer import EXPIRED, Event, PendingCall
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire.frames import Kind

if TYPE_CHECKING:
    import asyncio


QUEUED, BEGUN = int(Kind.QUEUED), int(Kind.BEGUN)


class Placer(Protocol):
    """Decides in which pods calls run."""

    def stream_for(self, call: Call) -> Stream | None:
        """The stream to the pod for a call; `None` when one has to be connected."""

    def wants_wakeup(self) -> bool:
        """True if one more call that has begun is to wake the waiting thread; in any thread."""

    def on_begun(self, call: Call) -> None:
        """Note that a call has begun."""

    def on_queued(self, call: Call) -> None:
        """Note that a call waits again in its pod."""

    def on_retry(self, call: Call) -> None:
        """Note that the pod of a call does not have it any more; another attempt follows."""


class Call:
    """One call on one pod, over all attempts to make it."""

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation
        self.is_started = self.is_over = False
        self._is_cleanup = is_cleanup()
        #: Called from any thread when an event arrives; without it the caller's thread reads.
        self.wake: Callable[[], object] | None = None
        #: Called in place of `wake` for events that can wait for the next one.
        self.note: Callable[[], object] | None = None
        #: Decides in which pod it runs; else its route does.
        self.placer: Placer | None = None
        #: The number of times that a pod was asked to give it back, since others had room.
        self.moves = 0
        #: True while it waits in the queue of a pod, from which it may move.
        self._is_queued = False
        #: Events to handle; `None` ends a wait.
        self._arrived: SimpleQueue[Event | Connected | None] = SimpleQueue()
        # The attempt that is under way, or the connection or the moment that it waits for.
        self._stream: Stream | None = None
        self._pending: PendingCall | None = None
        self._request: Request | None = None
        self._resume_at: float | None = None
        self._recalled_until: float | None = None

    # ------------------------------------------------------------------------------- waiting

    def next(self) -> Done | Yielded:
        """The end of the call, or a value of its generator; it starts the call, too.

        Any exception cancels the call.
        """
        try:
            if not self.is_started:
                self.start()
            while True:
                step = self.handle_event(self._wait())
                if step is not None:
                    return step
        except BaseException:  # Ctrl-C too: a call without a waiting caller must not go on
            self.cancel()
            raise

    async def next_async(self) -> Done | Yielded:
        """Awaitable form of `next`; it starts the call, too."""
        wakeup = LoopWakeup()
        self.wake = wakeup.set
        try:
            if not self.is_started:
                self.start()
            while True:
                event = self.arrived()
                step = self.handle_event(event)
                if step is not None:
                    return step
                if event is None:
                    deadline = self.deadline
                    await wakeup.wait(None if deadline is None else deadline - time.monotonic())
        except BaseException:
            self.cancel()
            raise

    def _wait(self) -> Event | Connected | None:
        """Wait for the next arrival; `None` at the deadline."""
        deadline = self.deadline
        target = self.invocation.target
        awaited = (target.name, target.service)
        with ends_with_call(self._end_wait, awaited, is_cleanup=self._is_cleanup):
            if self._stream is not None and self._pending is not None:
                return self._stream.wait(self._pending, self._arrived, deadline)
            try:
                timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                return self._arrived.get(timeout=timeout)
            except Empty:
                return None

    def _end_wait(self) -> None:
        """End a wait. Called by any thread."""
        self._arrived.put(None)
        stream = self._stream
        if stream is not None:
            stream.end_wait()

    @property
    def deadline(self) -> float | None:
        """The time at which `handle_event` is due at the latest, also if nothing arrives."""
        expires = self.invocation.expires
        if self._stream is not None and self._recalled_until is None:
            return expires
        request = None if self._request is None else self._request.deadline
        moments = (expires, self._recalled_until, self._resume_at, request)
        return min((moment for moment in moments if moment is not None), default=None)

    # ------------------------------------------------------------------------- what happened

    def arrived(self) -> Event | Connected | None:
        try:
            return self._arrived.get_nowait()
        except Empty:
            return None

    def handle_event(self, event: Event | Connected | None) -> Done | Yielded | None:
        """Handle an event; `None` stands for time that has passed."""
        if event is None:
            return self._on_deadline()
        if isinstance(event, Connected):
            self._on_connected(event)
            return None
        if event.call is not self._pending or self._stream is None:
            return None  # an event of an earlier attempt
        had_begun = self.invocation.has_begun
        step = self.invocation.step(self._stream, event)
        if self.placer is not None and self.invocation.has_begun != had_begun:
            if had_begun:
                self.placer.on_queued(self)
            else:
                self.placer.on_begun(self)
        if event.kind == QUEUED or (self._is_queued and (event.kind == BEGUN or step is not None)):
            self._note_queue(is_queued=event.kind == QUEUED)
        if isinstance(step, RetryAfter):
            self._stream = self._pending = None
            if self.placer is not None:
                self.placer.on_retry(self)
            if self._recalled_until is not None:
                return self._give_up()
            self._resume_at = time.monotonic() + step.delay
            return None
        if isinstance(step, Done):
            self.is_over = True
        return step

    def _note_queue(self, *, is_queued: bool) -> None:
        """Note that it waits in the queue of its pod, or that it does not any more."""
        route = self.invocation.service_route
        if self._is_queued:
            self._is_queued = False
            route.queued_calls.discard(self)
        may_move = self.placer is None and route.is_growing and self.invocation.may_move
        if is_queued and may_move and self._stream is not None:
            self._is_queued = True
            route.queued_calls.add(self, self._stream)

    def _on_deadline(self) -> Done | Yielded | None:
        now = time.monotonic()
        expires, request, stream, pending = (
            self.invocation.expires,
            self._request,
            self._stream,
            self._pending,
        )
        if self._recalled_until is not None and now >= self._recalled_until:
            return self._give_up()
        if expires is not None and now >= expires:
            if stream is not None and pending is not None:
                return self.handle_event(Event(pending, EXPIRED, None, None, 0))
            self.cancel()
            return Done(None, self.invocation.timed_out())
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._attempt()
        elif request is not None and now >= request.deadline:
            request.cancel()
            raise self.invocation.refused(request.refusal())
        return None

    def _on_connected(self, connected: Connected) -> None:
        request, self._request = self._request, None
        error = connected.error
        if error is None:
            if connected.stream is not None:
                self._open(connected.stream)
            else:
                self._attempt()
        elif not isinstance(error, CallRefusedError):
            raise error
        elif self.invocation.leave_ancestor() or (
            request is not None and connected.is_spent and request.deadline > time.monotonic()
        ):
            self._attempt()
        else:
            raise self.invocation.refused(error)

    def _give_up(self) -> Done:
        self.cancel()
        return Done(None, CallCancelledError("the caller gave the call up"))

    # ------------------------------------------------------------------------------ attempts

    def start(self) -> None:
        """Make the first attempt; after any exception the call is cancelled."""
        self.is_started = True
        try:
            self._attempt()
        except BaseException:
            self.cancel()
            raise

    def open(self) -> None:
        """Start, and wait until the call is on its way."""
        self.start()
        try:
            while self._pending is None:
                self.handle_event(self._wait())
        except BaseException:
            self.cancel()
            raise

    def wait_until_begun(self) -> Done | Yielded | None:
        """Wait until the call runs in its pod; returns its value or end, if that came first."""
        try:
            while not self.invocation.has_begun:
                step = self.handle_event(self._wait())
                if step is not None:
                    return step
        except BaseException:
            self.cancel()
            raise
        return None

    def _attempt(self) -> None:
        route = self.invocation.route
        stream = route.stream() if self.placer is None else self.placer.stream_for(self)
        if stream is None:
            self._request = route.request(self.invocation.patience, self._deliver)
        else:
            self._open(stream)

    def _open(self, stream: Stream) -> None:
        self._stream = stream
        # The call is noted before it is opened, so that it can be cancelled after any exception.
        deliver = self._arrived.put if self.wake is None else self._deliver
        self._pending = pending = stream.prepare(deliver)
        self.invocation.start(stream, pending, reads=self.wake is None)

    def _deliver(self, event: Event | Connected) -> None:
        self._arrived.put(event)
        if self.is_over:
            self._drop_connections()
        wake = self.wake
        if self.placer is not None and isinstance(event, Event) and event.kind == BEGUN:
            wake = wake if self.placer.wants_wakeup() else self.note
        if wake is not None:
            wake()

    # ----------------------------------------------------------------------------- giving up

    def take_back(self) -> None:
        """Have it run by another pod, unless it has begun. Any thread may."""
        stream, pending = self._stream, self._pending
        if stream is not None and pending is not None:
            self.invocation.is_taken_back = True
            stream.take_back(pending)

    def recall(self, reason: str) -> None:
        """Cancel the call in its pod, and wait a moment longer for its end."""
        self._recalled_until = time.monotonic() + TIMING.recalled_call_seconds
        if self._stream is not None and self._pending is not None:
            self._stream.cancel(self._pending, reason, abandons=False)

    @property
    def is_recalled(self) -> bool:
        return self._recalled_until is not None

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        self.is_over = True
        if self._is_queued:
            self._note_queue(is_queued=False)
        if self._stream is not None and self._pending is not None:
            self._stream.cancel(self._pending)
        if self._request is not None:
            self._request.cancel()
            self._drop_connections()
        self.invocation.end_lines()

    def _drop_connections(self) -> None:
        """Close a connection that was made for this call alone, and came too late."""
        with suppress(Empty):
            while True:
                event = self._arrived.get_nowait()
                if isinstance(event, Connected) and event.stream is not None:
                    event.stream.close()


class CallSet:
    """Calls that one thread or coroutine waits for together; `wake` ends its wait."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        #: A dict, for the order in which they started.
        self._running: dict[Call, None] = {}
        #: The calls with events to handle, once for each event.
        self._woken: deque[Call] = deque()
        #: The deadlines of calls; the number breaks ties.
        self._deadlines: list[tuple[float, int, Call]] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def seconds_left(self) -> float | None:
        """Seconds after which to `take_steps`, also without a wakeup."""
        if not self._deadlines:
            return None
        return max(self._deadlines[0][0] - time.monotonic(), 0.0)

    def start(self, call: Call) -> None:
        call.wake = functools.partial(self._notify, call)
        call.note = functools.partial(self._woken.append, call)
        self._running[call] = None
        call.start()
        self._schedule(call)

    def recall(self, call: Call, reason: str) -> None:
        call.recall(reason)
        self._schedule(call)

    def _notify(self, call: Call) -> None:
        self._woken.append(call)
        self._wake()

    def take_steps(self) -> Iterator[tuple[Call, Done | Yielded]]:
        """The values, errors and yielded values of calls. Never blocks.

        A call that has ended, or yields, is no longer in the set.
        """
        while self._woken:
            call = self._woken.popleft()
            if call in self._running:
                yield from self._steps_of(call, call.arrived())
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            call = heapq.heappop(self._deadlines)[2]
            if call in self._running:
                yield from self._steps_of(call, None)

    def _steps_of(
        self, call: Call, event: Event | Connected | None
    ) -> Iterator[tuple[Call, Done | Yielded]]:
        before = call.deadline
        try:
            step = call.handle_event(event)
        except KubetorchError as error:
            step = Done(None, error)
            call.cancel()
        if step is not None:
            self._running.pop(call, None)
            yield call, step
        elif event is None or call.deadline != before:
            self._schedule(call)

    def _schedule(self, call: Call) -> None:
        deadline = call.deadline
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, next(self._ties), call))

    def cancel(self) -> None:
        """End all calls, the last one first: else those that wait would begin in their turn."""
        for call in reversed(self._running):
            call.cancel()
        self._running.clear()


_NO_CALL = nullcontext()


def _current_call() -> Any:  # noqa: ANN401  # a RunningCall, or none
    context = sys.modules.get("kubetorch.pod.user_process.current_call")
    return None if context is None else context.current.get()


def is_cleanup() -> bool:
    """True in a call of this worker that was cancelled."""
    call = _current_call()
    return call is not None and call.is_interrupted


def ends_with_call(
    wake: Callable[[], object], awaited: tuple[str, str], *, is_cleanup: bool | None = None
) -> AbstractContextManager[None]:
    """Have a wait end with an error when the call of this worker that waits is cancelled.

    Args:
        wake: Ends the wait; it is called by any thread.
        awaited: Name of the callable, and of its service if that is known.
        is_cleanup: What `is_cleanup()` was when what is awaited began; `None`: it begins now.
    """
    call = _current_call()
    return _NO_CALL if call is None else call.waiting(wake, awaited, is_cleanup=is_cleanup)


class ThreadWakeup:
    """Wakes a thread that waits for calls; other threads set it.

    A wakeup that is set while no thread waits ends the next wait at once, so none is lost. It is no
    `threading.Event`: a signal handler that raises can leave the lock of an event held.
    """

    def __init__(self, awaited: tuple[str, str]) -> None:
        self._awaited = awaited
        self._is_cleanup = is_cleanup()
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Called by any thread."""
        self._tokens.put(None)

    def wait(self, timeout: float | None) -> None:
        """Returns when it is set, or after `timeout` seconds."""
        try:
            with ends_with_call(self.set, self._awaited, is_cleanup=self._is_cleanup):
                self._tokens.get(timeout=None if timeout is None else max(timeout, 0.0))
        except Empty:
            return
        while not self._tokens.empty():
            self._tokens.get()


class LoopWakeup:
    """Wakes a coroutine of the running loop: see `ThreadWakeup`."""

    def __init__(self) -> None:
        import asyncio  # noqa: PLC0415  # blocking programs do without

        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_set = False
        #: True if a wakeup of the loop is under way: one wakeup serves many events.
        self._is_due = False

    def set(self) -> None:
        """Called by any thread."""
        if self._is_due:
            return
        self._is_due = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed: no coroutine waits any more
            return

    def _wake(self) -> None:
        # First this, so that an event that comes from now on wakes the loop again.
        self._is_due = False
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self, timeout: float | None) -> None:
        """Returns when it is set, or after `timeout` seconds."""
        timer: asyncio.TimerHandle | None = None
        if not self._is_set:
            self._waiter = waiter = self._loop.create_future()
            if timeout is not None:
                timer = self._loop.call_later(max(timeout, 0.0), self._wake)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        self._is_set = False


# ---------------------------------------------------------------------------------- generators


class _RemoteValues:
    def __init__(self, call: Call, first: Done | Yielded | None = None) -> None:
        self._call = call
        self._first = first

    def close(self) -> None:
        """End the generator, if it has not ended."""
        self._first = None
        if not self._call.is_over:
            self._call.cancel()

    def __del__(self) -> None:
        self.close()


class RemoteIterator(_RemoteValues, Iterator[Any]):
    """The values of a generator that runs in a pod.

    The generator computes ahead by the window of flow control and then waits for this end. Closing
    the iterator, or forgetting it, ends the generator in the pod; so does leaving a `with` block.
    The `StopIteration` has the returned value as its `value`, as with a local generator.
    """

    def __next__(self) -> Any:  # noqa: ANN401  # the user's own value
        step, self._first = self._first, None
        if step is None:
            if self._call.is_over:
                raise StopIteration
            step = self._call.next()
        if isinstance(step, Yielded):
            return step.value
        if step.error is not None:
            raise step.error
        raise StopIteration(step.value)

    def __enter__(self) -> RemoteIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteAsyncIterator(_RemoteValues, AsyncIterator[Any]):
    """The values of a generator that runs in a pod, for `async for`: see `RemoteIterator`.

    Awaiting it gives the iterator itself, so a call of a generator can be awaited like every other.
    `close` and `aclose` do the same: nothing has to be waited for.
    """

    returned: Any = None

    def __await__(self) -> Generator[Any, None, RemoteAsyncIterator]:
        yield from ()
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # the user's own value
        step, self._first = self._first, None
        if step is None:
            if self._call.is_over:
                raise StopAsyncIteration
            step = await self._call.next_async()
        if isinstance(step, Yielded):
            return step.value
        if step.error is not None:
            raise step.error
        self.returned = step.value
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the generator, if it has not ended."""
        self.close()


def is_generator(step: Done | Yielded) -> bool:
    return isinstance(step, Yielded) or (step.is_streamed and step.error is None)


# ------------------------------------------------------------- a generator that runs on all ranks


class Rounds:
    """The values of one call for its ranks that no iterator has taken."""

    def __init__(self, call: Call, first: Done | Yielded) -> None:
        assert isinstance(first.value, RankValues)
        self.ranks = list(first.value.ranks)
        self.call = call
        self._values: dict[int, deque[Any]] = {rank: deque() for rank in self.ranks}
        self._returned: dict[int, Any] = {}
        self._error: Exception | None = None
        #: The rank whose iterator was closed, which ended the iterators of all ranks.
        self._closed: int | None = None
        self.add(first)

    def add(self, step: Done | Yielded) -> None:
        if isinstance(step, Done) and step.error is not None:
            self._error = step.error
            return
        assert isinstance(step.value, RankValues)
        for rank, value in zip(step.value.ranks, step.value, strict=True):
            if rank in step.value.ended or isinstance(step, Done):
                self._returned[rank] = value
            else:
                self._values[rank].append(value)

    def take_value(self, rank: int, end: type[Exception]) -> tuple[bool, Any]:
        """The next value for a rank, if one is there; raises `end` after the last."""
        if self._values[rank]:
            return True, self._values[rank].popleft()
        if rank in self._returned:
            raise end(self._returned[rank])
        if self._error is not None:
            raise self._error
        if self._closed not in (None, rank):
            raise CallCancelledError(
                f"the generator of rank {rank} was ended, since that of rank {self._closed} was "
                "closed: one call runs on all ranks"
            )
        if self.call.is_over:
            raise end(None)
        return False, None

    def close(self, rank: int | None = None) -> None:
        """End the generators of all ranks, since the iterator of one is closed."""
        if not self.call.is_over:
            self._closed = rank
            self.call.cancel()

    def __del__(self) -> None:
        self.close()


class _ValuesOfRank:
    def __init__(self, rounds: Rounds, rank: int) -> None:
        self._rounds = rounds
        self.rank = rank

    def close(self) -> None:
        """End the generators of all ranks, if they have not ended."""
        self._rounds.close(self.rank)


class RankIterator(_ValuesOfRank, Iterator[Any]):
    """The values of a generator on one rank. Closing it ends the generators of all ranks."""

    def __next__(self) -> Any:  # noqa: ANN401  # the user's own value
        while True:
            is_there, value = self._rounds.take_value(self.rank, StopIteration)
            if is_there:
                return value
            self._rounds.add(self._rounds.call.next())


class RankAsyncIterator(_ValuesOfRank, AsyncIterator[Any]):
    """As `RankIterator`, for `async for`."""

    async def __anext__(self) -> Any:  # noqa: ANN401  # the user's own value
        while True:
            is_there, value = self._rounds.take_value(self.rank, StopAsyncIteration)
            if is_there:
                return value
            self._rounds.add(await self._rounds.call.next_async())
