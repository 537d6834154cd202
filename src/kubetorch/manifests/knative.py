"""Knative Service: pods that come and go with the load.

https://knative.dev/docs/serving/autoscaling/ defines the annotations; all of them stand on the
template, since each revision has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kubetorch.errors import AutoScalingError, KubetorchError
from kubetorch.manifests import scheduling
from kubetorch.manifests.kinds import KINDS, Manifest, assign
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs import autoscaling, quantity
from kubetorch.specs.autoscaling import KPA, KPA_METRICS, AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec, thaw

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
    "activation_scale": f"{_DOMAIN}activation-scale",
    "panic_window_percentage": f"{_DOMAIN}panic-window-percentage",
    "panic_threshold_percentage": f"{_DOMAIN}panic-threshold-percentage",
}
_NUMBERS = (
    *("target", "min_scale", "max_scale", "initial_scale", "target_utilization"),
    *("activation_scale", "panic_window_percentage", "panic_threshold_percentage"),
)
#: Decimals of a percentage of memory that distinguish any two numbers of MiB.
_DECIMALS = 9


def scaling(compute: ComputeSpec) -> AutoscalingSpec | None:
    """How a workload scales; `None` if its number of pods is fixed.

    A Knative Service of the user's scales in any case: as its annotations say, else as Knative
    does without any.
    """
    if compute.autoscaling is not None or compute.manifest is None:
        return compute.autoscaling
    workload = WorkloadManifest.parse(thaw(compute.manifest), compute.pod_template_path)
    if not workload.kind.is_autoscaled:
        return None
    return _read(workload.primary) or AutoscalingSpec(autoscaler_class=KPA)


def render(scaling: AutoscalingSpec, *, memory: str | None = None) -> dict[str, str]:
    """The complete set of annotations.

    Args:
        scaling: How the service scales.
        memory: The memory request of a pod. A `target` of memory is a percentage of it; Knative
            takes MiB. Without a request the number stays as it is.
    """
    values = {name: getattr(scaling, name) for name in ANNOTATIONS} | {
        "min_scale": scaling.fewest_pods
    }
    if scaling.metric == "memory" and memory is not None and scaling.target is not None:
        values["target"] = _mebibytes(scaling.target, memory)
    scaling_annotations = {
        ANNOTATIONS[name]: str(value) for name, value in values.items() if value is not None
    }
    return scaling_annotations | extra_annotations(scaling)


def _mebibytes(percentage: float, memory: str) -> int:
    return max(1, round(percentage / 100 * quantity.size_bytes(memory) / 2**20))


def _percentage(mebibytes: float, memory: str) -> float:
    """The shortest percentage of a memory request that Knative is given as so many MiB."""
    exact = 100 * mebibytes * 2**20 / quantity.size_bytes(memory)
    rounded = (round(exact, decimals) for decimals in range(_DECIMALS))
    percentages = (number for number in rounded if number > 0)
    shortest = next(
        filter(lambda number: _mebibytes(number, memory) == mebibytes, percentages), exact
    )
    return int(shortest) if shortest == int(shortest) else shortest


def min_pods(template: PodTemplate) -> int:
    """The fewest pods of an autoscaled service: `min_scale`, but at least 1."""
    return max(1, int(template.read_pods("annotations").get(ANNOTATIONS["min_scale"]) or 1))


def without_scaling(template: PodTemplate) -> Manifest:
    """The body of a pod template without what says when there are how many pods."""
    body = template.body
    metadata = body.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    unscaled = {name: text for name, text in annotations.items() if not _is_scaling(name)}
    spec = {name: value for name, value in body["spec"].items() if name != "containerConcurrency"}
    return {**body, "metadata": {**metadata, "annotations": unscaled}, "spec": spec}


def extra_annotations(scaling: AutoscalingSpec) -> dict[str, str]:
    """The annotations beyond the fields, which Knative alone knows."""
    return {f"{_DOMAIN}{name}": text for name, text in scaling.extra_annotations}


def check(compute: ComputeSpec) -> None:
    """Refuse what only the scaler of Kubetorch does, where Knative scales."""
    spec = scaling(compute)
    options = "" if spec is None else autoscaling.beyond_knative(spec)
    if options:
        raise AutoScalingError(
            f"Knative scales the services of this cluster, and it has no {options}",
            hint="leave it out, or deploy to a cluster without Knative",
        )


def forbids_no_pods(error: KubetorchError, compute: ComputeSpec) -> bool:
    """True if Knative refuses `initial_scale=0`, which its administrators allow."""
    spec = scaling(compute)
    is_without = spec is not None and spec.initial_scale == 0
    return is_without and ANNOTATIONS["initial_scale"] in error.message


def start_pod(service: Manifest) -> None:
    """Have a Knative Service begin with one pod, not with none."""
    template = service["spec"]["template"]["metadata"]
    template["annotations"][ANNOTATIONS["initial_scale"]] = "1"


def warnings(
    compute: ComputeSpec, *, has_knative: bool = False, starts_pod: bool = False
) -> Iterator[str]:
    """Sentences about settings that have another meaning for the scaler than for their writer."""
    spec = scaling(compute)
    if spec is None:
        return
    if starts_pod:
        yield (
            f"Knative forbids initial_scale={spec.initial_scale} in this cluster: the service "
            "starts with one pod (its administrators can set allow-zero-initial-scale)"
        )
    names = list(extra_annotations(spec))
    if names and not has_knative:
        is_single = len(names) == 1
        yield (
            f"the scaler of Kubetorch does not know the annotation{'' if is_single else 's'} "
            f"{', '.join(names)}; {'it stays' if is_single else 'they stay'} in the manifest"
        )
    requests = {"cpu": ("cpus", compute.cpus), "memory": ("memory", compute.memory)}
    parameter, request = requests.get(spec.metric or "", ("", ""))
    if request is None:
        is_in_mebibytes = has_knative and spec.metric == "memory" and spec.target is not None
        yield (
            f"the metric {spec.metric!r} is a percentage of what a pod requests, and these pods "
            f"request none: kt.Compute({parameter}=...) says how much"
            + (f"; Knative takes the target for {spec.target} MiB" if is_in_mebibytes else "")
        )


def _write(template: PodTemplate, compute: ComputeSpec) -> None:
    scaling = compute.autoscaling
    if scaling is None or not template.kind.is_autoscaled:
        return
    *_, pod_annotations = template.annotations()
    for name in [name for name in pod_annotations if _is_scaling(name)]:
        del pod_annotations[name]
    pod_annotations |= render(scaling, memory=compute.memory)
    assign(template.spec, "containerConcurrency", _pod_concurrency(compute))


def admit_batches(template: PodTemplate, callable: CallableRef) -> None:
    """Let the calls of a batch into a pod, whose agent gives them one slot together."""
    concurrency = template.spec.get("containerConcurrency")
    if template.kind.is_autoscaled and concurrency and callable.batched:
        template.spec["containerConcurrency"] = concurrency * callable.largest_batch


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
    spec = AutoscalingSpec(
        **values,  # type: ignore[arg-type]  # by the names above
        concurrency=concurrency,
        extra_annotations=tuple(
            sorted((name.removeprefix(_DOMAIN), text) for name, text in extra.items())
        ),
    )
    if spec.autoscaler_class is None and spec.metric in (None, *KPA_METRICS):
        spec = replace(spec, autoscaler_class=KPA)
    memory = scheduling.requested_resource(template, "memory")
    if spec.metric == "memory" and spec.target is not None and memory is not None:
        spec = replace(spec, target=_percentage(spec.target, memory))
    return autoscaling.check(spec)


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
