"""The objects of a workload in the cluster: applied when they differ from their manifests.

A live object is an object as it is in the cluster. A desired manifest is a rendered manifest with
its marks: the digest of what is applied, the owner, and the note of what a user's object was.

`Applier` sends one request. `ApplyRetry` repeats a request whose refusal may pass (a webhook that
does not answer, too many requests, another writer), and the deploy reports the reason meanwhile.
It stops at the timeout of the deploy, or when the API server will never accept the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from kubetorch.controller.backends.kubernetes import malformed, takeover
from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import controller_of
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.controller.tuning import TIMING
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    KubetorchError,
    ServiceTimeoutError,
    StartupError,
)
from kubetorch.k8s import failures
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection, version
from kubetorch.lib import backoff, deadlines
from kubetorch.manifests import agent, kinds, labels, services
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.workload_manifest import WorkloadManifest

FIELD_MANAGER = "kubetorch"
#: The field manager of what the scaler writes: a deploy's applies leave it as it is.
SCALER_MANAGER = "kubetorch-scaler"

#: Live objects by reference; `None` for an object that does not exist.
LiveObjects = dict[Ref, Object | None]

_RECREATE: Object = {"type": "Recreate", "rollingUpdate": None}
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Applier:
    """Applies and deletes objects; an annotation marks the objects that it has applied."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def read_live_objects(self, manifests: Iterable[Manifest]) -> LiveObjects:
        """Get the live objects of manifests, all at once, without those that cannot be read."""
        refs: list[Ref] = []
        for manifest in manifests:
            with contextlib.suppress(KubetorchError):
                refs.append(await self.ref(manifest))
        answers = await asyncio.gather(*map(self.find, refs), return_exceptions=True)
        pairs = zip(refs, answers, strict=True)
        return {ref: answer for ref, answer in pairs if not isinstance(answer, BaseException)}

    async def apply(
        self,
        manifest: Manifest,
        *,
        owner: Manifest | None = None,
        permission: TakeoverPermission | None = None,
        live_objects: LiveObjects | None = None,
        scaled_to: int | None = None,
        on_wait: Callable[[str], object] = str,
    ) -> Object:
        """Make a live object what its manifest says; returns the live object.

        Args:
            manifest: The rendered manifest.
            owner: The object that owns it.
            permission: Whether the live object may be one that its user made.
            live_objects: Live objects that were read before; the used one is taken out.
            scaled_to: The number of pods of a Deployment whose manifest does not say it.
            on_wait: Called with the reason for which this waits.
        """
        ref = await self.ref(manifest)
        live_object = (
            live_objects.pop(ref) if live_objects and ref in live_objects else await self.find(ref)
        )
        while live_object is not None and live_object["metadata"].get("deletionTimestamp"):
            on_wait(
                f"the {live_object['kind']} {ref.name} is being deleted; it is made anew after that"
            )
            await self._wait_for_foreign_deletion(ref, live_object["metadata"]["uid"])
            live_object = await self.find(ref)
        desired_manifest = _desired_manifest(manifest, owner, live_object)
        # An object that is like its manifest already costs no request.
        if (
            live_object is not None
            and _applied(live_object) == _applied(desired_manifest)
            and not _is_edited(live_object, desired_manifest)
        ):
            return live_object
        # The objects of others stay as they are, unless their user brought them to the deploy.
        if live_object is not None and permission is None:
            _check_own(live_object, desired_manifest)
        elif live_object is not None and permission is not None:
            desired_manifest = await self._take_over(ref, live_object, desired_manifest, permission)
        # A change in place would leave pods of the old template.
        if live_object is not None and _keeps_pods(live_object, desired_manifest):
            await self._remove(ref, desired_manifest)
        elif live_object is not None and _is_to_be_recreated(live_object, desired_manifest):
            desired_manifest = {
                **desired_manifest,
                "spec": {"paused": False, **desired_manifest["spec"]},
            }
            await self._change_strategy(ref, live_object, desired_manifest)
        new_manifest = _with_replicas(desired_manifest, scaled_to)
        if live_object is None:
            applied_object = await self._put(new_manifest)
        else:
            if scaled_to is not None and scaled_size(live_object) is None:
                # Else the apply would reset the number to 1.
                await self.scale(desired_manifest, scaled_to)
            try:
                applied_object = await self._put(desired_manifest)
            except KubernetesRequestError as error:
                if not _is_immutable(error):
                    raise
                _log.info("object made anew ref=%s because=%s", ref, error.message)
                await self._remove(ref, desired_manifest)
                applied_object = await self._put(new_manifest)
        _log.info("object applied kind=%s namespace=%s name=%s", *_names(desired_manifest))
        return applied_object

    async def scale(self, manifest: Manifest, size: int) -> None:
        """Set the number of pods of a live Deployment whose manifest does not say it."""
        metadata = {part: manifest["metadata"][part] for part in ("name", "namespace")}
        scaled_manifest = {
            "apiVersion": manifest["apiVersion"],
            "kind": manifest["kind"],
            "metadata": metadata,
            "spec": {"replicas": size},
        }
        await self._client.apply(scaled_manifest, field_manager=SCALER_MANAGER, force=True)

    async def check(
        self,
        manifest: Manifest,
        owner: Manifest | None = None,
        *,
        permission: TakeoverPermission | None = None,
    ) -> None:
        """Refuse an object that `apply` would refuse, if it does not exist yet; makes nothing."""
        live_object = await self.find(await self.ref(manifest))
        if live_object is not None:
            if permission is None:
                _check_own(live_object, manifest)
            return
        kind = kinds.find(manifest)
        if kind is not None and not kind.has_template:
            return  # the API server refuses a TrainJob until its runtime exists
        try:
            await self._put(_marked(manifest, owner), dry_run=True)
        except KubernetesRequestError as error:
            # Some webhooks have side effects, and so no dry run.
            if "does not support dry run" not in error.message:
                raise

    async def check_form(
        self, manifest: Manifest, owner: Manifest | None, live_objects: LiveObjects
    ) -> None:
        """Refuse a manifest with fields that its kind does not have; changes nothing.

        `apply` meets all other refusals, and may know a way around them. Where it would have to
        delete the live object first, other errors in the manifest are raised here as well.
        """
        live_object = live_objects.get(await self.ref(manifest))
        desired_manifest = _desired_manifest(manifest, owner, live_object)
        if live_object is not None and _applied(live_object) == _applied(desired_manifest):
            return
        try:
            await self._put(desired_manifest, dry_run=True)
        except KubernetesRequestError as error:
            is_deleted = live_object is not None and _keeps_pods(live_object, desired_manifest)
            if is_deleted and error.status_code == 422 and not _is_immutable(error):
                raise

    async def _put(self, manifest: Manifest, *, dry_run: bool = False) -> Object:
        try:
            return await self._client.apply(
                manifest, field_manager=FIELD_MANAGER, force=True, dry_run=dry_run
            )
        except KubernetesRequestError as error:
            if not failures.is_malformed(error.message):
                raise
            raise await malformed.refusal(self._client, manifest, error.message) from error

    async def ref(self, manifest: Manifest) -> Ref:
        resource: Resource = await self._client.discovery.resource_of(manifest)
        return Ref(resource, manifest["metadata"]["name"], manifest["metadata"].get("namespace"))

    async def find(self, ref: Ref) -> Object | None:
        try:
            return await self._client.get(ref)
        except KubernetesNotFoundError:
            return None

    async def delete(self, ref: Ref, *, grace_seconds: int | None = None) -> None:
        """Delete an object and the objects that it owns, if it exists."""
        with contextlib.suppress(KubernetesNotFoundError):
            await self._client.delete(ref, grace_seconds=grace_seconds)

    async def delete_applied(self, ref: Ref) -> str | None:
        """Delete an object that Kubetorch applied; returns a phrase on an object that stays.

        The object of another writer stays, and an object that was taken over becomes again what it
        was.
        """
        live_object = await self.find(ref)
        if live_object is None:
            return None
        name = f"{ref.resource.kind} {ref.name}"
        if not _applied(live_object):
            return f"{name}, which is not Kubetorch's"
        original = takeover.read(live_object)
        if original is None:
            await self.delete(ref)
            return None
        outcome = await self._put_back(ref, live_object, original)
        _log.info("object put back ref=%s how=%s", ref, outcome)
        return f"{name}, {outcome}"

    async def _take_over(
        self,
        ref: Ref,
        live_object: Object,
        desired_manifest: Manifest,
        permission: TakeoverPermission,
    ) -> Manifest:
        """Record what a user's object is, and claim the fields that the agent replaces.

        The next apply removes the claimed fields, since the desired manifest has none of them.
        """
        paths = [
            *takeover.replaced_fields(live_object, desired_manifest, permission.replaced_containers)
        ]
        if not _applied(live_object):
            removed = list(paths)
            if _is_to_be_recreated(live_object, desired_manifest):
                removed.append(["f:spec", "f:strategy", "f:rollingUpdate"])
            # Without an owner: the deletion of the workload is not to delete the user's object.
            desired_manifest = _recorded(
                desired_manifest, takeover.record(live_object, desired_manifest, removed)
            )
            _log.info("object taken over ref=%s", ref)
        if paths:
            await self._set_managers(
                ref, live_object, takeover.entries_with_claim(live_object, FIELD_MANAGER, paths)
            )
        return desired_manifest

    async def _put_back(
        self, ref: Ref, live_object: Object, original: takeover.OriginalState
    ) -> str:
        kind = kinds.find(live_object)
        if kind is None or kind.replaces_pods:
            paths = takeover.agents_container_paths(live_object, original)
            restored = takeover.restoring_manifest(live_object, original, FIELD_MANAGER)
            await self._set_managers(
                ref, live_object, takeover.entries_with_claim(live_object, FIELD_MANAGER, paths)
            )
            try:
                applied_object = await self._put(restored)
            except KubernetesRequestError as error:
                if not _is_immutable(error):
                    raise
            else:
                await self._return_managers(ref, applied_object, original)
                return "as it was before"
        if original.is_ended:
            await self.delete(ref)
            return "which had run before its deploy and was replaced: it is not run once more"
        await self._remove(ref, live_object)
        await self._return_managers(
            ref,
            await self._client.create(takeover.original_manifest(live_object, original)),
            original,
        )
        return "made anew as it was before"

    async def _return_managers(
        self, ref: Ref, applied_object: Object, original: takeover.OriginalState
    ) -> None:
        """Return fields to their earlier managers, lest their next apply is a conflict."""
        with contextlib.suppress(KubernetesConflictError):  # a controller wrote it in between
            entries = takeover.entries_given_back(applied_object, original, FIELD_MANAGER)
            await self._set_managers(ref, applied_object, entries)
            return
        with contextlib.suppress(KubernetesConflictError, KubernetesNotFoundError):
            live_object = await self._client.get(ref)
            entries = takeover.entries_given_back(live_object, original, FIELD_MANAGER)
            await self._set_managers(ref, live_object, entries)

    async def _set_managers(self, ref: Ref, live_object: Object, entries: Sequence[Object]) -> None:
        version = live_object["metadata"]["resourceVersion"]
        patch: Object = {"metadata": {"resourceVersion": version, "managedFields": [*entries]}}
        await self._client.patch(ref, patch)

    async def remove(self, manifest: Manifest) -> None:
        """Delete an object that Kubetorch applied; returns when it and its pods are gone."""
        ref = await self.ref(manifest)
        live_object = await self.find(ref)
        if live_object is not None and _applied(live_object):
            _log.info("object to be made anew ref=%s", ref)
            await self._remove(ref, manifest)

    async def retry_revision(self, manifest: Manifest) -> Object:
        """Make Knative create a new Revision of the same template, in place of a failed Revision.

        Another field manager writes the annotation, so no later apply removes it.
        """
        ref = await self.ref(manifest)
        live_object = await self._client.get(ref)
        metadata = {"annotations": {labels.TRIED_AGAIN: version(live_object)}}
        patch = {"spec": {"template": {"metadata": metadata}}}
        return await self._client.patch(ref, patch, field_manager=f"{FIELD_MANAGER}-again")

    async def _change_strategy(
        self, ref: Ref, live_object: Object, desired_manifest: Manifest
    ) -> None:
        """Prepare a Deployment for an apply with the strategy `Recreate`.

        The defaults of a rolling update have no field manager, so no apply removes them, and the
        API server refuses `Recreate` beside them. The Deployment is paused in between, so that no
        pod ends for the change. Kubernetes does not scale a `Recreate` Deployment that has pods of
        two templates, so the pods of the earlier roll-out have to end first.
        """
        await self._client.patch(ref, {"spec": {"strategy": _RECREATE, "paused": True}})
        if _is_settled(live_object):
            return
        metadata = dict(desired_manifest["metadata"])
        metadata["annotations"] = {**metadata["annotations"], labels.APPLIED: "begun"}
        spec = {**desired_manifest["spec"], "replicas": live_object["spec"]["replicas"]}
        interim_manifest = {**desired_manifest, "metadata": metadata, "spec": spec}
        applied_object = await self._client.apply(
            interim_manifest, field_manager=FIELD_MANAGER, force=True
        )
        generation = applied_object["metadata"]["generation"]
        with contextlib.suppress(TimeoutError):
            async with Informer(self._client, _only(ref)) as informer:
                await informer.until(
                    lambda objects: all(
                        _is_settled(deployment, generation) for deployment in objects.values()
                    ),
                    timeout=TIMING.object_deletion_seconds,
                )

    async def _remove(self, ref: Ref, manifest: Manifest) -> None:
        """Delete an object and wait until it and its pods have disappeared.

        The pods of the new object may have the names of the old pods. Deletion does not wait for
        pods by itself (`Foreground`): an operator that still sees its object, without the pods,
        makes the pods once more. And of two Jobs with one name within a moment the second has no
        pods for five minutes, since its controller waits to see the pods of the first.
        """
        await self.delete(ref)
        try:
            async with deadlines.timeout(TIMING.object_deletion_seconds):
                await self._wait_until_empty(_only(ref))
                pods = _pods_of(manifest, ref.namespace)
                if pods is not None:
                    await self._wait_until_empty(pods)
        except TimeoutError as error:
            raise StartupError(
                f"the {ref.resource.kind} {ref.name} cannot be changed in place, and its old one, "
                f"or pods of it, are still there after {TIMING.object_deletion_seconds:.0f} s",
                hint=f"kubectl get {ref.resource},pods -n {ref.namespace} -o yaml shows what is "
                "left, and its finalizers",
            ) from error

    async def wait_until_deleted(self, ref: Ref) -> None:
        if await self.find(ref) is None:
            return
        try:
            await self._wait_until_empty(_only(ref))
        except TimeoutError as error:
            raise StartupError(
                f"the {ref.resource.kind} {ref.name} of an earlier deploy was deleted, and is "
                f"still there after {TIMING.object_deletion_seconds:.0f} s",
                hint=f"kubectl get {ref.resource} {ref.name} -n {ref.namespace} -o yaml shows its "
                "finalizers",
            ) from error

    async def _wait_for_foreign_deletion(self, ref: Ref, uid: str) -> None:
        """Wait until an object has disappeared that another client has deleted.

        Finalizers hold the object: those of a deletion that waits for the pods, or leaves them, or
        those of an operator. The deploy's timeout bounds the wait.
        """
        async with Informer(self._client, _only(ref)) as informer:
            await informer.until(
                lambda objects: all(
                    live_object["metadata"]["uid"] != uid for live_object in objects.values()
                ),
                timeout=None,
            )

    async def _wait_until_empty(self, selection: Selection) -> None:
        async with Informer(self._client, selection) as informer:
            await informer.until(
                lambda objects: not objects, timeout=TIMING.object_deletion_seconds
            )


