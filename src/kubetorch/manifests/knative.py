"""Knative Service: pods that come and go with the load.

https://knative.dev/docs/serving/autoscaling/ defines the annotations; all of them stand on the
template, since each revision has its own.
"""

from __future__ import annotations

from kubetorch.manifests.kinds import KINDS, Manifest, assign
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs.autoscaling import KPA, AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec

KIND = KINDS["Service", "serving.knative.dev"]
TEMPLATE_LABEL = "ksvc"

_DOMAIN = "autoscaling.knative.dev/"
_PROGRESS_DEADLINE = "serving.knative.dev/progress-deadline"
_SCALING = "https://knative.dev/docs/serving/autoscaling/"

#: Annotations by field of `AutoscalingSpec`.
ANNOTATIONS = {
    "autoscaler_class": f"{_DOMAIN}class",
    "target": f"{_DOMAIN}target",
    "min_scale": f"{_DOMAIN}min-scale",
    "max_scale": f"{_DOMAIN}max-scale",
    "initial_scale": f"{_DOMAIN}initial-scale",
    "window": f"{_DOMAIN}window",
    "metric": f"{_DOMAIN}metric",
    "target_utilization": f"{_DOMAIN}target-utilization-percentage",
    "scale_to_zero_pod_retention_period": f"{_DOMAIN}scale-to-zero-pod-retention-period",
    "scale_down_delay": f"{_DOMAIN}scale-down-delay",
    "progress_deadline": _PROGRESS_DEADLINE,
}
_NUMBERS = ("target", "min_scale", "max_scale", "initial_scale", "target_utilization")
#: Pods that are kept when nobody says: scaling to zero is asked for.
_LEAST = 1


def render(scaling: AutoscalingSpec) -> dict[str, str]:
    """The complete set of annotations."""
    least = _LEAST if scaling.min_scale is None else scaling.min_scale
    values = {name: getattr(scaling, name) for name in ANNOTATIONS} | {"min_scale": least}
    found = {ANNOTATIONS[name]: str(value) for name, value in values.items() if value is not None}
    return found | {f"{_DOMAIN}{name}": text for name, text in scaling.extra_annotations}


def least(template: PodTemplate) -> int:
    """The fewest pods of an autoscaled service, but one."""
    return max(1, int(template.read_pods("annotations").get(ANNOTATIONS["min_scale"]) or 1))


def unscaled(manifest: Manifest) -> str:
    """The sentence about a Knative Service that runs without Knative."""
    count = least(WorkloadManifest(manifest, KIND).primary)
    pods = "1 pod" if count == 1 else f"{count} pods"
    return f"there is no Knative here, so it does not scale: it runs on {pods} (min_scale)"


def _write(template: PodTemplate, compute: ComputeSpec) -> None:
    scaling = compute.autoscaling
    if scaling is None or not template.kind.is_autoscaled:
        return
    *_, of_pods = template.annotations()
    for name in [name for name in of_pods if _is_scaling(name)]:
        del of_pods[name]
    of_pods |= render(scaling)
    assign(template.spec, "containerConcurrency", _pod_concurrency(compute))


def _pod_concurrency(compute: ComputeSpec) -> int | None:
    """Calls that a pod runs at once; its agent alone bounds them where only it has the number."""
    if compute.concurrency is None:
        return None if compute.autoscaling is None else compute.autoscaling.concurrency
    return None if compute.processes is None else compute.concurrency * compute.processes


def _is_scaling(name: str) -> bool:
    return name.startswith(_DOMAIN) or name == _PROGRESS_DEADLINE


def _read(template: PodTemplate) -> AutoscalingSpec | None:
    if not template.kind.is_autoscaled:
        return None
    found = {name: str(text) for name, text in template.read_pods("annotations").items()}
    values: dict[str, object] = {
        field: _number(found[name]) if field in _NUMBERS else found[name]
        for field, name in ANNOTATIONS.items()
        if name in found
    }
    known = ANNOTATIONS.values()
    extra = {name: text for name, text in found.items() if _is_scaling(name) and name not in known}
    concurrency = template.spec.get("containerConcurrency")
    if not values and not extra and concurrency is None:
        return None
    return AutoscalingSpec(
        **{"autoscaler_class": KPA, **values},  # type: ignore[arg-type]  # by the names above
        concurrency=concurrency,
        extra_annotations=tuple(
            sorted((name.removeprefix(_DOMAIN), text) for name, text in extra.items())
        ),
    )


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


PARAMETERS = (
    ManifestParameter(
        "autoscaling",
        "PT.annotations: autoscaling.knative.dev/*, serving.knative.dev/progress-deadline; "
        "P.containerConcurrency",
        _read,
        _write,
        _SCALING,
    ),
)
