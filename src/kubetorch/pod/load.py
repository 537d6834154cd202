"""The load of a pod of an autoscaled service, and when it is reported to the controller.

    begins and ends of calls ──┐
    values of `kt.metric` ─────┼── LoadReports ── PodLoad ── the session with the controller
    CPU time and memory ───────┘

A change of the load is reported at once, but at most every `load_change_seconds`; as long as there
is load, a report comes each `load_report_seconds`. Without load there are no reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from kubetorch.lib import processes
from kubetorch.pod.logs import Line
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import metrics
from kubetorch.wire.frames import KUBETORCH
from kubetorch.wire.messages import PodLoad
from kubetorch.wire.metrics import MetricValue

_HIERARCHY = Path("/sys/fs/cgroup")
#: Metrics of a service for which CPU time and memory are measured.
_USAGE_METRICS = ("cpu", "memory")

_log = logging.getLogger(__name__)


class LoadReports(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """Sums up the load, and reports it while the service is autoscaled.

    `calls` counts those that run or wait, `waiting` those that wait, `came` those that came since
    the agent's start without those that were taken back.
    """

    calls: Callable[[], int]
    waiting: Callable[[], int]
    came: Callable[[], int]
    metrics: Metrics
    usage: Usage
    send: Callable[[PodLoad], object]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        #: True while the service is autoscaled.
        self.is_on = False
        self._has_usage = False
        # The calls since the last change, and the integral of their number until then.
        self._calls, self._since, self._call_seconds = 0, self.clock(), 0.0
        self._started = 0
        # The last report, and the time of it.
        self._last: PodLoad | None = None
        self._last_time = -TIMING.idle_usage_report_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def configure(self, spec: WorkloadSpec) -> None:
        """Report the load or not, as the service that the pod is to serve needs it."""
        autoscaling = spec.compute.autoscaling
        self.is_on = spec.compute.is_autoscaled
        self._has_usage = autoscaling is not None and autoscaling.metric in _USAGE_METRICS
        self._last = None
        if self.is_on:
            self.calls_changed()
        else:
            self.close()
            self._call_seconds, self._since, self._calls = self._call_seconds_at(), self.clock(), 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def calls_changed(self) -> None:
        """Count a begin or an end of a call; only while `is_on`."""
        self._call_seconds, self._since = self._call_seconds_at(), self.clock()
        self._calls = self.calls()
        self._report_at(self._last_time + TIMING.load_change_seconds)

    def metrics_changed(self) -> None:
        """Report values of user code, soon."""
        if self.is_on:
            self._report_at(self._last_time + TIMING.load_report_seconds)

    def report(self) -> PodLoad | None:
        """The load, as the controller is about to get it; `None` unless the service is scaled."""
        if not self.is_on:
            return None
        # A call that is taken back comes again to another pod. The number never falls: that is
        # the sign of an agent that started anew.
        self._started = max(self._started, self.came())
        cpu_seconds, memory_bytes = self.usage.measure() if self._has_usage else (0.0, 0)
        self._last = PodLoad(
            calls=self.calls(),
            waiting=self.waiting(),
            call_seconds=self._call_seconds_at(),
            started=self._started,
            cpu_seconds=cpu_seconds,
            memory_bytes=memory_bytes,
            metrics=self.metrics.sums(),
        )
        self._last_time = self.clock()
        self._report_next(self._last)
        return self._last

    def _call_seconds_at(self) -> float:
        return self._call_seconds + self._calls * (self.clock() - self._since)

    def _report_at(self, due: float) -> None:
        """Look at the load at this time, or before."""
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        delay = max(due - self.clock(), 0.0)
        # Also without a delay after this turn: the call that came may begin or wait in it.
        self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        """Report the load if it has changed, or if the next report of it is due."""
        self._timer = None
        last = self._last
        if last is not None and (self.calls(), self.waiting()) == (last.calls, last.waiting):
            pause = self._pause(last)
            # Calls may have come and ended, and processes with metrics may have ended.
            if self.came() > self._started or self.metrics.sums() != last.metrics:
                pause = TIMING.load_report_seconds
            if pause is None:
                self._report_next(last)
                return
            due = self._last_time + pause
            if self.clock() < due:
                self._report_at(due)
                return
        load = self.report()
        if load is not None:
            self.send(load)

    def _report_next(self, load: PodLoad) -> None:
        pause = self._pause(load)
        if pause is not None:
            self._report_at(self._last_time + pause)
        elif load.metrics:
            self._report_at(self.clock() + TIMING.load_report_seconds)

    def _pause(self, load: PodLoad) -> float | None:
        """Seconds until this load is reported again; `None` if it is none."""
        if load.calls:
            return TIMING.load_report_seconds
        return TIMING.idle_usage_report_seconds if self._has_usage else None


class Usage:
    """CPU time and memory of the processes of a pod."""

    def __init__(self, *, is_container: bool, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        # On a machine the control group is that of whatever started the pod.
        self._cgroup = _cgroup() if is_container else None
        # The last measurement, and the time before which there is no other.
        self._measured, self._valid_until = (0.0, 0), 0.0
        # A container may have used some before, which the agent's own processes have not.
        self._earlier_cpu_seconds = 0.0
        if self._cgroup is not None:
            self._earlier_cpu_seconds, _ = _usage_of_cgroup(self._cgroup)

    def measure(self) -> tuple[float, int]:
        """Seconds of CPU since the agent's start, and bytes of memory."""
        if time.monotonic() < self._valid_until:
            return self._measured
        begin = time.thread_time()
        with contextlib.suppress(OSError):  # for example no descriptor is left
            cpu_seconds, memory_bytes = self._measure()
            # A process that has ended and is not counted by its parent yet is missing.
            self._measured = max(self._measured[0], cpu_seconds), memory_bytes
        cost = time.thread_time() - begin
        self._valid_until = time.monotonic() + cost / TIMING.usage_measure_share
        return self._measured

    def _measure(self) -> tuple[float, int]:
        if self._cgroup is not None:
            cpu_seconds, memory_bytes = _usage_of_cgroup(self._cgroup)
            return cpu_seconds - self._earlier_cpu_seconds, memory_bytes
        pids = processes.descendants(self._pid)
        ticks = sum(processes.ticks_used(pid) or 0 for pid in pids)
        return ticks / processes.TICKS, processes.proportional(pids)


