"""The number of pods of a service under load: the frozen form of `.autoscale()`.

The words, defaults and bounds are those of Knative Serving
(https://knative.dev/docs/serving/autoscaling/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kubetorch.errors import AutoScalingError, did_you_mean
from kubetorch.specs import hints

KPA = "kpa.autoscaling.knative.dev"
HPA = "hpa.autoscaling.knative.dev"
KPA_METRICS = ("concurrency", "rps")

DEFAULT_SCALE_DOWN_DELAY = "1m"
DEFAULT_RETENTION = "10m"
DEFAULT_PROGRESS_DEADLINE = "10m"

_DURATION = re.compile(r"^\d+[smh](\d+[smh])*$")
# Seconds; https://knative.dev/docs/serving/autoscaling/kpa-specific/#stable-window
_SHORTEST_WINDOW_SECONDS = 6
_LONGEST_SECONDS = 3600
_SECONDS = {"s": 1, "m": 60, "h": 3600}

#: Spellings of the documents beside Knative's own words.
ALIASES = {
    "min_replicas": "min_scale",
    "max_replicas": "max_scale",
    "initial_replicas": "initial_scale",
    "target_concurrency": "target",
}


#: Annotations of Knative without a field here; they resemble our words and are no mistakes.
_KNATIVE_ANNOTATIONS = (
    "activation_scale",
    "panic_threshold_percentage",
    "panic_window_percentage",
    "target_burst_capacity",
)


@dataclass(frozen=True)
class AutoscalingSpec:
    """When pods are added and removed.

    Attributes:
        target: Load per pod that the autoscaler aims at, in units of `metric`.
        window: Time over which the metric is averaged.
        metric: `concurrency`, `rps`, `cpu`, `memory`, or a custom one (HPA).
        target_utilization: Percentage of the target at which pods are added.
        min_scale: Fewest pods; 0 allows none. `None`: 1, unless a scale-to-zero time was given.
        max_scale: Most pods; 0 is no limit.
        initial_scale: Pods at the start.
        concurrency: Requests that a pod handles at once; further requests wait.
        scale_to_zero_pod_retention_period: How long the last pod stays at least.
        scale_down_delay: How long the load must be lower before a pod goes (KPA only).
        autoscaler_class: KPA or HPA.
        progress_deadline: How long a revision may take to become ready.
        extra_annotations: Further `autoscaling.knative.dev/…` annotations, sorted by name.
    """

    target: int | float | None = None
    window: str | None = None
    metric: str | None = None
    target_utilization: int | None = None
    min_scale: int | None = None
    max_scale: int | None = None
    initial_scale: int | None = None
    concurrency: int | None = None
    scale_to_zero_pod_retention_period: str | None = None
    scale_down_delay: str | None = None
    autoscaler_class: str | None = None
    progress_deadline: str | None = None
    extra_annotations: tuple[tuple[str, str], ...] = ()


_FIELD_NAMES = tuple(
    spec_field.name
    for spec_field in fields(AutoscalingSpec)
    if spec_field.name != "extra_annotations"
)


def seconds(duration: str) -> int:
    """A duration such as `1m30s`, in seconds."""
    return sum(int(n) * _SECONDS[unit] for n, unit in re.findall(r"(\d+)([smh])", duration))


def parse(arguments: Mapping[str, Any], *, launch_timeout: int) -> AutoscalingSpec:
    """Parse the keywords of `.autoscale()`, for a deploy that may take so many seconds."""
    values, extra = _split_arguments(arguments)
    grace = values.pop("scale_to_zero_grace_period", None)
    if grace is not None:
        if isinstance(grace, bool) or not isinstance(grace, int) or grace < 0:
            raise AutoScalingError(
                f"scale_to_zero_grace_period is {grace!r}; it must be a number of seconds"
            )
        values.setdefault("scale_to_zero_pod_retention_period", f"{grace}s")
        values.setdefault("min_scale", 0)
    values.setdefault("scale_down_delay", DEFAULT_SCALE_DOWN_DELAY)
    values.setdefault("scale_to_zero_pod_retention_period", DEFAULT_RETENTION)
    values.setdefault("progress_deadline", progress_deadline(launch_timeout))
    return _checked(values, extra)


def config(arguments: Mapping[str, Any]) -> AutoscalingSpec:
    """Parse the fields of an `AutoscalingConfig`, without the defaults of `.autoscale()`."""
    return _checked(*_split_arguments(arguments))


def _checked(values: Mapping[str, Any], extra: Mapping[str, str]) -> AutoscalingSpec:
    spec = AutoscalingSpec(**values, extra_annotations=tuple(sorted(extra.items())))
    check_numbers(spec)
    _check_durations(spec)
    return _check_zero(_with_class(spec))


def _split_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    known_words = (*_FIELD_NAMES, *ALIASES, "scale_to_zero_grace_period")
    values_by_field: dict[str, Any] = {}
    extra: dict[str, str] = {}
    for word, value in arguments.items():
        if value is None:
            continue
        name = ALIASES.get(word, word)
        if name not in known_words:
            _check_unlike(word, known_words)
            extra[word.replace("_", "-")] = str(value)
            continue
        if name in values_by_field and values_by_field[name] != value:
            raise AutoScalingError(
                f"{word} says {value!r}, another spelling {values_by_field[name]!r}"
            )
        values_by_field[name] = value
    if "target_concurrency" in arguments:
        values_by_field.setdefault("metric", "concurrency")
    return values_by_field, extra


def _check_unlike(word: str, known_words: Sequence[str]) -> None:
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


def progress_deadline(launch_timeout: int) -> str:
    """The default deadline of a revision, for a deploy that may take so many seconds."""
    deadline_seconds = max(launch_timeout + 60, int(launch_timeout * 1.2))
    return f"{deadline_seconds}s" if deadline_seconds > 600 else DEFAULT_PROGRESS_DEADLINE


_LARGEST_NUMBER = 1_000_000


def check_numbers(spec: AutoscalingSpec) -> AutoscalingSpec:
    """A spec whose numbers of pods and requests are possible ones."""
    for name in ("min_scale", "max_scale", "initial_scale", "concurrency"):
        value: Any = getattr(spec, name)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 0 <= value <= _LARGEST_NUMBER
        ):
            raise AutoScalingError(f"{name} is {value!r}; it must be a whole number, 0 or more")
    target: Any = spec.target
    if target is not None and (
        isinstance(target, bool) or not isinstance(target, (int, float)) or not target > 0
    ):
        raise AutoScalingError(f"target is {target!r}; it must be a number above 0")
    use: Any = spec.target_utilization
    if use is not None and (
        isinstance(use, bool) or not isinstance(use, (int, float)) or not 1 <= use <= 100
    ):
        raise AutoScalingError(f"target_utilization must be between 1 and 100, not {use!r}")
    for name in ("min_scale", "initial_scale"):
        scale = getattr(spec, name)
        if scale is not None and spec.max_scale and scale > spec.max_scale:
            raise AutoScalingError(
                f"{name} cannot be greater than max_scale: {scale} > {spec.max_scale}"
            )
    return spec


def _check_durations(spec: AutoscalingSpec) -> None:
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
        if not isinstance(value, str) or not _DURATION.match(value):
            raise AutoScalingError(
                f"{name} must be a valid duration, not {value!r}",
                hint='for example "30s" or "1m30s"',
            )
        if seconds(value) < least or (most is not None and seconds(value) > most):
            bounds = f"{least} s or more" if most is None else f"{least} s to {most // 3600} h"
            raise AutoScalingError(f"{name} is {value!r}; Knative takes {bounds}")


def _check_zero(spec: AutoscalingSpec) -> AutoscalingSpec:
    for name in ("min_scale", "initial_scale"):
        if spec.autoscaler_class == HPA and getattr(spec, name) == 0:
            raise AutoScalingError(
                f"{name} is 0; the HPA class always has a pod, only KPA scales to zero",
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
    needs_hpa = metric is not None and metric not in KPA_METRICS
    if needs_hpa and autoscaler_class == KPA:
        raise AutoScalingError(
            f"metric {metric!r} needs the HPA class", hint=f"autoscaler_class={HPA!r}"
        )
    if not needs_hpa and autoscaler_class == HPA and metric is not None:
        raise AutoScalingError(
            f"metric {metric!r} needs the KPA class", hint=f"autoscaler_class={KPA!r}"
        )
    return replace(spec, autoscaler_class=HPA if needs_hpa else autoscaler_class or KPA)
