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
#: Pods that run without load where the user sets no `min_scale`.
_DEFAULT_MIN_SCALE = 1


def render(scaling: AutoscalingSpec) -> dict[str, str]:
    """The complete set of annotations."""
    min_scale = _DEFAULT_MIN_SCALE if scaling.min_scale is None else scaling.min_scale
    values = {name: getattr(scaling, name) for name in ANNOTATIONS} | {"min_scale": min_scale}
    scaling_annotations = {
        ANNOTATIONS[name]: str(value) for name, value in values.items() if value is not None
    }
    return scaling_annotations | {
        f"{_DOMAIN}{name}": text for name, text in scaling.extra_annotations
    }


def min_pods(template: PodTemplate) -> int:
    """The fewest pods of an autoscaled service: `min_scale`, but at least 1."""
    return max(1, int(template.read_pods("annotations").get(ANNOTATIONS["min_scale"]) or 1))


def unscaled_note(manifest: Manifest) -> str:
    """The sentence about a Knative Service that runs without Knative."""
    return f"there is no Knative here, so it does not scale: it runs on {min_pods_text(manifest)}"


def min_pods_text(manifest: Manifest) -> str:
    """The number of pods of a Knative Service where nothing scales it, in words."""
    count = min_pods(WorkloadManifest(manifest, KIND).primary)
    pods = "1 pod" if count == 1 else f"{count} pods"
    return f"{pods} (min_scale)"


def _write(template: PodTemplate, compute: ComputeSpec) -> None:
    scaling = compute.autoscaling
    if scaling is None or not template.kind.is_autoscaled:
        return
    *_, pod_annotations = template.annotations()
    for name in [name for name in pod_annotations if _is_scaling(name)]:
        del pod_annotations[name]
    pod_annotations |= render(scaling)
    assign(template.spec, "containerConcurrency", _pod_concurrency(compute))


def _pod_concurrency(compute: ComputeSpec) -> int | None:
    """Calls that Knative gives a pod at once; `None` where only the agent knows the bound."""
    if compute.concurrency is None:
        return None if compute.autoscaling is None else compute.autoscaling.concurrency
    return None if compute.processes is None else compute.concurrency * compute.processes


def _is_scaling(name: str) -> bool:
    return name.startswith(_DOMAIN) or name == _PROGRESS_DEADLINE


def _read(template: PodTemplate) -> AutoscalingSpec | None:
    if not template.kind.is_autoscaled:
        return None
    pod_annotations = {name: str(text) for name, text in template.read_pods("annotations").items()}
    values: dict[str, object] = {
        field: _number(pod_annotations[name]) if field in _NUMBERS else pod_annotations[name]
        for field, name in ANNOTATIONS.items()
        if name in pod_annotations
    }
    known_annotations = ANNOTATIONS.values()
    extra = {
        name: text
        for name, text in pod_annotations.items()
        if _is_scaling(name) and name not in known_annotations
    }
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
