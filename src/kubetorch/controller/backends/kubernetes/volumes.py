"""Volumes as PersistentVolumeClaims, and which storage class they get if nobody names one.

No API says which access modes a class can give. An administrator can, by an annotation; else a
class counts as shared by several nodes when its provisioner is known to make such volumes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kubetorch.controller.backends.kubernetes import namespaces
from kubetorch.controller.backends.kubernetes.launch_failures.volumes import claims
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    SpecError,
    VolumeInUseError,
)
from kubetorch.k8s import resources
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection, is_leaving, is_over
from kubetorch.manifests import labels, storage
from kubetorch.specs import volume as specs
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire import tokens
from kubetorch.wire.volumes import CreatedVolume, StorageClass, VolumeView

_DEFAULT = "storageclass.kubernetes.io/is-default-class"
_DEFAULT_BETA = "storageclass.beta.kubernetes.io/is-default-class"
_SHARED_MODES = ("ReadWriteMany", "ReadOnlyMany")
#: Provisioners whose volumes several nodes can mount at a time; the first ones go first.
_SHARED = (
    r"nfs\.csi\.k8s\.io",
    r"(.+\.)?cephfs\.csi\.ceph\.com",  # with the namespace of Rook's operator in front
    r"filestore\.csi\.storage\.gke\.io",
    r"efs\.csi\.aws\.com",
    r"fsx\.csi\.aws\.com",
    r"file\.csi\.azure\.com",
    r"azurelustre\.csi\.azure\.com",
    r"lustre\.csi\.storage\.gke\.io",
    r"fss\.csi\.oraclecloud\.com",
    r"csi\.juicefs\.com",
    r"csi\.weka\.io",
    r"csi\.vastdata\.com",
    r"beegfs\.csi\.netapp\.com",
    r"driver\.longhorn\.io",
    r"smb\.csi\.k8s\.io",
    r"k8s-sigs\.io/nfs-subdir-external-provisioner",
    r"cluster\.local/.*nfs.*",  # what the charts of NFS provisioners call themselves
)
#: It makes folders of a node, for which it waits until a pod has one; a class of it that waits for
#: none makes folders of a file system that all nodes have.
_LOCAL_PATH = "rancher.io/local-path"
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
PERSISTENT_VOLUMES = Resource(
    "", "v1", "persistentvolumes", "PersistentVolume", is_namespaced=False
)
CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", is_namespaced=False)
Objects = list[Object]


def choose(classes: Sequence[Object], access_mode: str) -> str:
    ordered = sorted(classes, key=_order)
    annotated = [one for one in ordered if access_mode in _annotated(one)]
    if annotated:
        return _name(annotated[0])
    if access_mode not in _SHARED_MODES:
        unsaid = [one for one in ordered if not _annotated(one)]
        if unsaid:
            return _name(unsaid[0])
        raise _none(ordered, access_mode)
    shared = [one for one in ordered if not _annotated(one) and _rank(one) is not None]
    if not shared:
        raise _none(ordered, access_mode)
    # Sorting is stable: the default one goes first among those of a provisioner.
    return _name(min(shared, key=lambda one: _rank(one) or 0))


def mode_of(classes: Sequence[Object], storage_class: str | None) -> str:
    """The access mode of a volume for which nobody names one; of any class if none is named."""
    candidates = [one for one in classes if storage_class in (None, _name(one))]
    can_share = any(
        specs.SHARED in _annotated(one) if _annotated(one) else _rank(one) is not None
        for one in candidates
    )
    return specs.SHARED if can_share else specs.UNSHARED


def _order(found: Object) -> tuple[int, int, str]:
    """Defaults first, of several the newest one, as Kubernetes does; the rest by name."""
    made = found["metadata"].get("creationTimestamp") or ""
    newest = -int("".join(re.findall(r"\d", made)) or 0)
    noted = found["metadata"].get("annotations") or {}
    is_default = "true" in (noted.get(_DEFAULT), noted.get(_DEFAULT_BETA))
    return (0, newest, _name(found)) if is_default else (1, 0, _name(found))


def _rank(found: Object) -> int | None:
    """The rank of a class among those that several nodes can mount; `None` if they cannot."""
    provisioner = str(found.get("provisioner") or "")
    for number, pattern in enumerate(_SHARED):
        if re.fullmatch(pattern, provisioner):
            return number
    if provisioner == _LOCAL_PATH and found.get("volumeBindingMode") != "WaitForFirstConsumer":
        return len(_SHARED)
    return None


def _annotated(found: Object) -> tuple[str, ...]:
    noted = found["metadata"].get("annotations") or {}
    return tuple(re.findall(r"\w+", noted.get(labels.ACCESS_MODES) or ""))


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _none(classes: Sequence[Object], access_mode: str) -> SpecError:
    if not classes:
        return SpecError(
            "this cluster has no storage class, so it can make no volumes",
            hint="install a provisioner, or name a PersistentVolume that exists: pv=",
        )
    hint = f"name one yourself: storage_class= ({_listed(classes)})"
    if access_mode in _SHARED_MODES:
        first = classes[0]["metadata"]["name"]
        hint += (
            '; access_mode="ReadWriteOnce" if the pods of one node are enough; or let an '
            f"administrator say which can: kubectl annotate storageclass {first} "
            f"{labels.ACCESS_MODES}={access_mode}"
        )
    return SpecError(f"no storage class of this cluster is known to give {access_mode}", hint=hint)


def _class_for(classes: Sequence[Object], storage_class: str | None, access_mode: str) -> str:
    if storage_class is None:
        return choose(classes, access_mode)
    if storage_class and all(_name(one) != storage_class for one in classes):
        raise SpecError(
            f"storage_class is {storage_class!r}, which this cluster does not have",
            hint=f"it has {_listed(classes)}",
        )
    return storage_class


def _listed(classes: Sequence[Object]) -> str:
    return ", ".join(sorted(_name(one) for one in classes)) or "none"


class VolumeClaims:
    """The volumes of a cluster; a `VolumeStore`."""

    def __init__(self, client: Client, watched: tuple[str, ...] = ()) -> None:
        self._client = client
        self._watched = watched

    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        found, is_new = await self._find(namespace, spec.claim_name), False
        if found is None:
            found, is_new = await self._make(namespace, spec)
        if found["metadata"].get("deletionTimestamp"):
            pods = await self._pods(namespace, spec.claim_name, are_going=True)
            raise VolumeInUseError(
                f"the volume {spec.claim_name!r} in namespace {namespace!r} is being deleted, and "
                f"is still held{_by(pods)}",
                services=_services(pods),
                hint="wait until it is gone, or use another name",
            )
        return CreatedVolume(is_new=is_new, volume=_view(found))

    async def get(self, namespace: str, claim: str) -> VolumeView | None:
        found = await self._find(namespace, claim)
        return None if found is None else _view(found)

    async def list(self, namespace: str | None) -> list[VolumeView]:  # VolumeStore's
        found = await namespaces.find(self._client, CLAIMS, namespace, self._watched, labels.VOLUME)
        return [_view(one) for one in found]

    async def delete(
        self, namespace: str, claim: str, *, wait: float, is_forced: bool = False
    ) -> bool:
        found = await self._find(namespace, claim)
        if found is None:
            return True
        if not _is_ours(found):
            raise SpecError(
                f"the claim {claim!r} in namespace {namespace!r} was not made by Kubetorch, and so "
                "is not deleted",
                hint=f"kubectl delete pvc {claim} -n {namespace}",
            )
        pods = await self._pods(namespace, claim)
        if pods and not is_forced:
            first = pods[0]["metadata"]["name"]
            raise VolumeInUseError(
                f"the volume {claim!r} in namespace {namespace!r} is held{_by(pods)}",
                services=_services(pods),
                hint=f"kubectl delete pod {first} -n {namespace}, or whatever made it; "
                f"{specs.FORCE}",
            )
        uid = found["metadata"]["uid"]
        try:
            await self._client.delete(_ref(namespace, claim), preconditions={"uid": uid})
        except (KubernetesNotFoundError, KubernetesConflictError):
            return True  # what is there by now, if anything, is another one
        return await self._is_gone(namespace, claim, uid, 0.0 if pods else wait)

    async def storage_class(self, spec: VolumeSpec) -> StorageClass:  # VolumeStore's
        if spec.volume_name is not None:
            return StorageClass("", spec.access_mode or await self._mode_of(spec.volume_name))
        classes = await self._classes()
        access_mode = spec.access_mode or mode_of(classes, spec.storage_class)
        return StorageClass(_class_for(classes, spec.storage_class, access_mode), access_mode)

    async def _mode_of(self, volume_name: str) -> str:
        """The access mode of a claim that is bound to a PersistentVolume."""
        try:
            volume = await self._client.get(Ref(PERSISTENT_VOLUMES, volume_name))
        except (KubernetesNotFoundError, KubernetesForbiddenError):
            return specs.UNSHARED  # the claim waits for it
        modes = (volume.get("spec") or {}).get("accessModes") or [specs.UNSHARED]
        return next((mode for mode in (specs.SHARED, specs.UNSHARED) if mode in modes), modes[0])

    async def _find(self, namespace: str, claim: str) -> Object | None:
        return await namespaces.get(self._client, _ref(namespace, claim), self._watched)

    async def _classes(self) -> Objects:
        return (await self._client.list(Selection(CLASSES))).items

    async def _make(self, namespace: str, spec: VolumeSpec) -> tuple[Object, bool]:
        """The claim, and whether it was not there."""
        # In the claim itself: a default that changes later, or that there is none, changes nothing.
        chosen = await self.storage_class(spec)
        manifest = storage.claim(
            replace(spec, storage_class=chosen.storage_class, access_mode=chosen.access_mode),
            namespace=namespace,
        )
        if manifest is None:
            raise SpecError(f"the volume {spec.name!r} has no size, so it cannot be made")
        try:
            return await self._client.create(manifest), True
        except KubernetesRequestError as error:
            # Of two deploys that need it, one is first.
            there = await self._find(namespace, spec.claim_name)
            if isinstance(error, KubernetesConflictError) and there is not None:
                return there, False
            refused = namespaces.explain(namespace, error)
            if refused is error:
                raise
            raise refused from error

    async def _pods(self, namespace: str, claim: str, *, are_going: bool = False) -> Objects:
        """The pods that hold a claim; those that are being deleted only on request."""
        found = await self._client.list(Selection(PODS, namespace))
        return [
            pod
            for pod in found.items
            if claim in claims(pod.get("spec") or {})
            and not is_over(pod)
            and (are_going or not is_leaving(pod))
        ]

    async def _is_gone(self, namespace: str, claim: str, uid: str, wait: float) -> bool:
        """Wait until that claim is gone, for so many seconds; whether it is."""
        one = Selection(CLAIMS, namespace, fields=f"metadata.name={claim}")
        if wait <= 0:
            items = (await self._client.list(one)).items
            return all(found["metadata"]["uid"] != uid for found in items)
        async with Informer(self._client, one) as claims:
            try:
                await claims.until(
                    lambda objects: all(o["metadata"]["uid"] != uid for o in objects.values()),
                    timeout=wait,
                )
            except TimeoutError:
                return False
        return True


def _ref(namespace: str, claim: str) -> Ref:
    return Ref(CLAIMS, claim, namespace)


def _is_ours(found: Object) -> bool:
    return labels.VOLUME in (found["metadata"].get("labels") or {})


def _by(pods: Objects) -> str:
    names = ", ".join(pod["metadata"]["name"] for pod in pods)
    return f" by the pods {names}" if names else ""


def _services(pods: Objects) -> tuple[str, ...]:
    found = ((pod["metadata"].get("labels") or {}).get(labels.SERVICE) for pod in pods)
    return tuple(dict.fromkeys(name for name in found if name))


def _view(found: Object) -> VolumeView:
    metadata, spec = found["metadata"], found["spec"]
    storage_class = spec.get("storageClassName") or ""
    return VolumeView(
        namespace=metadata["namespace"],
        claim=metadata["name"],
        spec=_spec(found),
        phase=(found.get("status") or {}).get("phase") or "Pending",
        storage_class=storage_class,
        is_ours=_is_ours(found),
        identity=tokens.fingerprint(metadata["uid"]),
        created=resources.seconds(metadata["creationTimestamp"]),
    )


def _spec(found: Object) -> VolumeSpec:
    read = storage.volume_of_claim(found)
    if not _is_ours(found):
        return read
    # A volume that its class made for it is no part of how it was declared.
    is_named = not read.storage_class
    return VolumeSpec(
        name=read.name,
        mount_path=read.mount_path,
        size=read.size,
        storage_class=read.storage_class or None,
        access_mode=read.access_mode,
        namespace=read.namespace,
        volume_name=read.volume_name if is_named else None,
    )
