"""Many calls of one callable: a window of them at a time, results in order or as they come."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import CallRefusedError, KubetorchError, SpecError
from kubetorch.sdk.bars import Bar
from kubetorch.sdk.calls import blocking
from kubetorch.sdk.calls.attempts import Done, Invocation
from kubetorch.sdk.calls.call import Call, CallSet, LoopWakeup, ThreadWakeup, is_generator
from kubetorch.wire import exceptions

#: Calls of one `map` at a time.
WINDOW = 64

#: Encodes the arguments of the next call.
Make = Callable[[], Invocation]


@dataclass(frozen=True)
class MapOptions:
    ordered: bool = True
    window: int = WINDOW
    return_exceptions: bool = False
    #: What is called, and how often if that is known, for the bar.
    label: str = "map"
    count: int | None = None

    def __post_init__(self) -> None:
        window: object = self.window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise SpecError(f"window is {window!r}; it must be a whole number, 1 or more")


class Results:
    """The results of the calls of one `map`, in the order in which they are due."""

    def __init__(self, options: MapOptions) -> None:
        self._options = options
        self._numbers = itertools.count()
        self._next = 0
        self._open = 0
        self._ready: dict[int, Done] = {}

    @property
    def has_room(self) -> bool:
        return self._open < self._options.window

    @property
    def is_empty(self) -> bool:
        return self._open == 0

    def admit(self) -> int:
        """Start one more call; returns its number."""
        self._open += 1
        return next(self._numbers)

    def complete(self, number: int, done: Done) -> None:
        self._ready[number] = done

    def take(self) -> Iterator[Any]:
        while self._ready:
            if self._options.ordered:
                done = self._ready.pop(self._next, None)
                if done is None:
                    return
                self._next += 1
            else:
                done = self._ready.pop(next(iter(self._ready)))
            self._open -= 1
            if done.error is None:
                yield done.value
            elif self._options.return_exceptions:
                yield done.error
            else:
                raise done.error


def results(invocations: Iterator[Make], options: MapOptions) -> Iterator[Any]:
    blocking.warn_in_loop(
        f"{options.label}.map(...)", f"async for value in {options.label}.map_async(...)"
    )
    wakeup = ThreadWakeup()
    work = _Map(invocations, options, wakeup.set)
    try:
        while not work.is_over:
            yield from work.take()
            if work.must_wait:
                with work.waiting():
                    wakeup.wait(work.calls.left)
    finally:
        work.calls.cancel()


async def results_for_loop(invocations: Iterator[Make], options: MapOptions) -> AsyncIterator[Any]:
    """As `results`, for `async for`."""
    wakeup = LoopWakeup()
    work = _Map(invocations, options, wakeup.set)
    try:
        while not work.is_over:
            for value in work.take():
                yield value
            if work.must_wait:
                with work.waiting():
                    await wakeup.wait(work.calls.left)
    finally:
        work.calls.cancel()


class _Map:
    """The calls of one `map`; nothing here waits."""

    def __init__(
        self, invocations: Iterator[Make], options: MapOptions, wake: Callable[[], object]
    ) -> None:
        self.calls = CallSet(wake)
        self._invocations = invocations
        self._results = Results(options)
        self._bar = Bar(options.label)
        self._count = options.count
        self._ended = 0
        self._has_more = True
        # The number of the result of each call.
        self._numbers: dict[Call, int] = {}

    @property
    def is_over(self) -> bool:
        return self._results.is_empty and not self._has_more

    @property
    def must_wait(self) -> bool:
        """True if nothing can start before a call ends."""
        return len(self.calls) > 0 and not (self._has_more and self._results.has_room)

    def waiting(self) -> Bar:
        """Shown while a result is waited for, and never while the user has one."""
        of, share = "", None
        if self._count:
            of, share = f" of {self._count}", self._ended / self._count
        self._bar.update(f"{self._ended}{of} calls ended", share)
        return self._bar

    def take(self) -> Iterator[Any]:
        """Start calls; the results that are due now."""
        try:
            while self._has_more and self._results.has_room:
                self._start_next()
        except Exception:
            # The input raised: what is due goes first.
            yield from self._results.take()
            raise
        self._complete()
        yield from self._results.take()

    def _start_next(self) -> None:
        try:
            make = next(self._invocations)
        except StopIteration:
            self._has_more = False
            return
        number = self._results.admit()
        try:
            invocation = make()
        except KubetorchError as error:
            self._results.complete(number, Done(None, error))
            return
        call = Call(invocation.of_item(number))
        self._numbers[call] = number
        self.calls.start(call)

    def _complete(self) -> None:
        for call, step in self.calls.take():
            if is_generator(step):
                call.cancel()
                step = Done(None, _refused_generator(call.invocation))
            assert isinstance(step, Done)
            self._ended += 1
            number = self._numbers.pop(call)
            if step.error is not None:
                exceptions.add_note(step.error, f"item {number} of the map, counted from 0")
            self._results.complete(number, step)


def _refused_generator(invocation: Invocation) -> Exception:
    return CallRefusedError(
        f"{invocation.target.name} is a generator; .map() and .starmap() take plain values",
        hint="call it once for each item, or let it return a list",
    )
