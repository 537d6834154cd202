"""Many calls of one callable: a window of them at a time, results in order or as they come."""

from __future__ import annotations

import heapq
import itertools
import time
from _queue import Empty, SimpleQueue  # `queue` adds classes that nobody needs here
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import CallRefusedError, KubetorchError, SpecError
from kubetorch.sdk.calls.invocation import Again, Done, Invocation, Yielded
from kubetorch.sdk.streams.pending import EXPIRED, Event, PendingCall
from kubetorch.sdk.streams.stream import Stream

#: Calls of one `map` at a time.
WINDOW = 64

#: Encodes the arguments of the next call.
Make = Callable[[], Invocation]


@dataclass(frozen=True)
class Manner:
    """How many calls are made.

    Attributes:
        ordered: Results come in the order of the inputs.
        window: Calls that run, or have a result that waits to be taken.
        return_exceptions: Exceptions are results.
    """

    ordered: bool = True
    window: int = WINDOW
    return_exceptions: bool = False

    def __post_init__(self) -> None:
        window: object = self.window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise SpecError(f"window is {window!r}; it must be a whole number, 1 or more")


class Results:
    """What came of the calls of one `map`, in the order in which it is due.

    Args:
        manner: How many calls are made.
    """

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._numbers = itertools.count()
        self._next = 0
        self._open = 0
        self._ready: dict[int, Done] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more call may start."""
        return self._open < self._manner.window

    @property
    def is_empty(self) -> bool:
        """Whether no call runs and no result waits."""
        return self._open == 0

    def admit(self) -> int:
        """One more call starts; its number."""
        self._open += 1
        return next(self._numbers)

    def complete(self, number: int, done: Done) -> None:
        """A call ended."""
        self._ready[number] = done

    def take(self) -> Iterator[Any]:
        """The values that are due now.

        Raises:
            Exception: What a call raised.
        """
        while self._ready:
            if self._manner.ordered:
                done = self._ready.pop(self._next, None)
                if done is None:
                    return
                self._next += 1
            else:
                done = self._ready.pop(next(iter(self._ready)))
            self._open -= 1
            if done.error is None:
                yield done.value
            elif self._manner.return_exceptions:
                yield done.error
            else:
                raise done.error


@dataclass
class _Running:
    number: int
    invocation: Invocation
    stream: Stream | None = None
    call: PendingCall | None = None


def run(invocations: Iterator[Make], manner: Manner) -> Iterator[Any]:
    """The results of calls, made as they are taken."""
    return _Map(invocations, manner).results()


class _Map:
    """The calls of one `map`, driven by the thread that takes its results."""

    def __init__(self, invocations: Iterator[Make], manner: Manner) -> None:
        self._invocations = invocations
        self._results = Results(manner)
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._running: dict[int, _Running] = {}
        # Calls to be started again: when, and which.
        self._again: list[tuple[float, int]] = []

    def results(self) -> Iterator[Any]:
        """The results, as they are due."""
        try:
            has_more = True
            while True:
                try:
                    while has_more and self._results.has_room:
                        has_more = self._start_next()
                except Exception:
                    # The input raised: what is due goes first.
                    yield from self._results.take()
                    raise
                yield from self._results.take()
                if self._results.is_empty and not has_more:
                    return
                if self._running and not (has_more and self._results.has_room):
                    self._wait()
        finally:
            for running in self._running.values():
                _cancel(running)

    def _start_next(self) -> bool:
        try:
            make = next(self._invocations)
        except StopIteration:
            return False
        number = self._results.admit()
        try:
            invocation = make()
        except KubetorchError as error:
            self._results.complete(number, Done(None, error))
            return True
        self._running[number] = running = _Running(number, invocation)
        self._attempt(running)
        return True

    def _attempt(self, running: _Running) -> None:
        invocation = running.invocation
        try:
            stream = invocation.route.stream() or invocation.route.connect(invocation.patience)
        except KubetorchError as error:
            if isinstance(error, CallRefusedError):
                error = invocation.refused(error)  # type: ignore[assignment]
            self._complete(running, Done(None, error))
            return
        running.stream = stream
        running.call = call = stream.prepare(self._events.put, running)
        invocation.start(stream, call)

    def _wait(self) -> None:
        until = self._deadline()
        try:
            timeout = None if until is None else max(until - time.monotonic(), 0.0)
            event = self._events.get(timeout=timeout)
        except Empty:
            self._catch_up()
            return
        running: _Running = event.call.context
        if event.call is running.call:
            self._step(running, event)

    def _deadline(self) -> float | None:
        times = [running.invocation.expires for running in self._running.values()]
        known = [at for at in times if at is not None]
        if self._again:
            known.append(self._again[0][0])
        return min(known, default=None)

    def _catch_up(self) -> None:
        """Attempts whose pause is over, and calls whose deadline has passed."""
        now = time.monotonic()
        while self._again and self._again[0][0] <= now:
            _, number = heapq.heappop(self._again)
            if number in self._running:
                self._attempt(self._running[number])
        for running in list(self._running.values()):
            expires = running.invocation.expires
            if expires is None or expires > now:
                continue
            if running.call is None:
                self._complete(running, Done(None, running.invocation.timed_out()))
            else:
                self._step(running, Event(running.call, EXPIRED, None, None, 0))

    def _step(self, running: _Running, event: Event) -> None:
        assert running.stream is not None
        step = running.invocation.step(running.stream, event)
        if type(step) is Done:
            self._complete(running, step)
        elif type(step) is Yielded:
            _cancel(running)
            self._complete(running, Done(None, refused_generator(running.invocation)))
        elif type(step) is Again:
            running.stream = running.call = None
            heapq.heappush(self._again, (time.monotonic() + step.delay, running.number))

    def _complete(self, running: _Running, done: Done) -> None:
        del self._running[running.number]
        if done.is_streamed and done.error is None:
            done = Done(None, refused_generator(running.invocation))
        self._results.complete(running.number, done)


def refused_generator(invocation: Invocation) -> Exception:
    """The error of a `map` over a generator."""
    return CallRefusedError(
        f"{invocation.target.name} is a generator; .map() and .starmap() take plain values",
        hint="call it once for each item, or let it return a list",
    )


def _cancel(running: _Running) -> None:
    if running.stream is not None and running.call is not None:
        running.stream.cancel(running.call)
