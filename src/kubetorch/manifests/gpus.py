"""GPUs: how many, of which type, with how much memory, and pods that stay away from them."""

from __future__ import annotations

from kubetorch.manifests import kinds, labels, resources, tolerations
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.place import Place, assign, entry, items
from kubetorch.specs.compute import ComputeSpec

RESOURCE = "nvidia.com/gpu"
#: Label of a node that says which GPUs it has, set by GPU feature discovery.
PRODUCT = "nvidia.com/gpu.product"
#: Labels of nodes with GPUs, as device plugins and clouds set them.
NODE_LABELS = (
    "nvidia.com/gpu",
    "eks.amazonaws.com/instance-gpu-count",
    "cloud.google.com/gke-accelerator",
)

_BOTH = ("requests", "limits")
_GPUS = "https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/"
_DISCOVERY = "https://github.com/NVIDIA/gpu-feature-discovery"
_SHARING = "https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/gpu-sharing"
_AFFINITY = "https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/"


def count(compute: ComputeSpec) -> str | None:
    """Number of GPUs; who wants memory of one needs one."""
    return compute.gpus or ("1" if compute.gpu_memory else None)


def read_count(place: Place) -> str | None:
    """Number of GPUs that the container has."""
    found = [resources.requested(place, RESOURCE, section=section) for section in _BOTH]
    return next((amount for amount in found if amount not in (None, "0")), None)


def _write_count(place: Place, compute: ComputeSpec) -> None:
    wanted = count(compute)
    resources.request(place, RESOURCE, wanted, sections=_BOTH)
    if wanted is None:
        kept = compute.tolerations
        tolerations.remove(place, [one for one in tolerations.OF_GPUS if one not in kept])


def tolerate(place: Place) -> None:
    """Add the tolerations that nodes with GPUs need, where the pod asks for GPUs."""
    if read_count(place) is not None:
        tolerations.add(place, tolerations.OF_GPUS)


# ----------------------------------------------------------------------------------------- memory


def _write_memory(place: Place, compute: ComputeSpec) -> None:
    _write_count(place, compute)
    if place.is_primary:
        is_everywhere = place.kind.is_autoscaled
        for annotations in place.annotations() if is_everywhere else [place.mine("annotations")]:
            assign(annotations, labels.GPU_MEMORY, compute.gpu_memory)


# ------------------------------------------------------------------------------------------- type


def node_label(gpu_type: str) -> tuple[str, str]:
    """Label of the nodes that have this type: `key: value`, or a value of `PRODUCT`."""
    key, colon, value = gpu_type.partition(":")
    return (key.strip(), value.strip()) if colon else (PRODUCT, gpu_type)


def _read_type(place: Place) -> str | None:
    found: str | None = (place.pod.get("nodeSelector") or {}).get(PRODUCT)
    return found


def _write_type(place: Place, compute: ComputeSpec) -> None:
    found = entry(place.pod, "nodeSelector")
    found.pop(PRODUCT, None)
    if compute.gpu_type is not None:
        found |= [node_label(compute.gpu_type)]
    assign(place.pod, "nodeSelector", found)


# ---------------------------------------------------------------------------------- anti-affinity


def _terms(place: Place) -> list[Manifest]:
    """The alternatives of which a node has to fulfil one."""
    path = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    found: list[Manifest] = kinds.get(place.pod, (*path, "nodeSelectorTerms"), [])
    return found


_ABSENT = tuple({"key": label, "operator": "DoesNotExist"} for label in NODE_LABELS)


def _read_anti_affinity(place: Place) -> bool | None:
    terms = [term.get("matchExpressions") or () for term in _terms(place)]
    return True if terms and all(one in term for term in terms for one in _ABSENT) else None


def _write_anti_affinity(place: Place, compute: ComputeSpec) -> None:
    wanted = compute.gpu_anti_affinity and count(compute) is None
    if wanted and not _terms(place):
        affinity = entry(entry(place.pod, "affinity"), "nodeAffinity")
        required = entry(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
        required["nodeSelectorTerms"] = [{}]
    # The terms are alternatives, so each of them has to say it.
    for term in _terms(place):
        others = [one for one in items(term, "matchExpressions") if one not in _ABSENT]
        added = [dict(one) for one in _ABSENT] if wanted else []
        assign(term, "matchExpressions", [*others, *added])
    if not any(_terms(place)):
        _drop_terms(place)


def _drop_terms(place: Place) -> None:
    """Remove the terms, and what is empty without them."""
    affinity = place.pod.get("affinity") or {}
    node = affinity.get("nodeAffinity") or {}
    node.pop("requiredDuringSchedulingIgnoredDuringExecution", None)
    assign(affinity, "nodeAffinity", node)
    assign(place.pod, "affinity", affinity)


PARAMETERS = (
    Parameter(
        "gpus",
        "C.resources.{requests,limits}.nvidia.com/gpu; P.tolerations",
        read_count,
        _write_count,
        "with the tolerations that nodes with GPUs usually demand",
        _GPUS,
    ),
    Parameter(
        "gpu_memory",
        "M.annotations.gpu-memory; C.resources.{requests,limits}.nvidia.com/gpu",
        lambda place: place.own("annotations").get(labels.GPU_MEMORY),
        _write_memory,
        "asks for one GPU unless `gpus` says otherwise; Knative: annotation of the pods too",
        _SHARING,
    ),
    Parameter(
        "gpu_type",
        "P.nodeSelector.nvidia.com/gpu.product",
        _read_type,
        _write_type,
        '`"key: value"` names another label of the nodes, and reads back as `node_selector`',
        _DISCOVERY,
    ),
    Parameter(
        "gpu_anti_affinity",
        "P.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
        _read_anti_affinity,
        _write_anti_affinity,
        "three labels that nodes with GPUs have must not exist; only where no GPU is asked for",
        _AFFINITY,
    ),
)