def _only(ref: Ref) -> Selection:
    return Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")


def _desired_manifest(
    manifest: Manifest, owner: Manifest | None, live_object: Object | None
) -> Manifest:
    """The manifest with its marks; the note of what a user's object was stays in it."""
    if live_object is None or not takeover.is_recorded(live_object):
        return _marked(manifest, owner)
    return _recorded(
        _marked(manifest, owner), live_object["metadata"]["annotations"][labels.BEFORE]
    )


def _recorded(manifest: Manifest, text: str) -> Manifest:
    """The manifest with a note of what the user's object was, and without an owner."""
    metadata = {**manifest["metadata"]}
    metadata.pop("ownerReferences", None)
    metadata["annotations"] = {**metadata["annotations"], labels.BEFORE: text}
    return {**manifest, "metadata": metadata}


def _marked(manifest: Manifest, owner: Manifest | None) -> Manifest:
    """The manifest with its owner and its digest."""
    metadata = dict(manifest["metadata"])
    if owner is not None:
        identity = {part: owner["metadata"][part] for part in ("name", "uid")}
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **identity}
        metadata["ownerReferences"] = [reference]
    marked = {**manifest, "metadata": metadata}
    text = msgspec.json.encode(marked, order="sorted")
    digest = hashlib.sha256(text).hexdigest()[:16]
    metadata["annotations"] = {**(metadata.get("annotations") or {}), labels.APPLIED: digest}
    return marked