def _cgroup() -> Path | None:
    """The folder of this process's control group (version 2), if its files can be read."""
    folders = [_HIERARCHY]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                folders.insert(0, _HIERARCHY / path.lstrip("/"))
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError):
            _usage_of_cgroup(folder)
            return folder
    return None


def _usage_of_cgroup(folder: Path) -> tuple[float, int]:
    """Seconds of CPU, and bytes of memory without the files that could be dropped at any time."""
    cpu, memory = _numbers(folder / "cpu.stat"), _numbers(folder / "memory.stat")
    used_bytes = int((folder / "memory.current").read_text())
    return cpu["usage_usec"] / 1e6, max(used_bytes - memory["inactive_file"], 0)


def _numbers(file: Path) -> dict[str, int]:
    pairs = (line.split(" ", 1) for line in file.read_text().splitlines())
    return {name: int(number) for name, number in pairs}


class Metrics:
    """The last value of each metric in each process that lives; see `kubetorch.wire.metrics`.

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


class ItemUse(msgspec.Struct, eq=False):
    """Advises to run several items of a map at once, when its items hardly use the processor.

    Maps are named by their identity.
    """

    #: The processes that run items.
    pids: Callable[[], Collection[int]]
    #: The number of running items of a map, one of which gets the line.
    running: Callable[[str], int]
    send_line: Callable[[str, Line], None]
    _watched_maps: dict[str, None] = msgspec.field(default_factory=dict)

    def on_begun(self, map_id: str) -> None:
        """Measure a map from its first running item on."""
        if map_id in self._watched_maps:
            return
        self._watched_maps[map_id] = None
        if len(self._watched_maps) > LIMITS.measured_maps:
            del self._watched_maps[next(iter(self._watched_maps))]
        pids = frozenset(self.pids())
        seconds_before = _seconds_used(pids)
        if seconds_before is not None:
            asyncio.get_running_loop().call_later(
                TIMING.item_use_seconds, self._check_use, map_id, pids, seconds_before
            )

    def _check_use(self, map_id: str, pids: frozenset[int], seconds_before: float) -> None:
        running, seconds_after = self.running(map_id), _seconds_used(pids)
        if not running or seconds_after is None or pids != frozenset(self.pids()):
            return
        share = (seconds_after - seconds_before) / TIMING.item_use_seconds / running
        if share < TIMING.idle_item_share:
            text = (
                f"the items of this map use {max(share, 0.0):.0%} of a core each, and run one at a "
                "time in a process: kt.Compute(concurrency=N) runs N of them at once"
            )
            self.send_line(map_id, Line(text, KUBETORCH, "INFO", time.time(), None))


def _seconds_used(pids: Collection[int]) -> float | None:
    """Seconds of processor time of processes and their descendants; `None` if unknown."""
    ticks = 0
    for pid in pids:
        for process_id in processes.descendants(pid):
            used = processes.ticks_used(process_id)
            if used is None and process_id == pid:
                return None
            ticks += used or 0
    return ticks / processes.TICKS
