"""Many calls of one callable: a window of them at a time, results in order or as they come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import CallRefusedError, KubetorchError, SpecError
from kubetorch.sdk.calls.driver import Driver, Running
from kubetorch.sdk.calls.group import Group
from kubetorch.sdk.calls.invocation import Done, Invocation, Yielded

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


def run(invocations: Iterator[Make], manner: Manner) -> Iterator[Any]:
    """The results of calls, made as they are taken."""
    return _Map(invocations, manner).results()


class _Map:
    """The calls of one `map`, driven by the thread that takes its results."""

    def __init__(self, invocations: Iterator[Make], manner: Manner) -> None:
        self._invocations = invocations
        self._results = Results(manner)
        self._driver = Driver()

    def results(self) -> Iterator[Any]:
        """The results, as they are due."""
        results, driver = self._results, self._driver
        try:
            has_more = True
            while True:
                try:
                    while has_more and results.has_room:
                        has_more = self._start_next()
                except Exception:
                    # The input raised: what is due goes first.
                    yield from results.take()
                    raise
                yield from results.take()
                if results.is_empty and not has_more:
                    return
                if len(driver) and not (has_more and results.has_room):
                    for running, step in driver.wait():
                        self._happened(running, step)
        finally:
            driver.cancel()

    def _start_next(self) -> bool:
        try:
            make = next(self._invocations)
        except StopIteration:
            return False
        number = self._results.admit()
        try:
            parts = make().spread()
        except KubetorchError as error:
            self._results.complete(number, Done(None, error))
            return True
        group = Group(number, [Running(part) for part in parts])
        for running in group.parts:
            running.context = group
            self._driver.start(running)
        return True

    def _happened(self, running: Running, step: Done | Yielded) -> None:
        invocation, group = running.invocation, running.context
        if isinstance(step, Yielded) or (step.is_streamed and step.error is None):
            running.cancel()
            step = Done(None, refused_generator(invocation))
        done = group.complete(running, step)
        if done is not None:
            self._results.complete(group.number, done)


def refused_generator(invocation: Invocation) -> Exception:
    """The error of a `map` over a generator."""
    return CallRefusedError(
        f"{invocation.target.name} is a generator; .map() and .starmap() take plain values",
        hint="call it once for each item, or let it return a list",
    )
