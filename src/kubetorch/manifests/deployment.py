"""The Deployment of a workload: writer, and the reader that backends other than Kubernetes use."""

from __future__ import annotations

import msgspec

from kubetorch.manifests import labels, pod
from kubetorch.manifests.pod import Manifest
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec

#: Image of a pod when the user names none.
DEFAULT_IMAGE = "ghcr.io/kubetorch/pod:latest"


def of_workload(workload: WorkloadSpec) -> Manifest:
    """The Deployment that a deploy applies."""
    return render(
        workload.compute,
        namespace=workload.namespace,
        name=workload.name,
        callable=workload.callable,
        username=workload.username,
    )


def render(
    compute: ComputeSpec,
    *,
    namespace: str,
    name: str | None = None,
    callable: CallableRef | None = None,
    username: str | None = None,
) -> Manifest:
    """The Deployment for a compute; what is known only at a deploy may be left out."""
    own = labels.standard(name=name, callable=callable, username=username)
    user = dict(compute.labels)
    spec: Manifest = {
        "replicas": compute.replicas,
        "selector": {"matchLabels": {labels.SERVICE: name} if name else {}},
        "template": pod.template(compute, image=DEFAULT_IMAGE, labels=user | own),
    }
    if compute.replicas > 1:
        spec["strategy"] = {"type": "Recreate"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": user | own | {labels.TEMPLATE: "deployment"},
            "annotations": _annotations(compute),
        },
        "spec": spec,
    }


def _annotations(compute: ComputeSpec) -> dict[str, str]:
    found = {labels.ALLOWED_SERIALIZATION: ",".join(compute.allowed_serialization)}
    if compute.inactivity_ttl is not None:
        found[labels.INACTIVITY_TTL] = compute.inactivity_ttl
    return found


# --------------------------------------------------------------------------------------- reader


class Wanted(msgspec.Struct, frozen=True):
    """What a Deployment says, for a backend that is no Kubernetes.

    Attributes:
        namespace, name: Its identity.
        replicas: Number of pods.
        template: Fingerprint of the pod template: pods with another one are replaced.
        environment: Variables of the container.
        working_dir: Working directory of the container, if it says so.
        is_recreated: Whether old pods end before new ones start.
        requests: Resources that the container asks for.
    """

    namespace: str
    name: str
    replicas: int
    template: str
    environment: tuple[tuple[str, str], ...]
    working_dir: str | None
    is_recreated: bool
    requests: tuple[tuple[str, str], ...]


def read(manifest: Manifest) -> Wanted:
    """What a Deployment says."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    template = spec["template"]
    container = template["spec"]["containers"][0]
    variables = [(item["name"], item["value"]) for item in container.get("env", ())]
    return Wanted(
        namespace=metadata["namespace"],
        name=metadata["name"],
        replicas=spec["replicas"],
        template=pod.fingerprint(template),
        environment=tuple(variables),
        working_dir=container.get("workingDir"),
        is_recreated=spec.get("strategy", {}).get("type") == "Recreate",
        requests=tuple(container["resources"].get("requests", {}).items()),
    )
