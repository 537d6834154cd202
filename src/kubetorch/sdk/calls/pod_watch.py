"""Watches the pods of a service that the controller scales, and reports the calls that have none.

    calls without a pod ── note ──► a report at once, then one every 0.1 s ──► controller
    the route ◄── on_answer ◄────── one long poll after the other ◄────────────┘

Nothing runs while no call waits, and while every call has a pod to itself.
"""

from __future__ import annotations

import os
import threading
import time
from _queue import Empty, SimpleQueue
from collections.abc import Callable, Collection, Hashable

from kubetorch.errors import KubetorchError
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire.messages import PodWait


class PodWatch:
    """The watch of one route.

    Args:
        ask: Sends a `PodWait`; returns the names of the ready pods once they have changed.
        pods: The names of the ready pods that the route knows.
        closed: Set when the route sends nothing any more.
    """

    def __init__(
        self,
        ask: Callable[[PodWait], Collection[str]],
        pods: Callable[[], Collection[str]],
        closed: threading.Event,
    ) -> None:
        self._ask = ask
        self._pods = pods
        self._closed = closed
        self._client = os.urandom(8).hex()
        self._lock = threading.Lock()
        #: The number of calls without a pod, by what counts them.
        self._waiting: dict[Hashable, int] = {}
        self._wanted_until = 0.0
        self._is_watching = self._is_reporting = False
        #: The number that the controller knows, and when it was reported.
        self._reported, self._reported_at = 0, 0.0
        #: The number of answers so far; each wakes the threads that wait for one.
        self.answers = 0
        self._waiters: set[SimpleQueue[None]] = set()

    @property
    def waiting(self) -> int:
        """The number of calls that have no pod."""
        return sum(self._waiting.copy().values())

    def note(self, source: Hashable, count: int) -> None:
        """Note how many calls of a source have no pod."""
        with self._lock:
            if count:
                self._waiting[source] = count
            elif self._waiting.pop(source, None) is None:
                return
        if count:
            self.want()
        self._begin_reports()

    def recount(self, source: Hashable, count: int) -> None:
        """As `note`, of a source that has calls without a pod already; others are not noted."""
        if source in self._waiting:
            self.note(source, count)
            if not count:
                self.wake()

    def want(self) -> None:
        """Watch the pods for a while, since calls could use further ones."""
        self._wanted_until = time.monotonic() + TIMING.pod_watch_seconds
        if self._is_watching:
            return
        with self._lock:
            is_running, self._is_watching = self._is_watching, True
        if not is_running:
            self._start(self._watch)

    def await_answer(self, seen: int, timeout: float) -> None:
        """Wait until there were more than `seen` answers, no call waits, or the time is over."""
        # Not a Condition: a signal handler that raises in its methods can leave it locked.
        tokens: SimpleQueue[None] = SimpleQueue()
        self._waiters.add(tokens)
        try:
            if self.answers == seen:
                tokens.get(timeout=max(timeout, 0.0))
        except Empty:
            return
        finally:
            self._waiters.discard(tokens)

    def wake(self) -> None:
        for tokens in self._waiters.copy():
            tokens.put(None)

    # ----------------------------------------------------------------------------- its threads

    def _start(self, run: Callable[[], None]) -> None:
        try:
            threading.Thread(target=run, name="kubetorch-pods", daemon=True).start()
        except RuntimeError:  # too many of them, or the program ends
            self._is_watching = self._is_reporting = False

    def _watch(self) -> None:
        """Ask for the pods again and again, as long as calls could use further ones."""
        while self._goes_on():
            begun, known_pods = time.monotonic(), frozenset(self._pods())
            waiting = self._note_report()
            wait = PodWait(
                client=self._client,
                waiting=waiting,
                pods=tuple(sorted(known_pods)),
                seconds=TIMING.pod_wait_seconds,
            )
            pause = 0.0
            try:
                ready_pods = frozenset(self._ask(wait))
            except (OSError, KubetorchError):  # threads that wait for a pod ask, and raise it
                pause = TIMING.stream_longest_delay_seconds
            else:
                if ready_pods == known_pods and time.monotonic() - begun < 1.0:
                    pause = TIMING.stream_longest_delay_seconds  # a pod that cannot be reached
            self.answers += 1
            self.wake()
            if pause:
                self._closed.wait(pause)

    def _goes_on(self) -> bool:
        with self._lock:
            is_wanted = bool(self._waiting) or time.monotonic() < self._wanted_until
            self._is_watching = is_wanted and not self._closed.is_set()
            return self._is_watching

    def _begin_reports(self) -> None:
        with self._lock:
            is_running, self._is_reporting = self._is_reporting, True
        if not is_running:
            self._start(self._report)

    def _report(self) -> None:
        """Report the number of calls whenever it has changed, until it is 0."""
        while self._is_report_due():
            now = time.monotonic()
            is_old = now - self._reported_at >= TIMING.waiting_refresh_seconds
            if self.waiting != self._reported or is_old:
                waiting = self._note_report()
                try:
                    self._ask(PodWait(client=self._client, waiting=waiting, pods=(), seconds=0.0))
                except (OSError, KubetorchError):
                    self._reported = -1  # unknown
            self._closed.wait(TIMING.waiting_report_seconds)

    def _is_report_due(self) -> bool:
        with self._lock:
            is_due = bool(self._waiting) or self._reported != 0
            self._is_reporting = is_due and not self._closed.is_set()
            return self._is_reporting

    def _note_report(self) -> int:
        self._reported, self._reported_at = self.waiting, time.monotonic()
        return self._reported
