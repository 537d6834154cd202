"""What a deploy applies, and what backends other than Kubernetes read in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kubetorch.manifests import attached as attaching
from kubetorch.manifests import commanding, environment, knative, locating, pod, replicas
from kubetorch.manifests.attached import Attached
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.place import Place
from kubetorch.manifests.rendering import of_workload, render

__all__ = ["Wanted", "of_workload", "primary_template", "read", "render"]


# Kinds whose pods have names of their own, which no two of them can have at a time.
_NAMED = ("Pod", "StatefulSet")


class Wanted(msgspec.Struct, frozen=True):
    """What a manifest says, for a backend that is no Kubernetes.

    Attributes:
        namespace, name: Its identity.
        replicas: Number of pods; of an autoscaled service the fewest, and at least one.
        template: Fingerprint of the pod template: pods with another one are replaced.
        environment: Variables of the container.
        working_dir: Working directory of the container, if it says so.
        kind: Kind of the object.
        is_recreated: Whether old pods end before new ones start.
        requests: Resources that the container asks for.
        limits: Resources that the container may not exceed.
        attached: Secrets and volumes of the container.
    """

    namespace: str
    name: str
    replicas: int
    template: str
    environment: tuple[tuple[str, str], ...]
    working_dir: str | None
    kind: str
    is_recreated: bool
    requests: tuple[tuple[str, str], ...]
    limits: tuple[tuple[str, str], ...] = ()
    attached: Attached = Attached()


def read(manifest: Manifest, *, pod_template_path: tuple[str, ...] | None = None) -> Wanted:
    """What a manifest says.

    Raises:
        SpecError: Its kind is not known, or it has no pod template.
    """
    kind = locating.kind_of(manifest, pod_template_path)
    primary = locating.places(manifest, kind)[0]
    container, spec = primary.container, manifest.get("spec") or {}
    variables = commanding.variables(container)
    # Pods that are processes share the ports of the machine, so two cannot have one app.
    has_app = environment.APP_PORT in variables
    resources = container.get("resources") or {}
    return Wanted(
        namespace=manifest["metadata"]["namespace"],
        name=manifest["metadata"]["name"],
        replicas=_least(primary) if kind.is_autoscaled else replicas.read(manifest, kind),
        template=pod.fingerprint(primary.template),
        environment=tuple(variables.items()),
        working_dir=container.get("workingDir"),
        kind=kind.kind,
        is_recreated=has_app
        or kind.kind in _NAMED
        or (spec.get("strategy") or {}).get("type") == "Recreate",
        requests=_amounts(resources, "requests"),
        limits=_amounts(resources, "limits"),
        attached=attaching.read(primary.pod, container),
    )


def primary_template(
    manifest: Manifest, *, pod_template_path: tuple[str, ...] | None = None
) -> Manifest:
    """The template of the pods that are called.

    Raises:
        SpecError: Its kind is not known, or it has no pod template.
    """
    kind = locating.kind_of(manifest, pod_template_path)
    return locating.places(manifest, kind)[0].template


def _amounts(resources: Mapping[str, Any], section: str) -> tuple[tuple[str, str], ...]:
    found = resources.get(section) or {}
    return tuple((name, str(amount)) for name, amount in found.items())


def _least(primary: Place) -> int:
    """The fewest pods of an autoscaled service, but one."""
    found = primary.of_pods("annotations").get(knative.ANNOTATIONS["min_scale"])
    return max(1, int(found or 1))
