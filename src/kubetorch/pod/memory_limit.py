"""The memory limit of a pod of the local backend, which its agent enforces."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from typing import Protocol

from kubetorch.errors import OutOfMemoryError
from kubetorch.lib import processes
from kubetorch.pod.tuning import TIMING

_log = logging.getLogger(__name__)


class Process(Protocol):
    """A worker or an app."""

    @property
    def pid(self) -> int:
        """The first process."""

    @property
    def is_alive(self) -> bool: ...

    def abort(self, error: OutOfMemoryError) -> None:
        """End the process, for this reason."""


class MemoryLimit:
    """Ends the worker or app that uses most memory when the pod uses more than its limit."""

    def __init__(
        self,
        limit: int,
        *,
        pod_name: str,
        service: str,
        processes: Callable[[], Collection[Process]],
    ) -> None:
        self._limit = limit
        self._service = service
        self._pod_name = pod_name
        self._processes = processes
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(TIMING.memory_check_interval_seconds, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        begin = time.thread_time()  # of the processor: beside other programs it takes longer
        pids = processes.descendants(os.getpid())
        if processes.resident(pids) > self._limit:
            used = processes.proportional(pids)
            if used > self._limit:
                self._end_largest(used)
        cost = time.thread_time() - begin
        seconds = max(TIMING.memory_check_interval_seconds, cost / TIMING.memory_check_share)
        self._timer = self._loop.call_later(seconds, self._check)

    def _end_largest(self, used: int) -> None:
        sizes = {
            worker: processes.proportional(processes.descendants(worker.pid))
            for worker in self._processes()
            if worker.is_alive
        }
        if not sizes:
            return
        largest = max(sizes, key=lambda worker: sizes[worker])
        limit_text, used_text = processes.written(self._limit), processes.written(used)
        _log.warning(
            "memory limit exceeded pod=%s limit=%s used=%s", self._pod_name, limit_text, used_text
        )
        error = OutOfMemoryError(
            f"the worker of {self._service} in {self._pod_name} was killed: the pod used "
            f"{used_text} of memory, and its limit is {limit_text}",
            exit_code=-signal.SIGKILL,
            hint="resources.limits.memory in the manifest, or in service_template, allows more",
        )
        error.pod_name = self._pod_name
        error.limit_bytes, error.used_bytes = self._limit, used
        largest.abort(error)
