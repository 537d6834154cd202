"""Labels and annotations: the user's, and annotations that hold settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kubetorch.manifests import labels
from kubetorch.manifests.kinds import assign
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate
from kubetorch.specs.compute import ComputeSpec, Pairs

_LABELS = "https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/"
_ANNOTATIONS = "https://kubernetes.io/docs/concepts/overview/working-with-objects/annotations/"
_OURS = "Kubetorch"

_SPECIAL_LABELS = {*labels.RESERVED, labels.APP, labels.KUEUE, labels.KUEUE_GROUP, labels.KAI}
#: Annotations below these belong to Kubetorch, Knative and kubectl.
_SPECIAL_DOMAINS = (
    labels.PREFIX,
    "autoscaling.knative.dev/",
    "serving.knative.dev/",
    "kubectl.kubernetes.io/",
    "deployment.kubernetes.io/",
)


def is_user_label(name: str) -> bool:
    return name not in _SPECIAL_LABELS


def is_user_annotation(name: str) -> bool:
    is_of_gpu = name in (labels.GPU_MEMORY, labels.GPU_DEVICES)
    return not is_of_gpu and not name.startswith(_SPECIAL_DOMAINS)


def _shared(template: PodTemplate, key: str, is_user: Callable[[str], bool]) -> Pairs | None:
    """The pairs that the object and its pods share, as a parameter would have written them."""
    pod_pairs = template.read_pods(key)
    object_pairs = template.read_object(key).items()
    return (
        tuple(pair for pair in object_pairs if is_user(pair[0]) and pair in pod_pairs.items())
        or None
    )


def _read_pod_labels(template: PodTemplate) -> Pairs | None:
    object_labels = template.read_object("labels")
    pod_labels = template.read_pods("labels").items()
    return (
        tuple(
            pair for pair in pod_labels if is_user_label(pair[0]) and pair[0] not in object_labels
        )
        or None
    )


def _write_labels(template: PodTemplate, compute: ComputeSpec) -> None:
    user_labels = _allowed(compute.labels)
    for target_labels in template.labels():
        target_labels |= user_labels


def _write_pod_labels(template: PodTemplate, compute: ComputeSpec) -> None:
    target_labels = template.labels()[-1]
    target_labels |= _allowed(compute.pod_labels)


def _allowed(user_labels: Pairs) -> Mapping[str, str]:
    return {name: text for name, text in user_labels if name not in labels.RESERVED}


def _write_annotations(template: PodTemplate, compute: ComputeSpec) -> None:
    for target_annotations in template.annotations():
        target_annotations |= dict(compute.annotations)


def _annotation(
    name: str, key: str, text: Callable[[ComputeSpec], str | None]
) -> ManifestParameter:
    """A parameter that is an annotation of the object."""

    def write(template: PodTemplate, compute: ComputeSpec) -> None:
        if template.is_primary:
            assign(template.annotations_of_object(), key, text(compute))

    def read(template: PodTemplate) -> str | None:
        return template.read_object("annotations").get(key)

    return ManifestParameter(name, f"M.annotations: {key}", read, write, _OURS)


def _read_codecs(template: PodTemplate) -> tuple[str, ...] | None:
    codecs = template.read_object("annotations").get(labels.ALLOWED_SERIALIZATION)
    return None if codecs is None else tuple(codecs.split(","))


def _write_codecs(template: PodTemplate, compute: ComputeSpec) -> None:
    if template.is_primary:
        codecs = ",".join(compute.allowed_serialization)
        template.annotations_of_object()[labels.ALLOWED_SERIALIZATION] = codecs


def fill_serialization(template: PodTemplate, compute: ComputeSpec) -> None:
    """Set the allowed serializations where the object has none."""
    if template.is_primary and labels.ALLOWED_SERIALIZATION not in template.read_object(
        "annotations"
    ):
        _write_codecs(template, compute)


PARAMETERS = (
    ManifestParameter(
        "labels",
        "M.labels, PT.labels",
        lambda template: _shared(template, "labels", is_user_label),
        _write_labels,
        _LABELS,
    ),
    ManifestParameter("pod_labels", "PT.labels", _read_pod_labels, _write_pod_labels, _LABELS),
    ManifestParameter(
        "annotations",
        "M.annotations, PT.annotations",
        lambda template: _shared(template, "annotations", is_user_annotation),
        _write_annotations,
        _ANNOTATIONS,
    ),
    ManifestParameter(
        "allowed_serialization",
        f"M.annotations: {labels.ALLOWED_SERIALIZATION}",
        _read_codecs,
        _write_codecs,
        _OURS,
    ),
    _annotation("inactivity_ttl", labels.INACTIVITY_TTL, lambda compute: compute.inactivity_ttl),
    _annotation("kubeconfig_path", labels.KUBECONFIG_PATH, lambda compute: compute.kubeconfig_path),
)
