"""Volumes as PersistentVolumeClaims, and the storage class of a volume whose spec names none.

No API says which access modes a storage class provides. An administrator can say so by an
annotation; else a class counts as shared by several nodes if its provisioner is in a table here.
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

_DEFAULT_ANNOTATION = "storageclass.kubernetes.io/is-default-class"
_DEFAULT_ANNOTATION_BETA = "storageclass.beta.kubernetes.io/is-default-class"
_SHARED_MODES = ("ReadWriteMany", "ReadOnlyMany")
#: Provisioners whose volumes several nodes can mount at a time, the preferred ones first.
_SHARED_PROVISIONERS = (
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
    r"cluster\.local/.*nfs.*",  # as the charts of NFS provisioners name them
)
#: A provisioner of folders. A class that waits for the first pod makes folders on the node of that
#: pod; a class that does not wait makes folders in a file system that all nodes share.
_LOCAL_PATH = "rancher.io/local-path"
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
PERSISTENT_VOLUMES = Resource(
    "", "v1", "persistentvolumes", "PersistentVolume", is_namespaced=False
)
CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", is_namespaced=False)
Objects = list[Object]


def choose(classes: Sequence[Object], access_mode: str) -> str:
    """Choose the storage class of a volume with an access mode.

    Raises:
        SpecError: No class is known to provide the access mode.
    """
    ordered = sorted(classes, key=_order)
    annotated = [
        class_object for class_object in ordered if access_mode in _annotated(class_object)
    ]
    if annotated:
        return _name(annotated[0])
    if access_mode not in _SHARED_MODES:
        unannotated = [class_object for class_object in ordered if not _annotated(class_object)]
        if unannotated:
            return _name(unannotated[0])
        raise _no_class(ordered, access_mode)
    shared = [
        class_object
        for class_object in ordered
        if not _annotated(class_object) and _rank(class_object) is not None
    ]
    if not shared:
        raise _no_class(ordered, access_mode)
    # `min` keeps the order: among the classes of one provisioner the default class goes first.
    return _name(min(shared, key=lambda class_object: _rank(class_object) or 0))


def mode_of(classes: Sequence[Object], storage_class: str | None) -> str:
    """The access mode of a volume whose spec names none; without `storage_class`, of any class."""
    candidates = [
        class_object for class_object in classes if storage_class in (None, _name(class_object))
    ]
    can_share = any(
        specs.SHARED in _annotated(candidate)
        if _annotated(candidate)
        else _rank(candidate) is not None
        for candidate in candidates
    )
    return specs.SHARED if can_share else specs.UNSHARED


def _order(class_object: Object) -> tuple[int, int, str]:
    """Sort key: default classes first, the newest first as in Kubernetes; the others by name."""
    creation_time = class_object["metadata"].get("creationTimestamp") or ""
    newest = -int("".join(re.findall(r"\d", creation_time)) or 0)
    class_annotations = class_object["metadata"].get("annotations") or {}
    is_default = "true" in (
        class_annotations.get(_DEFAULT_ANNOTATION),
        class_annotations.get(_DEFAULT_ANNOTATION_BETA),
    )
    return (0, newest, _name(class_object)) if is_default else (1, 0, _name(class_object))


def _rank(class_object: Object) -> int | None:
    """The rank of a class among those that several nodes can mount; `None` if they cannot."""
    provisioner = str(class_object.get("provisioner") or "")
    for number, pattern in enumerate(_SHARED_PROVISIONERS):
        if re.fullmatch(pattern, provisioner):
            return number
    if (
        provisioner == _LOCAL_PATH
        and class_object.get("volumeBindingMode") != "WaitForFirstConsumer"
    ):
        return len(_SHARED_PROVISIONERS)
    return None


def _annotated(class_object: Object) -> tuple[str, ...]:
    class_annotations = class_object["metadata"].get("annotations") or {}
    return tuple(re.findall(r"\w+", class_annotations.get(labels.ACCESS_MODES) or ""))


def _name(class_object: Object) -> str:
    return str(class_object["metadata"]["name"])


def _no_class(classes: Sequence[Object], access_mode: str) -> SpecError:
    if not classes:
        return SpecError(
            "this cluster has no storage class, so it can make no volumes",
            hint="install a provisioner, or name a PersistentVolume that exists: pv=",
        )
    hint = f"name one yourself: storage_class= ({_class_names(classes)})"
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
    if storage_class and all(_name(class_object) != storage_class for class_object in classes):
        raise SpecError(
            f"storage_class is {storage_class!r}, which this cluster does not have",
            hint=f"it has {_class_names(classes)}",
        )
    return storage_class


def _class_names(classes: Sequence[Object]) -> str:
    return ", ".join(sorted(_name(class_object) for class_object in classes)) or "none"


class VolumeClaims:
    """The volumes of a cluster; a `VolumeStore`."""

    def __init__(self, client: Client, watched: tuple[str, ...] = ()) -> None:
        self._client = client
        self._watched = watched

    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        claim_object, is_new = await self._find(namespace, spec.claim_name), False
        if claim_object is None:
            claim_object, is_new = await self._make(namespace, spec)
        if claim_object["metadata"].get("deletionTimestamp"):
            pods = await self._pods(namespace, spec.claim_name, with_leaving=True)
            raise VolumeInUseError(
                f"the volume {spec.claim_name!r} in namespace {namespace!r} is being deleted, and "
                f"is still held{_held_by(pods)}",
                services=_services(pods),
                hint="wait until it is gone, or use another name",
            )
        return CreatedVolume(is_new=is_new, volume=_view(claim_object))

    async def get(self, namespace: str, claim: str) -> VolumeView | None:
        claim_object = await self._find(namespace, claim)
        return None if claim_object is None else _view(claim_object)

    async def list(self, namespace: str | None) -> list[VolumeView]:  # VolumeStore's
        claim_objects = await namespaces.list_labelled(
            self._client, CLAIMS, namespace, self._watched, labels.VOLUME
        )
        return [_view(claim_object) for claim_object in claim_objects]

    async def delete(
        self, namespace: str, claim: str, *, wait: float, is_forced: bool = False
    ) -> bool:
        claim_object = await self._find(namespace, claim)
        if claim_object is None:
            return True
        if not _is_ours(claim_object):
            raise SpecError(
                f"the claim {claim!r} in namespace {namespace!r} was not made by Kubetorch, and so "
                "is not deleted",
                hint=f"kubectl delete pvc {claim} -n {namespace}",
            )
        pods = await self._pods(namespace, claim)
        if pods and not is_forced:
            first = pods[0]["metadata"]["name"]
            raise VolumeInUseError(
                f"the volume {claim!r} in namespace {namespace!r} is held{_held_by(pods)}",
                services=_services(pods),
                hint=f"kubectl delete pod {first} -n {namespace}, or whatever made it; "
                f"{specs.FORCE}",
            )
        uid = claim_object["metadata"]["uid"]
        try:
            await self._client.delete(_ref(namespace, claim), preconditions={"uid": uid})
        except (KubernetesNotFoundError, KubernetesConflictError):
            return True  # the claim has disappeared, or another claim has its name
        return await self._wait_until_deleted(namespace, claim, uid, 0.0 if pods else wait)

    async def storage_class(self, spec: VolumeSpec) -> StorageClass:  # VolumeStore's
        if spec.volume_name is not None:
            return StorageClass("", spec.access_mode or await self._mode_of(spec.volume_name))
        classes = (await self._client.list(Selection(CLASSES))).items
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

    async def _make(self, namespace: str, spec: VolumeSpec) -> tuple[Object, bool]:
        """Make a claim; returns it, and `False` if another deploy was faster."""
        # The claim names its class, so that a later change of the default class changes nothing.
        storage_class = await self.storage_class(spec)
        manifest = storage.claim(
            replace(
                spec,
                storage_class=storage_class.storage_class,
                access_mode=storage_class.access_mode,
            ),
            namespace=namespace,
        )
        if manifest is None:
            raise SpecError(f"the volume {spec.name!r} has no size, so it cannot be made")
        try:
            return await self._client.create(manifest), True
        except KubernetesRequestError as error:
            # Another deploy that needs the volume may have made it in between.
            claim_object = await self._find(namespace, spec.claim_name)
            if isinstance(error, KubernetesConflictError) and claim_object is not None:
                return claim_object, False
            refusal = namespaces.explain(namespace, error)
            if refusal is error:
                raise
            raise refusal from error

    async def _pods(self, namespace: str, claim: str, *, with_leaving: bool = False) -> Objects:
        """The pods that hold a claim; those that are being deleted only on request."""
        listing = await self._client.list(Selection(PODS, namespace))
        return [
            pod
            for pod in listing.items
            if claim in claims(pod) and not is_over(pod) and (with_leaving or not is_leaving(pod))
        ]

    async def _wait_until_deleted(self, namespace: str, claim: str, uid: str, wait: float) -> bool:
        """Wait for `wait` seconds until a claim has disappeared; returns `False` if it has not."""
        selection = Selection(CLAIMS, namespace, fields=f"metadata.name={claim}")
        if wait <= 0:
            items = (await self._client.list(selection)).items
            return all(claim_object["metadata"]["uid"] != uid for claim_object in items)
        async with Informer(self._client, selection) as informer:
            try:
                await informer.until(
                    lambda objects: all(
                        claim_object["metadata"]["uid"] != uid for claim_object in objects.values()
                    ),
                    timeout=wait,
                )
            except TimeoutError:
                return False
        return True


def _ref(namespace: str, claim: str) -> Ref:
    return Ref(CLAIMS, claim, namespace)


def _is_ours(claim_object: Object) -> bool:
    return labels.VOLUME in (claim_object["metadata"].get("labels") or {})


def _held_by(pods: Objects) -> str:
    names = ", ".join(pod["metadata"]["name"] for pod in pods)
    return f" by the pods {names}" if names else ""


def _services(pods: Objects) -> tuple[str, ...]:
    service_names = ((pod["metadata"].get("labels") or {}).get(labels.SERVICE) for pod in pods)
    return tuple(dict.fromkeys(name for name in service_names if name))


def _view(claim_object: Object) -> VolumeView:
    metadata, spec = claim_object["metadata"], claim_object["spec"]
    storage_class = spec.get("storageClassName") or ""
    return VolumeView(
        namespace=metadata["namespace"],
        claim=metadata["name"],
        spec=_spec(claim_object),
        phase=(claim_object.get("status") or {}).get("phase") or "Pending",
        storage_class=storage_class,
        is_ours=_is_ours(claim_object),
        identity=tokens.fingerprint(metadata["uid"]),
        created=resources.seconds(metadata["creationTimestamp"]),
    )


def _spec(claim_object: Object) -> VolumeSpec:
    volume = storage.volume_of_claim(claim_object)
    if not _is_ours(claim_object):
        return volume
    # A PersistentVolume that the storage class made is no part of the declaration.
    is_named = not volume.storage_class
    return VolumeSpec(
        name=volume.name,
        mount_path=volume.mount_path,
        size=volume.size,
        storage_class=volume.storage_class or None,
        access_mode=volume.access_mode,
        namespace=volume.namespace,
        volume_name=volume.volume_name if is_named else None,
    )
