"""The threads that run sync calls; one of them always reads.

    leader ── reads a job ──┬── is usually quick: runs it, and goes on reading
                            └── else: gives the lead to an idle thread, runs it

The thread that read a job runs it, so no job is handed over between threads, and as long as jobs
are quick no thread wakes another at all. A usually quick job that takes long this time does not
hold up the others: a *deputy* wakes when a job comes that the leader does not read, and takes the
lead away from a leader that is still at the same job a millisecond later.

Threads are made when they are needed: one reads, and up to `limit` others run jobs. A job that
comes while all of them run jobs, or when the system has no thread for it, is refused, or waits.

One thread may be the *home*, where jobs run as long as it is free: objects that are bound to the
thread that made them can be used there. A leader that reads a job while the home is free gives the
home the job and the lead, so the home reads the next job itself.

Some jobs stand in a *line*: one of them runs at a time, in the order in which they were read. The
thread that ran one of them runs the next.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.tuning import TIMING

_QUICK_SECONDS: Final = TIMING.quick_job_seconds
#: By how much, from one job to the next, the remembered time of a kind of job may grow. The quick
#: jobs tell how long a kind of job takes: the others may have waited for the interpreter's lock.
_FADE_FACTOR: Final = 1.25


class Job(NamedTuple):
    kind: str | None
    run: Callable[[], None]
    #: Called in place of `run` if there is no thread for the job; `None`: the job waits.
    refuse: Callable[[], None] | None = None
    #: True if the job stands in the line.
    in_line: bool = False


@dataclass(eq=False)
class ThreadPool:
    """Runs `limit` jobs at once, which its threads get from `read`; `None` is the end.

    `wait_for_unread` waits until a job comes while no thread waits in `read`.
    """

    limit: int
    read: Callable[[], Job | None]
    wait_for_unread: Callable[[], object]
    #: Called in each new thread.
    on_start: Callable[[], None]

    def __post_init__(self) -> None:
        self._is_over = False
        # Held by, or on behalf of, the leader.
        self._lead = threading.Lock()
        self._state = threading.Lock()
        self._waiting: deque[Job] = deque()
        # The job at the head of the line, which runs or is about to run, and those behind it.
        self._line_head: Job | None = None
        self._line: deque[Job] = deque()
        self._running = 0
        self._threads = 0
        # Threads that wait for the lead, or are on their way to it; the leader counts.
        self._idle = 1
        # The home waits at its gate, where it gets the lead, perhaps with a job. The home is free
        # from the moment that its job is done, so that a job right after an answer finds it free.
        self._home: int | None = None
        self._is_home_free = False
        self._is_home_called = False
        self._job_for_home: Job | None = None
        self._job_at_home: Job | None = None
        self._gate = threading.Lock()
        self._gate.acquire()
        # How long a job of each kind usually takes.
        self._usual_seconds: dict[str | None, float] = {}
        # Number of the job that the leader runs itself; 0 when it reads.
        self._turn = 0
        self._turns = 0

    def start(self) -> None:
        threading.Thread(target=self._watch, name="kubetorch-deputy", daemon=True).start()
        self._spawn()

    def make_home(self) -> None:
        """Run jobs in this thread, which calls `run_at_home` next."""
        self._home = threading.get_ident()
        with self._state:
            self._idle += 1
            self._is_home_free = True

    def run_at_home(self) -> None:
        """Run jobs in this thread until there are no more."""
        self._work(self._next(self._wait_at_gate()))

    def job_is_done(self) -> None:
        """Note that the job of this thread only has to answer."""
        if threading.get_ident() == self._home:
            with self._state:
                self._is_home_free = self._leave_line(self._job_at_home)

    def _spawn(self) -> bool:
        name = f"kubetorch-{self._threads + 1}"
        try:
            threading.Thread(target=self._begin, name=name, daemon=True).start()
        except RuntimeError:  # the system allows no more
            return False
        self._threads += 1
        return True

    def _begin(self) -> None:
        self.on_start()
        self._work(self._next(self._take_lead()))

    def _work(self, job: Job | None) -> None:
        while job is not None:
            self._run(job)
            job = self._waiting_job(job) or self._next(self._take_lead())

    def _is_first(self, job: Job) -> bool:
        """False for a job that has to wait in line; to be called with `_state` held."""
        if not job.in_line or job is self._line_head:
            return True
        if self._line_head is not None:
            self._line.append(job)
            return False
        self._line_head = job
        return True

    def _leave_line(self, job: Job | None) -> bool:
        """End a job; true unless one waits in line behind it; to be called with `_state` held."""
        if job is None or job is not self._line_head:
            return True
        if not self._line:
            self._line_head = None
        return not self._line

    def _waiting_job(self, ended: Job) -> Job | None:
        """The next job that waits; without one, this thread is idle."""
        with self._state:
            is_home = threading.get_ident() == self._home
            if not self._leave_line(ended):
                self._line_head = self._line.popleft()
                return self._line_head
            if self._waiting and not (is_home and self._is_home_called):
                self._is_home_free &= not is_home
                return self._waiting.popleft()
            self._running -= 1
            self._idle += 1
            return None

    def _take_lead(self) -> Job | None:
        """Wait until this thread leads; the home may get a job with the lead."""
        if threading.get_ident() == self._home:
            with self._state:
                self._is_home_free = not (self._is_over or self._is_home_called)
                waits_at_gate = self._is_home_free or self._is_home_called
            if waits_at_gate:
                return self._wait_at_gate()
        self._lead.acquire()
        return None

    def _wait_at_gate(self) -> Job | None:
        while True:
            try:
                self._gate.acquire()
            except BaseException:  # noqa: BLE001  # the user's signal handler raised an error
                traceback.print_exc()
            else:
                break
        with self._state:
            self._is_home_called = False
            job, self._job_for_home = self._job_for_home, None
        return job

    def _pass_lead(self, job: Job | None = None) -> None:
        """Let another thread lead; to be called with `_state` held."""
        if self._is_home_free and threading.get_ident() != self._home:
            self._is_home_free, self._is_home_called, self._job_for_home = False, True, job
            self._gate.release()  # `_lead` stays locked, on behalf of the home
        else:
            self._lead.release()

    def _next(self, job: Job | None) -> Job | None:
        """Lead until there is a job to run without the lead; begins with a job already read."""
        while not self._is_over:
            job = job or self.read()
            with self._state:
                if job is None:
                    self._is_over = True
                    break
                if not self._is_first(job):
                    job = None
                    continue
                goes_home = self._is_home_free and threading.get_ident() != self._home
                usual_seconds = self._usual_seconds.get(job.kind, _QUICK_SECONDS)
                is_slow = not goes_home and usual_seconds >= _QUICK_SECONDS
                has_room = self._running < self.limit and (not is_slow or self._has_successor())
                if not has_room and job.refuse is None:
                    self._waiting.append(job)
                    job = None
                    continue
                if has_room:
                    if goes_home:
                        self._pass_lead(job)
                    self._is_home_free = False
                    if is_slow:
                        self._hand_over()
                        return job
            if not has_room and job.refuse is not None:
                job.refuse()
                with self._state:
                    self._leave_line(job)
                job = None
                continue
            if not goes_home:
                if self._run_as_leader(job):
                    job = None
                    continue
                # The deputy took the lead; by now this thread counts as running.
                following = self._waiting_job(job)
                if following is not None:
                    return following
            job = self._take_lead()
        with self._state:
            self._pass_lead()
        return None

    def _run_as_leader(self, job: Job) -> bool:
        """Run a job that is usually quick; true if this thread still leads after it."""
        self._turns += 1
        turn = self._turn = self._turns
        self._run(job)
        with self._state:
            is_leader = self._turn == turn
            if is_leader:  # no other thread has read: no job waits behind this one
                self._turn = 0
                self._leave_line(job)
            return is_leader

    def _run(self, job: Job) -> None:
        if threading.get_ident() == self._home:
            self._job_at_home = job
        begin = time.perf_counter()
        job.run()
        took = time.perf_counter() - begin
        self._usual_seconds[job.kind] = min(
            took, _FADE_FACTOR * self._usual_seconds.get(job.kind, took)
        )

    def _hand_over(self) -> None:
        """Run without the lead; to be called with `_state` held."""
        self._running += 1
        self._idle -= 1
        self._pass_lead()

    def _has_successor(self) -> bool:
        """True if another thread will read while this one runs; to be called with `_state` held."""
        if self._idle == 1:
            self._idle += self._spawn()
        return self._idle > 1

    def _watch(self) -> None:
        """Run as the deputy, which answers when the agent asks for the stacks of all threads."""
        if protocol.STACKS is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [protocol.STACKS])
        while not self._is_over:
            self.wait_for_unread()
            turn = self._turn
            time.sleep(TIMING.deputy_grace_seconds)
            with self._state:
                if self._turn and self._turn == turn and self._has_successor():
                    self._turn = 0
                    self._hand_over()
