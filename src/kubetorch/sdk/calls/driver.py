"""Many calls that one thread makes: it starts them, and waits for whatever happens to any of them.

Driver.start(Running) ──► attempt ──► Stream ──► event ──► Driver.wait() ──► (Running, step)
                             │                                   ▲
                             └── no connection: a thread makes it ┘
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from _queue import Empty, SimpleQueue  # `queue` adds classes that nobody needs here
from collections.abc import Iterator
from typing import Any

from kubetorch.errors import CallCancelledError, CallRefusedError, KubetorchError
from kubetorch.sdk.calls.attempts import Attempts
from kubetorch.sdk.calls.invocation import Again, Done, Invocation, Yielded
from kubetorch.sdk.calls.route import Route
from kubetorch.sdk.streams.pending import EXPIRED, Event
from kubetorch.sdk.streams.stream import Stream

#: Seconds that a call which nobody wants any more gets to say how it ended.
SETTLING = 0.2

Happened = tuple["Running", "Done | Yielded"]


class Running(Attempts):
    """One of the calls.

    Args:
        invocation: What is called.
        context: Whatever its owner wants to find in it.
    """

    __slots__ = ("context", "recalled_until", "tokens")

    def __init__(self, invocation: Invocation, context: Any = None) -> None:  # noqa: ANN401  # the owner's
        super().__init__(invocation)
        self.context = context
        self.recalled_until: float | None = None
        self.tokens: SimpleQueue[Running | _Connected] | None = None

    @property
    def deadline(self) -> float | None:
        """When to stop waiting for it."""
        expires, recalled = self.invocation.expires, self.recalled_until
        if expires is None or recalled is None:
            return expires if recalled is None else recalled
        return min(expires, recalled)

    def open(self, stream: Stream, tokens: SimpleQueue[Running | _Connected]) -> None:
        """Make an attempt on this stream."""
        self.tokens = tokens
        self._stream = stream
        # Noted before it is opened, so that whatever interrupts this can cancel it.
        self._call = call = stream.prepare(self._deliver)
        self.invocation.start(stream, call)

    def _deliver(self, event: Event) -> None:
        self._events.put(event)
        if self.tokens is not None:
            self.tokens.put(self)

    def take(self) -> Done | Yielded | Again | None:
        """What the event means that a token announced."""
        event = self._events.get_nowait()
        if event.call is not self._call or self._stream is None:
            return None
        step = self.invocation.step(self._stream, event)
        if isinstance(step, Again):
            self._stream = self._call = None
        return step

    def expire(self) -> Done | Yielded | Again | None:
        """Its deadline has passed."""
        if self.recalled_until is not None:
            self.cancel()
            return Done(None, CallCancelledError("the call was not wanted any more"))
        if self._stream is None or self._call is None:
            return Done(None, self.invocation.timed_out())
        event = Event(self._call, EXPIRED, None, None, 0)
        return self.invocation.step(self._stream, event)

    def recall(self, reason: str) -> None:
        """Ask for its end, which is waited for a moment longer."""
        self.recalled_until = time.monotonic() + SETTLING
        if self._stream is not None and self._call is not None:
            self._stream.cancel(self._call, reason, abandons=False)

    def release(self) -> None:
        """Its owner drives it alone from now on, with `next`."""
        self.tokens = None


class _Connected:
    """A connection was made for calls that wait for it, or not."""

    __slots__ = ("error", "route", "stream", "waiting")

    def __init__(
        self,
        route: Route,
        waiting: list[Running],
        stream: Stream | None,
        error: BaseException | None,
    ) -> None:
        self.route = route
        self.waiting = waiting
        self.stream = stream
        self.error = error


class Driver:
    """Makes calls; used by one thread."""

    def __init__(self) -> None:
        self._tokens: SimpleQueue[Running | _Connected] = SimpleQueue()
        self._running: set[Running] = set()
        # Calls to be started again: when, and which; the number breaks ties.
        self._again: list[tuple[float, int, Running]] = []
        self._ties = itertools.count()
        self._connecting: dict[Route, list[Running]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, running: Running) -> None:
        """Start a call."""
        self._running.add(running)
        self._attempt(running)

    def wait(self) -> Iterator[Happened]:
        """Wait until something happens to a call: its value, its error, a value that it yields.

        A call that has ended, or yields, is not waited for any more.
        """
        until = self._deadline()
        try:
            timeout = None if until is None else max(until - time.monotonic(), 0.0)
            token = self._tokens.get(timeout=timeout)
        except Empty:
            yield from self._catch_up()
            return
        if isinstance(token, _Connected):
            yield from self._connected(token)
        elif token in self._running:
            yield from self._happened(token, token.take())

    def cancel(self) -> None:
        """End all calls that run."""
        for running in self._running:
            running.cancel()
        self._running.clear()

    def _attempt(self, running: Running) -> None:
        stream = running.invocation.route.stream()
        if stream is None:
            self._connect(running)
        else:
            running.open(stream, self._tokens)

    def _happened(
        self, running: Running, step: Done | Yielded | Again | None
    ) -> Iterator[Happened]:
        if isinstance(step, Again):
            if running.recalled_until is not None:
                step = Done(None, CallCancelledError("the call was not wanted any more"))
            else:
                at = time.monotonic() + step.delay
                heapq.heappush(self._again, (at, next(self._ties), running))
                return
        if step is not None:
            running.is_over = isinstance(step, Done)
            self._running.discard(running)
            yield running, step

    # ----------------------------------------------------------------------------- connecting

    def _connect(self, running: Running) -> None:
        """Have a thread connect, so that a pod that is away holds up its own calls only."""
        route = running.invocation.route
        waiting = [running]
        if route.shares_streams:
            others = self._connecting.setdefault(route, waiting)
            if others is not waiting:
                others.append(running)
                return
        patience, tokens = running.invocation.patience, self._tokens

        def connect() -> None:
            stream: Stream | None = None
            error: BaseException | None = None
            try:
                stream = route.connect(patience)
            except BaseException as failed:  # noqa: BLE001  # it is raised where the calls are made
                error = failed
            tokens.put(_Connected(route, waiting, stream, error))

        threading.Thread(target=connect, name="kubetorch-connect", daemon=True).start()

    def _connected(self, token: _Connected) -> Iterator[Happened]:
        if self._connecting.get(token.route) is token.waiting:
            del self._connecting[token.route]
        error, single = token.error, token.stream
        if single is not None and not single.is_single:
            single = None
        if error is not None and not isinstance(error, KubetorchError):
            raise error
        for running in token.waiting:
            if running not in self._running:
                continue
            if error is None:
                if single is None:
                    self._attempt(running)
                else:
                    running.open(single, self._tokens)
                    single = None
                continue
            refused: Exception = error
            if isinstance(error, CallRefusedError):
                refused = running.invocation.refused(error)
            yield from self._happened(running, Done(None, refused))
        if single is not None:
            single.close()

    # ------------------------------------------------------------------------------ deadlines

    def _deadline(self) -> float | None:
        times = [running.deadline for running in self._running]
        known = [at for at in times if at is not None]
        if self._again:
            known.append(self._again[0][0])
        return min(known, default=None)

    def _catch_up(self) -> Iterator[Happened]:
        """Attempts whose pause is over, and calls whose deadline has passed."""
        now = time.monotonic()
        while self._again and self._again[0][0] <= now:
            running = heapq.heappop(self._again)[2]
            if running in self._running:
                self._attempt(running)
        for running in list(self._running):
            deadline = running.deadline
            if deadline is not None and deadline <= now and running in self._running:
                yield from self._happened(running, running.expire())
