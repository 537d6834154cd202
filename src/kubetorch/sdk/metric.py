"""`kt.metric`: values of user code by which its service is scaled."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from typing import SupportsFloat

from kubetorch.config import environment
from kubetorch.errors import SpecError
from kubetorch.lib import processes
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import introspection, metrics
from kubetorch.wire.metrics import MetricValue


def metric(name: str, value: SupportsFloat) -> None:
    """Report a value by which the pods of this service are scaled, such as the length of a queue.

    The service declares the metric: `autoscale(metric="queue", target=10)` has a pod for each 10
    of the sum over all pods. The value of a pod is the sum over its processes: of each process the
    last value counts, until the process ends. Threads, async functions, processes that user code
    starts, and apps may report. At most ten values a second of each name leave a process; of more
    values the last arrives. Outside of a pod only the arguments are checked.

    Args:
        name: 1 to 63 letters, digits, `_` and `-`, as in `autoscale(metric=)`. `concurrency`,
            `rps`, `cpu` and `memory` are measured anyway. A process has at most 100 names.
        value: A finite number, in the unit of `autoscale(target=)`.

    Raises:
        SpecError: The name or the value is not of that form, or there are too many names.
    """
    _check_name(name)
    number = _number(name, value)
    pipe = environment.metrics_pipe()
    if pipe is not None:
        _reports.put(pipe, name, number)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or metrics.NAME.fullmatch(name) is None:
        raise SpecError(
            f"a metric is named {introspection.shown(name)}; its name must be 1 to 63 letters, "
            "digits, _ and -",
            hint='for example kt.metric("queue", len(queue))',
        )
    if not metrics.is_free(name):
        raise SpecError(
            f"a metric is named {name!r}, which Kubetorch measures itself",
            hint=f"give it a name other than {', '.join(metrics.MEASURED)}",
        )


def _number(name: str, value: object) -> float:
    """The value as a number; numbers of NumPy and the like are numbers, too."""
    is_number = hasattr(type(value), "__float__") and not isinstance(value, bool)
    number: float = introspection.safely(float, math.nan, value) if is_number else math.nan
    if not math.isfinite(number):
        raise SpecError(
            f"the metric {name!r} is {introspection.shown(value)}; it must be a finite number",
            hint=f"report a number, for example kt.metric({name!r}, len(queue))",
        )
    return number


class MetricReports:
    """The values that this process reports, each name at most so often."""

    def __init__(self) -> None:
        self._reset()
        # The lock may be held by a thread that a forked child does not have.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # A handler of a signal may report while its thread does.
        self._lock = threading.RLock()
        self._sent_times: dict[str, float] = {}
        self._waiting: dict[str, float] = {}

    def put(self, pipe: str, name: str, value: float) -> None:
        """Report a value now, or soon if another one was reported just now."""
        with self._lock:
            if name not in self._sent_times and len(self._sent_times) >= LIMITS.metric_names:
                raise SpecError(
                    f"the metric {name!r} is one more than the {LIMITS.metric_names} that a "
                    "process may have",
                    hint="report the values by which the service is scaled alone",
                )
            is_scheduled = name in self._waiting
            self._waiting[name] = value
            if not is_scheduled:
                self._flush(pipe, name)

    def _flush(self, pipe: str, name: str) -> None:
        with self._lock:
            now = time.monotonic()
            due = self._sent_times.get(name, -math.inf) + TIMING.metric_interval_seconds
            if now >= due:
                # Also if there was no room: the next attempt is as long after this one.
                self._sent_times[name] = now
                if _write(pipe, MetricValue(processes.identity(), name, self._waiting[name])):
                    del self._waiting[name]
                    return
            delay = max(due - now, 0.0) or TIMING.metric_interval_seconds
            timer = threading.Timer(delay, self._flush, (pipe, name))
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # at the end of the interpreter, or no threads
                timer.start()
                return
            del self._waiting[name]


def _write(pipe: str, line: MetricValue) -> bool:
    """Write a line to the agent; false if its pipe has no room. Without an agent it is lost."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        os.write(descriptor, metrics.pack(line))
    except OSError as error:
        return error.errno != errno.EAGAIN
    finally:
        os.close(descriptor)
    return True


#: The values of this process.
_reports = MetricReports()
