"""Volumes of a pod, shared memory, and the claims of volumes that Kubetorch makes."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest, assign, items, named
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.volume import UNSHARED, VolumeSpec, default_mount_path

SHARED_MEMORY = "dshm"
SHARED_MEMORY_PATH = "/dev/shm"

_CLAIMS = "https://kubernetes.io/docs/concepts/storage/persistent-volumes/"
_EMPTY = "https://kubernetes.io/docs/concepts/storage/volumes/#emptydir"

_LABEL_LIMIT = 63


def volume_name(name: str) -> str:
    """`name` as a pod may call a volume, which has to be a DNS label."""
    if len(name) <= _LABEL_LIMIT and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    kept = re.sub(r"[^a-z0-9-]+", "-", name.lower())[: _LABEL_LIMIT - len(digest) - 1]
    return f"{kept}-{digest}".lstrip("-")


def mount(template: PodTemplate, volume: Manifest, path: str, *, read_only: bool = False) -> None:
    name = volume["name"]
    volumes = items(template.spec, "volumes")
    there = named(volumes, name)
    if there is None:
        volumes.append(volume)
    elif _source(there) != _source(volume):
        raise SpecError(
            f"two volumes have the name {name!r}: {_source(there)} and {_source(volume)}",
            hint="give one of them another name",
        )
    mounts = items(template.container, "volumeMounts")
    mounted = named(mounts, path, by="mountPath")
    if mounted is None:
        found: Manifest = {"name": name, "mountPath": path}
        mounts.append(found | {"readOnly": True} if read_only else found)
    elif mounted["name"] != name:
        raise SpecError(
            f"two volumes are mounted at {path}: {mounted['name']!r} and {name!r}",
            hint="give one of them another path",
        )


def _source(volume: Manifest) -> str:
    claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
    secret = (volume.get("secret") or {}).get("secretName")
    if claim or secret:
        return f"claim {claim}" if claim else f"secret {secret}"
    return next((key for key in volume if key != "name"), "nothing")


def mount_paths(template: PodTemplate) -> dict[str, str]:
    mounts = template.container.get("volumeMounts") or []
    whole = [one for one in mounts if "subPath" not in one]
    return {one["name"]: str(one["mountPath"]) for one in reversed(whole)}


def restore(template: PodTemplate, before: list[Any]) -> None:
    """Bring back the volumes that are gone from the pod's list and that a mount still names."""
    volumes = items(template.spec, "volumes")
    containers = [*(template.spec.get("initContainers") or ()), *template.spec["containers"]]
    mounted = {one["name"] for container in containers for one in container.get("volumeMounts", ())}
    there = {one["name"] for one in volumes}
    volumes += [one for one in before if one["name"] in mounted - there]
    assign(template.spec, "volumes", volumes)


def _read_volumes(template: PodTemplate) -> tuple[VolumeSpec, ...] | None:
    found, paths = [], mount_paths(template)
    for volume in template.spec.get("volumes") or ():
        path = paths.get(volume["name"])
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and path is not None:
            found.append(VolumeSpec(claim, path, claim=claim))
    return tuple(found) or None


def _write_volumes(template: PodTemplate, compute: ComputeSpec) -> None:
    for one in compute.volumes:
        claim = {"claimName": one.claim_name}
        name = _volume_of(template, one.claim_name) or volume_name(one.name)
        volume = {"name": name, "persistentVolumeClaim": claim}
        mount(template, volume, one.mount_path, read_only=one.is_read_only)


def _volume_of(template: PodTemplate, claim: str) -> str | None:
    """Name of the volume that a manifest has for a claim."""
    for volume in template.spec.get("volumes") or ():
        if _source(volume) == f"claim {claim}":
            return str(volume["name"])
    return None


def _shared_memory(template: PodTemplate) -> Manifest | None:
    mounted = named(
        template.container.get("volumeMounts") or [], SHARED_MEMORY_PATH, by="mountPath"
    )
    if mounted is None:
        return None
    return named(template.spec.get("volumes") or [], mounted["name"])


def _read_limit(template: PodTemplate) -> str | None:
    found = _shared_memory(template)
    limit = ((found or {}).get("emptyDir") or {}).get("sizeLimit")
    return None if limit is None else str(limit)


def _write_limit(template: PodTemplate, compute: ComputeSpec) -> None:
    found = _shared_memory(template)
    if found is not None and "emptyDir" in found:
        assign(found["emptyDir"], "sizeLimit", compute.shared_memory_limit)


def fill_shared_memory(template: PodTemplate, compute: ComputeSpec) -> None:
    """Give the pod shared memory, unless a manifest mounts something there."""
    mounts = template.container.get("volumeMounts") or []
    if named(mounts, SHARED_MEMORY_PATH, by="mountPath") is not None:
        return
    memory: Manifest = {"medium": "Memory"}
    assign(memory, "sizeLimit", compute.shared_memory_limit)
    mount(template, {"name": SHARED_MEMORY, "emptyDir": memory}, SHARED_MEMORY_PATH)


PARAMETERS = (
    ManifestParameter(
        "volumes",
        "P.volumes: persistentVolumeClaim; C.volumeMounts",
        _read_volumes,
        _write_volumes,
        _CLAIMS,
    ),
    ManifestParameter(
        "shared_memory_limit",
        "P.volumes: dshm.emptyDir.sizeLimit",
        _read_limit,
        _write_limit,
        _EMPTY,
    ),
)


def claim(volume: VolumeSpec, *, namespace: str) -> Manifest | None:
    """The PersistentVolumeClaim of a volume; `None` for a claim that is there already."""
    if volume.claim is not None or volume.size is None:
        return None
    spec: Manifest = {
        "accessModes": [volume.access_mode or UNSHARED],
        "resources": {"requests": {"storage": volume.size}},
    }
    if volume.volume_name is not None:
        # No class: one would make a new volume instead of binding to that one.
        spec |= {"volumeName": volume.volume_name, "storageClassName": ""}
    elif volume.storage_class is not None:
        spec["storageClassName"] = volume.storage_class
    return _claim(volume, volume.namespace or namespace, volume.claim_name, spec)


def _claim(volume: VolumeSpec, namespace: str, name: str, spec: Manifest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {labels.APP: "kubetorch", labels.VOLUME: labels.value(volume.name)},
            "annotations": {labels.MOUNT_PATH: volume.mount_path},
        },
        "spec": spec,
    }


def claim_of(
    volume: VolumeSpec, *, namespace: str, claim: str, storage_class: str, phase: str
) -> Manifest:
    """The PersistentVolumeClaim of a volume that exists, as far as is known of it."""
    spec: Manifest = {"accessModes": [volume.access_mode], "storageClassName": storage_class}
    if volume.size is not None:
        spec["resources"] = {"requests": {"storage": volume.size}}
    if volume.volume_name is not None:
        spec["volumeName"] = volume.volume_name
    return _claim(volume, namespace, claim, spec) | {"status": {"phase": phase}}


def volume_of_claim(found: Manifest) -> VolumeSpec:
    metadata, spec = found["metadata"], found["spec"]
    name = metadata["name"]
    annotated = (metadata.get("annotations") or {}).get(labels.MOUNT_PATH)
    return VolumeSpec(
        name=name,
        mount_path=annotated or default_mount_path(name),
        size=str(spec["resources"]["requests"]["storage"]),
        storage_class=spec.get("storageClassName"),
        access_mode=spec["accessModes"][0],
        namespace=metadata.get("namespace"),
        volume_name=spec.get("volumeName"),
        claim=name,
    )