def _is_edited(live_object: Object, desired_manifest: Manifest) -> bool:
    """True if another writer has set fields of the spec, as `kubectl scale` and `set image` do.

    Objects of other kinds do not count: their operators set fields of the spec by design.
    """
    if live_object["kind"] not in ("Deployment", "StatefulSet"):
        return False
    # `managedFields` do not always show that another writer has scaled the object.
    replicas = desired_manifest["spec"].get("replicas")
    if replicas is not None and live_object["spec"].get("replicas") != replicas:
        return True
    # The number of pods of a scaled Deployment is not the deploy's.
    ignored_fields = {"f:replicas"} if replicas is None else set[str]()
    entries = live_object["metadata"].get("managedFields") or ()
    own_managers = (FIELD_MANAGER, SCALER_MANAGER)
    return any(
        _spec_fields(entry) - ignored_fields
        for entry in entries
        if entry.get("manager") not in own_managers
    )


def scaled_size(live_object: Object) -> int | None:
    """The number of pods of a Deployment, if it is the scaler's and not that of an apply."""
    is_of_scaler = any(
        "f:replicas" in _spec_fields(entry)
        for entry in live_object["metadata"].get("managedFields") or ()
        if entry.get("manager") == SCALER_MANAGER
    )
    return int(live_object["spec"].get("replicas", 1)) if is_of_scaler else None


