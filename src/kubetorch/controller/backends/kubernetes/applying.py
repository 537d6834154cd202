"""Objects of a workload in the cluster: applied when they differ, deleted together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable

import msgspec

from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    KubetorchError,
    StartupError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection
from kubetorch.lib import deadlines
from kubetorch.manifests import agent, kinds, labels, locating, services
from kubetorch.manifests.kinds import Manifest

FIELD_MANAGER = "kubetorch"
#: Seconds until an object that has to be made anew is gone.
GONE_TIMEOUT = 60.0

#: What is there, by reference; `None` where nothing is.
Known = dict[Ref, Object | None]

_RECREATE: Object = {"type": "Recreate", "rollingUpdate": None}

_log = logging.getLogger(__name__)


class Applier:
    """Applies objects, and knows what it applied.

    Args:
        client: Asks the API server.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def look(self, manifests: Iterable[Manifest]) -> Known:
        """What is there of these objects, asked at once; what cannot be said is left out."""
        refs: list[Ref] = []
        for manifest in manifests:
            with contextlib.suppress(KubetorchError):
                refs.append(await self.ref(manifest))
        found = await asyncio.gather(*map(self.find, refs), return_exceptions=True)
        pairs = zip(refs, found, strict=True)
        return {ref: one for ref, one in pairs if not isinstance(one, BaseException)}

    async def apply(
        self,
        manifest: Manifest,
        *,
        owner: Manifest | None = None,
        takes: bool = False,
        known: Known | None = None,
        on_wait: Callable[[str], object] = str,
    ) -> Object:
        """Make an object what its manifest says; one that is like that already is left alone.

        Args:
            manifest: The object.
            owner: The object that it goes away with (`ownerReferences`).
            takes: Whether an object that somebody else made is taken over.
            known: What was there a moment ago; it is used up.
            on_wait: Told why it takes a while: what is being deleted has to be gone first, however
                long that takes.

        Raises:
            KubernetesError: The API server refuses it.
            StartupError: Somebody else made an object of that name.
        """
        wanted = _marked(manifest, owner)
        ref = await self.ref(wanted)
        if known is not None and ref in known:
            there = known.pop(ref)
        else:
            there = await self.find(ref)
        while there is not None and there["metadata"].get("deletionTimestamp"):
            on_wait(f"the {there['kind']} {ref.name} is being deleted; it is made anew after that")
            await self._leave(ref, there["metadata"]["uid"])
            there = await self.find(ref)
        if there is not None and _applied(there) == _applied(wanted):
            return there
        if there is not None and not takes:
            _check_own(there, wanted)
        if there is not None and _keeps_pods(there, wanted):
            await self._remove(ref, wanted)
        elif there is not None and _is_to_be_recreated(there, wanted):
            wanted = {**wanted, "spec": {"paused": False, **wanted["spec"]}}
            await self._change_strategy(ref, there, wanted)
        try:
            found = await self._client.apply(wanted, field_manager=FIELD_MANAGER, force=True)
        except KubernetesRequestError as error:
            if there is None or not _is_immutable(error):
                raise
            _log.info("object made anew ref=%s because=%s", ref, error.message)
            await self._remove(ref, wanted)
            found = await self._client.apply(wanted, field_manager=FIELD_MANAGER, force=True)
        _log.info("object applied kind=%s namespace=%s name=%s", *_names(wanted))
        return found

    async def check(
        self, manifest: Manifest, owner: Manifest | None = None, *, takes: bool = False
    ) -> None:
        """Refuse what `apply` would refuse of an object that is not there yet; nothing is made.

        Raises:
            KubernetesError: The API server would refuse it.
            StartupError: Somebody else made an object of that name.
        """
        there = await self.find(await self.ref(manifest))
        if there is not None:
            if not takes:
                _check_own(there, manifest)
            return
        kind = kinds.find(manifest)
        if kind is not None and not kind.has_template:
            return  # a TrainJob is refused until the runtime is there that is made for it
        try:
            wanted = _marked(manifest, owner)
            await self._client.apply(wanted, field_manager=FIELD_MANAGER, force=True, dry_run=True)
        except KubernetesRequestError as error:
            # Some webhook cannot say it without doing it.
            if "does not support dry run" not in error.message:
                raise

    async def ref(self, manifest: Manifest) -> Ref:
        """Which object a manifest is of.

        Raises:
            KubernetesNotFoundError: The cluster has no such kind.
        """
        resource: Resource = await self._client.discovery.resource_of(manifest)
        return Ref(resource, manifest["metadata"]["name"], manifest["metadata"].get("namespace"))

    async def find(self, ref: Ref) -> Object | None:
        """An object, if it is there."""
        try:
            return await self._client.get(ref)
        except KubernetesNotFoundError:
            return None

    async def delete(self, ref: Ref, *, grace_seconds: int | None = None) -> None:
        """Delete an object and what it owns; nothing happens if it is not there."""
        try:
            await self._client.delete(ref, grace_seconds=grace_seconds)
        except KubernetesNotFoundError:
            return

    async def delete_own(self, ref: Ref) -> None:
        """Delete an object if it was applied here; that of somebody else stays."""
        there = await self.find(ref)
        if there is not None and _applied(there):
            await self.delete(ref)

    async def remove(self, manifest: Manifest) -> None:
        """Delete an object that was applied here, and wait until it and its pods are gone."""
        ref = await self.ref(manifest)
        there = await self.find(ref)
        if there is not None and _applied(there):
            _log.info("object to be made anew ref=%s", ref)
            await self._remove(ref, manifest)

    async def _change_strategy(self, ref: Ref, there: Object, wanted: Manifest) -> None:
        """Make a Deployment ready for an apply that has its pods recreated.

        The defaults of a rolling update belong to nobody, so no apply removes them, and the other
        strategy is refused beside them. What is between the two is paused, lest pods end for it.
        A Deployment to be recreated whose pods are of two templates is not scaled any more, so
        those of the earlier roll-out have to end first.
        """
        await self._client.patch(ref, {"spec": {"strategy": _RECREATE, "paused": True}})
        if _is_settled(there):
            return
        metadata = dict(wanted["metadata"])
        metadata["annotations"] = {**metadata["annotations"], labels.APPLIED: "begun"}
        spec = {**wanted["spec"], "replicas": there["spec"]["replicas"]}
        begun = {**wanted, "metadata": metadata, "spec": spec}
        made = await self._client.apply(begun, field_manager=FIELD_MANAGER, force=True)
        generation = made["metadata"]["generation"]
        one = Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")
        with contextlib.suppress(TimeoutError):
            async with Informer(self._client, one) as informer:
                await informer.until(
                    lambda objects: all(_is_settled(o, generation) for o in objects.values()),
                    timeout=GONE_TIMEOUT,
                )

    async def _remove(self, ref: Ref, wanted: Manifest) -> None:
        """Delete an object and wait until it and its pods are gone.

        Pods of the old one may have the names of those of the new one. Nor does deletion wait for
        them by itself (`Foreground`): an operator that sees its object still there, without what
        it owned, makes that once more, and of two Jobs of one name within a moment the second has
        no pods for five minutes, as its controller waits to see those of the first.
        """
        await self.delete(ref)
        try:
            async with deadlines.timeout(GONE_TIMEOUT):
                await self._gone(
                    Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")
                )
                pods = _pods_of(wanted, ref.namespace)
                if pods is not None:
                    await self._gone(pods)
        except TimeoutError as error:
            raise StartupError(
                f"the {ref.resource.kind} {ref.name} cannot be changed in place, and its old one, "
                f"or pods of it, are still there after {GONE_TIMEOUT:.0f} s",
                hint=f"kubectl get {ref.resource},pods -n {ref.namespace} -o yaml shows what is "
                "left, and its finalizers",
            ) from error

    async def gone(self, ref: Ref) -> None:
        """Wait until an object is gone.

        Raises:
            StartupError: It is still there after a minute.
        """
        if await self.find(ref) is None:
            return
        one = Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")
        try:
            await self._gone(one)
        except TimeoutError as error:
            raise StartupError(
                f"the {ref.resource.kind} {ref.name} of an earlier deploy was deleted, and is "
                f"still there after {GONE_TIMEOUT:.0f} s",
                hint=f"kubectl get {ref.resource} {ref.name} -n {ref.namespace} -o yaml shows its "
                "finalizers",
            ) from error

    async def _leave(self, ref: Ref, uid: str) -> None:
        """Wait until an object is gone that somebody has deleted.

        Finalizers hold it: of a deletion that waits for the pods first, or leaves them, or of an
        operator. Whoever waits for the deploy bounds it.
        """
        one = Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")
        async with Informer(self._client, one) as informer:
            await informer.until(
                lambda objects: all(one["metadata"]["uid"] != uid for one in objects.values()),
                timeout=None,
            )

    async def _gone(self, selection: Selection) -> None:
        """Wait until there is nothing of a selection any more."""
        async with Informer(self._client, selection) as informer:
            await informer.until(lambda objects: not objects, timeout=GONE_TIMEOUT)


