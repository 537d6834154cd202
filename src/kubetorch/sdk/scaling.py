"""How a service scales: its settings, and `ScalingStats`, its pods and its load now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kubetorch.errors import AutoScalingError, SpecError
from kubetorch.manifests import knative
from kubetorch.specs import autoscaling
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.wire.messages import WorkloadView


class AutoscalingConfig(AutoscalingSpec):
    """When pods are added and removed, without the defaults of `kt.Compute.autoscale`.

    It is what `compute.autoscaling_config` is, and programs for 0.5 import it.

    Args:
        arguments: As those of `kt.Compute.autoscale`; other names are annotations of Knative.

    Raises:
        AutoScalingError: A value is impossible.
    """

    def __init__(
        self,
        *,
        min_schedule: Iterable[tuple[str, int]] = (),
        extra_annotations: Iterable[tuple[str, str]] = (),
        **arguments: Any,  # noqa: ANN401  # they are checked
    ) -> None:
        # `dataclasses.replace` passes all fields, these two as they are stored.
        if min_schedule and arguments.get("min_scale") is None:
            arguments["min_scale"] = dict(min_schedule)
        spec = autoscaling.parse_config(arguments, extra_annotations)
        super().__init__(**{item.name: getattr(spec, item.name) for item in fields(spec)})

    @classmethod
    def from_spec(cls, spec: AutoscalingSpec) -> AutoscalingConfig:
        """The settings of a compute, with the defaults that `.autoscale()` gave them."""
        config = cls.__new__(cls)
        AutoscalingSpec.__init__(
            config, **{item.name: getattr(spec, item.name) for item in fields(spec)}
        )
        return config

    def convert_to_annotations(self) -> dict[str, str]:
        """The annotations of Knative that say the same, on the template of a Knative Service."""
        return knative.render(self)


@dataclass(frozen=True)
class ScalingDecision:
    """A change of the number of pods of an autoscaled service.

    Attributes:
        time: Unix time in seconds.
        before: Number of pods until then.
        after: Number of pods since then.
        reason: Why, in words.
    """

    time: float
    before: int
    after: int
    reason: str


@dataclass(frozen=True, repr=False)
class ScalingStats:
    """The pods of a service and its load, when it was asked.

    Attributes:
        service: Name of the service.
        engine: What decides on the number of pods: `"kubetorch"`, `"knative"`, or `"fixed"`.
        pods_wanted: Number of pods that there should be.
        pods: Number of pods that there are, those that start or end included.
        pods_ready: Number of pods that take calls.
        calls_running: Calls and requests that run.
        calls_waiting: Calls and requests that wait, for a pod or for their turn in one.
        calls_per_second: Calls and requests that came per second, over the last seconds; `None`
            where nothing measures it.
        min_scale: Fewest pods, at this time of the day.
        max_scale: Most pods; `None` without a bound.
        reason: Why the number of pods is what it is.
        metrics: By name: the sum over the pods of what the service reports with `kt.metric`.
        decisions: The last changes of the number of pods, the oldest first.
        settings: The keywords that `handle.autoscale()` has changed since the deploy.
    """

    service: str
    engine: str
    pods_wanted: int
    pods: int
    pods_ready: int
    calls_running: int
    calls_waiting: int
    calls_per_second: float | None
    min_scale: int
    max_scale: int | None
    reason: str
    metrics: Mapping[str, float]
    decisions: tuple[ScalingDecision, ...]
    settings: Mapping[str, Any]

    @classmethod
    def of_service(cls, view: WorkloadView) -> ScalingStats:
        """The state that the controller describes."""
        pods = [pod for pod in view.pods if pod.ended is None]
        ready_count = sum(pod.is_ready for pod in pods)
        waiting = sum(pod.queue.waiting for pod in pods if pod.queue is not None)
        calls = sum(pod.calls for pod in pods)
        scaling = view.scaling
        if scaling is None or scaling.engine != "kubetorch":
            bounds = view.spec.compute.autoscaling
            pods_wanted = view.pods_wanted or view.spec.compute.pods
            is_fixed = scaling is None
            return cls(
                view.spec.name,
                "fixed" if is_fixed else "knative",
                pods_wanted if is_fixed else view.pods_wanted,
                len(pods),
                ready_count,
                max(calls - waiting, 0),
                waiting,
                None,
                pods_wanted if bounds is None or is_fixed else bounds.min_scale or 0,
                pods_wanted if bounds is None or is_fixed else bounds.max_scale or None,
                view.reason,
                {},
                (),
                {},
            )
        return cls(
            view.spec.name,
            scaling.engine,
            scaling.wanted,
            len(pods),
            ready_count,
            max(scaling.calls - scaling.waiting, 0),
            scaling.waiting,
            scaling.rate,
            scaling.minimum,
            scaling.maximum or None,
            "; ".join(filter(None, (view.reason, scaling.reason))),
            dict(scaling.metrics),
            tuple(
                ScalingDecision(item.time, item.before, item.after, item.reason)
                for item in scaling.decisions
            ),
            dict(scaling.settings),
        )

    def __repr__(self) -> str:
        bounds = f"{self.min_scale} to {self.max_scale or 'any number'} by {self.engine}"
        rate = "" if self.calls_per_second is None else f", {self.calls_per_second:.3g} per second"
        pods = "their number is fixed" if self.engine == "fixed" else bounds
        lines = [
            f"{self.service}: {self.pods_ready} of {self.pods_wanted} pods ready, {pods}",
            f"  calls: {self.calls_running} running, {self.calls_waiting} waiting{rate}",
        ]
        lines += [f"  {name}: {value:g}" for name, value in self.metrics.items()]
        if self.settings:
            changes = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
            lines.append(f"  changed since the deploy: {changes}")
        lines += [f"  reason: {self.reason}"] if self.reason else []
        lines += [f"  {item.before} → {item.after} pods: {item.reason}" for item in self.decisions]
        return "\n".join(lines)


def checked(view: WorkloadView, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `handle.autoscale()`, which a service may change while it runs.

    Raises:
        SpecError: The number of pods of the service is fixed.
        AutoScalingError: There is no such keyword, or a value is impossible.
    """
    name, declared = view.spec.name, view.spec.compute.autoscaling
    if declared is None:
        raise SpecError(
            f"{name} has a fixed number of pods",
            hint=".to(kt.Compute(...).autoscale(min_scale=1, max_scale=4)) lets the load decide",
        )
    if not settings:
        raise AutoScalingError(
            "autoscale() was given nothing to change",
            hint="for example handle.autoscale(max_scale=30); handle.stats() returns the state",
        )
    former = {} if view.scaling is None else view.scaling.settings
    autoscaling.changed(declared, autoscaling.merge_changes(former, settings))
    return dict(settings)
