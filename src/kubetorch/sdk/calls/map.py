"""Many calls of one callable: some of them at a time, results in order or as they come.

Without a window the pods decide how many items run: of a `def` one in each process. Every pod gets
the items that it runs and a few more (`kubetorch.sdk.calls.placement`). An autoscaled service is
offered all items that its pods could run at once: its scaler counts those that were sent, and the
controller is told how many others there are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import CallRefusedError, KubetorchError, SpecError
from kubetorch.sdk.bars import Bar
from kubetorch.sdk.calls import blocking
from kubetorch.sdk.calls.attempts import Done, Invocation
from kubetorch.sdk.calls.call import Call, CallSet, LoopWakeup, ThreadWakeup, is_generator
from kubetorch.sdk.calls.placement import Placement
from kubetorch.sdk.calls.route import Route
from kubetorch.sdk.calls.stream import Stream
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions
from kubetorch.wire.calls import new_call_id

_BEGUN_ITEMS = LIMITS.begun_items_per_wakeup

#: Encodes the arguments of the next call.
Make = Callable[[], Invocation]


@dataclass(frozen=True)
class MapOptions:
    ordered: bool = True
    #: `None`: the pods decide.
    window: int | None = None
    return_exceptions: bool = False
    #: The callable's name, and the number of calls if that is known, for the bar.
    label: str = "map"
    count: int | None = None

    def __post_init__(self) -> None:
        window: object = self.window
        if window is None:
            return
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise SpecError(f"window is {window!r}; it must be a whole number, 1 or more")


class Results:
    """The results of the calls of one `map`, in the order in which they are due."""

    def __init__(self, options: MapOptions) -> None:
        self._options = options
        #: Calls that run, or have a result that waits, at most.
        self.room = options.window or LIMITS.map_items
        self._numbers = itertools.count()
        self._next = 0
        self._open = 0
        self._ready: dict[int, Done] = {}

    @property
    def has_room(self) -> bool:
        return self._open < self.room

    @property
    def is_empty(self) -> bool:
        return self._open == 0

    @property
    def free_room(self) -> int:
        """Calls that may start before results are taken."""
        return max(self.room - self._open, 0)

    def admit(self) -> int:
        """Start one more call; returns its number."""
        self._open += 1
        return next(self._numbers)

    def complete(self, number: int, done: Done) -> None:
        self._ready[number] = done

    def take_due(self) -> Iterator[Any]:
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
    wakeup = ThreadWakeup((f"{options.label}.map(...)", ""))
    work = _Map(invocations, options, wakeup.set)
    try:
        while not work.is_over:
            yield from work.advance()
            if work.must_wait:
                with work.waiting():
                    wakeup.wait(work.seconds_left)
    finally:
        work.close()


async def results_for_loop(invocations: Iterator[Make], options: MapOptions) -> AsyncIterator[Any]:
    """As `results`, for `async for`."""
    wakeup = LoopWakeup()
    work = _Map(invocations, options, wakeup.set)
    try:
        while not work.is_over:
            for value in work.advance():
                yield value
            if work.must_wait:
                with work.waiting():
                    await wakeup.wait(work.seconds_left)
    finally:
        work.close()


class _Map:
    """The calls of one `map`; nothing here waits."""

    def __init__(
        self, invocations: Iterator[Make], options: MapOptions, wake: Callable[[], object]
    ) -> None:
        self.calls = CallSet(wake)
        self._wake = wake
        self._invocations = invocations
        self._options = options
        self._results = Results(options)
        self._bar = Bar(options.label)
        self._started = self._ended = 0
        self._has_more = True
        #: The number of each call's result.
        self._numbers: dict[Call, int] = {}
        self._placement: Placement[Call, Stream] = Placement()
        self._id = new_call_id()
        self._begun = itertools.count(1)
        #: The stream to the pod of the first item.
        self._first: Stream | None = None
        #: The route to all pods, once a call was made.
        self._route: Route | None = None
        self._is_placing = options.window is None
        #: The number of items that were not sent, as reported last, and when the next may follow.
        self._reported, self._report_at, self._is_report_due = 0, 0.0, False
        #: Items that a pod should have, of a batched function.
        self._pod_items = 0

    @property
    def is_over(self) -> bool:
        return self._results.is_empty and not self._has_more

    @property
    def must_wait(self) -> bool:
        """True if nothing can start before a call ends."""
        return len(self.calls) > 0 and not (self._has_more and self._has_room)

    @property
    def seconds_left(self) -> float | None:
        """Seconds after which to `advance`, also without a wakeup."""
        seconds_left = self.calls.seconds_left
        if not self._is_placing or not (self._has_more or self._placement.has_waiting):
            return seconds_left
        # Pods may come meanwhile, so the map wakes for them, too.
        longest = TIMING.pod_check_seconds
        if self._is_report_due:
            longest = min(longest, max(self._report_at - time.monotonic(), 0.0))
        return longest if seconds_left is None else min(seconds_left, longest)

    @property
    def _has_room(self) -> bool:
        return self._results.has_room and (not self._is_placing or self._placement.has_room)

    def waiting(self) -> Bar:
        """The bar, which is shown while a result is waited for, and not while the user has one."""
        of, share = "", None
        if self._options.count:
            of, share = f" of {self._options.count}", self._ended / self._options.count
        self._bar.update(f"{self._ended}{of} calls ended", share)
        return self._bar

    def advance(self) -> Iterator[Any]:
        """Start calls; the results that are due now."""
        self._update_pods()
        self._complete()
        try:
            while self._has_more and self._has_room:
                self._start_next()
        except Exception:
            # The input raised: the results that are due go first.
            yield from self._results.take_due()
            raise
        self._complete()
        if self._is_placing and not (self._has_more and self._results.has_room):
            for call in self._placement.take_back():
                call.take_back()
        self._report_unsent()
        yield from self._results.take_due()

    def close(self) -> None:
        """Cancel the calls that run."""
        self._has_more = False
        self._report_unsent()
        if self._route is not None:
            self._route.on_new_pods.discard(self._wake)
        self.calls.cancel()

    def _report_unsent(self) -> None:
        """Report the items that wait here for a pod, which are load of an autoscaled service."""
        route, now = self._route, time.monotonic()
        if route is None or not (self._is_placing and route.is_growing):
            return
        count = self._results.free_room if self._has_more else 0
        if self._options.count is not None:
            count = min(count, max(self._options.count - self._started, 0))
        self._is_report_due = count != self._reported
        if self._is_report_due and (now >= self._report_at or not count):
            self._reported, self._report_at = count, now + TIMING.waiting_items_seconds
            self._is_report_due = False
            route.note_waiting(self, count)

    def _start_next(self) -> None:
        try:
            make = next(self._invocations)
        except StopIteration:
            self._has_more = False
            return
        number = self._results.admit()
        self._started = number + 1
        try:
            invocation = make()
        except KubetorchError as error:
            self._results.complete(number, Done(None, error))
            return
        if self._route is not invocation.service_route:
            self._route = invocation.service_route
            if self._is_placing and self._route.is_growing:
                self._route.on_new_pods.add(self._wake)
            self._pod_items = invocation.target.pod_items
            self._update_pods()
        call = Call(invocation.of_item(number))
        call.invocation.is_item = self._options.window is None
        call.invocation.item = number
        self._numbers[call] = number
        is_small = invocation.body.total <= LIMITS.small_item_bytes
        self._placement.read_ahead = invocation.target.pod_items or (
            LIMITS.small_read_ahead_items if is_small else LIMITS.read_ahead_items
        )
        if self._is_placing:
            self._placement.offer(call)
            call.placer = self
        self.calls.start(call)

    def _complete(self) -> None:
        for call, step in self.calls.take_steps():
            if is_generator(step):
                call.cancel()
                step = Done(None, _refused_generator(call.invocation))
            assert isinstance(step, Done)
            self._ended += 1
            number = self._numbers.pop(call)
            self._placement.end(call)
            if step.error is not None:
                exceptions.add_note(step.error, f"item {number} of the map, counted from 0")
            self._results.complete(number, step)

    # ---------------------------------------------------------------------------- where they run

    def _update_pods(self) -> None:
        """Update the pods that items go to."""
        route = self._route
        if route is None or not self._is_placing:
            return
        if not route.shares_streams:
            # Its scaler decides.
            room = max(LIMITS.map_items, route.scale, self._pod_items)
            self._is_placing, self._results.room = False, room
            return
        streams = route.streams()
        self._placement.update(streams)
        most_items = max(self._placement.most_items, self._pod_items * len(streams))
        scale = route.scale if route.is_growing else 0
        self._results.room = max(LIMITS.map_items, 2 * most_items, scale)

    def stream_for(self, call: Call) -> Stream | None:  # Placer's
        route = call.invocation.route
        if not self._placement.has_pods:
            self._update_pods()
        if not self._is_placing or route is not self._route:
            self._placement.end(call)
            return route.stream()  # the pod that alone may know its outcome
        stream = self._placement.assign(call)
        # One pod is enough to measure the items.
        self._first = self._first or stream
        call.invocation.map_id = self._id if stream is self._first else ""
        return stream

    def wants_wakeup(self) -> bool:  # Placer's
        return next(self._begun) % _BEGUN_ITEMS == 0

    def on_begun(self, call: Call) -> None:  # Placer's
        self._placement.begin(call)

    def on_queued(self, call: Call) -> None:  # Placer's
        self._placement.wait(call)

    def on_retry(self, call: Call) -> None:  # Placer's
        self._placement.give_back(call)


def _refused_generator(invocation: Invocation) -> Exception:
    return CallRefusedError(
        f"{invocation.target.name} is a generator; .map() and .starmap() take plain values",
        hint="call it once for each item, or let it return a list",
    )
