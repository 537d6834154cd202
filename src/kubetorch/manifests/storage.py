"""Volumes of a pod, shared memory, and the claims of volumes that Kubetorch makes."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest, assign, list_at, named
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.volume import UNSHARED, VolumeSpec, default_mount_path

SHARED_MEMORY = "dshm"
SHARED_MEMORY_PATH = "/dev/shm"

_CLAIMS = "https://kubernetes.io/docs/concepts/storage/persistent-volumes/"
_EMPTY = "https://kubernetes.io/docs/concepts/storage/volumes/#emptydir"

_LABEL_CHARACTERS = 63


def volume_name(name: str) -> str:
    """`name` as a name of a pod's volume, which has to be a DNS label."""
    if len(name) <= _LABEL_CHARACTERS and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    cleaned_name = re.sub(r"[^a-z0-9-]+", "-", name.lower())[: _LABEL_CHARACTERS - len(digest) - 1]
    return f"{cleaned_name}-{digest}".lstrip("-")


def mount(template: PodTemplate, volume: Manifest, path: str, *, read_only: bool = False) -> None:
    name = volume["name"]
    volumes = list_at(template.spec, "volumes")
    present_volume = named(volumes, name)
    if present_volume is None:
        volumes.append(volume)
    elif _source(present_volume) != _source(volume):
        raise SpecError(
            f"two volumes have the name {name!r}: {_source(present_volume)} and {_source(volume)}",
            hint="give one of them another name",
        )
    mounts = list_at(template.container, "volumeMounts")
    mounted = named(mounts, path, by="mountPath")
    if mounted is None:
        volume_mount: Manifest = {"name": name, "mountPath": path}
        mounts.append(volume_mount | {"readOnly": True} if read_only else volume_mount)
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
    whole = [volume_mount for volume_mount in mounts if "subPath" not in volume_mount]
    return {
        volume_mount["name"]: str(volume_mount["mountPath"]) for volume_mount in reversed(whole)
    }


def restore(template: PodTemplate, old_volumes: list[Any]) -> None:
    """Add the old volumes that the pod's list lacks and that a mount still names."""
    volumes = list_at(template.spec, "volumes")
    containers = [*(template.spec.get("initContainers") or ()), *template.spec["containers"]]
    mounted_names = {
        volume_mount["name"]
        for container in containers
        for volume_mount in container.get("volumeMounts", ())
    }
    present_names = {volume["name"] for volume in volumes}
    volumes += [volume for volume in old_volumes if volume["name"] in mounted_names - present_names]
    assign(template.spec, "volumes", volumes)


def _read_volumes(template: PodTemplate) -> tuple[VolumeSpec, ...] | None:
    volumes, paths = [], mount_paths(template)
    for volume in template.spec.get("volumes") or ():
        path = paths.get(volume["name"])
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and path is not None:
            volumes.append(VolumeSpec(claim, path, claim=claim))
    return tuple(volumes) or None


def _write_volumes(template: PodTemplate, compute: ComputeSpec) -> None:
    for volume_spec in compute.volumes:
        claim = {"claimName": volume_spec.claim_name}
        name = _volume_of(template, volume_spec.claim_name) or volume_name(volume_spec.name)
        volume = {"name": name, "persistentVolumeClaim": claim}
        mount(template, volume, volume_spec.mount_path, read_only=volume_spec.is_read_only)


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
    volume = _shared_memory(template)
    limit = ((volume or {}).get("emptyDir") or {}).get("sizeLimit")
    return None if limit is None else str(limit)


def _write_limit(template: PodTemplate, compute: ComputeSpec) -> None:
    volume = _shared_memory(template)
    if volume is not None and "emptyDir" in volume:
        assign(volume["emptyDir"], "sizeLimit", compute.shared_memory_limit)


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
    """The PersistentVolumeClaim of a volume; `None` for a claim that the user made."""
    if volume.claim is not None or volume.size is None:
        return None
    spec: Manifest = {
        "accessModes": [volume.access_mode or UNSHARED],
        "resources": {"requests": {"storage": volume.size}},
    }
    if volume.volume_name is not None:
        # No class: a class would make a new volume instead of binding to the named one.
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
    """The PersistentVolumeClaim of an existing volume, with the fields that are known."""
    spec: Manifest = {"accessModes": [volume.access_mode], "storageClassName": storage_class}
    if volume.size is not None:
        spec["resources"] = {"requests": {"storage": volume.size}}
    if volume.volume_name is not None:
        spec["volumeName"] = volume.volume_name
    return _claim(volume, namespace, claim, spec) | {"status": {"phase": phase}}


def volume_of_claim(claim_manifest: Manifest) -> VolumeSpec:
    metadata, spec = claim_manifest["metadata"], claim_manifest["spec"]
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
