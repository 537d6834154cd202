"""The place and time of pods: CPUs, memory, GPUs, nodes, taints, priorities, queues."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kubetorch.manifests import kinds, labels
from kubetorch.manifests.kinds import Manifest, assign, dictionary_at
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs import quantity
from kubetorch.specs.compute import TOLERATION_WORDS, ComputeSpec, Pairs, Toleration

#: Tolerations that nodes with GPUs usually demand.
GPU_TOLERATIONS = (
    Toleration("nvidia.com/gpu", "Exists", effect="NoSchedule"),
    Toleration("dedicated", "Equal", "gpu", "NoSchedule"),
)


def parse_toleration(manifest: Mapping[str, Any]) -> Toleration:
    """One entry of `tolerations`; empty text is the same as no text."""
    values = {field: manifest.get(word) for word, field in TOLERATION_WORDS.items()}
    return Toleration(**{field: None if text == "" else text for field, text in values.items()})


def render_toleration(toleration: Toleration) -> Manifest:
    values = {word: getattr(toleration, field) for word, field in TOLERATION_WORDS.items()}
    return {word: value for word, value in values.items() if value is not None}


def read_tolerations(template: PodTemplate) -> list[Toleration]:
    return [parse_toleration(toleration) for toleration in template.spec.get("tolerations") or ()]


def add_tolerations(template: PodTemplate, tolerations: Collection[Toleration]) -> None:
    present_tolerations = read_tolerations(template)
    missing_tolerations = [
        render_toleration(toleration)
        for toleration in tolerations
        if toleration not in present_tolerations
    ]
    if missing_tolerations:
        assign(
            template.spec,
            "tolerations",
            [*(template.spec.get("tolerations") or ()), *missing_tolerations],
        )


def remove_tolerations(template: PodTemplate, unwanted: Collection[Toleration]) -> None:
    manifests = template.spec.get("tolerations") or []
    assign(
        template.spec,
        "tolerations",
        [manifest for manifest in manifests if parse_toleration(manifest) not in unwanted],
    )


_RESOURCES = "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"


def requested_resource(
    template: PodTemplate, resource: str, *, section: str = "requests"
) -> str | None:
    amount = ((template.container.get("resources") or {}).get(section) or {}).get(resource)
    return None if amount is None else str(amount)


def request_resource(
    template: PodTemplate,
    resource: str,
    amount: str | None,
    *,
    sections: tuple[str, ...] = ("requests",),
) -> None:
    """Ask for an amount of a resource; `None` asks for nothing."""
    resources = dictionary_at(template.container, "resources")
    for section in sections:
        amounts = dictionary_at(resources, section)
        assign(amounts, resource, amount)
        assign(resources, section, amounts)


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

_SECTIONS = ("requests", "limits")
_GPUS = "https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/"
_DISCOVERY = "https://github.com/NVIDIA/gpu-feature-discovery"
_SHARING = "https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/gpu-sharing"
_AFFINITY = "https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/"


def gpu_count(compute: ComputeSpec) -> str | None:
    return compute.gpus or ("1" if compute.gpu_memory or compute.gpu_type else None)


def read_gpu_count(template: PodTemplate) -> str | None:
    """Number of GPUs that the container has, whole or shared."""
    amounts = [requested_resource(template, GPU_RESOURCE, section=section) for section in _SECTIONS]
    annotations = template.read_pods("annotations")
    if template.spec.get("schedulerName") == KAI_SCHEDULER and labels.GPU_MEMORY in annotations:
        amounts.append(annotations.get(labels.GPU_DEVICES, "1"))
    return next((amount for amount in amounts if amount not in (None, "0")), None)


def _write_gpu_count(template: PodTemplate, compute: ComputeSpec) -> None:
    gpus = gpu_count(compute)
    amount = None if _is_shared(compute) else gpus
    request_resource(template, GPU_RESOURCE, amount, sections=_SECTIONS)
    if gpus is None:
        user_tolerations = compute.tolerations
        remove_tolerations(
            template,
            [toleration for toleration in GPU_TOLERATIONS if toleration not in user_tolerations],
        )


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
    object_annotations, pod_annotations = (
        template.annotations_of_object(),
        template.annotations()[-1],
    )
    if template.is_primary:
        assign(object_annotations, labels.GPU_MEMORY, compute.gpu_memory)
    shared = compute.gpu_memory if _is_shared(compute) else None
    if shared is not None:
        # KAI counts in MiB.
        assign(
            pod_annotations, labels.GPU_MEMORY, str(math.ceil(quantity.size_bytes(shared) / 2**20))
        )
    elif pod_annotations is not object_annotations:
        is_said = template.is_primary and template.kind.is_autoscaled
        assign(pod_annotations, labels.GPU_MEMORY, compute.gpu_memory if is_said else None)
    several = shared is not None and compute.gpus not in (None, "1")
    assign(pod_annotations, labels.GPU_DEVICES, compute.gpus if several else None)


# ------------------------------------------------------------------------------------------- type

#: By type of GPU: its names for GPU feature discovery, for GKE and for CoreWeave.
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
_GKE_LABEL = "cloud.google.com/gke-accelerator"
_AWS_LABELS = ("karpenter.k8s.aws/instance-gpu-name", "eks.amazonaws.com/instance-gpu-name")
_COREWEAVE_LABELS = ("gpu.nvidia.com/class", "gpu.nvidia.com/model")


def gpu_node_label(gpu_type: str) -> tuple[str, str] | None:
    """The label of nodes that `key: value` names; `None` of a mere type."""
    key, colon, value = gpu_type.partition(":")
    return (key.strip(), value.strip()) if colon else None


def gpu_products(gpu_type: str) -> list[str]:
    """The values of `GPU_PRODUCT_LABEL` that stand for a type, itself first."""
    discovered_products, _, _ = _GPU_TYPES.get(gpu_type.upper(), ("", "", ""))
    guessed_products = (
        []
        if discovered_products or _says_maker(gpu_type)
        else [f"{maker}-{gpu_type}" for maker in _MAKERS]
    )
    products = dict.fromkeys([gpu_type, *discovered_products.split(), *guessed_products])
    # The label of nodes whose GPUs the device plugin shares ends so.
    return [*products, *(f"{name}-SHARED" for name in products)]


def _says_maker(gpu_type: str) -> bool:
    """True for a type that begins with its maker, as the whole value of a label does."""
    return gpu_type.lower().startswith(("nvidia-", "tesla-"))


def _type_expressions(gpu_type: str) -> list[Manifest]:
    """The alternative requirements for a node of this type: labels of drivers and of clouds."""
    small = gpu_type.lower()
    _, gke, coreweave = _GPU_TYPES.get(gpu_type.upper(), ("", f"nvidia-{small}", gpu_type))
    values = {GPU_PRODUCT_LABEL: gpu_products(gpu_type)}
    if _says_maker(gpu_type):
        values[_GKE_LABEL] = [gpu_type]
    else:
        values[_GKE_LABEL] = gke.split()
        values |= {label: [small] for label in _AWS_LABELS}
        values |= {label: coreweave.split() for label in _COREWEAVE_LABELS}
    return [
        {"key": label, "operator": "In", "values": products}
        for label, products in values.items()
        if products
    ]


def _read_type(template: PodTemplate) -> str | None:
    product: str | None = (template.spec.get("nodeSelector") or {}).get(GPU_PRODUCT_LABEL)
    return product or _type_of_terms(template)


def _type_of_terms(template: PodTemplate) -> str | None:
    expressions = [
        expression
        for term in _node_terms(template)
        for expression in term.get("matchExpressions") or ()
    ]
    for expression in expressions:
        if expression.get("key") == GPU_PRODUCT_LABEL and expression.get("values"):
            gpu_type = str(expression["values"][0])
            if all(
                type_expression in expressions for type_expression in _type_expressions(gpu_type)
            ):
                return gpu_type
    return None


def _write_type(template: PodTemplate, compute: ComputeSpec) -> None:
    _write_gpu_count(template, compute)
    gpu_type, old_type = compute.gpu_type, _type_of_terms(template)
    label = None if gpu_type is None else gpu_node_label(gpu_type)
    if gpu_type is not None and not template.kind.has_template:
        # A TrainJob has no field for affinity.
        label = label or (GPU_PRODUCT_LABEL, gpu_type)
    node_selector = dictionary_at(template.spec, "nodeSelector")
    node_selector.pop(GPU_PRODUCT_LABEL, None)
    if label is not None:
        node_selector |= [label]
    assign(template.spec, "nodeSelector", node_selector)
    if old_type is not None:
        _put_node_terms(
            template, _without_expressions(_node_terms(template), _type_expressions(old_type))
        )
    if gpu_type is not None and label is None:
        terms = _node_terms(template) or [{}]
        types = _type_expressions(gpu_type)
        _put_node_terms(
            template,
            [_with_expressions(term, expression) for term in terms for expression in types],
        )


# ---------------------------------------------------------------------------------------- affinity


def _put_node_terms(template: PodTemplate, terms: list[Manifest]) -> None:
    """Set the alternatives of which a node has to fulfil one; without any, every node will do."""
    affinity = dictionary_at(template.spec, "affinity")
    node_affinity = dictionary_at(affinity, "nodeAffinity")
    required = {"nodeSelectorTerms": terms} if any(terms) else None
    assign(node_affinity, "requiredDuringSchedulingIgnoredDuringExecution", required)
    assign(affinity, "nodeAffinity", node_affinity)
    assign(template.spec, "affinity", affinity)


def _with_expressions(term: Manifest, *expressions: Manifest) -> Manifest:
    return {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *expressions]}


def _without_expressions(
    terms: Iterable[Manifest], removed_expressions: Collection[Manifest]
) -> list[Manifest]:
    """The alternatives without these expressions, and without the duplicates that result."""
    remaining_terms: list[Manifest] = []
    for term in terms:
        rest = dict(term)
        expressions = [
            expression
            for expression in rest.get("matchExpressions") or ()
            if expression not in removed_expressions
        ]
        assign(rest, "matchExpressions", expressions)
        if rest not in remaining_terms:
            remaining_terms.append(rest)
    return remaining_terms


def _node_terms(template: PodTemplate) -> list[Manifest]:
    """The alternatives of which a node has to fulfil one."""
    path = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms: list[Manifest] = kinds.get(template.spec, (*path, "nodeSelectorTerms"), [])
    return terms


_NO_GPU_EXPRESSIONS = tuple({"key": label, "operator": "DoesNotExist"} for label in GPU_NODE_LABELS)


def _read_anti_affinity(template: PodTemplate) -> bool | None:
    terms = [term.get("matchExpressions") or () for term in _node_terms(template)]
    return (
        True
        if terms and all(expression in term for term in terms for expression in _NO_GPU_EXPRESSIONS)
        else None
    )


def _write_anti_affinity(template: PodTemplate, compute: ComputeSpec) -> None:
    terms = _without_expressions(_node_terms(template), _NO_GPU_EXPRESSIONS)
    if compute.gpu_anti_affinity and gpu_count(compute) is None:
        # The terms are alternatives, so each of them needs the expressions.
        terms = [_with_expressions(term, *map(dict, _NO_GPU_EXPRESSIONS)) for term in terms or [{}]]
    _put_node_terms(template, terms)


KAI_SCHEDULER = "kai-scheduler"

_NODES = "https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/"
_TAINTS = "https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/"
_PRIORITY = "https://kubernetes.io/docs/concepts/scheduling-eviction/pod-priority-preemption/"
_KUEUE = "https://kueue.sigs.k8s.io/docs/tasks/run/"
_KAI = "https://github.com/NVIDIA/KAI-Scheduler/tree/main/docs/queues"


def _read_node_selector(template: PodTemplate) -> Pairs | None:
    node_selector = template.spec.get("nodeSelector") or {}
    return tuple(pair for pair in node_selector.items() if pair[0] != GPU_PRODUCT_LABEL) or None


def _write_node_selector(template: PodTemplate, compute: ComputeSpec) -> None:
    label = None if compute.gpu_type is None else gpu_node_label(compute.gpu_type)
    gpu_keys = {GPU_PRODUCT_LABEL, *(label or ())[:1]}
    node_selector = dictionary_at(template.spec, "nodeSelector")
    gpu_labels = {name: text for name, text in node_selector.items() if name in gpu_keys}
    assign(template.spec, "nodeSelector", gpu_labels | dict(compute.node_selector))


def all_tolerations(compute: ComputeSpec) -> tuple[Toleration, ...]:
    """All tolerations of the pods: the user's, and those that nodes with GPUs demand."""
    gpu_tolerations = GPU_TOLERATIONS if gpu_count(compute) else ()
    return (
        *compute.tolerations,
        *(toleration for toleration in gpu_tolerations if toleration not in compute.tolerations),
    )


