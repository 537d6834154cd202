"""`AutoscalingConfig`: what `compute.autoscaling_config` is, and programs for 0.5 import."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from kubetorch.manifests import knative
from kubetorch.specs import autoscaling
from kubetorch.specs.autoscaling import AutoscalingSpec


class AutoscalingConfig(AutoscalingSpec):
    """When pods are added and removed, without the defaults of `kt.Compute.autoscale`.

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