def _spec_fields(entry: Object) -> set[str]:
    return {*((entry.get("fieldsV1") or {}).get("f:spec") or {})}


def _with_replicas(manifest: Manifest, size: int | None) -> Manifest:
    """The manifest of a new object, which is to come up with so many pods."""
    if size is None:
        return manifest
    return {**manifest, "spec": {**manifest["spec"], "replicas": size}}


def _keeps_pods(live_object: Object, desired_manifest: Manifest) -> bool:
    """True if pods of another template would stay if the object were changed in place."""
    kind = kinds.find(desired_manifest)
    if kind is None or kind.replaces_pods:
        return False
    live_digest, desired_digest = (
        agent.digest_of(WorkloadManifest(manifest, kind).primary.body)
        for manifest in (live_object, desired_manifest)
    )
    return bool(live_digest and desired_digest and live_digest != desired_digest)


def _is_to_be_recreated(live_object: Object, desired_manifest: Manifest) -> bool:
    """True if a Deployment changes its strategy to `Recreate`, or an earlier apply began to."""
    if desired_manifest["kind"] != "Deployment":
        return False
    live_strategy, desired_strategy = (
        manifest["spec"].get("strategy") or {} for manifest in (live_object, desired_manifest)
    )
    is_whole = "rollingUpdate" not in live_strategy and not live_object["spec"].get("paused")
    return desired_strategy.get("type") == "Recreate" and not is_whole


