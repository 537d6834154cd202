"""How many pods an autoscaled service has: events in, a number out, no I/O.

The rules and their order are those of Knative's pod autoscaler
(https://knative.dev/docs/serving/autoscaling/), for `cpu` and `memory` that of Kubernetes'
horizontal one:

    load ──► needed ──────► held ──────────────► bounded ──► size
             on average,    by a burst,          min_scale
             or in a        scale_down_delay,    (by the clock),
             burst          the last pod's stay  max_scale

*Holds* keep pods that the load does not need any more; they never add any. Each has an end, and
`next_decision` names the first: a service at rest needs no clock.

*Time* is that of the caller, without its jumps: while a clock jumps, no time passes for averages
and holds. Schedules alone follow the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import ceil, inf
from typing import Any, TypeAlias

import msgspec

from kubetorch.controller.load import RESOURCES, SUMMED, ServiceLoad
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.specs.autoscaling import AutoscalingSpec, seconds
from kubetorch.wire.messages import PodLoad, ScalingDecision, ScalingView

_DEFAULT_TARGETS = {"concurrency": 100.0, "rps": 200.0, "cpu": 80.0, "memory": 80.0}
_DEFAULT_UTILIZATION = {"concurrency": 70.0, "rps": 70.0}
_DEFAULT_WINDOW = "60s"
#: Percent of the window, and of what the ready pods can carry.
_DEFAULT_PANIC_WINDOW = 10
_DEFAULT_PANIC_THRESHOLD = 200
#: A quotient that is above a whole number by less is that number: sums of floats are not exact.
_ROUNDING = 1e-6
_INTERVAL = TIMING.scaling_interval_seconds
#: A function that says why, and its arguments: most decisions change nothing, and say nothing.
_Reason: TypeAlias = tuple[Any, ...]


class ScalerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of `autoscale()`; times are in seconds.

    Attributes:
        metric: `concurrency`, `rps`, `cpu`, `memory`, or the name of the user's own.
        target: Load per pod that is aimed at, in units of the metric; percent of the request for
            `cpu` and `memory`.
        utilization: Percentage of the target at which pods are added.
        request: Cores or bytes that a pod asks for, for `cpu` and `memory`; 0 if none.
        panic_window: The short window in which bursts are seen.
        panic_threshold: The pods that a burst needs, per ready pod.
        maximum: Most pods; 0 is no limit.
        schedule: Values of `minimum` by cron expression, in place of it.
        timezone: That of the schedule.
    """

    metric: str
    target: float
    utilization: float
    request: float = 0.0
    window: float
    panic_window: float
    panic_threshold: float
    minimum: int
    maximum: int = 0
    activation: int = 0
    buffer: int = 0
    delay: float = 0.0
    retention: float = 0.0
    schedule: tuple[tuple[str, int], ...] = ()
    timezone: str = "UTC"

    @classmethod
    def of(
        cls, spec: AutoscalingSpec, *, cpu_cores: float | None, memory_bytes: int | None
    ) -> ScalerSettings:
        """Those of a spec, for pods that ask for so much."""
        metric = spec.metric or "concurrency"
        target = float(spec.target or 0.0)
        if metric == "concurrency" and spec.concurrency:
            target = min(target or inf, float(spec.concurrency))
        window = float(seconds(spec.window or _DEFAULT_WINDOW))
        request = {"cpu": cpu_cores, "memory": memory_bytes}.get(metric)
        panic_percentage = spec.panic_window_percentage or _DEFAULT_PANIC_WINDOW
        return cls(
            metric=metric,
            target=target or _DEFAULT_TARGETS.get(metric, 1.0),
            utilization=spec.target_utilization or _DEFAULT_UTILIZATION.get(metric, 100.0),
            request=float(request or 0.0),
            window=window,
            panic_window=window * panic_percentage / 100,
            panic_threshold=(spec.panic_threshold_percentage or _DEFAULT_PANIC_THRESHOLD) / 100,
            minimum=1 if spec.min_scale is None else spec.min_scale,
            maximum=spec.max_scale or 0,
            activation=spec.activation_scale or 0,
            buffer=spec.buffer or 0,
            delay=float(seconds(spec.scale_down_delay or "0s")),
            retention=float(seconds(spec.scale_to_zero_pod_retention_period or "0s")),
            schedule=spec.min_schedule,
            timezone=spec.timezone or "UTC",
        )

    @property
    def share(self) -> float:
        """The load that a pod takes: the part of the target at which pods are added."""
        return self.target * self.utilization / 100


