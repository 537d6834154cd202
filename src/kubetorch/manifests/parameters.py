"""All parameters of a compute in a manifest: the table, and the reading of a manifest by it.

Reading and rendering agree: rendering what was read changes nothing, and reading what was rendered
gives the same values (`tests/unit/manifests/test_parameters.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import (
    agent_container,
    kinds,
    knative,
    labels,
    metadata,
    replicas,
    scheduling,
    secrets,
    storage,
)
from kubetorch.manifests.kinds import Kind, Manifest, Path
from kubetorch.manifests.workload_manifest import ManifestParameter, WorkloadManifest
from kubetorch.specs.compute import ComputeSpec, freeze, thaw
from kubetorch.specs.distribution import DistributionSpec

#: In the order in which they are written.
PARAMETERS: tuple[ManifestParameter, ...] = (
    *replicas.PARAMETERS,
    *metadata.PARAMETERS,
    *agent_container.PARAMETERS,
    *scheduling.PARAMETERS,
    *agent_container.ENVIRONMENT_PARAMETERS,
    *storage.PARAMETERS,
    *secrets.PARAMETERS,
    *knative.PARAMETERS,
)

# Fields that an API server adds to an object, and annotations of controllers and kubectl.
_SERVER_METADATA = (
    "creationTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "uid",
)
_SERVER_ANNOTATIONS = ("deployment.kubernetes.io/revision", labels.LAST_APPLIED)


def read_manifest(
    manifest: Mapping[str, Any], *, pod_template_path: str | Sequence[str | int] | None = None
) -> ComputeSpec:
    """The compute of a user's manifest, which a deploy applies as it is.

    Fields that an API server has added to the manifest are left out.
    """
    path = None if pod_template_path is None else kinds.path(pod_template_path)
    plain = thaw(freeze(manifest, parameter="manifest"))
    cleaned = _without_server(plain)
    spec = read_compute(cleaned, pod_template_path=path)
    text = freeze(cleaned, parameter="manifest")
    return replace(spec, manifest=text, pod_template_path=path)


def read_compute(manifest: Manifest, *, pod_template_path: Path | None = None) -> ComputeSpec:
    """Read the parameters of a compute from a manifest; absent fields have their defaults."""
    return read_workload(WorkloadManifest.parse(manifest, pod_template_path))


def read_workload(workload: WorkloadManifest) -> ComputeSpec:
    """As `read_compute`, of a manifest whose kind is known."""
    kind = workload.kind
    values: dict[str, Any] = {}
    for parameter in PARAMETERS:
        try:
            value = parameter.read(workload.primary)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"the {kind.kind} cannot be read: {_path_of(workload, parameter.target)} is not "
                f"what Kubernetes takes there ({type(error).__name__}: {error})"
            ) from error
        if value is not None:
            values[parameter.name] = value
    spec = ComputeSpec(**values)
    return replace(spec, distribution=distribution_of(kind, spec.replicas))


def _path_of(workload: WorkloadManifest, target: str) -> str:
    """The place of a parameter in an object, as users write it."""
    pods = ".".join((*workload.kind.primary.template, "spec"))
    container = f"{pods}.containers[name={workload.primary.container.get('name')!r}]"
    prefixes = {"P": pods, "C": container, "M": "metadata"}
    beginning, _, rest = target.partition(".")
    return f"{prefixes.get(beginning, beginning)}.{rest}"


def distribution_of(kind: Kind, replicas: int) -> DistributionSpec | None:
    """The default distribution of calls on pods of a kind: a training job's pods are one world."""
    if kind.kind == "RayCluster":
        return DistributionSpec("ray")
    return DistributionSpec() if kind.is_job and replicas > 1 else None


def name_of(manifest: Mapping[str, Any]) -> str | None:
    name = (manifest.get("metadata") or {}).get("name")
    return str(name) if name else None


def namespace_of(manifest: Mapping[str, Any]) -> str | None:
    namespace = (manifest.get("metadata") or {}).get("namespace")
    return str(namespace) if namespace else None


def _without_server(manifest: Manifest) -> Manifest:
    metadata = dict(manifest.get("metadata") or {})
    annotations = {
        key: text
        for key, text in (metadata.pop("annotations", None) or {}).items()
        if key not in _SERVER_ANNOTATIONS
    }
    user_metadata = {key: value for key, value in metadata.items() if key not in _SERVER_METADATA}
    if annotations:
        user_metadata["annotations"] = annotations
    rest = {key: value for key, value in manifest.items() if key != "status"}
    return {**rest, "metadata": user_metadata}
