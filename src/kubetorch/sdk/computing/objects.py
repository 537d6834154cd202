"""What parameters of `kt.Compute` may be that name things of Kubernetes, or are such things.

Every function raises `SpecError` with the parameter, the value, and what would be right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.sdk import parameters
from kubetorch.sdk.parameters import Pairs
from kubetorch.specs import frozen
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.spelling import nearest

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII)
_NAME_LIMIT = 253
#: Names that stand in a label too.
_LABEL_LIMIT = 63
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_PORTS = range(1, 65536)


def name(parameter: str, value: object, *, limit: int = _NAME_LIMIT) -> str:
    """The name of an object of Kubernetes."""
    if not isinstance(value, str) or len(value) > limit or not _NAME.fullmatch(value):
        raise SpecError(
            f"{parameter} is {value!r}; it must be the name of an object of Kubernetes: at most "
            f"{limit} lower-case letters, digits, '-' and '.', the first and last a letter or "
            "digit"
        )
    return value


def priority_class_name(value: object) -> str:
    """The name of a PriorityClass."""
    return name("priority_class_name", value)


def service_account_name(value: object) -> str:
    """The name of a service account."""
    return name("service_account_name", value)


def queue_name(value: object) -> str:
    """The name of a LocalQueue of Kueue."""
    return name("queue_name", value, limit=_LABEL_LIMIT)


def queue(value: object) -> str:
    """The name of a queue of the KAI scheduler."""
    return name("queue", value, limit=_LABEL_LIMIT)


def image_pull_policy(value: object) -> str:
    """When a node pulls an image."""
    if value not in _PULL_POLICIES:
        near = nearest(str(value).lower(), {known.lower(): known for known in _PULL_POLICIES})
        chosen = next((known for known in _PULL_POLICIES if known.lower() == near), None)
        raise SpecError(
            f"image_pull_policy is {value!r}; it must be one of {', '.join(_PULL_POLICIES)}",
            hint=f"did you mean {chosen!r}?" if chosen else None,
        )
    return str(value)


def kubeconfig_path(value: object) -> str:
    """The path of a kubeconfig, as it was given."""
    path = os.fspath(value) if isinstance(value, (str, PathLike)) else value
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise SpecError(
            f"kubeconfig_path is {value!r}; it must be the path of a file",
            hint='for example kt.Compute(kubeconfig_path="~/.kube/config")',
        )
    return path


def server_port(value: object) -> int | None:
    """A port; `None` is the one that agents have anyway."""
    from kubetorch.manifests.serving import PORT  # noqa: PLC0415  # few programs choose one

    number = parameters.whole(value)
    if number is None or number not in _PORTS:
        raise SpecError(f"server_port is {value!r}; it must be a port, 1 to {_PORTS[-1]}")
    return None if number == PORT else number


def shown_port(port: int | None) -> int:
    """The port that an agent has."""
    from kubetorch.manifests.serving import PORT  # noqa: PLC0415  # few programs look at it

    return PORT if port is None else port


def selector(value: object) -> Pairs:
    """Labels of the pods that belong to a workload."""
    found = parameters.labels(value, parameter="selector")
    if not found:
        raise SpecError(
            "selector is empty, so it would select every pod of the namespace",
            hint='for example kt.Compute(selector={"app": "workers"})',
        )
    return found


def shown_pairs(pairs: Pairs | None) -> dict[str, str] | None:
    """Pairs as a dictionary."""
    return None if pairs is None else dict(pairs)


def endpoint(value: object) -> Endpoint:
    """Where calls go."""
    if not isinstance(value, Endpoint):
        raise SpecError(
            f"endpoint is {value!r}; it must be a kt.Endpoint",
            hint='for example kt.Endpoint(url="my-svc.my-ns.svc.cluster.local:8080")',
        )
    return value


def service_template(value: object) -> str | None:
    """What is laid over the manifest, as JSON text."""
    if not isinstance(value, Mapping):
        raise SpecError(
            f"service_template is {value!r}; it must be a dictionary",
            hint='for example {"spec": {"template": {"spec": {"hostNetwork": True}}}}',
        )
    return frozen.freeze(value, parameter="service_template") if value else None


def shown_template(text: str | None) -> dict[str, Any] | None:
    """The dictionary that text stands for."""
    return None if text is None else frozen.thaw(text)


def flag(parameter: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise SpecError(
            f"{parameter} is {value!r}; it must be True or False",
            hint=f"for example kt.Compute({parameter}=True)",
        )
    return value


def freeze(value: object) -> bool:
    """Whether pods run what their image has."""
    return flag("freeze", value)


def gpu_anti_affinity(value: object) -> bool:
    """Whether pods without GPUs stay away from nodes with some."""
    return flag("gpu_anti_affinity", value)


# ----------------------------------------------------------------------------------------- labels


def own_labels(value: object) -> Pairs:
    """Labels that are a user's to set."""
    from kubetorch.manifests.labels import RESERVED  # noqa: PLC0415  # not to declare a compute

    found = parameters.labels(value)
    for key, text in found:
        if key in RESERVED:
            raise SpecError(
                f"labels has {key!r}: {text!r}; that label is set by Kubetorch itself",
                hint="choose another name",
            )
    return found


def annotation_pairs(value: object) -> Pairs:
    """Kubernetes annotations, their values as text."""
    pairs = parameters.mapping("annotations", value, 'kt.Compute(annotations={"owner": "me"})')
    for name, item in pairs.items():
        parameters.check_label_name("annotations", name)
        if not isinstance(item, (str, int, float)) or "\0" in str(item):
            raise SpecError(f"annotations[{name!r}] is {item!r}; it must be text or a number")
    return tuple((str(name), str(item)) for name, item in pairs.items())


def label_names(value: object) -> list[str]:
    """Names of labels."""
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(f"remove_keys is {value!r}; it must be a list of names of labels")
    return [str(key) for key in value]


def without_labels(spec: ComputeSpec, keys: set[str]) -> str:
    """The user's manifest without these labels of its pods."""
    from kubetorch.manifests import locating  # noqa: PLC0415  # few programs need it

    manifest = frozen.thaw(spec.manifest or "{}")
    kind = locating.kind_of(manifest, spec.pod_template_path)
    for place in locating.places(manifest, kind):
        metadata = place.template.get("metadata") or {}
        labels = metadata.get("labels") or {}
        for key in keys & labels.keys():
            del labels[key]
    return frozen.freeze(manifest, parameter="manifest")