class Scaler:
    """Decides the number of pods of one service.

    `now` is the Unix time in seconds of all methods. After each of them `next_decision` says when
    `decide` is due.

    Attributes:
        size: The number of pods wanted now.
        decisions: Its last changes, the oldest first.
    """

    __slots__ = (
        "_due",
        "_hold_end",
        "_is_proving",
        "_last_need",
        "_latest",
        "_load",
        "_minimum",
        "_minimum_from",
        "_minimum_until",
        "_panic_time",
        "_recent_needs",
        "_schedule_expression",
        "_settings",
        "_shrink_time",
        "_skew",
        "_time",
        "_used_time",
        "_why",
        "decisions",
        "size",
    )

    def __init__(self, settings: ScalerSettings, *, size: int, now: float) -> None:
        self.size = size
        self.decisions: deque[ScalingDecision] = deque(maxlen=LIMITS.scaling_decisions)
        self._settings = settings
        self._load = ServiceLoad(*_measurement(settings), 0.0)
        self._why: _Reason = (str, "")
        self._is_proving = False
        #: The end of the last proof: a deploy is as good a sign of use as a call.
        self._used_time = 0.0

        # ------------------------------------------------------------------------------- time
        #: Seconds since the start without the jumps of the clock: the time of all numbers here but
        #: those of the schedule. The clock is ahead of it by `_skew`.
        self._time = 0.0
        self._skew = now
        #: When the next decision is due, and when it is so late that the clock has jumped.
        self._due = 0.0
        self._latest = inf

        # ------------------------------------------------------------------------------ holds
        self._panic_time: float | None = None
        #: When pods went last.
        self._shrink_time = -inf
        #: The number that was needed at the last decision, and larger ones before, each with the
        #: time until which it was needed.
        self._last_need = size
        self._recent_needs: deque[tuple[float, int]] = deque()
        #: The first end of a hold.
        self._hold_end = inf

        # --------------------------------------------------------------------------- schedule
        #: The least number of pods, and the times on the clock between which it holds.
        self._minimum = settings.minimum
        self._minimum_from = inf
        self._minimum_until = inf
        self._schedule_expression = ""

    # --------------------------------------------------------------------------------- events

    def configure(self, settings: ScalerSettings, now: float) -> None:
        time = self._time_at(now)
        self._load.measure(time)
        if _measurement(settings) != _measurement(self._settings):
            self._load.configure(*_measurement(settings), time)
            self._panic_time = None
        self._settings = settings
        self._minimum = settings.minimum
        self._minimum_from = inf
        self._schedule_expression = ""
        self._wake(time)

    def begin_proof(self, size: int, reason: str, now: float) -> None:
        """Have so many pods until `end_proof`, or the minimum, whatever the load is."""
        time = self._time_at(now)
        self._is_proving = True
        self._update_minimum(now)
        self._resize(max(size, self._minimum), (str, reason), now)
        self._wake(time)

    def end_proof(self, now: float) -> None:
        """Decide by the load again."""
        self._used_time = self._time_at(now)
        self._is_proving = False
        self._wake(self._used_time)

    def pods_changed(self, pods: Collection[str], ready: Collection[str], now: float) -> None:
        """Take note of the pods that are there, and of those that serve."""
        time = self._time_at(now)
        if self._load.pods_changed(pods, ready, time):
            self._wake(time + TIMING.standing_start_seconds)

    def report(self, pod: str, load: PodLoad, now: float) -> None:
        """Take the load of a pod; that of a pod that is not there counts nothing."""
        time = now - self._skew
        if self._time <= time <= self._latest:
            self._time = time
        else:
            time = self._time_at(now)
        was_idle = self._load.began is None
        self._load.report(pod, load, time)
        if was_idle or time + _INTERVAL < self._due:
            self._wake_for_load(time)

    def wait(self, count: int, now: float) -> None:
        """Take the number of calls whose callers have no pod: they are load too."""
        time = self._time_at(now)
        if count == self._load.waiting:
            return
        self._load.wait(count, time)
        if count and not self.size:
            self._wake(time)
        else:
            self._wake_for_load(time)

    # ------------------------------------------------------------------------------ decisions

    def decide(self, now: float) -> int:
        time = self._time_at(now)
        self._load.measure(time)
        self._hold_end = inf
        self._update_minimum(now)
        size, why = self.size, self._why
        if not self._is_proving:
            size, why = self._with_holds(*self._needed(time), time)
        if size < self._minimum:
            size, why = self._minimum, (self._minimum_words,)
        maximum = self._settings.maximum
        if maximum and size > maximum and not self._is_proving:
            size, why = maximum, (self._maximum_words, size)
        if size < self.size:
            self._shrink_time = time
        self._resize(size, why, now)
        self._set_due(time)
        return self.size

    def next_decision(self, now: float) -> float | None:
        """Seconds until `decide` is due if nothing happens before; `None`: it never is."""
        if self._due == inf:
            return None
        return max(0.0, self._due - (now - self._skew))

    def leaving(self, size: int) -> list[str]:
        """The pods that should go so that `size` of them stay, in their order.

        Those that do not serve, then those with the fewest calls, of these the newest.
        """
        surplus = len(self._load.pods) - size
        if surplus <= 0:
            return []
        pods = sorted(
            self._load.pods.values(), key=lambda pod: (pod.is_ready, pod.calls, -pod.order)
        )
        return [pod.name for pod in pods[:surplus]]

    def view(self, now: float) -> ScalingView:
        load = self._load
        waiting = load.waiting
        metrics: dict[str, float] = {}
        for pod in load.pods.values():
            waiting += min(pod.load.waiting, pod.calls)
            for name, (value, _) in pod.load.metrics.items():
                if not abs(value) < LIMITS.metric_value:
                    continue  # nothing was decided by it, either
                metrics[name] = metrics.get(name, 0.0) + value
        return ScalingView(
            engine="kubetorch",
            wanted=self.size,
            minimum=self._minimum,
            maximum=self._settings.maximum,
            calls=load.calls,
            waiting=waiting,
            rate=load.rate(now - self._skew),
            metrics=metrics,
            reason=self._why[0](*self._why[1:]),
            decisions=tuple(self.decisions),
        )

    # ----------------------------------------------------------------------------------- time

    def _time_at(self, now: float) -> float:
        """The time of the clock without its jumps."""
        time = now - self._skew
        if not self._time <= time <= self._latest:
            if abs(time - self._time) > TIMING.standing_start_seconds:
                # The sums of agents have grown over a time that has not passed here.
                self._load.forget_baselines()
            time = self._time
            self._skew = now - time
        self._time = time
        return time

    def _wake(self, time: float) -> None:
        """Decide at this time, if not before."""
        if time < self._due:
            self._due = time
            self._latest = time + TIMING.scaling_stall_seconds

    def _wake_for_load(self, time: float) -> None:
        delay = _INTERVAL
        began = self._load.began
        if began is not None and time - began < delay:
            delay = TIMING.standing_start_seconds
        self._wake(time + delay)

    def _set_due(self, time: float) -> None:
        self._due = inf
        load = self._load
        settled_time = load.settled_time
        if load.calls or time < settled_time:
            if load.began is None:
                self._wake(settled_time)
            else:
                self._wake_for_load(time)
        if not self._is_proving:
            self._wake(self._hold_end)
        if self._settings.schedule:
            # Not at once far ahead: a clock that jumps forward would pass over the time.
            recheck = time + TIMING.schedule_check_seconds
            self._wake(min(recheck, self._minimum_until - self._skew))
        self._latest = self._due + TIMING.scaling_stall_seconds

    # ---------------------------------------------------------------------------------- needs

    def _needed(self, time: float) -> tuple[int, _Reason]:
        settings, load = self._settings, self._load
        if settings.metric in RESOURCES:
            return self._needed_for_use(time)
        if settings.metric not in SUMMED:
            values_end = load.values_end(time)
            if values_end is None:
                return max(self.size, min(1, load.calls)), (self._unreported_words,)
            self._hold_end = values_end
        panic_end = self._panic_end()
        if panic_end is not None and time >= panic_end:
            self._panic_time = None
        if load.began is None:
            return 0, (str, "no calls")
        average = load.average(time, TIMING.standing_start_seconds)
        burst = load.burst(time, TIMING.standing_start_seconds)
        ready = max(1, load.ready)
        share = settings.share
        rounding = LIMITS.scaling_jitter_percent / 100 if settings.metric in SUMMED else _ROUNDING
        needed = max(1, ceil(average / share - rounding))
        why: _Reason = (self._load_words, average, needed)
        if not self.size and needed == 1:
            why = (str, "a call waits for the first pod")
        needed_in_burst = ceil(burst / share - rounding)
        if needed_in_burst >= settings.panic_threshold * ready:
            self._panic_time = time
        if self._panic_time is not None and needed_in_burst > needed:
            needed = needed_in_burst
            why = (self._burst_words, burst, needed)
        return self._with_spare(min(needed, LIMITS.scale_up_factor * ready), why)

    def _with_spare(self, needed: int, why: _Reason) -> tuple[int, _Reason]:
        needed += self._settings.buffer
        if needed < self._settings.activation:
            return self._settings.activation, (self._activation_words,)
        return needed, why

    def _needed_for_use(self, time: float) -> tuple[int, _Reason]:
        """The same for cpu and memory, by the rule of the horizontal pod autoscaler."""
        settings, load = self._settings, self._load
        least = max(self.size, min(1, load.calls))
        if not settings.request:
            return least, (self._no_request_words,)
        if load.began is None:
            if settings.metric == "memory":
                return least, (str, "no pod has reported its memory: the size is held")
            return 0, (str, "no calls")
        # A moment of work says little about the use.
        use = load.average(time, settings.panic_window)
        pods = use / (settings.share / 100)
        sharing_pods = max(1, load.ready - settings.buffer)
        if abs(pods / sharing_pods - 1) <= LIMITS.scaling_tolerance_percent / 100:
            return least, (self._tolerance_words, use * 100 / sharing_pods)
        needed = max(1, ceil(pods - _ROUNDING))
        why = (self._load_words, use * 100, needed)
        most = LIMITS.scale_up_factor * max(1, load.ready)
        size, why = self._with_spare(min(needed, most), why)
        if size < self.size:
            # A pod that has not reported yet may be as busy as it should be.
            silent = sum(pod.is_ready and not pod.has_reported for pod in load.pods.values())
            size = min(self.size, size + silent)
        return size, why

    # ---------------------------------------------------------------------------------- holds

    def _with_holds(self, size: int, why: _Reason, time: float) -> tuple[int, _Reason]:
        """The size once what keeps pods that the load does not need has had its say."""
        settings = self._settings
        panic_end = self._panic_end()
        if size < self.size and panic_end is not None:
            size, why = self._hold(self.size, (self._panic_words,), panic_end)
        self._remember_need(size, time)
        if self._recent_needs and size < self.size:
            until, recent_need = self._recent_needs[0]
            if recent_need > size:
                recent_need = min(recent_need, self.size)
                why = (self._delay_words, recent_need)
                size, why = self._hold(recent_need, why, until + settings.delay)
        if not size and self.size and not self._minimum:
            used_time = max(self._load.last_time, self._used_time)
            stay_end = used_time + settings.window + settings.retention
            why = (self._idle_words,)
            if time < stay_end:
                size, why = self._hold(1, (self._retention_words,), stay_end)
        if size >= self.size:
            return size, why
        observed_end = self._load.observed + settings.window
        if time < observed_end:
            return self._hold(self.size, (self._observed_words,), observed_end)
        step_end = self._shrink_time + TIMING.scale_down_interval_seconds
        if time < step_end:
            return self._hold(self.size, (self._step_words, size), step_end)
        fewest = min(self.size, self._load.ready // LIMITS.scale_down_divisor)
        if size < fewest:
            return fewest, (self._rate_words, size)
        return size, why

    def _hold(self, size: int, why: _Reason, end: float) -> tuple[int, _Reason]:
        """Keep a size up to a time, at which it is decided again."""
        self._hold_end = min(self._hold_end, end)
        return size, why

    def _panic_end(self) -> float | None:
        if self._panic_time is None:
            return None
        return self._panic_time + self._settings.window

    def _remember_need(self, size: int, time: float) -> None:
        """Note until when a larger number was needed: each is less than those before it."""
        recent_needs = self._recent_needs
        if size != self._last_need:
            need = max(size, self._last_need)
            while recent_needs and recent_needs[-1][1] <= need:
                recent_needs.pop()
            if size < self._last_need:
                recent_needs.append((time, self._last_need))
            self._last_need = size
        while recent_needs and recent_needs[0][0] + self._settings.delay <= time:
            recent_needs.popleft()

    # ------------------------------------------------------------------------ bounds and size

    def _update_minimum(self, now: float) -> None:
        """Take the minimum of the expression that fired last, of two at once the larger."""
        settings = self._settings
        if not settings.schedule or self._minimum_from <= now < self._minimum_until:
            return
        firings = [
            (*_firings(expression, settings.timezone, now), minimum, expression)
            for expression, minimum in settings.schedule
        ]
        self._minimum_from, _, self._minimum, self._schedule_expression = max(
            firings, key=lambda firing: (firing[0], firing[2])
        )
        self._minimum_until = min(firing[1] for firing in firings)

    def _resize(self, size: int, why: _Reason, now: float) -> None:
        self._why = why
        if size != self.size:
            reason = why[0](*why[1:])
            self.decisions.append(ScalingDecision(now, self.size, size, reason))
            self.size = size

    # -------------------------------------------------------------------------------- reasons

    def _load_words(self, load: float, needed: int) -> str:
        settings = self._settings
        target = f"the target {settings.target:g}"
        if settings.metric in RESOURCES:
            amount = f"{settings.metric} use of {load:.0f} % of what a pod asks for"
            target += " %"
        elif settings.metric == "concurrency":
            amount = f"load of {_number(load)} calls"
        elif settings.metric == "rps":
            amount = f"load of {_number(load)} calls per second"
        else:
            amount = f"{settings.metric} of {_number(load)}"
        if settings.utilization != 100:
            target = f"{settings.utilization:g} % of {target}"
        words = f"{amount} needs {_pods(needed)} at {target} per pod"
        if settings.buffer:
            words += f", and {settings.buffer} free (buffer)"
        return words

    def _tolerance_words(self, use: float) -> str:
        settings = self._settings
        return (
            f"{settings.metric} use of {use:.0f} % per pod is within "
            f"{LIMITS.scaling_tolerance_percent} % of the target {settings.target:g} %"
        )

    def _burst_words(self, load: float, needed: int) -> str:
        return f"a burst: {self._load_words(load, needed)}"

    def _activation_words(self) -> str:
        return f"activation_scale is {self._settings.activation}"

    def _unreported_words(self) -> str:
        settings = self._settings
        observed_end = self._load.observed + settings.window
        since = "yet" if self._time < observed_end else f"for {_duration(settings.window)}"
        return f"no pod has reported {settings.metric} {since}: the size is held"

    def _no_request_words(self) -> str:
        metric = self._settings.metric
        return f"the pods ask for no {metric} that its use could be compared to: the size is held"

    def _panic_words(self) -> str:
        return f"a burst: no pod goes until {_duration(self._settings.window)} after it"

    def _delay_words(self, needed: int) -> str:
        delay = _duration(self._settings.delay)
        return f"{_pods(needed)} needed within the last {delay} (scale_down_delay)"

    def _idle_words(self) -> str:
        settings = self._settings
        if settings.retention:
            return f"idle for {_duration(settings.retention)}"
        return f"no calls for {_duration(settings.window)}"

    def _retention_words(self) -> str:
        retention = _duration(self._settings.retention)
        return f"no calls: the last pod stays for {retention} (scale_to_zero_pod_retention_period)"

    def _observed_words(self) -> str:
        window = _duration(self._settings.window)
        return f"no pod goes before the load of {window} is known"

    def _rate_words(self, needed: int) -> str:
        return f"{_pods(needed)} needed; at most half of {self._load.ready} go at once"

    def _step_words(self, needed: int) -> str:
        interval = _duration(TIMING.scale_down_interval_seconds)
        return f"{_pods(needed)} needed; others went a moment ago, the next go {interval} later"

    def _minimum_words(self) -> str:
        if self._schedule_expression:
            return f"min_scale of the schedule {self._schedule_expression!r} is {self._minimum}"
        return f"min_scale is {self._minimum}"

    def _maximum_words(self, needed: int) -> str:
        return f"max_scale is {self._settings.maximum}, {_pods(needed)} would be needed"


def _measurement(settings: ScalerSettings) -> tuple[str, float, float, float]:
    return settings.metric, settings.request, settings.window, settings.panic_window


def _firings(expression: str, timezone: str, now: float) -> tuple[float, float]:
    """When a cron expression fired last, and when it fires next."""
    # Imported only where there is a schedule.
    import datetime  # noqa: PLC0415  # for schedules only
    from zoneinfo import ZoneInfo  # noqa: PLC0415  # for schedules only

    from cronsim import CronSim  # noqa: PLC0415  # for schedules only

    zone = datetime.timezone.utc if timezone == "UTC" else ZoneInfo(timezone)
    second = datetime.datetime.fromtimestamp(int(now), zone)
    fired = next(CronSim(expression, second + datetime.timedelta(seconds=1), reverse=True), None)
    following = next(CronSim(expression, fired or second), None)
    # In the hour that a clock repeats, the search backwards passes over the first of the two.
    while following is not None and following.timestamp() <= now:
        fired, following = following, next(CronSim(expression, following), None)
    return (
        -inf if fired is None else fired.timestamp(),
        inf if following is None else following.timestamp(),
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def _pods(count: int) -> str:
    return f"{count} pod" if count == 1 else f"{count} pods"


def _duration(seconds: float) -> str:
    """A time for people: `90 s`, `10 m`."""
    if seconds >= 120 and not seconds % 60:
        return f"{seconds / 60:g} m"
    return f"{seconds:g} s"