def _marked(manifest: Manifest, owner: Manifest | None) -> Manifest:
    """The manifest with its owner and its digest."""
    metadata = dict(manifest["metadata"])
    if owner is not None:
        metadata["ownerReferences"] = [
            {
                "apiVersion": owner["apiVersion"],
                "kind": owner["kind"],
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
            }
        ]
    marked = {**manifest, "metadata": metadata}
    text = msgspec.json.encode(marked, order="sorted")
    digest = hashlib.sha256(text).hexdigest()[:16]
    metadata["annotations"] = {**(metadata.get("annotations") or {}), labels.APPLIED: digest}
    return marked


def _keeps_pods(there: Object, wanted: Manifest) -> bool:
    """Whether pods of another template would stay if the object were changed in place."""
    kind = kinds.find(wanted)
    if kind is None or kind.replaces_pods:
        return False
    old, new = (agent.digest_of(locating.places(one, kind)[0].template) for one in (there, wanted))
    return bool(old and new and old != new)


def _is_to_be_recreated(there: Object, wanted: Manifest) -> bool:
    """Whether a Deployment changes its strategy to the one without fields, or was about to."""
    if wanted["kind"] != "Deployment":
        return False
    was, becomes = (one["spec"].get("strategy") or {} for one in (there, wanted))
    is_whole = "rollingUpdate" not in was and not there["spec"].get("paused")
    return becomes.get("type") == "Recreate" and not is_whole


