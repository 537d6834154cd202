"""Labels and annotations: the user's, and those that carry settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kubetorch.manifests import labels
from kubetorch.manifests.kinds import assign
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate
from kubetorch.specs.compute import ComputeSpec, Pairs

_LABELS = "https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/"
_ANNOTATIONS = "https://kubernetes.io/docs/concepts/overview/working-with-objects/annotations/"
_OURS = "Kubetorch"

_SPECIAL_LABELS = {
    *labels.RESERVED,
    labels.APP,
    labels.KUEUE,
    labels.KUEUE_GROUP,
    labels.KAI,
}
#: Annotations below these belong to Kubetorch, Knative and kubectl.
_SPECIAL_DOMAINS = (
    labels.PREFIX,
    "autoscaling.knative.dev/",
    "serving.knative.dev/",
    "kubectl.kubernetes.io/",
    "deployment.kubernetes.io/",
)


def is_own_label(name: str) -> bool:
    return name not in _SPECIAL_LABELS


def is_own_annotation(name: str) -> bool:
    is_of_gpu = name in (labels.GPU_MEMORY, labels.GPU_DEVICES)
    return not is_of_gpu and not name.startswith(_SPECIAL_DOMAINS)


def _shared(template: PodTemplate, key: str, is_own: Callable[[str], bool]) -> Pairs | None:
    """The pairs that the object and its pods share, as a parameter would have written them."""
    of_pods = template.read_pods(key)
    found = template.read_object(key).items()
    return tuple(one for one in found if is_own(one[0]) and one in of_pods.items()) or None


def _read_pod_labels(template: PodTemplate) -> Pairs | None:
    of_object = template.read_object("labels")
    found = template.read_pods("labels").items()
    return tuple(one for one in found if is_own_label(one[0]) and one[0] not in of_object) or None


def _write_labels(template: PodTemplate, compute: ComputeSpec) -> None:
    given = _allowed(compute.labels)
    for found in template.labels():
        found |= given


def _write_pod_labels(template: PodTemplate, compute: ComputeSpec) -> None:
    of_pods = template.labels()[-1]
    of_pods |= _allowed(compute.pod_labels)


def _allowed(given: Pairs) -> Mapping[str, str]:
    return {name: text for name, text in given if name not in labels.RESERVED}


def _write_annotations(template: PodTemplate, compute: ComputeSpec) -> None:
    for found in template.annotations():
        found |= dict(compute.annotations)


def _annotation(
    name: str, key: str, text: Callable[[ComputeSpec], str | None]
) -> ManifestParameter:
    """A setting that stands in an annotation of the object."""

    def write(template: PodTemplate, compute: ComputeSpec) -> None:
        if template.is_primary:
            assign(template.annotations_of_object(), key, text(compute))

    def read(template: PodTemplate) -> str | None:
        return template.read_object("annotations").get(key)

    return ManifestParameter(name, f"M.annotations: {key}", read, write, _OURS)


def _read_codecs(template: PodTemplate) -> tuple[str, ...] | None:
    found = template.read_object("annotations").get(labels.ALLOWED_SERIALIZATION)
    return None if found is None else tuple(found.split(","))


def _write_codecs(template: PodTemplate, compute: ComputeSpec) -> None:
    if template.is_primary:
        found = ",".join(compute.allowed_serialization)
        template.annotations_of_object()[labels.ALLOWED_SERIALIZATION] = found


def fill_serialization(template: PodTemplate, compute: ComputeSpec) -> None:
    """Say what callers may send where nobody has."""
    if template.is_primary and labels.ALLOWED_SERIALIZATION not in template.read_object(
        "annotations"
    ):
        _write_codecs(template, compute)


PARAMETERS = (
    ManifestParameter(
        "labels",
        "M.labels, PT.labels",
        lambda template: _shared(template, "labels", is_own_label),
        _write_labels,
        _LABELS,
    ),
    ManifestParameter(
        "pod_labels",
        "PT.labels",
        _read_pod_labels,
        _write_pod_labels,
        _LABELS,
    ),
    ManifestParameter(
        "annotations",
        "M.annotations, PT.annotations",
        lambda template: _shared(template, "annotations", is_own_annotation),
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
