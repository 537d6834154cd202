"""Labels and annotations: the user's, and those that carry settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kubetorch.manifests import labels
from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.place import Place, assign
from kubetorch.specs.compute import ComputeSpec, Pairs

_LABELS = "https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/"
_ANNOTATIONS = "https://kubernetes.io/docs/concepts/overview/working-with-objects/annotations/"
_OURS = "Kubetorch"

_SPECIAL_LABELS = {*labels.RESERVED, labels.APP, labels.KUEUE, labels.KAI}
#: Annotations below these belong to Kubetorch, Knative and kubectl.
_SPECIAL_DOMAINS = (
    labels.PREFIX,
    "autoscaling.knative.dev/",
    "serving.knative.dev/",
    "kubectl.kubernetes.io/",
    "deployment.kubernetes.io/",
)


def is_own_label(name: str) -> bool:
    """Whether a label is the user's own."""
    return name not in _SPECIAL_LABELS


def is_own_annotation(name: str) -> bool:
    """Whether an annotation is the user's own."""
    return name != labels.GPU_MEMORY and not name.startswith(_SPECIAL_DOMAINS)


def _shared(place: Place, key: str, is_own: Callable[[str], bool]) -> Pairs | None:
    """What the object and its pods both have: so would have been written by a parameter."""
    of_pods = place.of_pods(key)
    found = place.own(key).items()
    return tuple(one for one in found if is_own(one[0]) and one in of_pods.items()) or None


def _read_pod_labels(place: Place) -> Pairs | None:
    of_object = place.own("labels")
    found = place.of_pods("labels").items()
    return tuple(one for one in found if is_own_label(one[0]) and one[0] not in of_object) or None


def _write_labels(place: Place, compute: ComputeSpec) -> None:
    given = _allowed(compute.labels)
    for found in place.labels():
        found |= given


def _write_pod_labels(place: Place, compute: ComputeSpec) -> None:
    of_pods = place.labels()[-1]
    of_pods |= _allowed(compute.pod_labels)


def _allowed(given: Pairs) -> Mapping[str, str]:
    return {name: text for name, text in given if name not in labels.RESERVED}


def _write_annotations(place: Place, compute: ComputeSpec) -> None:
    for found in place.annotations():
        found |= dict(compute.annotations)


def _annotation(
    name: str, key: str, text: Callable[[ComputeSpec], str | None], about: str
) -> Parameter:
    """A setting that stands in an annotation of the object."""

    def write(place: Place, compute: ComputeSpec) -> None:
        if place.is_primary:
            assign(place.mine("annotations"), key, text(compute))

    def read(place: Place) -> str | None:
        return place.own("annotations").get(key)

    return Parameter(name, f"M.annotations: {key}", read, write, about, _OURS)


def _read_codecs(place: Place) -> tuple[str, ...] | None:
    found = place.own("annotations").get(labels.ALLOWED_SERIALIZATION)
    return None if found is None else tuple(found.split(","))


def _write_codecs(place: Place, compute: ComputeSpec) -> None:
    if place.is_primary:
        found = ",".join(compute.allowed_serialization)
        place.mine("annotations")[labels.ALLOWED_SERIALIZATION] = found


def fill(place: Place, compute: ComputeSpec) -> None:
    """Say what callers may send where nobody has."""
    if place.is_primary and labels.ALLOWED_SERIALIZATION not in place.own("annotations"):
        _write_codecs(place, compute)


PARAMETERS = (
    Parameter(
        "labels",
        "M.labels, PT.labels",
        lambda place: _shared(place, "labels", is_own_label),
        _write_labels,
        "reserved keys are left out",
        _LABELS,
    ),
    Parameter(
        "pod_labels",
        "PT.labels",
        _read_pod_labels,
        _write_pod_labels,
        "`add_pod_template_labels`",
        _LABELS,
    ),
    Parameter(
        "annotations",
        "M.annotations, PT.annotations",
        lambda place: _shared(place, "annotations", is_own_annotation),
        _write_annotations,
        "",
        _ANNOTATIONS,
    ),
    Parameter(
        "allowed_serialization",
        f"M.annotations: {labels.ALLOWED_SERIALIZATION}",
        _read_codecs,
        _write_codecs,
        "names separated by commas; pods are told at each deploy",
        _OURS,
    ),
    _annotation(
        "inactivity_ttl",
        labels.INACTIVITY_TTL,
        lambda compute: compute.inactivity_ttl,
        "the controller counts it",
    ),
    _annotation(
        "kubeconfig_path",
        labels.KUBECONFIG_PATH,
        lambda compute: compute.kubeconfig_path,
        "used by the user's machine alone",
    ),
)