def _is_settled(deployment: Object, generation: int = 0) -> bool:
    """True if a Deployment of this generation or a later one has pods of one template."""
    status = deployment.get("status") or {}
    is_seen = int(status.get("observedGeneration", 0)) >= generation
    return is_seen and int(status.get("replicas", 0)) == int(status.get("updatedReplicas", 0))


def _pods_of(manifest: Manifest, namespace: str | None) -> Selection | None:
    """The selection of an object's pods; `None` if its kind is not known to have pods."""
    kind = kinds.find(manifest)
    if kind is None:
        return None
    name = manifest["metadata"]["name"]
    service = (manifest["metadata"].get("labels") or {}).get(labels.SERVICE, name)
    selector = services.pods_of(manifest, kind, name=service)
    return Selection(PODS, namespace, labels=",".join(f"{k}={v}" for k, v in selector.items()))


def is_own(live_object: Object) -> bool:
    """True if Kubetorch applied an object, and not a controller that copied its annotations."""
    return bool(_applied(live_object)) and controller_of(live_object) is None


def is_applied(live_object: Object, owner: Manifest | None) -> bool:
    """True if Kubetorch applied an object for the workload that `owner` is."""
    references = live_object["metadata"].get("ownerReferences") or ()
    uids = [reference["uid"] for reference in references]
    is_owned = owner is None or owner["metadata"]["uid"] in uids
    return bool(_applied(live_object)) and (is_owned or takeover.is_recorded(live_object))


def _check_own(live_object: Object, desired_manifest: Manifest) -> None:
    if is_own(live_object):
        return
    kind, namespace, name = _names(desired_manifest)
    raise StartupError(
        f"there is a {kind} {name!r} in namespace {namespace!r} that Kubetorch did not make, so it "
        "is left as it is",
        hint="give the service another name, or bring that object: kt.Compute.from_manifest(...)",
    )