def _read_tolerations(template: PodTemplate) -> tuple[Toleration, ...] | None:
    implied = GPU_TOLERATIONS if read_gpu_count(template) else ()
    return (
        tuple(toleration for toleration in read_tolerations(template) if toleration not in implied)
        or None
    )


def _write_tolerations(template: PodTemplate, compute: ComputeSpec) -> None:
    tolerations = all_tolerations(compute)
    remove_tolerations(
        template,
        [toleration for toleration in read_tolerations(template) if toleration not in tolerations],
    )
    add_tolerations(template, tolerations)


def _write_queue_name(template: PodTemplate, compute: ComputeSpec) -> None:
    for target_labels in template.labels():
        assign(target_labels, labels.KUEUE, compute.queue_name)
    if not template.is_primary:
        return
    kind, manifest = template.kind, template.workload.object
    if kind.queued is not None:
        metadata = dictionary_at(kinds.get(manifest, kind.queued), "metadata")
        assign(dictionary_at(metadata, "labels"), labels.KUEUE, compute.queue_name)
    if kind.suspend is not None:
        kinds.put(manifest, kind.suspend, compute.queue_name is not None)


def queue_as_group(workload: WorkloadManifest, compute: ComputeSpec) -> None:
    """Have Kueue admit all pods of a distributed workload or none, where it would admit each alone.

    The label of the queue is moved to the pods, since Kueue makes no groups where the object has
    it. `agent.equip` names the group.
    """
    if compute.distribution is None or not workload.kind.is_queued_by_pods:
        return
    object_labels, pod_labels = workload.primary.labels()
    queue = object_labels.pop(labels.KUEUE, None) or pod_labels.get(labels.KUEUE)
    if queue is not None:
        pod_labels[labels.KUEUE] = queue
        workload.primary.annotations()[-1][labels.KUEUE_GROUP_COUNT] = str(compute.pods)


