"""Manifests → specs: what a user's manifest, or one of ours, says of a compute.

The two directions agree: rendering what was read changes nothing, and reading what was rendered
gives the same values (`tests/unit/manifests/test_reading.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import kinds, locating
from kubetorch.manifests.kinds import Kind, Manifest, Path
from kubetorch.manifests.parameters import PARAMETERS
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.frozen import freeze, thaw

# What a server adds to an object, and what kubectl keeps in it.
_OF_SERVER = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink")
_SERVER_IDENTITY = "uid"
_SERVER_ANNOTATIONS = (
    "deployment.kubernetes.io/revision",
    "kubectl.kubernetes.io/last-applied-configuration",
)


def declared(
    manifest: Mapping[str, Any], *, pod_template_path: str | Sequence[str | int] | None = None
) -> ComputeSpec:
    """The compute of a user's manifest, which stays what a deploy applies.

    What a server has added to the manifest is left out.

    Args:
        manifest: The manifest.
        pod_template_path: Where its pod template lies, for kinds that are not known: dotted text
            or a list of keys.

    Raises:
        SpecError: Its kind is not known, it has no pod template or more than one, or JSON cannot
            carry it.
    """
    path = None if pod_template_path is None else kinds.path(pod_template_path)
    plain = thaw(freeze(manifest, parameter="manifest"))
    cleaned = _without_server(plain)
    spec = compute(cleaned, pod_template_path=path)
    text = freeze(cleaned, parameter="manifest")
    return replace(spec, manifest=text, pod_template_path=path)


def compute(manifest: Manifest, *, pod_template_path: Path | None = None) -> ComputeSpec:
    """What a manifest says of a compute; fields that it does not say have their defaults.

    Raises:
        SpecError: As for `declared`, or a value in it is none of its type.
    """
    kind = locating.kind_of(manifest, pod_template_path)
    primary = locating.places(manifest, kind)[0]
    found: dict[str, Any] = {}
    for parameter in PARAMETERS:
        try:
            value = parameter.read(primary)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"the {kind.kind} cannot be read: {parameter.target} is not what Kubernetes "
                f"takes there ({type(error).__name__}: {error})"
            ) from error
        if value is not None:
            found[parameter.name] = value
    spec = ComputeSpec(**found)
    return replace(spec, distribution=_distribution(kind, spec.replicas))


def _distribution(kind: Kind, replicas: int) -> DistributionSpec | None:
    if kind.kind == "RayCluster":
        return DistributionSpec("ray")
    return DistributionSpec() if kind.is_job and replicas > 1 else None


def name(manifest: Mapping[str, Any]) -> str | None:
    """Name of the object, if it has one."""
    found = (manifest.get("metadata") or {}).get("name")
    return str(found) if found else None


def namespace(manifest: Mapping[str, Any]) -> str | None:
    """Namespace of the object, if it says."""
    found = (manifest.get("metadata") or {}).get("namespace")
    return str(found) if found else None


def _without_server(manifest: Manifest) -> Manifest:
    metadata = dict(manifest.get("metadata") or {})
    annotations = {
        key: text
        for key, text in (metadata.pop("annotations", None) or {}).items()
        if key not in _SERVER_ANNOTATIONS
    }
    kept = {
        key: value for key, value in metadata.items() if key not in (*_OF_SERVER, _SERVER_IDENTITY)
    }
    if annotations:
        kept["annotations"] = annotations
    rest = {key: value for key, value in manifest.items() if key != "status"}
    return {**rest, "metadata": kept}