def _applied(manifest: Manifest) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(labels.APPLIED) or "")


def _is_immutable(error: KubernetesRequestError) -> bool:
    # The webhooks of operators refuse such a change with 403.
    if isinstance(error, KubernetesConflictError) or error.status_code not in (403, 422):
        return False
    message = error.message.lower()
    return "immutable" in message or "may not change fields" in message or "updates to" in message


def _names(manifest: Manifest) -> tuple[str, str, str]:
    metadata = manifest["metadata"]
    return manifest["kind"], str(metadata.get("namespace")), metadata["name"]


class TakeoverPermission(NamedTuple):
    """The permission to apply a manifest to an object that its user made.

    Attributes:
        replaced_containers: The names of the containers that the agent's container replaces.
    """

    replaced_containers: frozenset[str] = frozenset()


class ApplyPlan(NamedTuple):
    """The objects that one deploy applies.

    Attributes:
        manifests: The rendered manifests, in the order of their applies; the main object is last.
        user_manifest: The one of them whose live object may be the user's.
        permission: What the deploy may do to the user's object.
        owner: The object that owns all of them, if any.
        live_objects: The live objects that were read before.
        timeout: Seconds for all requests of one step.
        scaled_to: The number of pods of the main object, if its manifest does not say it.
    """

    manifests: Sequence[Manifest]
    user_manifest: Manifest | None
    permission: TakeoverPermission
    owner: Manifest | None
    live_objects: LiveObjects
    timeout: float
    scaled_to: int | None = None


class ApplyRetry:
    def __init__(
        self, applier: Applier, *, now: Callable[[], float], on_wait: Callable[[Key], None]
    ) -> None:
        self._applier = applier
        self._now = now
        self._on_wait = on_wait
        #: Why the objects of a workload are not applied yet, by workload.
        self.reasons: dict[Key, str] = {}

    async def apply(self, key: Key, plan: ApplyPlan) -> list[Object]:
        async with self.within(key, plan.timeout):
            return [await self._apply(key, manifest, plan) for manifest in plan.manifests]

    async def check_form(self, key: Key, plan: ApplyPlan) -> None:
        """Refuse a main object with fields that its kind does not have, before any change."""
        main = plan.manifests[-1]
        check = functools.partial(self._applier.check_form, main, plan.owner, plan.live_objects)
        async with self.within(key, plan.timeout):
            await self.until_accepted(key, main, check)

    async def _apply(self, key: Key, manifest: Manifest, plan: ApplyPlan) -> Object:
        permission = plan.permission if manifest is plan.user_manifest else None
        scaled_to = plan.scaled_to if manifest is plan.manifests[-1] else None
        return await self.until_accepted(
            key,
            manifest,
            lambda: self._applier.apply(
                manifest,
                owner=plan.owner,
                permission=permission,
                live_objects=plan.live_objects,
                scaled_to=scaled_to,
                on_wait=lambda reason: self._wait(key, reason),
            ),
        )

    @contextlib.asynccontextmanager
    async def within(self, key: Key, seconds: float) -> AsyncIterator[None]:
        """Bound the time of the requests for a workload; the timeout error has the last reason."""
        try:
            async with deadlines.timeout(seconds):
                yield
        except TimeoutError as error:
            raise ServiceTimeoutError(
                f"{key[1]} could not be applied within {seconds:.0f} s: "
                f"{self.reasons.get(key, 'the API server is slow')}",
                hint="kt.Compute(launch_timeout=...) allows more time",
            ) from error
        finally:
            self.reasons.pop(key, None)

    async def until_accepted(
        self, key: Key, manifest: Manifest, request: Callable[[], Awaitable[_T]]
    ) -> _T:
        """Repeat a request about a manifest until the API server accepts it, or never will."""
        pauses = backoff.exponential(
            first=TIMING.apply_first_delay_seconds, limit=TIMING.apply_longest_delay_seconds
        )
        while True:
            try:
                return await request()
            except KubetorchError as error:
                verdict = diagnosis.judge_refusal(error, manifest, now=self._now())
                if verdict.error is error:
                    raise
                if verdict.error is not None:
                    raise verdict.error from error
                self._wait(key, verdict.reason)
                await asyncio.sleep(verdict.recheck_seconds or next(pauses))

    def _wait(self, key: Key, reason: str) -> None:
        self.reasons[key] = reason
        self._on_wait(key)
