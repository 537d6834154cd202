"""The load of a service: reports of its pods in, averages over time out, no I/O.

The averages are exact. Agents report sums over time, so what came between two reports is in the
next sum, however uneven it was; until then, the last number of calls is taken to go on. A report
that is lost, repeated or late changes nothing. Where the window before was empty, the averages
begin with the load, so that a step from idle is seen whole at once.

Reports and measurements cost the same however many pods there are.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
from math import ceil, inf

from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.wire.messages import PodLoad

#: Metrics of which an agent reports a sum: `memory` and the user's own are values.
SUMMED = ("concurrency", "rps", "cpu")
#: Metrics that are compared to what a pod asks for.
RESOURCES = ("cpu", "memory")

#: A window has so many buckets at least, and its panic window so many.
_BUCKETS = 60
_PANIC_BUCKETS = 6
_GAP = TIMING.load_gap_seconds
_SILENCE = TIMING.load_silence_seconds


class _Window:
    """The integral of the load over the last time.

    `_integrals` has its value at the begin of each bucket, in a ring; within a bucket the load is
    taken to be even.
    """

    __slots__ = ("_bucket", "_integral", "_integrals", "_size", "_time", "_width", "memory_seconds")

    def __init__(self, length: float, shortest: float, time: float) -> None:
        self._width = min(length / _BUCKETS, shortest / _PANIC_BUCKETS)
        self._size = ceil(length / self._width) + 2
        #: After so many whole seconds no average has a part of a load that has ended.
        self.memory_seconds = ceil(length + self._width)
        self._integrals = array("d", bytes(8 * self._size))
        self._integral = 0.0
        self._time = time
        self._bucket = int(time / self._width)

    def add(self, amount: float, time: float) -> None:
        """Count load that came evenly since the last time."""
        bucket = int(time / self._width)
        if bucket != self._bucket:
            first = max(self._bucket + 1, bucket - self._size + 1)
            slope = amount / (time - self._time)
            for index in range(first, bucket + 1):
                self._integrals[index % self._size] = (
                    self._integral + (index * self._width - self._time) * slope
                )
            self._bucket = bucket
        self._integral += amount
        self._time = time

    def correct(self, amount: float, span: float) -> None:
        """Count load that came evenly over so many seconds before the last time."""
        span = max(span, TIMING.shortest_load_seconds)
        begin = self._time - span
        oldest = max(int(begin / self._width) + 1, self._bucket - self._size + 1)
        for index in range(oldest, self._bucket + 1):
            self._integrals[index % self._size] += amount * (index * self._width - begin) / span
        self._integral += amount

    def average(self, span: float) -> float:
        """The load over so many seconds before the last time."""
        begin = self._time - span
        bucket = int(begin / self._width)
        integral = self._integrals[bucket % self._size]
        if bucket < self._bucket:
            end, length = self._integrals[(bucket + 1) % self._size], self._width
        else:
            end, length = self._integral, self._time - bucket * self._width
        if length > 0:
            integral += (end - integral) * (begin - bucket * self._width) / length
        return max(0.0, (self._integral - integral) / span)


class _Pod:
    """What a pod has reported.

    Attributes:
        order: Its place among the pods by age.
        load, time: Its last report, and when that came.
        calls: Those of this report; none once the pod is silent.
        base: The sum of its calls at the time `t` is `base + calls * t`, while these go on.
        is_regular: Its next report is likely to continue the last one.
        is_baseline_lost: The sums of the next report are not compared to those of the last one.
        overtaken: After a report with smaller sums, the one before it: if the next one is above
            this, the smaller one was late, else the agent had started anew.
        surplus: What the sum was above that of the smaller report.
        value, value_time: The value of a metric that is not summed, and when it was given.
    """

    __slots__ = (
        "base",
        "calls",
        "is_baseline_lost",
        "is_ready",
        "is_regular",
        "load",
        "name",
        "order",
        "overtaken",
        "surplus",
        "time",
        "value",
        "value_time",
    )

    def __init__(self, name: str, order: int) -> None:
        self.name = name
        self.order = order
        self.is_ready = False
        self.load = PodLoad(0)
        self.time = -inf
        self.calls = 0
        self.base = 0.0
        self.is_regular = False
        self.is_baseline_lost = True
        self.overtaken: PodLoad | None = None
        self.surplus = 0.0
        self.value = 0.0
        self.value_time = -inf

    @property
    def has_reported(self) -> bool:
        return self.time > -inf

    def baseline(self, load: PodLoad, expected: float) -> tuple[PodLoad | None, float]:
        """What the sums of a report are compared to, where the sum of calls was expected so high.

        Returns:
            The report above which they count, or `None` if they count from here, and the sum of
            the calls above which that of this report counts.
        """
        previous, overtaken = self.load, self.overtaken
        self.overtaken = None
        if self.is_baseline_lost:
            self.is_baseline_lost = False
        elif _is_above(load, previous):
            if overtaken is None or not _is_above(load, overtaken):
                return previous, expected
            return overtaken, expected + self.surplus
        elif overtaken is None:
            self.overtaken = previous
            self.surplus = expected - load.call_seconds
        return None, load.call_seconds


class ServiceLoad:
    """The load of one service.

    `time` is the same for all methods: seconds, which never go back.

    Attributes:
        pods: The pods that are there, by name.
        ready: The number of those that serve.
        calls: Calls that run or wait in the pods, and those of callers without a pod.
        waiting: Calls of callers that have no pod.
        began: Since when there is load without a window of silence; `None`: there is none.
        last_time: When there was load last.
        observed: Since when the load is known.

    Args:
        metric: As in `autoscale()`.
        request: Cores or bytes that a pod asks for, for `cpu` and `memory`.
        window, panic_window: Seconds of the two averages.
    """

    __slots__ = (
        "_base",
        "_counted",
        "_metric",
        "_next_order",
        "_panic_window",
        "_rates",
        "_request",
        "_silence_time",
        "_started",
        "_sum",
        "_values",
        "_values_changed",
        "_values_time",
        "_window",
        "_window_seconds",
        "began",
        "calls",
        "last_time",
        "observed",
        "pods",
        "ready",
        "waiting",
    )

    def __init__(
        self, metric: str, request: float, window: float, panic_window: float, time: float
    ) -> None:
        self.pods: dict[str, _Pod] = {}
        self.ready = 0
        self.calls = 0
        self.waiting = 0
        self.last_time = time
        self._next_order = 0
        #: The sum of all calls at the time `t` is `_base + calls * t`, while these go on. No pod
        #: is silent before `_silence_time`.
        self._base = 0.0
        self._silence_time = time + _SILENCE
        self._started = 0
        #: The number of calls that had come at some times.
        self._rates: deque[tuple[float, int]] = deque(maxlen=8)
        self.configure(metric, request, window, panic_window, time)

    def configure(
        self, metric: str, request: float, window: float, panic_window: float, time: float
    ) -> None:
        """Measure another metric, or over another window; nothing is known of it yet."""
        self._metric = metric
        self._request = request
        self._window_seconds = window
        self._panic_window = panic_window
        self._window = _Window(window, panic_window, time)
        self.observed = time
        #: The sum of the pods' values, and when it changed last; it is in `_sum` up to this time.
        self._values = 0.0
        self._values_changed = self._values_time = time
        #: The sum of the metric in all reports, but of concurrency, for which `_base` has it; and
        #: the part that the window has.
        self._sum = 0.0
        self._counted = self._total(time)
        for pod in self.pods.values():
            pod.is_regular = False
            pod.value = 0.0
            pod.value_time = -inf
            if pod.has_reported:
                self._take_value(pod, pod.load, time)
        self.began: float | None = time if self.calls or self._values > 0 else None

    def pods_changed(self, pods: Collection[str], ready: Collection[str], time: float) -> bool:
        """Take note of the pods that are there, and of those that serve; whether that is new."""
        names, ready_names = set(pods), set(pods).intersection(ready)
        known_ready_names = {name for name, pod in self.pods.items() if pod.is_ready}
        if names == self.pods.keys() and ready_names == known_ready_names:
            return False
        self.measure(time)
        for name in self.pods.keys() - names:
            pod = self.pods.pop(name)
            self._change_values(-pod.value, time)
            self.calls -= pod.calls
            self._base -= pod.base
        self._counted = self._total(time)
        for name in sorted(names - self.pods.keys()):
            self.pods[name] = _Pod(name, self._next_order)
            self._next_order += 1
        for name, pod in self.pods.items():
            pod.is_ready = name in ready_names
        self.ready = len(ready_names)
        return True

    def report(self, name: str, load: PodLoad, time: float) -> None:
        """Take the load of a pod; that of a pod that is not there counts nothing."""
        pod = self.pods.get(name)
        if pod is None:
            return
        previous = pod.load
        if (
            pod.is_regular
            and self.began is not None
            and time - pod.time <= _GAP
            and load.call_seconds >= previous.call_seconds
            and load.started >= previous.started
        ):
            self._started += load.started - previous.started
        else:
            self._take(pod, load, time)
        # From here on `measure` counts the difference to what was expected.
        calls = load.calls
        base = load.call_seconds - calls * time
        self._base += base - pod.base
        self.calls += calls - pod.calls
        pod.base = base
        pod.calls = calls
        pod.load = load
        pod.time = time

    def wait(self, count: int, time: float) -> None:
        """Take the number of calls whose callers have no pod."""
        self.measure(time)
        if count and self.began is None:
            self.began = time
        more = count - self.waiting
        self.waiting = count
        self.calls += more
        self._base -= more * time
        if self._metric == "rps":
            # A call that reaches a pod is counted there: then it is taken off here.
            self._sum += more

    def forget_baselines(self) -> None:
        """Compare the sums of the next reports to none: it is not known how long ago those were."""
        for pod in self.pods.values():
            pod.is_regular = False
            pod.is_baseline_lost = True

    # ------------------------------------------------------------------------------- averages

    def measure(self, time: float) -> None:
        """Bring all numbers up to this time."""
        if time >= self._silence_time:
            self._drop_silent_calls(time)
        total = self._total(time)
        amount = total - self._counted
        self._counted = total
        self._window.add(amount, time)
        if self.calls or (amount and self._metric not in RESOURCES):
            self.last_time = time
        elif time - self.last_time >= self._window_seconds and self._metric != "memory":
            self.began = None
        if not self._rates or time - self._rates[-1][0] >= 1.0:
            self._rates.append((time, self._started))

    @property
    def settled_time(self) -> float:
        """From when on the averages stay as they are while nothing is reported."""
        if self._metric == "memory":  # what is in use stays in use
            return self._values_changed + self._window.memory_seconds
        return self.last_time + self._window_seconds

    def average(self, time: float, shortest: float) -> float:
        """The load over the window, of which load that began lately has `shortest` seconds."""
        return self._window.average(min(self._age(time, shortest), self._window_seconds))

    def burst(self, time: float, shortest: float) -> float:
        """The same over the panic window."""
        return self._window.average(min(self._age(time, shortest), self._panic_window))

    def _age(self, time: float, shortest: float) -> float:
        return shortest if self.began is None else max(time - self.began, shortest)

    def rate(self, time: float) -> float:
        """Calls per second that came in the last seconds."""
        period = TIMING.call_rate_seconds
        first_mark = None
        for mark in self._rates:
            if first_mark is None or mark[0] <= time - period:
                first_mark = mark
        if first_mark is None:
            return 0.0
        return (self._started - first_mark[1]) / max(1.0, min(period, time - first_mark[0]))

    def values_end(self, time: float) -> float | None:
        """Drop old values of the user's metric; when the next one is old; `None`: all are."""
        oldest = time - self._window_seconds
        values_time = inf
        values = 0.0
        for pod in self.pods.values():
            if pod.value_time > oldest:
                values += pod.value
                values_time = min(values_time, pod.value_time)
            else:
                pod.value = 0.0
        self._values = values
        return None if values_time == inf else values_time + self._window_seconds

    # -------------------------------------------------------------------------------- reports

    def _take(self, pod: _Pod, load: PodLoad, time: float) -> None:
        """Count what a report says of the past: `measure` expects no more than what goes on."""
        gap = time - pod.time
        # What came over a longer time is spread over it.
        is_spread = self.began is None or gap > _GAP or self._metric == "concurrency"
        if is_spread:
            self.measure(time)
        expected = pod.base + pod.calls * time
        base, call_seconds = pod.baseline(load, expected)
        amount = span = 0.0
        if base is not None:
            self._started += load.started - base.started
            amount = self._increase(load, base, load.call_seconds - call_seconds)
            # Agents report at once when calls come: after silence, the load is as old as its sum.
            span = gap
            if not base.calls and self._metric != "cpu":
                span = min(gap, (load.call_seconds - base.call_seconds) / max(1, load.calls))
        if self._metric == "concurrency":
            self._counted += load.call_seconds - expected
        else:
            self._sum_values(time)
            self._sum += amount
            if is_spread:
                self._counted += amount
        if amount and is_spread:
            self._window.correct(amount, span)
        self._take_value(pod, load, time)
        if load.calls or (base is not None and load.started > base.started):
            self.last_time = time
        if self.began is None and (load.calls or amount > 0 or self._values > 0):
            self.began = time - span
        pod.is_regular = self._metric == "concurrency" and pod.overtaken is None

    def _increase(self, load: PodLoad, base: PodLoad, call_seconds: float) -> float:
        """What a report adds to the sum of the metric."""
        if self._metric == "concurrency":
            return call_seconds
        if self._metric == "rps":
            return load.started - base.started
        if self._metric == "cpu" and self._request:
            return max(0.0, load.cpu_seconds - base.cpu_seconds) / self._request
        return 0.0

    def _take_value(self, pod: _Pod, load: PodLoad, time: float) -> None:
        """Take the value of a metric that is not summed."""
        if self._metric in SUMMED:
            return
        if self._metric == "memory":
            value = load.memory_bytes / self._request if self._request else 0.0
        elif reported := load.metrics.get(self._metric):
            value = reported[0]
            if not abs(value) < LIMITS.metric_value:
                return
            if pod.value_time > -inf and pod.load.metrics.get(self._metric) == reported:
                # An agent repeats the last value in each report.
                return
            pod.value_time = time
        else:
            return
        self._change_values(value - pod.value, time)
        pod.value = value

    def _change_values(self, change: float, time: float) -> None:
        if change:
            self._values += change
            self._values_changed = time

    def _sum_values(self, time: float) -> None:
        self._sum += self._values * (time - self._values_time)
        self._values_time = time

    def _total(self, time: float) -> float:
        """The sum of the metric, of which the window has `_counted`."""
        if self._metric == "concurrency":
            return self._base + self.calls * time
        self._sum_values(time)
        return self._sum

    def _drop_silent_calls(self, time: float) -> None:
        """Take pods that have not reported for long to have no calls since then."""
        self._silence_time = time + _SILENCE
        for pod in self.pods.values():
            if not pod.calls:
                continue
            silence_time = pod.time + _SILENCE
            if silence_time > time:
                self._silence_time = min(self._silence_time, silence_time)
                continue
            self._base += pod.calls * silence_time
            pod.base += pod.calls * silence_time
            self.calls -= pod.calls
            pod.calls = 0


def _is_above(load: PodLoad, base: PodLoad) -> bool:
    """Whether the sums of a report are not smaller than those of another."""
    return load.call_seconds >= base.call_seconds and load.started >= base.started
