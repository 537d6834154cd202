"""Volumes as PersistentVolumeClaims."""

from __future__ import annotations

from kubetorch.controller.backends.kubernetes import listing, refusals, storage_classes
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    SpecError,
    VolumeInUseError,
)
from kubetorch.k8s import timestamps
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection
from kubetorch.manifests import labels, storage
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire.volumes import CreatedVolume, VolumeView

CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", is_namespaced=False)
Objects = list[Object]
#: Pods that hold no volume any more.
_ENDED = ("Succeeded", "Failed")


class VolumeClaims:
    """The volumes of a cluster; a `VolumeStore`.

    Args:
        client: Asks the API server.
        watched: Namespaces that the controller has a say in; all if there are none.
    """

    def __init__(self, client: Client, watched: tuple[str, ...] = ()) -> None:
        self._client = client
        self._watched = watched

    # -------------------------------------------------------------------------------- VolumeStore

    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:  # noqa: D102
        found = await self._find(namespace, spec.claim_name)
        if found is None:
            found, is_new = await self._make(namespace, spec)
        else:
            is_new = False
        if found["metadata"].get("deletionTimestamp"):
            pods = await self._pods(namespace, spec.claim_name, are_going=True)
            raise VolumeInUseError(
                f"the volume {spec.claim_name!r} in namespace {namespace!r} is being deleted, and "
                f"is still held{_by(pods)}",
                services=_services(pods),
                hint="wait until it is gone, or use another name",
            )
        return CreatedVolume(is_new=is_new, volume=_view(found))

    async def get(self, namespace: str, claim: str) -> VolumeView | None:  # noqa: D102
        found = await self._find(namespace, claim)
        return None if found is None else _view(found)

    async def list(self, namespace: str | None) -> list[VolumeView]:  # noqa: D102  # VolumeStore's
        found = await listing.find(self._client, CLAIMS, namespace, self._watched, labels.VOLUME)
        return [_view(one) for one in found]

    async def delete(self, namespace: str, claim: str, *, wait: float) -> bool:  # noqa: D102
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
        if pods:
            first = pods[0]["metadata"]["name"]
            raise VolumeInUseError(
                f"the volume {claim!r} in namespace {namespace!r} is held{_by(pods)}",
                services=_services(pods),
                hint=f"kubectl delete pod {first} -n {namespace}, or whatever made it",
            )
        uid = found["metadata"]["uid"]
        try:
            await self._client.delete(_ref(namespace, claim), preconditions={"uid": uid})
        except (KubernetesNotFoundError, KubernetesConflictError):
            return True  # what is there by now, if anything, is another one
        return await self._is_gone(namespace, claim, uid, wait)

    async def storage_class(self, access_mode: str) -> str:  # noqa: D102  # VolumeStore's
        return storage_classes.choose(await self._classes(), access_mode)

    # ------------------------------------------------------------------------------------- pieces

    async def _find(self, namespace: str, claim: str) -> Object | None:
        refusals.check_watched(namespace, self._watched)
        try:
            return await self._client.get(_ref(namespace, claim))
        except KubernetesNotFoundError:
            return None

    async def _classes(self) -> Objects:
        return (await self._client.list(Selection(CLASSES))).items

    async def _make(self, namespace: str, spec: VolumeSpec) -> tuple[Object, bool]:
        """The claim, and whether it was not there."""
        manifest = storage.claim(spec, namespace=namespace)
        if manifest is None:
            raise SpecError(f"the volume {spec.name!r} has no size, so it cannot be made")
        if spec.volume_name is None:
            # Said in the claim: a default that changes later, or that there is none, changes
            # nothing for it.
            manifest["spec"]["storageClassName"] = await self._class_for(spec)
        try:
            return await self._client.create(manifest), True
        except KubernetesRequestError as error:
            # Of two deploys that need it, one is first.
            there = await self._find(namespace, spec.claim_name)
            if isinstance(error, KubernetesConflictError) and there is not None:
                return there, False
            refused = refusals.explain(namespace, error)
            if refused is error:
                raise
            raise refused from error

    async def _class_for(self, spec: VolumeSpec) -> str:
        classes = await self._classes()
        if spec.storage_class is None:
            return storage_classes.choose(classes, spec.access_mode)
        names = {one["metadata"]["name"] for one in classes}
        if spec.storage_class and spec.storage_class not in names:
            raise storage_classes.missing(classes, spec.storage_class)
        return spec.storage_class

    async def _pods(self, namespace: str, claim: str, *, are_going: bool = False) -> Objects:
        """The pods that hold a claim; those that are being deleted only on request."""
        found = await self._client.list(Selection(PODS, namespace))
        return [
            pod
            for pod in found.items
            if claim in _claims(pod)
            and (pod.get("status") or {}).get("phase") not in _ENDED
            and (are_going or not pod["metadata"].get("deletionTimestamp"))
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


def _claims(pod: Object) -> list[str]:
    """Names of the claims that a pod has."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return [(one.get("persistentVolumeClaim") or {}).get("claimName", "") for one in volumes]


def _by(pods: Objects) -> str:
    names = ", ".join(pod["metadata"]["name"] for pod in pods)
    return f" by the pods {names}" if names else ""


def _services(pods: Objects) -> tuple[str, ...]:
    """The services that pods are of."""
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
        created=timestamps.seconds(metadata["creationTimestamp"]),
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
