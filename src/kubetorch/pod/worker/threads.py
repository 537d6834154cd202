"""The threads that run sync calls, one of which always reads.

    leader ── reads a job ──┬── is usually quick: runs it, and goes on reading
                            └── else: gives the lead to an idle thread, runs it

The thread that read a job runs it, so no job is handed over between threads, and as long as jobs
are quick no thread wakes another at all. A quick one that takes long this time does not hold up the
others: a *deputy* looks every millisecond, while there are such jobs, and takes the lead away from
a leader that is still at the same one.

Threads are made when they are needed: one reads, and up to `limit` others run jobs. What comes
while all of them do waits in line.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final, NamedTuple

#: Seconds up to which a job is quick.
QUICK: Final = 0.0001
#: Seconds that the deputy leaves to a job that should have been quick.
GRACE: Final = 0.001
#: How many times in a row the deputy looks in vain before it sleeps.
_LINGER: Final = 50
#: How fast, from one job to the next, the memory fades that a job was quick. It is the quick ones
#: that tell what a kind of job takes: the others may have waited for the interpreter's lock.
_FADING: Final = 1.25


class Job(NamedTuple):
    """Something to run.

    Attributes:
        kind: Jobs of one kind take about as long as each other.
        run: Runs it; raises nothing.
    """

    kind: str | None
    run: Callable[[], None]


class Threads:
    """A pool whose threads take their work from `read`.

    Args:
        limit: Jobs that run at the same time.
        read: Waits for the next job; `None` ends this pool. One thread at a time calls it.
        on_start: Called first in each thread.
    """

    def __init__(
        self, limit: int, read: Callable[[], Job | None], on_start: Callable[[], None]
    ) -> None:
        self._limit = limit
        self._read = read
        self._on_start = on_start
        self._is_over = False
        # Held by, or on behalf of, the leader.
        self._lead = threading.Lock()
        self._state = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._threads = 0
        # Threads that wait for the lead, or are on their way to it; the leader counts.
        self._idle = 1
        self._usual: dict[str | None, float] = {}
        # Number of the job that the leader runs itself; 0 when it reads.
        self._turn = 0
        self._turns = 0
        self._alarm = threading.Lock()
        self._is_watched = False

    def start(self) -> None:
        """Begin to read."""
        self._alarm.acquire()
        threading.Thread(target=self._watch, name="kubetorch-deputy", daemon=True).start()
        self._spawn()

    def _spawn(self) -> None:
        self._threads += 1
        name = f"kubetorch-{self._threads}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        self._on_start()
        job = self._next()
        while job is not None:
            self._run(job)
            job = self._waiting_job() or self._next()

    def _waiting_job(self) -> Job | None:
        """What waits in line goes first; else this thread is idle."""
        with self._state:
            if self._waiting:
                return self._waiting.popleft()
            self._running -= 1
            self._idle += 1
            return None

    def _next(self) -> Job | None:
        """Become the leader and read, until there is a job to run without the lead."""
        self._lead.acquire()
        while not self._is_over:
            job = self._read()
            if job is None:
                self._is_over = True
                break
            with self._state:
                if self._running >= self._limit:
                    self._waiting.append(job)
                    continue
                if self._usual.get(job.kind, QUICK) >= QUICK:
                    self._hand_over()
                    return job
            if not self._run_as_leader(job):
                # The deputy took the lead; by now this thread counts as running.
                following = self._waiting_job()
                if following is not None:
                    return following
                self._lead.acquire()
        self._lead.release()
        return None

    def _run_as_leader(self, job: Job) -> bool:
        """Run a job that is usually quick; whether this thread still leads after it."""
        self._turns += 1
        turn = self._turn = self._turns
        if not self._is_watched:
            self._is_watched = True
            self._alarm.release()
        self._run(job)
        with self._state:
            is_leader = self._turn == turn
            if is_leader:
                self._turn = 0
            return is_leader

    def _run(self, job: Job) -> None:
        begin = perf_counter()
        job.run()
        took = perf_counter() - begin
        self._usual[job.kind] = min(took, _FADING * self._usual.get(job.kind, took))

    def _hand_over(self) -> None:
        """Let another thread lead; to be called with `_state` held."""
        self._running += 1
        self._idle -= 1
        if self._idle == 0:
            self._idle += 1
            self._spawn()
        self._lead.release()

    def _watch(self) -> None:
        """Be the deputy."""
        while True:
            self._alarm.acquire()
            seen = 0
            in_vain = 0
            while in_vain < _LINGER:
                self._alarm.acquire(timeout=GRACE)
                with self._state:
                    if self._turn and self._turn == seen:
                        self._turn = 0
                        self._hand_over()
                    in_vain = in_vain + 1 if self._turns == seen else 0
                    seen = self._turns
            self._is_watched = False
            if self._turn:  # it began just now, and did not give the alarm
                self._is_watched = True
                self._alarm.release()
