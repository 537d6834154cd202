"""The memory limit of a pod: its agent enforces it on the local backend, elsewhere the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from kubetorch.errors import OutOfMemoryError
from kubetorch.lib import processes

#: Seconds between two looks.
INTERVAL = 0.05
# A look takes at most this share of the time.
_SHARE = 0.05
_HIERARCHY = Path("/sys/fs/cgroup")
# Version 1 says "no limit" by the largest number of pages that there could be.
_UNLIMITED = 1 << 60
_log = logging.getLogger(__name__)


class Process(Protocol):
    """A worker or an app."""

    @property
    def pid(self) -> int:
        """The first process."""

    @property
    def is_alive(self) -> bool: ...

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
        self._timer = self._loop.call_later(INTERVAL, self._look)

    def stop(self) -> None:
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


class OomKills:
    """The number of kills for lack of memory in the control group of a process.

    The process's own cgroup is asked, of either version; where its files cannot be read, the
    machine's counter.
    """

    def __init__(self, pid: int) -> None:
        self._files = [file for file in _counters(pid) if _count(file) is not None][:1]
        self._before = self._now()

    def has_risen(self) -> bool:
        """True if the kernel has killed since this object was made."""
        return self._now() > self._before

    @property
    def limit(self) -> int | None:
        """Bytes that the cgroup may use, if it has a limit."""
        return self._beside("memory.max", "memory.limit_in_bytes")

    @property
    def peak(self) -> int | None:
        """Bytes that it used at most."""
        return self._beside("memory.peak", "memory.max_usage_in_bytes")

    def _beside(self, *names: str) -> int | None:
        """A number in the folder of the counter, whichever version of cgroups it is of."""
        for file in self._files:
            for name in names:
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    found = int((file.parent / name).read_text())
                    return found if found < _UNLIMITED else None
        return None

    def _now(self) -> int:
        return sum(_count(file) or 0 for file in self._files)


def _counters(pid: int) -> list[Path]:
    """Files that may have the counter, the most specific first."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if "memory" in controllers.split(","):
                found.append(_HIERARCHY / "memory" / below / "memory.oom_control")
            elif not controllers:
                found.append(_HIERARCHY / below / "memory.events")
    return [
        *found,
        _HIERARCHY / "memory.events",
        _HIERARCHY / "memory" / "memory.oom_control",
        Path("/proc/vmstat"),
    ]


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None
