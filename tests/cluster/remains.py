"""What is left of an installation in a cluster, looked for among every kind that it lists."""

from __future__ import annotations

import json

from cluster.conftest import Kubectl

#: By which an object is of Kubetorch, whoever made it.
_PREFIX = "kubetorch"
#: What is in every namespace, and what only says what happened.
_IGNORED = ("events", "events.events.k8s.io")


def of_installation(kubectl: Kubectl, install_namespace: str, *namespaces: str) -> list[str]:
    """Objects that an installation left behind, as `resource/namespace/name`.

    Args:
        kubectl: Runs kubectl.
        install_namespace: Where it was; all in it counts that names Kubetorch.
        namespaces: Where its workloads were, likewise.
    """
    resources = kubectl("api-resources", "--verbs=list", "-o", "name").split()
    searched_resources = [resource for resource in resources if resource not in _IGNORED]
    objects = json.loads(kubectl("get", ",".join(searched_resources), "-A", "-o", "json"))["items"]
    remaining_objects = []
    for manifest in objects:
        metadata = manifest["metadata"]
        labels = {**(metadata.get("labels") or {})}
        where = metadata.get("namespace") or ""
        is_labelled = labels.get("kubetorch.com/install-namespace") == install_namespace
        is_inside = where in (install_namespace, *namespaces) and (
            _PREFIX in metadata["name"]
            or any(_PREFIX in key + value for key, value in labels.items())
        )
        if is_labelled or is_inside:
            remaining_objects.append(f"{manifest['kind']}/{where}/{metadata['name']}")
    return sorted(remaining_objects)
