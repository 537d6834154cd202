"""A compute as the expression that makes it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kubetorch.sdk.computing.field import ABSENT
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec, Toleration
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.frozen import thaw
from kubetorch.specs.logging import LoggingConfig

if TYPE_CHECKING:
    from kubetorch.sdk.computing.attachments import Attachments
    from kubetorch.sdk.secrets.secret import Secret

#: Fields of the spec that are dictionaries to the user.
_PAIRS = ("labels", "annotations", "env_vars", "node_selector", "selector")
#: Fields of the spec that no parameter sets, or that are shown otherwise.
_HIDDEN = ("autoscaling", "distribution", "image", "secrets", "pod_labels", "server_port")
_NAMES = {"logging": "logging_config"}


def compute(declared: Attachments, namespace: str | None) -> str:
    """The expression.

    Args:
        declared: The compute.
        namespace: Its namespace, if it was given.
    """
    spec = declared._spec
    given = {} if namespace is None else {"namespace": namespace}
    if spec.manifest is not None or spec.pod_labels or spec.server_port is not None:
        shown = _call("ComputeSpec", _changed(declared.to_spec()))
        return _call("Compute.from_spec", given, positional=shown)
    values = {
        _NAMES.get(name, name): _as_given(name, value)
        for name, value in _changed(spec).items()
        if name not in _HIDDEN
    }
    if declared.image is not None:
        values["image"] = declared.image
    if spec.secrets:
        declared_secrets = [_secret(one) for one in declared.secrets]
        values["secrets"] = declared_secrets or [one.object_name for one in spec.secrets]
    text = _call("Compute", values | given)
    if spec.autoscaling is not None:
        text += _call(".autoscale", _scaling(spec.autoscaling))
    if spec.distribution is not None:
        text += _call(".distribute", _distribution(spec.distribution))
    return text


def _changed(spec: ComputeSpec) -> dict[str, Any]:
    """The fields that are not as if nobody had said anything."""
    absent = {**ABSENT, "logging": LoggingConfig()}
    found = {item.name: getattr(spec, item.name) for item in fields(ComputeSpec)}
    return {name: value for name, value in found.items() if value != absent[name]}


def _as_given(name: str, value: Any) -> Any:  # noqa: ANN401  # fields differ
    if name in _PAIRS:
        return dict(value)
    if name == "tolerations":
        return [_toleration(one) for one in value]
    if name == "service_template":
        return thaw(value)
    return list(value) if isinstance(value, tuple) else value


def _secret(one: Secret) -> Secret | str:
    """A secret of which nothing but the name is known is given by that."""
    return one.name if one.to_ref().all_keys else one


def _toleration(one: Toleration) -> dict[str, Any]:
    from kubetorch.manifests import tolerations  # noqa: PLC0415  # to be looked at

    return tolerations.render(one)


def _scaling(spec: AutoscalingSpec) -> dict[str, Any]:
    found = {item.name: getattr(spec, item.name) for item in fields(spec)}
    extra = found.pop("extra_annotations")
    given = {name: value for name, value in found.items() if value is not None}
    return given | {name.replace("-", "_"): text for name, text in extra}


def _distribution(spec: DistributionSpec) -> dict[str, Any]:
    found = {item.name: getattr(spec, item.name) for item in fields(spec)}
    given = {name: value for name, value in found.items() if value is not None}
    return {**given, "options": None, **json.loads(spec.options)}


def _call(name: str, values: Mapping[str, Any], *, positional: str | None = None) -> str:
    given = {key: value for key, value in values.items() if value is not None}
    named = [f"{key}={value!r}" for key, value in given.items() if key.isidentifier()]
    others = {key: value for key, value in given.items() if not key.isidentifier()}
    parts = [*([positional] if positional else []), *named, *([f"**{others!r}"] if others else [])]
    return f"{name}({', '.join(parts)})"
