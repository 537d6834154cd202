"""The number of pods of a service under load: the frozen form of `.autoscale()`.

The words, defaults and bounds are those of Knative Serving
(https://knative.dev/docs/serving/autoscaling/). `buffer`, a schedule and metrics of the user's own
go beyond them: see `beyond_knative`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from kubetorch.errors import AutoScalingError, did_you_mean
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.specs import hints

if TYPE_CHECKING:
    from datetime import datetime

KPA = "kpa.autoscaling.knative.dev"
HPA = "hpa.autoscaling.knative.dev"
KPA_METRICS = ("concurrency", "rps")
RESOURCE_METRICS = ("cpu", "memory")

DEFAULT_SCALE_DOWN_DELAY = "1m"
DEFAULT_RETENTION = "10m"
DEFAULT_PROGRESS_DEADLINE = "10m"

_DURATION = re.compile(r"\d+[smh](\d+[smh])*")
# Durations of Go, which manifests have; https://pkg.go.dev/time#ParseDuration
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
# Seconds; https://knative.dev/docs/serving/autoscaling/kpa-specific/#stable-window
_SHORTEST_WINDOW_SECONDS = 6
_LONGEST_SECONDS = 3600
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_DURATIONS = (
    "window",
    "scale_to_zero_pod_retention_period",
    "scale_down_delay",
    "progress_deadline",
)

#: Spellings of the documents beside Knative's own words.
ALIASES = {
    "min_replicas": "min_scale",
    "max_replicas": "max_scale",
    "initial_replicas": "initial_scale",
    "target_concurrency": "target",
}


#: Annotations of Knative without a field here; they resemble our words and are no mistakes.
_KNATIVE_ANNOTATIONS = ("target_burst_capacity",)

_MOST_PODS = 1_000_000
#: Expressions of a schedule; a week has 168 hours.
_MOST_EXPRESSIONS = 200
_CRON_FIELDS = "minute hour day-of-month month day-of-week"


class AutoscalingSpec(FrozenValue):
    """When pods are added and removed.

    Attributes:
        target: Load per pod that the autoscaler aims at, in units of `metric`; for `cpu` and
            `memory` a percentage of what the pod requests.
        window: Time over which the metric is averaged.
        metric: `concurrency`, `rps`, `cpu`, `memory`, or one of the user's own: that of
            `kt.metric`, or with the HPA class one that Knative's HPA gets from elsewhere.
        target_utilization: Percentage of the target at which pods are added.
        min_scale: Fewest pods; 0 allows none. `None`: 1, or 0 with `scale_to_zero_grace_period`.
        max_scale: Most pods; 0 is no limit.
        initial_scale: Pods at the start.
        concurrency: Requests that a pod handles at once; further requests wait.
        scale_to_zero_pod_retention_period: How long the last pod stays at least.
        scale_down_delay: How long the load must be lower before a pod goes (KPA only).
        autoscaler_class: KPA or HPA; `None` for a metric of `kt.metric`, which neither has.
        progress_deadline: How long a revision may take to become ready.
        extra_annotations: Further `autoscaling.knative.dev/…` annotations, sorted by name.
        activation_scale: Fewest pods while there is load.
        panic_window_percentage: The short window in which bursts are seen, in percent of `window`.
        panic_threshold_percentage: The load that is a burst, in percent of what the ready pods
            can carry.
        buffer: Free pods beyond those that work, while there is work.
        min_schedule: Values of `min_scale` by cron expression, in place of `min_scale`.
        timezone: The time zone of `min_schedule`, such as `Europe/Berlin`; `None` is UTC.
    """

    target: int | float | None = None
    window: str | None = None
    metric: str | None = None
    target_utilization: int | float | None = None
    min_scale: int | None = None
    max_scale: int | None = None
    initial_scale: int | None = None
    concurrency: int | None = None
    scale_to_zero_pod_retention_period: str | None = None
    scale_down_delay: str | None = None
    autoscaler_class: str | None = None
    progress_deadline: str | None = None
    extra_annotations: tuple[tuple[str, str], ...] = ()
    activation_scale: int | None = None
    panic_window_percentage: float | None = None
    panic_threshold_percentage: float | None = None
    buffer: int | None = None
    min_schedule: tuple[tuple[str, int], ...] = ()
    timezone: str | None = None

    @property
    def fewest_pods(self) -> int:
        """The fewest pods at any time: `min_scale`, or the smallest number of the schedule."""
        if self.min_schedule:
            return min(number for _, number in self.min_schedule)
        return 1 if self.min_scale is None else self.min_scale


_FIELD_NAMES = tuple(
    spec_field.name
    for spec_field in fields(AutoscalingSpec)
    if spec_field.name not in ("extra_annotations", "min_schedule")
)


def seconds(duration: str) -> int:
    """A duration such as `1m30s`, in whole seconds, rounded up.

    Raises:
        ValueError: It is no duration.
    """
    if not re.fullmatch(f"(?:{_PART})+", duration):
        raise ValueError(f"{duration!r} is no duration, such as '1m30s'")
    total = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, duration))
    return math.ceil(round(total, 6))


def parse(arguments: Mapping[str, Any], *, launch_timeout: int) -> AutoscalingSpec:
    """Parse the keywords of `.autoscale()`, for a deploy that may take so many seconds."""
    values, extra = _split_arguments(arguments)
    values.setdefault("scale_down_delay", DEFAULT_SCALE_DOWN_DELAY)
    values.setdefault("scale_to_zero_pod_retention_period", DEFAULT_RETENTION)
    values.setdefault("progress_deadline", default_progress_deadline(launch_timeout))
    return _build_spec(values, extra)


def parse_config(
    arguments: Mapping[str, Any], annotations: Iterable[tuple[str, str]] = ()
) -> AutoscalingSpec:
    """Parse the fields of an `AutoscalingConfig`, without the defaults of `.autoscale()`."""
    values, extra = _split_arguments(arguments)
    return _build_spec(values, {**dict(annotations), **extra})


def beyond_knative(spec: AutoscalingSpec) -> str:
    """The options that Knative does not have, for a message; empty if it has them all."""
    is_of_program = spec.metric not in (None, *KPA_METRICS, *RESOURCE_METRICS)
    options = {
        f"buffer={spec.buffer}": bool(spec.buffer),
        "min_scale by the clock": bool(spec.min_schedule),
        f"metric={spec.metric!r} of kt.metric": is_of_program and spec.autoscaler_class != HPA,
    }
    return ", ".join(option for option, is_set in options.items() if is_set)


def check(spec: AutoscalingSpec) -> AutoscalingSpec:
    """The spec, if its values are possible ones and do not contradict each other.

    The bounds that Knative sets for durations, and the class of a metric, are checked where they
    are declared: a manifest of the user may have others.
    """
    _check_numbers(spec)
    _check_scales(spec)
    _check_schedule(spec)
    for name in _DURATIONS:
        duration: Any = getattr(spec, name)
        try:
            seconds("0s" if duration is None else duration)
        except (TypeError, ValueError) as error:
            raise _no_duration(name, duration) from error
    return spec


def _build_spec(values: dict[str, Any], extra: Mapping[str, str]) -> AutoscalingSpec:
    values = _with_schedule(values)
    spec = AutoscalingSpec(**values, extra_annotations=tuple(sorted(extra.items())))
    _check_windows(spec)
    return _check_hpa_has_a_pod(_with_class(check(spec)))


def _with_schedule(values: dict[str, Any]) -> dict[str, Any]:
    """The values of fields, with a `min_scale` by the clock in the field for it."""
    schedule = values.get("min_scale")
    if not isinstance(schedule, Mapping):
        return values
    return {**values, "min_scale": None, "min_schedule": _schedule(schedule)}


def _schedule(numbers: Mapping[Any, Any]) -> tuple[tuple[str, int], ...]:
    """The pairs of a schedule, sorted, so that equal dictionaries make equal specs."""
    if not numbers or len(numbers) > _MOST_EXPRESSIONS:
        raise AutoScalingError(
            f"min_scale has {len(numbers)} cron expressions; 1 to {_MOST_EXPRESSIONS} are possible",
            hint='for example min_scale={"0 8 * * 1-5": 4, "0 20 * * *": 0}',
        )
    # Of two that fire at the same time the larger number counts, so their order says nothing.
    return tuple(sorted((str(expression), number) for expression, number in numbers.items()))


def _split_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    known_words = (*_FIELD_NAMES, *ALIASES, "scale_to_zero_grace_period")
    values_by_field: dict[str, Any] = {}
    words_by_field: dict[str, str] = {}
    extra: dict[str, str] = {}
    for word, value in arguments.items():
        if value is None:
            continue
        name = ALIASES.get(word, word)
        if name not in known_words:
            _refuse_near_miss(word, known_words)
            extra[word.replace("_", "-")] = str(value)
            continue
        if name in values_by_field and values_by_field[name] != value:
            raise AutoScalingError(
                f"{word} is {value!r}, {words_by_field[name]} is {values_by_field[name]!r}",
                hint="both mean the same; leave one out",
            )
        values_by_field[name], words_by_field[name] = value, word
    if arguments.get("target_concurrency") is not None:
        values_by_field.setdefault("metric", "concurrency")
    grace_seconds = values_by_field.pop("scale_to_zero_grace_period", None)
    if grace_seconds is not None:
        if not _is_whole(grace_seconds) or grace_seconds < 0:
            raise AutoScalingError(
                f"scale_to_zero_grace_period is {grace_seconds!r}; it must be a number of seconds"
            )
        values_by_field.setdefault("scale_to_zero_pod_retention_period", f"{grace_seconds}s")
        values_by_field.setdefault("min_scale", 0)
    return values_by_field, extra


def _refuse_near_miss(word: str, known_words: Sequence[str]) -> None:
    """Refuse a word that is no annotation of Knative and resembles one of our words."""
    suggestion = hints.hint("autoscale", word)
    if suggestion is None and word not in _KNATIVE_ANNOTATIONS:
        suggestion = did_you_mean(word, known_words, likeness=0.6)
    if "timeout" in word.lower():
        hint = (
            "progress_deadline is the time to become ready, scale_down_delay that until a pod "
            "goes, scale_to_zero_pod_retention_period that of the last one; "
            "kt.Compute(launch_timeout=) bounds a deploy"
        )
    elif suggestion:
        hint = suggestion
    else:
        return
    raise AutoScalingError(f"autoscale() has no {word!r}", hint=hint)


def default_progress_deadline(launch_timeout: int) -> str:
    """The default deadline of a revision, for a deploy that may take so many seconds."""
    deadline_seconds = max(launch_timeout + 60, int(launch_timeout * 1.2))
    return f"{deadline_seconds}s" if deadline_seconds > 600 else DEFAULT_PROGRESS_DEADLINE


def _check_numbers(spec: AutoscalingSpec) -> None:
    bounds = {
        "min_scale": (0, _MOST_PODS),
        "max_scale": (0, _MOST_PODS),
        "initial_scale": (0, _MOST_PODS),
        "concurrency": (0, _MOST_PODS),
        "buffer": (0, _MOST_PODS),
        # https://knative.dev/docs/serving/autoscaling/scale-bounds/#scale-up-minimum
        "activation_scale": (1, _MOST_PODS),
    }
    for name, (least, most) in bounds.items():
        if getattr(spec, name) is not None:
            _check_whole(name, getattr(spec, name), least, most)
    for expression, number in spec.min_schedule:
        _check_whole(f"min_scale at {expression!r}", number, 0, _MOST_PODS)
    target: Any = spec.target
    if target is not None and (not _is_number(target) or not 0 < target < math.inf):
        raise AutoScalingError(f"target is {target!r}; it must be a number above 0")
    # https://knative.dev/docs/serving/autoscaling/kpa-specific/
    for name, least, most in (
        ("target_utilization", 1, 100),
        ("panic_window_percentage", 1, 100),
        ("panic_threshold_percentage", 110, 1000),
    ):
        percentage: Any = getattr(spec, name)
        if percentage is None:
            continue
        if not _is_number(percentage) or not least <= percentage <= most:
            raise AutoScalingError(f"{name} must be between {least} and {most}, not {percentage!r}")


def _check_whole(name: str, number: object, least: int, most: int) -> None:
    if not _is_whole(number) or not least <= number <= most:
        raise AutoScalingError(
            f"{name} is {number!r}; it must be a whole number from {least} to {most:,}"
        )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_scales(spec: AutoscalingSpec) -> None:
    """Refuse numbers of pods that `max_scale` never allows."""
    if not spec.max_scale:
        return
    scales = {
        name: getattr(spec, name)
        for name in ("min_scale", "initial_scale", "activation_scale", "buffer")
    }
    scales |= {f"min_scale at {expression!r}": number for expression, number in spec.min_schedule}
    for name, scale in scales.items():
        if scale is not None and scale > spec.max_scale:
            raise AutoScalingError(
                f"{name} cannot be greater than max_scale: {scale} > {spec.max_scale}"
            )


def _check_schedule(spec: AutoscalingSpec) -> None:
    if spec.timezone is not None and not spec.min_schedule:
        raise AutoScalingError(
            f"timezone is {spec.timezone!r}, and there is no schedule",
            hint='min_scale={"0 8 * * 1-5": 4, "0 20 * * *": 0} is one',
        )
    if not spec.min_schedule:
        return
    if spec.min_scale is not None:
        raise AutoScalingError(f"min_scale is {spec.min_scale}, and there is a schedule of it")
    # For schedules only.
    from datetime import datetime, timezone  # noqa: PLC0415  # for schedules only

    if spec.timezone is not None:
        _check_timezone(spec.timezone)
    now = datetime.now(timezone.utc)
    for expression, _ in spec.min_schedule:
        _check_expression(expression, now)


def _check_timezone(name: object) -> None:
    import zoneinfo  # noqa: PLC0415  # for schedules only

    try:
        zoneinfo.ZoneInfo(name)  # type: ignore[arg-type]  # anything; it is checked here
    except (KeyError, OSError, TypeError, ValueError) as error:
        known_names = zoneinfo.available_timezones()
        hint = did_you_mean(str(name), known_names, likeness=0.6) or 'for example "Europe/Berlin"'
        if not known_names:
            hint = "this machine has no list of time zones: pip install tzdata"
        raise AutoScalingError(f"timezone {name!r} is not known", hint=hint) from error


def _check_expression(expression: str, now: datetime) -> None:
    from cronsim import CronSim, CronSimError  # noqa: PLC0415  # for schedules only

    problem = ""
    if len(expression.split()) != len(_CRON_FIELDS.split()):
        problem = f"it must have {len(_CRON_FIELDS.split())} fields"
    else:
        try:
            next(CronSim(expression, now))
        except CronSimError as error:
            problem = str(error)
        except StopIteration:
            problem = "it never comes"
    if problem:
        raise AutoScalingError(
            f"min_scale has {expression!r}, which is no cron expression: {problem}",
            hint=f"the fields are: {_CRON_FIELDS}; for example 0 8 * * 1-5",
        )


def _check_windows(spec: AutoscalingSpec) -> None:
    """Refuse times that Knative would refuse, or that are not written as documented."""
    window: Any = spec.window
    if window is not None and (not isinstance(window, str) or not window.endswith(("s", "m", "h"))):
        raise AutoScalingError(f"window must end with s, m, or h, not {window!r}")
    for name, least, most in (
        ("window", _SHORTEST_WINDOW_SECONDS, _LONGEST_SECONDS),
        ("scale_to_zero_pod_retention_period", 0, _LONGEST_SECONDS),
        ("scale_down_delay", 0, _LONGEST_SECONDS),
        ("progress_deadline", 1, None),
    ):
        value: Any = getattr(spec, name)
        if value is None:
            continue
        if not isinstance(value, str) or not _DURATION.fullmatch(value):
            raise _no_duration(name, value)
        if seconds(value) < least or (most is not None and seconds(value) > most):
            bounds = f"{least} s or more" if most is None else f"{least} s to {most // 3600} h"
            raise AutoScalingError(f"{name} is {value!r}; Knative takes {bounds}")


def _no_duration(name: str, value: object) -> AutoScalingError:
    return AutoScalingError(
        f"{name} must be a valid duration, not {value!r}", hint='for example "30s" or "1m30s"'
    )


def _check_hpa_has_a_pod(spec: AutoscalingSpec) -> AutoscalingSpec:
    if spec.autoscaler_class != HPA:
        return spec
    for name, scale in (("min_scale", spec.fewest_pods), ("initial_scale", spec.initial_scale)):
        if scale == 0:
            raise AutoScalingError(
                f"{name} is 0; the HPA class keeps at least one pod: only Kubernetes 1.37 and "
                "later allow none, with object and external metrics",
                hint=f"{name}=1, or a metric of KPA: {' or '.join(KPA_METRICS)}",
            )
    return spec


def _with_class(spec: AutoscalingSpec) -> AutoscalingSpec:
    """The spec with the autoscaler class that its metric needs; refuses an impossible pair."""
    autoscaler_class: Any = spec.autoscaler_class
    if autoscaler_class is not None and autoscaler_class not in (KPA, HPA, "kpa", "hpa"):
        raise AutoScalingError(
            f"autoscaler_class must be {KPA!r} or {HPA!r}, not {autoscaler_class!r}"
        )
    if autoscaler_class in ("kpa", "hpa"):
        autoscaler_class = {"kpa": KPA, "hpa": HPA}[autoscaler_class]
    metric: Any = spec.metric
    if metric is not None and not (isinstance(metric, str) and metric.strip()):
        raise AutoScalingError(f"metric is {metric!r}; it must be a word such as 'concurrency'")
    if metric is None:
        # Knative's default metric of the class.
        metric = "cpu" if autoscaler_class == HPA else None
        return replace(spec, metric=metric, autoscaler_class=autoscaler_class or KPA)
    if metric in KPA_METRICS:
        if autoscaler_class == HPA:
            raise AutoScalingError(
                f"metric {metric!r} needs the KPA class", hint=f"autoscaler_class={KPA!r}"
            )
        return replace(spec, autoscaler_class=KPA)
    is_resource = metric in RESOURCE_METRICS
    if autoscaler_class == KPA:
        hint = f"autoscaler_class={HPA!r}"
        hint += "" if is_resource else f", or none for the metric of kt.metric({metric!r}, ...)"
        raise AutoScalingError(f"metric {metric!r} needs the HPA class", hint=hint)
    if not is_resource and spec.target is None:
        raise AutoScalingError(
            f"metric {metric!r} needs a target: the value per pod that is aimed at",
            hint=f"metric={metric!r}, target=10; without one: "
            f"{', '.join(KPA_METRICS + RESOURCE_METRICS)}",
        )
    return replace(spec, autoscaler_class=HPA if is_resource else autoscaler_class)


#: Keywords that cannot change while a service runs: pods would have to be made anew.
_FIXED = ("concurrency", "initial_scale", "autoscaler_class", "progress_deadline")


def check_changeable(words: Iterable[str]) -> None:
    """Refuse words that are no keywords of `.autoscale()`, or not while a service runs."""
    known_words = [
        word for word in (*_FIELD_NAMES, *ALIASES) if ALIASES.get(word, word) not in _FIXED
    ]
    for word in words:
        if ALIASES.get(word, word) in _FIXED:
            raise AutoScalingError(
                f"{word} cannot be changed while the service runs",
                hint="deploy it again with .to(kt.Compute(...).autoscale(...))",
            )
        if word not in known_words:
            raise AutoScalingError(
                f"autoscale() of a service that runs has no {word!r}",
                hint=did_you_mean(word, known_words, likeness=0.6)
                or f"it has {', '.join(sorted(known_words))}",
            )


def merge_changes(former: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `.autoscale()` after a further change; `None` is as deployed again."""
    check_changeable(changes)
    replaced_fields = {ALIASES.get(word, word) for word in changes}
    min_scale = changes.get("min_scale", changes.get("min_replicas"))
    if "min_scale" in replaced_fields and not isinstance(min_scale, Mapping):
        replaced_fields.add("timezone")  # that of the schedule before
    settings = {
        word: value
        for word, value in former.items()
        if ALIASES.get(word, word) not in replaced_fields
    }
    return settings | {word: value for word, value in changes.items() if value is not None}


def changed(spec: AutoscalingSpec, changes: Mapping[str, Any]) -> AutoscalingSpec:
    """The settings with these keywords of `.autoscale()` in place of the declared ones.

    Raises:
        AutoScalingError: They are impossible, or not while the service runs.
    """
    check_changeable(changes)
    values, _ = _split_arguments(changes)
    metric = values.get("metric")
    if metric in RESOURCE_METRICS and spec.metric not in RESOURCE_METRICS:
        raise AutoScalingError(
            f"metric cannot become {metric!r} while the service runs: its pods do not measure it",
            hint=f"deploy it again with .to(kt.Compute(...).autoscale(metric={metric!r}))",
        )
    if "metric" in values:
        values["autoscaler_class"] = None
    if spec.initial_scale is not None and (max_scale := values.get("max_scale")):
        # Its time is over: the pods of the next deploy are as many as it declares.
        values["initial_scale"] = min(spec.initial_scale, max_scale)
    if "min_scale" in values:
        values = _with_schedule(values)
        if "min_schedule" not in values:
            values = {"min_schedule": (), "timezone": None, **values}
    changed_spec = replace(spec, **values)
    _check_windows(changed_spec)
    return _check_hpa_has_a_pod(_with_class(check(changed_spec)))