def _is_settled(deployment: Object, generation: int = 0) -> bool:
    """Whether a Deployment of this generation or a later one has pods of one template."""
    status = deployment.get("status") or {}
    is_seen = int(status.get("observedGeneration", 0)) >= generation
    return is_seen and int(status.get("replicas", 0)) == int(status.get("updatedReplicas", 0))


def _pods_of(manifest: Manifest, namespace: str | None) -> Selection | None:
    """The pods of an object; `None` for one of a kind that is not known to run any."""
    kind = kinds.find(manifest)
    if kind is None:
        return None
    name = manifest["metadata"]["name"]
    service = (manifest["metadata"].get("labels") or {}).get(labels.SERVICE, name)
    chosen = services.pods_of(manifest, kind, name=service)
    return Selection(PODS, namespace, labels=",".join(f"{k}={v}" for k, v in chosen.items()))


def is_own(there: Object) -> bool:
    """Whether an object was applied here; controllers copy annotations to what they make."""
    return bool(_applied(there)) and controller_of(there) is None


def controller_of(one: Object) -> Object | None:
    """The reference to what made an object and keeps it, if something does."""
    owners: list[Object] = one["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)


def _check_own(there: Object, wanted: Manifest) -> None:
    """Refuse to change an object of somebody else."""
    if is_own(there):
        return
    kind, namespace, name = _names(wanted)
    raise StartupError(
        f"there is a {kind} {name!r} in namespace {namespace!r} that Kubetorch did not make, so it "
        "is left as it is",
        hint="give the service another name, or bring that object: kt.Compute.from_manifest(...)",
    )


def _applied(manifest: Manifest) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(labels.APPLIED) or "")


def _is_immutable(error: KubernetesRequestError) -> bool:
    """Whether the object would have to be made anew."""
    # Operators refuse it by their webhooks, which answers 403.
    if isinstance(error, KubernetesConflictError) or error.status_code not in (403, 422):
        return False
    said = error.message.lower()
    return "immutable" in said or "may not change fields" in said or "updates to" in said


def _names(manifest: Manifest) -> tuple[str, str, str]:
    metadata = manifest["metadata"]
    return manifest["kind"], str(metadata.get("namespace")), metadata["name"]