def queue_labels(manifest: Manifest) -> dict[str, str]:
    """The labels of an object, with those of pods that are queued as a group."""
    pods = kinds.get(manifest, ("spec", "template", "metadata")) or {}
    is_group = labels.KUEUE_GROUP_COUNT in (pods.get("annotations") or {})
    pod_labels = (pods.get("labels") or {}) if is_group else {}
    return {**pod_labels, **(manifest["metadata"].get("labels") or {})}


def name_group(template: PodTemplate, name: str, digest: str) -> None:
    """Name the group of pods that Kueue admits together: another group for another template.

    A group keeps its number of pods and their requests as long as one of its pods exists.
    """
    if labels.KUEUE_GROUP_COUNT in template.read_pods("annotations"):
        template.labels()[-1][labels.KUEUE_GROUP] = f"{name[: 62 - len(digest)]}-{digest}"


def _read_queue_name(template: PodTemplate) -> str | None:
    pod_labels = template.read_pods("labels") if template.kind.is_queued_by_pods else {}
    return template.read_object("labels").get(labels.KUEUE) or pod_labels.get(labels.KUEUE)


def _read_queue(template: PodTemplate) -> str | None:
    is_kai = template.spec.get("schedulerName") == KAI_SCHEDULER
    return template.read_object("labels").get(labels.KAI) if is_kai else None


def _write_queue(template: PodTemplate, compute: ComputeSpec) -> None:
    for target_labels in template.labels():
        assign(target_labels, labels.KAI, compute.queue)
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
