"""The place and time of pods: CPUs, memory, GPUs, nodes, taints, priorities, queues."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kubetorch.manifests import kinds, labels
from kubetorch.manifests.kinds import Manifest, assign, entry
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs import quantity
from kubetorch.specs.compute import ComputeSpec, Pairs, Toleration

#: What nodes with GPUs usually demand.
GPU_TOLERATIONS = (
    Toleration("nvidia.com/gpu", "Exists", effect="NoSchedule"),
    Toleration("dedicated", "Equal", "gpu", "NoSchedule"),
)


def parse_toleration(found: Mapping[str, Any]) -> Toleration:
    """One entry of `tolerations`; text that is empty is the same as none."""
    return Toleration(
        key=found.get("key") or None,
        operator=found.get("operator") or None,
        value=found.get("value") or None,
        effect=found.get("effect") or None,
        seconds=found.get("tolerationSeconds"),
    )


def render_toleration(wanted: Toleration) -> Manifest:
    found = {
        "key": wanted.key,
        "operator": wanted.operator,
        "value": wanted.value,
        "effect": wanted.effect,
        "tolerationSeconds": wanted.seconds,
    }
    return {name: value for name, value in found.items() if value is not None}


def read_tolerations(template: PodTemplate) -> list[Toleration]:
    return [parse_toleration(one) for one in template.spec.get("tolerations") or ()]


def add_tolerations(template: PodTemplate, wanted: Collection[Toleration]) -> None:
    there = read_tolerations(template)
    found = [render_toleration(one) for one in wanted if one not in there]
    if found:
        assign(template.spec, "tolerations", [*(template.spec.get("tolerations") or ()), *found])


def remove_tolerations(template: PodTemplate, unwanted: Collection[Toleration]) -> None:
    found = template.spec.get("tolerations") or []
    assign(
        template.spec,
        "tolerations",
        [one for one in found if parse_toleration(one) not in unwanted],
    )


_RESOURCES = "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"


def requested_resource(
    template: PodTemplate, resource: str, *, section: str = "requests"
) -> str | None:
    found = ((template.container.get("resources") or {}).get(section) or {}).get(resource)
    return None if found is None else str(found)


def request_resource(
    template: PodTemplate,
    resource: str,
    amount: str | None,
    *,
    sections: tuple[str, ...] = ("requests",),
) -> None:
    """Ask for an amount of a resource; `None` asks for nothing."""
    found = entry(template.container, "resources")
    for section in sections:
        amounts = entry(found, section)
        assign(amounts, resource, amount)
        assign(found, section, amounts)


def _resource_parameter(name: str, resource: str) -> ManifestParameter:
    def write(template: PodTemplate, compute: ComputeSpec) -> None:
        request_resource(template, resource, getattr(compute, name))

    def read(template: PodTemplate) -> str | None:
        return requested_resource(template, resource)

    return ManifestParameter(name, f"C.resources.requests.{resource}", read, write, _RESOURCES)


GPU_RESOURCE = "nvidia.com/gpu"
#: Label of a node that says which GPUs it has, set by GPU feature discovery.
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
#: Labels of nodes with GPUs, as device plugins and clouds set them.
GPU_NODE_LABELS = (
    "nvidia.com/gpu",
    "eks.amazonaws.com/instance-gpu-count",
    "cloud.google.com/gke-accelerator",
)

_BOTH = ("requests", "limits")
_GPUS = "https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/"
_DISCOVERY = "https://github.com/NVIDIA/gpu-feature-discovery"
_SHARING = "https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/gpu-sharing"
_AFFINITY = "https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/"


def gpu_count(compute: ComputeSpec) -> str | None:
    return compute.gpus or ("1" if compute.gpu_memory or compute.gpu_type else None)


def read_gpu_count(template: PodTemplate) -> str | None:
    """Number of GPUs that the container has, or has a part of."""
    found = [requested_resource(template, GPU_RESOURCE, section=section) for section in _BOTH]
    annotations = template.read_pods("annotations")
    if template.spec.get("schedulerName") == KAI_SCHEDULER and labels.GPU_MEMORY in annotations:
        found.append(annotations.get(labels.GPU_DEVICES, "1"))
    return next((amount for amount in found if amount not in (None, "0")), None)


def _write_gpu_count(template: PodTemplate, compute: ComputeSpec) -> None:
    wanted = gpu_count(compute)
    amount = None if _is_shared(compute) else wanted
    request_resource(template, GPU_RESOURCE, amount, sections=_BOTH)
    if wanted is None:
        kept = compute.tolerations
        remove_tolerations(template, [one for one in GPU_TOLERATIONS if one not in kept])


def tolerate_gpus(template: PodTemplate) -> None:
    """Add the tolerations that nodes with GPUs need, where the pod asks for GPUs."""
    if read_gpu_count(template) is not None:
        add_tolerations(template, GPU_TOLERATIONS)


# ----------------------------------------------------------------------------------------- memory


def _is_shared(compute: ComputeSpec) -> bool:
    """True if pods get a part of a GPU, which only the KAI scheduler gives."""
    return compute.gpu_memory is not None and compute.queue is not None


def _write_memory(template: PodTemplate, compute: ComputeSpec) -> None:
    _write_gpu_count(template, compute)
    of_object, of_pods = template.annotations_of_object(), template.annotations()[-1]
    if template.is_primary:
        assign(of_object, labels.GPU_MEMORY, compute.gpu_memory)
    shared = compute.gpu_memory if _is_shared(compute) else None
    if shared is not None:
        # KAI counts in MiB.
        assign(of_pods, labels.GPU_MEMORY, str(math.ceil(quantity.size_bytes(shared) / 2**20)))
    elif of_pods is not of_object:
        is_said = template.is_primary and template.kind.is_autoscaled
        assign(of_pods, labels.GPU_MEMORY, compute.gpu_memory if is_said else None)
    several = shared is not None and compute.gpus not in (None, "1")
    assign(of_pods, labels.GPU_DEVICES, compute.gpus if several else None)


# ------------------------------------------------------------------------------------------- type

#: A type of GPU, and what it is called by GPU feature discovery, by GKE and by CoreWeave.
_GPU_TYPES = {
    "A10": ("NVIDIA-A10", "", ""),
    "A10G": ("NVIDIA-A10G", "", ""),
    "A30": ("NVIDIA-A30", "", ""),
    "A40": ("NVIDIA-A40", "", "A40"),
    "A100": (
        "NVIDIA-A100-SXM4-40GB NVIDIA-A100-SXM4-80GB NVIDIA-A100-PCIE-40GB NVIDIA-A100-80GB-PCIe "
        "A100-SXM4-40GB A100-SXM-80GB A100-PCIE-40GB",
        "nvidia-tesla-a100 nvidia-a100-80gb",
        "A100 A100_NVLINK A100_NVLINK_80GB A100_PCIE_40GB A100_PCIE_80GB",
    ),
    "A100-80GB": (
        "NVIDIA-A100-SXM4-80GB NVIDIA-A100-80GB-PCIe A100-SXM-80GB",
        "nvidia-a100-80gb",
        "A100_NVLINK_80GB A100_PCIE_80GB",
    ),
    "B200": ("NVIDIA-B200", "nvidia-b200", "B200"),
    "B300": ("NVIDIA-B300", "", "B300"),
    "GB200": ("NVIDIA-GB200", "nvidia-gb200", "GB200"),
    "GB300": ("NVIDIA-GB300", "nvidia-gb300", "GB300"),
    "GH200": ("NVIDIA-GH200-480GB", "", "GH200"),
    "H100": (
        "NVIDIA-H100-80GB-HBM3 NVIDIA-H100-PCIe NVIDIA-H100-NVL",
        "nvidia-h100-80gb nvidia-h100-mega-80gb",
        "H100 H100_NVLINK_80GB H100_PCIE_80GB",
    ),
    "H200": ("NVIDIA-H200 NVIDIA-H200-NVL", "nvidia-h200-141gb", "H200"),
    "L4": ("NVIDIA-L4", "nvidia-l4", "L4"),
    "L40": ("NVIDIA-L40", "", "L40"),
    "L40S": ("NVIDIA-L40S", "", "L40S"),
    "P4": ("Tesla-P4", "nvidia-tesla-p4", ""),
    "P100": ("Tesla-P100-PCIE-16GB Tesla-P100-SXM2-16GB", "nvidia-tesla-p100", ""),
    "T4": ("Tesla-T4", "nvidia-tesla-t4", ""),
    "V100": (
        "Tesla-V100-SXM2-16GB Tesla-V100-SXM2-32GB Tesla-V100-PCIE-16GB Tesla-V100-PCIE-32GB",
        "nvidia-tesla-v100",
        "Tesla_V100 Tesla_V100_NVLINK",
    ),
}
_MAKERS = ("NVIDIA", "NVIDIA-GeForce", "NVIDIA-RTX", "Tesla")
_GKE = "cloud.google.com/gke-accelerator"
_AWS = ("karpenter.k8s.aws/instance-gpu-name", "eks.amazonaws.com/instance-gpu-name")
_COREWEAVE = ("gpu.nvidia.com/class", "gpu.nvidia.com/model")


def gpu_node_label(gpu_type: str) -> tuple[str, str] | None:
    """The label of nodes that `key: value` names; `None` of a mere type."""
    key, colon, value = gpu_type.partition(":")
    return (key.strip(), value.strip()) if colon else None


def gpu_products(gpu_type: str) -> list[str]:
    """The values of `GPU_PRODUCT_LABEL` that stand for a type, itself first."""
    known, _, _ = _GPU_TYPES.get(gpu_type.upper(), ("", "", ""))
    guessed = [] if known or _says_maker(gpu_type) else [f"{one}-{gpu_type}" for one in _MAKERS]
    named = dict.fromkeys([gpu_type, *known.split(), *guessed])
    # So the nodes are labelled whose GPUs the device plugin shares.
    return [*named, *(f"{name}-SHARED" for name in named)]


def _says_maker(gpu_type: str) -> bool:
    """True for a type that begins with its maker, which is the value of one label."""
    return gpu_type.lower().startswith(("nvidia-", "tesla-"))


def _type_expressions(gpu_type: str) -> list[Manifest]:
    """The requirements of which a node of this type fulfils one: labels of drivers and clouds."""
    small = gpu_type.lower()
    _, gke, coreweave = _GPU_TYPES.get(gpu_type.upper(), ("", f"nvidia-{small}", gpu_type))
    values = {GPU_PRODUCT_LABEL: gpu_products(gpu_type)}
    if _says_maker(gpu_type):
        values[_GKE] = [gpu_type]
    else:
        values[_GKE] = gke.split()
        values |= {label: [small] for label in _AWS}
        values |= {label: coreweave.split() for label in _COREWEAVE}
    return [
        {"key": label, "operator": "In", "values": found}
        for label, found in values.items()
        if found
    ]


def _read_type(template: PodTemplate) -> str | None:
    found: str | None = (template.spec.get("nodeSelector") or {}).get(GPU_PRODUCT_LABEL)
    return found or _type_of_terms(template)


def _type_of_terms(template: PodTemplate) -> str | None:
    there = [one for term in _terms(template) for one in term.get("matchExpressions") or ()]
    for one in there:
        if one.get("key") == GPU_PRODUCT_LABEL and one.get("values"):
            gpu_type = str(one["values"][0])
            if all(ours in there for ours in _type_expressions(gpu_type)):
                return gpu_type
    return None


def _write_type(template: PodTemplate, compute: ComputeSpec) -> None:
    _write_gpu_count(template, compute)
    wanted, before = compute.gpu_type, _type_of_terms(template)
    label = None if wanted is None else gpu_node_label(wanted)
    if wanted is not None and not template.kind.has_template:
        # A TrainJob has no word for affinity.
        label = label or (GPU_PRODUCT_LABEL, wanted)
    found = entry(template.spec, "nodeSelector")
    found.pop(GPU_PRODUCT_LABEL, None)
    if label is not None:
        found |= [label]
    assign(template.spec, "nodeSelector", found)
    if before is not None:
        _put_terms(template, _without(_terms(template), _type_expressions(before)))
    if wanted is not None and label is None:
        terms = _terms(template) or [{}]
        types = _type_expressions(wanted)
        _put_terms(template, [_with(term, one) for term in terms for one in types])


# ---------------------------------------------------------------------------------------- affinity


def _put_terms(template: PodTemplate, terms: list[Manifest]) -> None:
    """Set the alternatives of which a node has to fulfil one; without any, it may be any node."""
    affinity = entry(template.spec, "affinity")
    of_nodes = entry(affinity, "nodeAffinity")
    required = {"nodeSelectorTerms": terms} if any(terms) else None
    assign(of_nodes, "requiredDuringSchedulingIgnoredDuringExecution", required)
    assign(affinity, "nodeAffinity", of_nodes)
    assign(template.spec, "affinity", affinity)


def _with(term: Manifest, *expressions: Manifest) -> Manifest:
    return {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *expressions]}


def _without(terms: Iterable[Manifest], unwanted: Collection[Manifest]) -> list[Manifest]:
    """Alternatives without these expressions; those that are the same then are one."""
    found: list[Manifest] = []
    for term in terms:
        rest = dict(term)
        kept = [one for one in rest.get("matchExpressions") or () if one not in unwanted]
        assign(rest, "matchExpressions", kept)
        if rest not in found:
            found.append(rest)
    return found


def _terms(template: PodTemplate) -> list[Manifest]:
    """The alternatives of which a node has to fulfil one."""
    path = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    found: list[Manifest] = kinds.get(template.spec, (*path, "nodeSelectorTerms"), [])
    return found


_ABSENT = tuple({"key": label, "operator": "DoesNotExist"} for label in GPU_NODE_LABELS)


def _read_anti_affinity(template: PodTemplate) -> bool | None:
    terms = [term.get("matchExpressions") or () for term in _terms(template)]
    return True if terms and all(one in term for term in terms for one in _ABSENT) else None


def _write_anti_affinity(template: PodTemplate, compute: ComputeSpec) -> None:
    terms = _without(_terms(template), _ABSENT)
    if compute.gpu_anti_affinity and gpu_count(compute) is None:
        # The terms are alternatives, so each of them has to say it.
        terms = [_with(term, *map(dict, _ABSENT)) for term in terms or [{}]]
    _put_terms(template, terms)


KAI_SCHEDULER = "kai-scheduler"

_NODES = "https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/"
_TAINTS = "https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/"
_PRIORITY = "https://kubernetes.io/docs/concepts/scheduling-eviction/pod-priority-preemption/"
_KUEUE = "https://kueue.sigs.k8s.io/docs/tasks/run/"
_KAI = "https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/queues"


def _read_node_selector(template: PodTemplate) -> Pairs | None:
    found = template.spec.get("nodeSelector") or {}
    return tuple(one for one in found.items() if one[0] != GPU_PRODUCT_LABEL) or None


def _write_node_selector(template: PodTemplate, compute: ComputeSpec) -> None:
    label = None if compute.gpu_type is None else gpu_node_label(compute.gpu_type)
    kept = {GPU_PRODUCT_LABEL, *(label or ())[:1]}
    found = entry(template.spec, "nodeSelector")
    wanted = {name: text for name, text in found.items() if name in kept}
    assign(template.spec, "nodeSelector", wanted | dict(compute.node_selector))


def all_tolerations(compute: ComputeSpec) -> tuple[Toleration, ...]:
    """All that pods tolerate: what the user says, and what GPUs need."""
    of_gpus = GPU_TOLERATIONS if gpu_count(compute) else ()
    return (*compute.tolerations, *(one for one in of_gpus if one not in compute.tolerations))


def _read_tolerations(template: PodTemplate) -> tuple[Toleration, ...] | None:
    implied = GPU_TOLERATIONS if read_gpu_count(template) else ()
    return tuple(one for one in read_tolerations(template) if one not in implied) or None


def _write_tolerations(template: PodTemplate, compute: ComputeSpec) -> None:
    wanted = all_tolerations(compute)
    remove_tolerations(template, [one for one in read_tolerations(template) if one not in wanted])
    add_tolerations(template, wanted)


def _write_queue_name(template: PodTemplate, compute: ComputeSpec) -> None:
    for found in template.labels():
        assign(found, labels.KUEUE, compute.queue_name)
    if not template.is_primary:
        return
    kind, manifest = template.kind, template.workload.object
    if kind.queued is not None:
        metadata = entry(kinds.get(manifest, kind.queued), "metadata")
        assign(entry(metadata, "labels"), labels.KUEUE, compute.queue_name)
    if kind.suspend is not None:
        kinds.put(manifest, kind.suspend, compute.queue_name is not None)


def queue_as_group(workload: WorkloadManifest, compute: ComputeSpec) -> None:
    """Have Kueue admit all pods of a distributed workload or none, where it would admit each alone.

    The queue stands on the pods alone then, since Kueue makes no groups of what says it above them.
    `agent.equip` names the group.
    """
    if compute.distribution is None or not workload.kind.is_queued_by_pods:
        return
    of_object, of_pods = workload.primary.labels()
    queue = of_object.pop(labels.KUEUE, None) or of_pods.get(labels.KUEUE)
    if queue is not None:
        of_pods[labels.KUEUE] = queue
        workload.primary.annotations()[-1][labels.KUEUE_GROUP_COUNT] = str(compute.pods)


def queue_labels(manifest: Manifest) -> dict[str, str]:
    """The labels of an object, with those of pods that are queued as a group."""
    pods = kinds.get(manifest, ("spec", "template", "metadata")) or {}
    is_group = labels.KUEUE_GROUP_COUNT in (pods.get("annotations") or {})
    of_pods = (pods.get("labels") or {}) if is_group else {}
    return {**of_pods, **(manifest["metadata"].get("labels") or {})}


def name_group(template: PodTemplate, name: str, digest: str) -> None:
    """Name the group of pods that Kueue admits together: another one for another template.

    A group keeps its number of pods and what they ask for as long as one of them is there.
    """
    if labels.KUEUE_GROUP_COUNT in template.read_pods("annotations"):
        template.labels()[-1][labels.KUEUE_GROUP] = f"{name[: 62 - len(digest)]}-{digest}"


def _read_queue_name(template: PodTemplate) -> str | None:
    of_pods = template.read_pods("labels") if template.kind.is_queued_by_pods else {}
    return template.read_object("labels").get(labels.KUEUE) or of_pods.get(labels.KUEUE)


def _read_queue(template: PodTemplate) -> str | None:
    is_kai = template.spec.get("schedulerName") == KAI_SCHEDULER
    return template.read_object("labels").get(labels.KAI) if is_kai else None


def _write_queue(template: PodTemplate, compute: ComputeSpec) -> None:
    for found in template.labels():
        assign(found, labels.KAI, compute.queue)
    assign(template.spec, "schedulerName", KAI_SCHEDULER if compute.queue else None)
    if compute.gpu_memory is not None:
        _write_memory(template, compute)


#: In the order in which they are written.
PARAMETERS = (
    _resource_parameter("cpus", "cpu"),
    _resource_parameter("memory", "memory"),
    _resource_parameter("disk_size", "ephemeral-storage"),
    ManifestParameter(
        "gpus",
        "C.resources.{requests,limits}.nvidia.com/gpu; P.tolerations",
        read_gpu_count,
        _write_gpu_count,
        _GPUS,
    ),
    ManifestParameter(
        "gpu_memory",
        "M.annotations.gpu-memory; C.resources.{requests,limits}.nvidia.com/gpu, or with `queue` "
        "PT.annotations.gpu-memory in MiB",
        lambda template: template.read_object("annotations").get(labels.GPU_MEMORY),
        _write_memory,
        _SHARING,
    ),
    ManifestParameter(
        "gpu_type",
        "P.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution; `key: value`: "
        "P.nodeSelector",
        _read_type,
        _write_type,
        _DISCOVERY,
    ),
    ManifestParameter(
        "gpu_anti_affinity",
        "P.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
        _read_anti_affinity,
        _write_anti_affinity,
        _AFFINITY,
    ),
    ManifestParameter(
        "node_selector", "P.nodeSelector", _read_node_selector, _write_node_selector, _NODES
    ),
    ManifestParameter(
        "tolerations", "P.tolerations", _read_tolerations, _write_tolerations, _TAINTS
    ),
    ManifestParameter(
        "priority_class_name",
        "P.priorityClassName",
        lambda template: template.spec.get("priorityClassName"),
        lambda template, compute: assign(
            template.spec, "priorityClassName", compute.priority_class_name
        ),
        _PRIORITY,
    ),
    ManifestParameter(
        "queue_name",
        "M.labels, PT.labels: kueue.x-k8s.io/queue-name",
        _read_queue_name,
        _write_queue_name,
        _KUEUE,
    ),
    ManifestParameter(
        "queue",
        "M.labels, PT.labels: kai.scheduler/queue; P.schedulerName",
        _read_queue,
        _write_queue,
        _KAI,
    ),
)
