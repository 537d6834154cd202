"""Where pods may run, and when: nodes, taints, priorities, queues."""

from __future__ import annotations

from kubetorch.manifests import gpus, kinds, labels, tolerations
from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.place import Place, assign, entry
from kubetorch.specs.compute import ComputeSpec, Pairs, Toleration

KAI_SCHEDULER = "kai-scheduler"

_NODES = "https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/"
_TAINTS = "https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/"
_PRIORITY = "https://kubernetes.io/docs/concepts/scheduling-eviction/pod-priority-preemption/"
_KUEUE = "https://kueue.sigs.k8s.io/docs/tasks/run/"
_KAI = "https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/queues"


def _read_node_selector(place: Place) -> Pairs | None:
    found = place.pod.get("nodeSelector") or {}
    return tuple(one for one in found.items() if one[0] != gpus.PRODUCT) or None


def _write_node_selector(place: Place, compute: ComputeSpec) -> None:
    kept = {gpus.PRODUCT}
    if compute.gpu_type is not None:
        kept.add(gpus.node_label(compute.gpu_type)[0])
    found = entry(place.pod, "nodeSelector")
    wanted = {name: text for name, text in found.items() if name in kept}
    assign(place.pod, "nodeSelector", wanted | dict(compute.node_selector))


def all_tolerations(compute: ComputeSpec) -> tuple[Toleration, ...]:
    """All that pods tolerate: what the user says, and what GPUs need."""
    of_gpus = tolerations.OF_GPUS if gpus.count(compute) else ()
    return (*compute.tolerations, *(one for one in of_gpus if one not in compute.tolerations))


def _read_tolerations(place: Place) -> tuple[Toleration, ...] | None:
    implied = tolerations.OF_GPUS if gpus.read_count(place) else ()
    return tuple(one for one in tolerations.read(place) if one not in implied) or None


def _write_tolerations(place: Place, compute: ComputeSpec) -> None:
    wanted = all_tolerations(compute)
    tolerations.remove(place, [one for one in tolerations.read(place) if one not in wanted])
    tolerations.add(place, wanted)


def _write_queue_name(place: Place, compute: ComputeSpec) -> None:
    for found in place.labels():
        assign(found, labels.KUEUE, compute.queue_name)
    if not place.is_primary:
        return
    kind, manifest = place.kind, place.manifest
    if kind.queued is not None:
        metadata = entry(kinds.get(manifest, kind.queued), "metadata")
        assign(entry(metadata, "labels"), labels.KUEUE, compute.queue_name)
    if kind.suspend is not None:
        kinds.put(manifest, kind.suspend, compute.queue_name is not None)


def _read_queue(place: Place) -> str | None:
    is_kai = place.pod.get("schedulerName") == KAI_SCHEDULER
    return place.own("labels").get(labels.KAI) if is_kai else None


def _write_queue(place: Place, compute: ComputeSpec) -> None:
    for found in place.labels():
        assign(found, labels.KAI, compute.queue)
    assign(place.pod, "schedulerName", KAI_SCHEDULER if compute.queue else None)


PARAMETERS = (
    Parameter(
        "node_selector", "P.nodeSelector", _read_node_selector, _write_node_selector, "", _NODES
    ),
    Parameter("tolerations", "P.tolerations", _read_tolerations, _write_tolerations, "", _TAINTS),
    Parameter(
        "priority_class_name",
        "P.priorityClassName",
        lambda place: place.pod.get("priorityClassName"),
        lambda place, compute: assign(place.pod, "priorityClassName", compute.priority_class_name),
        "",
        _PRIORITY,
    ),
    Parameter(
        "queue_name",
        "M.labels, PT.labels: kueue.x-k8s.io/queue-name",
        lambda place: place.own("labels").get(labels.KUEUE),
        _write_queue_name,
        "training jobs, JobSet and TrainJob begin suspended; the jobs of a CronJob are queued",
        _KUEUE,
    ),
    Parameter(
        "queue",
        "M.labels, PT.labels: kai.scheduler/queue; P.schedulerName",
        _read_queue,
        _write_queue,
        "the scheduler is `kai-scheduler`",
        _KAI,
    ),
)
