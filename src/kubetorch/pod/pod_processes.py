"""All processes of a pod: the agent reaps orphans, and enforces the memory limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Protocol

from kubetorch.errors import OutOfMemoryError
from kubetorch.lib import processes

#: Seconds from the end of a child until orphans are looked for: one look for many of them.
DELAY = 1.0
#: Seconds after which nobody waits for the leader of a session any more; killing takes up to 10.
LEADER_DELAY = 30.0
#: Seconds between two looks.
INTERVAL = 0.05
# A look takes at most this share of the time.
_SHARE = 0.05
_log = logging.getLogger(__name__)


class OrphanReaper:
    """Reaps orphans, as long as it is started.

    Workers and zygotes have somebody who waits for them. They lead a session each, as a few orphans
    do too: a leader is taken only when it has been left alone for long.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # Leaders of sessions that have ended, and when that was seen first.
        self._leaders: dict[int, float] = {}

    def start(self) -> None:
        """Look for orphans whenever a child ends."""
        # Not the loop's own add_signal_handler: uvloop keeps this signal for itself.
        signal.signal(signal.SIGCHLD, self._on_signal)

    def stop(self) -> None:
        """Look no more."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._look_in, DELAY)

    def _look_in(self, delay: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        leaders: dict[int, float] = {}
        for pid in _children():
            leads = _leads_session(pid)
            if leads is None:
                continue
            since = self._leaders.get(pid, now)
            if not leads or now - since >= LEADER_DELAY:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            else:
                leaders[pid] = since
        self._leaders = leaders
        if leaders:
            self._look_in(LEADER_DELAY)


def _children() -> list[int]:
    """The children of this process; none where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _leads_session(pid: int) -> bool | None:
    """Whether a process that has ended led its session; `None` if it lives or is gone."""
    try:
        # The name, in parentheses, may have spaces and parentheses in it.
        fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    state, session = fields[0], int(fields[3])
    return session == pid if state == b"Z" else None


class Process(Protocol):
    """A worker or an app."""

    @property
    def pid(self) -> int:
        """Its first process."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def abort(self, error: OutOfMemoryError) -> None:
        """End it, for this reason."""


class MemoryLimit:
    """Ends the worker or app that uses most memory when the pod uses more than its limit."""

    def __init__(
        self, limit: int, *, pod_name: str, processes: Callable[[], Collection[Process]]
    ) -> None:
        self._limit = limit
        self._pod_name = pod_name
        self._processes = processes
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on."""
        self._timer = self._loop.call_later(INTERVAL, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        begun = self._loop.time()
        pids = processes.descendants(os.getpid())
        if processes.resident(pids) > self._limit:
            used = processes.proportional(pids)
            if used > self._limit:
                self._end_largest(used)
        cost = self._loop.time() - begun
        self._timer = self._loop.call_later(max(INTERVAL, cost / _SHARE), self._look)

    def _end_largest(self, used: int) -> None:
        sizes = {
            worker: processes.proportional(processes.descendants(worker.pid))
            for worker in self._processes()
            if worker.is_alive
        }
        if not sizes:
            return
        largest = max(sizes, key=lambda worker: sizes[worker])
        limit, found = processes.written(self._limit), processes.written(used)
        _log.warning("memory limit exceeded pod=%s limit=%s used=%s", self._pod_name, limit, found)
        error = OutOfMemoryError(
            f"the worker in {self._pod_name} was killed: the pod used {found} of memory, and its "
            f"limit is {limit}",
            exit_code=-signal.SIGKILL,
            hint="resources.limits.memory in the manifest, or in service_template, allows more",
        )
        error.pod_name = self._pod_name
        error.limit_bytes, error.used_bytes = self._limit, used
        largest.abort(error)
