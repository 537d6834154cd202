"""The values of `kt.metric` in the processes of a pod; see `kubetorch.wire.metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kubetorch.lib import processes
from kubetorch.pod.tuning import LIMITS
from kubetorch.wire import metrics
from kubetorch.wire.metrics import MetricValue

_log = logging.getLogger(__name__)


class Metrics:
    """The last value of each metric in each process that lives.

    User code may write anything to the pipe: what is no value is ignored.
    """

    def __init__(self, path: Path, is_alive: Callable[[str], bool] = processes.is_alive) -> None:
        #: Called when values have come.
        self.on_change: Callable[[], None] = lambda: None
        self._path = path
        self._is_alive = is_alive
        # By process and name: the value, and its Unix time.
        self._values: dict[str, dict[str, tuple[float, float]]] = {}
        self._descriptor: int | None = None
        # The begin of a line that was cut by the end of a read.
        self._rest = b""
        self._has_warned = False

    def open(self) -> None:
        """Make the pipe, and read it from now on; without room on the disk there are no metrics."""
        try:
            self._path.unlink(missing_ok=True)
            os.mkfifo(self._path, 0o600)
            # Also for writing, so that the pipe has no end when the last writer closes it.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            _log.warning("no metrics of user code error=%s", error)
            return
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def sums(self) -> dict[str, tuple[float, float]]:
        """By name: the sum over the processes that live, and the Unix time of its last value."""
        for process in [process for process in self._values if not self._is_alive(process)]:
            del self._values[process]
        sums: dict[str, tuple[float, float]] = {}
        for values in self._values.values():
            for name, (value, reported) in values.items():
                total, last = sums.get(name, (0.0, 0.0))
                sums[name] = total + value, max(last, reported)
        # JSON has no infinity.
        largest = sys.float_info.max
        return {
            name: (min(max(total, -largest), largest), last)
            for name, (total, last) in sums.items()
            if not math.isnan(total)
        }

    def _read(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            assert self._descriptor is not None
            data = os.read(self._descriptor, LIMITS.metric_read_bytes)
        *lines, rest = (self._rest + data).split(b"\n")
        most = LIMITS.metric_line_bytes
        self._rest = rest if len(rest) <= most else b""
        values = [metrics.parse(line) for line in lines if len(line) <= most]
        taken = [self._take(value) for value in values if value is not None]
        if any(taken):
            self.on_change()

    def _take(self, line: MetricValue) -> bool:
        """Take a value; false for one that is more than the pod keeps."""
        values = self._values.get(line.process)
        is_known = values is not None and line.name in values
        if not is_known and not self._has_room(line):
            if not self._has_warned:
                _log.warning("metric ignored, since the pod has too many name=%s", line.name)
            self._has_warned = True
            return False
        self._values.setdefault(line.process, {})[line.name] = line.value, time.time()
        return True

    def _has_room(self, line: MetricValue) -> bool:
        if line.process not in self._values and len(self._values) >= LIMITS.metric_processes:
            self.sums()  # forgets the processes that have ended
        names = {name for values in self._values.values() for name in values}
        is_free = line.name in names or len(names) < LIMITS.metric_names
        is_process_known = line.process in self._values
        return is_free and (is_process_known or len(self._values) < LIMITS.metric_processes)
