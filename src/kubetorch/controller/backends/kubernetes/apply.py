"""Objects of a workload in the cluster: applied when they differ, until the API server takes them.

A webhook that is away, a request too many, another writer: what may still come right is tried
again, and whoever waits for the deploy is notified of the reason. It ends with the deploy's own
time, or when the API server says that it never will.
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
#: Seconds until an object that has to be made anew is gone.
GONE_TIMEOUT = 60.0

#: What is there, by reference; `None` where nothing is.
Known = dict[Ref, Object | None]

_RECREATE: Object = {"type": "Recreate", "rollingUpdate": None}
_T = TypeVar("_T")
# Seconds until an object is applied again that could not be: at first, and at most.
_AGAIN = (0.5, 5.0)

_log = logging.getLogger(__name__)


class Applier:
    """Applies and deletes objects; an annotation marks those that it applied."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def look(self, manifests: Iterable[Manifest]) -> Known:
        """Get these objects, all at once; those that cannot be read are left out."""
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
        takes: Taking | None = None,
        known: Known | None = None,
        on_wait: Callable[[str], object] = str,
    ) -> Object:
        """Make an object what its manifest says; one that is like that already is left alone."""
        ref = await self.ref(manifest)
        there = known.pop(ref) if known and ref in known else await self.find(ref)
        while there is not None and there["metadata"].get("deletionTimestamp"):
            on_wait(f"the {there['kind']} {ref.name} is being deleted; it is made anew after that")
            await self._leave(ref, there["metadata"]["uid"])
            there = await self.find(ref)
        wanted = _wanted(manifest, owner, there)
        if (
            there is not None
            and _applied(there) == _applied(wanted)
            and not _is_edited(there, wanted)
        ):
            return there
        if there is not None and takes is None:
            _check_own(there, wanted)
        elif there is not None and takes is not None:
            wanted = await self._take_over(ref, there, wanted, takes)
        if there is not None and _keeps_pods(there, wanted):
            await self._remove(ref, wanted)
        elif there is not None and _is_to_be_recreated(there, wanted):
            wanted = {**wanted, "spec": {"paused": False, **wanted["spec"]}}
            await self._change_strategy(ref, there, wanted)
        try:
            found = await self._put(wanted)
        except KubernetesRequestError as error:
            if there is None or not _is_immutable(error):
                raise
            _log.info("object made anew ref=%s because=%s", ref, error.message)
            await self._remove(ref, wanted)
            found = await self._put(wanted)
        _log.info("object applied kind=%s namespace=%s name=%s", *_names(wanted))
        return found

    async def check(
        self, manifest: Manifest, owner: Manifest | None = None, *, takes: Taking | None = None
    ) -> None:
        """Refuse what `apply` would refuse of an object that is not there yet; nothing is made."""
        there = await self.find(await self.ref(manifest))
        if there is not None:
            if takes is None:
                _check_own(there, manifest)
            return
        kind = kinds.find(manifest)
        if kind is not None and not kind.has_template:
            return  # a TrainJob is refused until the runtime is there that is made for it
        try:
            await self._put(_marked(manifest, owner), dry_run=True)
        except KubernetesRequestError as error:
            # Some webhook cannot say it without doing it.
            if "does not support dry run" not in error.message:
                raise

    async def check_form(self, manifest: Manifest, owner: Manifest | None, known: Known) -> None:
        """Refuse an object whose fields its kind does not have; nothing is made, or changed.

        What else there may be against it is for `apply` to find out, which may know a way, unless
        what is there would be deleted for it.
        """
        there = known.get(await self.ref(manifest))
        wanted = _wanted(manifest, owner, there)
        if there is not None and _applied(there) == _applied(wanted):
            return
        try:
            await self._put(wanted, dry_run=True)
        except KubernetesRequestError as error:
            is_deleted = there is not None and _keeps_pods(there, wanted)
            if is_deleted and error.status_code == 422 and not _is_immutable(error):
                raise

    async def _put(self, wanted: Manifest, *, dry_run: bool = False) -> Object:
        try:
            return await self._client.apply(
                wanted, field_manager=FIELD_MANAGER, force=True, dry_run=dry_run
            )
        except KubernetesRequestError as error:
            if not failures.is_malformed(error.message):
                raise
            raise await malformed.refusal(self._client, wanted, error.message) from error

    async def ref(self, manifest: Manifest) -> Ref:
        resource: Resource = await self._client.discovery.resource_of(manifest)
        return Ref(resource, manifest["metadata"]["name"], manifest["metadata"].get("namespace"))

    async def find(self, ref: Ref) -> Object | None:
        try:
            return await self._client.get(ref)
        except KubernetesNotFoundError:
            return None

    async def delete(self, ref: Ref, *, grace_seconds: int | None = None) -> None:
        """Delete an object and what it owns; nothing happens if it is not there."""
        with contextlib.suppress(KubernetesNotFoundError):
            await self._client.delete(ref, grace_seconds=grace_seconds)

    async def delete_own(self, ref: Ref) -> str | None:
        """Delete an object if it was applied here; what is left of it, in words.

        That of somebody else stays, and one that was taken over is put back as it was.
        """
        there = await self.find(ref)
        if there is None:
            return None
        name = f"{ref.resource.kind} {ref.name}"
        if not _applied(there):
            return f"{name}, which is not Kubetorch's"
        before = takeover.read(there)
        if before is None:
            await self.delete(ref)
            return None
        how = await self._put_back(ref, there, before)
        _log.info("object put back ref=%s how=%s", ref, how)
        return f"{name}, {how}"

    async def _take_over(
        self, ref: Ref, there: Object, wanted: Manifest, takes: Taking
    ) -> Manifest:
        """Note what an object of a user is, and have what the agent replaces in it go."""
        paths = [*takeover.replaced_fields(there, wanted, takes.replaced)]
        if not _applied(there):
            removed = list(paths)
            if _is_to_be_recreated(there, wanted):
                removed.append(["f:spec", "f:strategy", "f:rollingUpdate"])
            # Without the owner: what deletes the workload is not to delete this.
            wanted = _recorded(wanted, takeover.record(there, wanted, removed))
            _log.info("object taken over ref=%s", ref)
        if paths:
            await self._set_managers(ref, there, takeover.claimed(there, FIELD_MANAGER, paths))
        return wanted

    async def _put_back(self, ref: Ref, there: Object, before: takeover.Before) -> str:
        kind = kinds.find(there)
        if kind is None or kind.replaces_pods:
            paths = takeover.agents_paths(there, before)
            restored = takeover.restored(there, before, FIELD_MANAGER)
            await self._set_managers(ref, there, takeover.claimed(there, FIELD_MANAGER, paths))
            try:
                made = await self._put(restored)
            except KubernetesRequestError as error:
                if not _is_immutable(error):
                    raise
            else:
                await self._return_managers(ref, made, before)
                return "as it was before"
        if before.is_ended:
            await self.delete(ref)
            return "which had run before its deploy and was replaced: it is not run once more"
        await self._remove(ref, there)
        await self._return_managers(
            ref, await self._client.create(takeover.whole(there, before)), before
        )
        return "made anew as it was before"

    async def _return_managers(self, ref: Ref, made: Object, before: takeover.Before) -> None:
        """Have fields be of those who had them, lest their next apply is a conflict."""
        with contextlib.suppress(KubernetesConflictError):  # a controller was faster
            entries = takeover.given_back(made, before, FIELD_MANAGER)
            await self._set_managers(ref, made, entries)
            return
        with contextlib.suppress(KubernetesConflictError, KubernetesNotFoundError):
            there = await self._client.get(ref)
            entries = takeover.given_back(there, before, FIELD_MANAGER)
            await self._set_managers(ref, there, entries)

    async def _set_managers(self, ref: Ref, there: Object, entries: Sequence[Object]) -> None:
        version = there["metadata"]["resourceVersion"]
        patch: Object = {"metadata": {"resourceVersion": version, "managedFields": [*entries]}}
        await self._client.patch(ref, patch)

    async def remove(self, manifest: Manifest) -> None:
        """Delete an object that was applied here, and wait until it and its pods are gone."""
        ref = await self.ref(manifest)
        there = await self.find(ref)
        if there is not None and _applied(there):
            _log.info("object to be made anew ref=%s", ref)
            await self._remove(ref, manifest)

    async def try_again(self, manifest: Manifest) -> Object:
        """Have Knative make a new Revision of the same template, in place of one that failed.

        The field is not one of those that are applied, so no later apply takes it away.
        """
        ref = await self.ref(manifest)
        there = await self._client.get(ref)
        noted = {"annotations": {labels.TRIED_AGAIN: version(there)}}
        patch = {"spec": {"template": {"metadata": noted}}}
        return await self._client.patch(ref, patch, field_manager=f"{FIELD_MANAGER}-again")

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
        with contextlib.suppress(TimeoutError):
            async with Informer(self._client, _only(ref)) as informer:
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
                await self._gone(_only(ref))
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
        if await self.find(ref) is None:
            return
        try:
            await self._gone(_only(ref))
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
        async with Informer(self._client, _only(ref)) as informer:
            await informer.until(
                lambda objects: all(one["metadata"]["uid"] != uid for one in objects.values()),
                timeout=None,
            )

    async def _gone(self, selection: Selection) -> None:
        async with Informer(self._client, selection) as informer:
            await informer.until(lambda objects: not objects, timeout=GONE_TIMEOUT)


def _only(ref: Ref) -> Selection:
    return Selection(ref.resource, ref.namespace, fields=f"metadata.name={ref.name}")


def _wanted(manifest: Manifest, owner: Manifest | None, there: Object | None) -> Manifest:
    """The manifest as it is applied: what an object was before stays with it."""
    if there is None or not takeover.is_recorded(there):
        return _marked(manifest, owner)
    return _recorded(_marked(manifest, owner), there["metadata"]["annotations"][labels.BEFORE])


def _recorded(wanted: Manifest, text: str) -> Manifest:
    """An object with the note of what it was, which nothing owns."""
    metadata = {**wanted["metadata"]}
    metadata.pop("ownerReferences", None)
    metadata["annotations"] = {**metadata["annotations"], labels.BEFORE: text}
    return {**wanted, "metadata": metadata}


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


def _is_edited(there: Object, wanted: Manifest) -> bool:
    """True if somebody else has set fields of its spec, as `kubectl scale` and `set image` do.

    Operators do that with objects of other kinds, and are right.
    """
    if there["kind"] not in ("Deployment", "StatefulSet"):
        return False
    # Its managed fields do not always say that somebody has scaled it.
    replicas = wanted["spec"].get("replicas")
    if replicas is not None and there["spec"].get("replicas") != replicas:
        return True
    entries = there["metadata"].get("managedFields") or ()
    others = (one for one in entries if one.get("manager") != FIELD_MANAGER)
    return any("f:spec" in (one.get("fieldsV1") or {}) for one in others)


def _keeps_pods(there: Object, wanted: Manifest) -> bool:
    """True if pods of another template would stay if the object were changed in place."""
    kind = kinds.find(wanted)
    if kind is None or kind.replaces_pods:
        return False
    old, new = (
        agent.digest_of(WorkloadManifest(one, kind).primary.body) for one in (there, wanted)
    )
    return bool(old and new and old != new)


def _is_to_be_recreated(there: Object, wanted: Manifest) -> bool:
    """True if a Deployment changes its strategy to the one without fields, or was about to."""
    if wanted["kind"] != "Deployment":
        return False
    was, becomes = (one["spec"].get("strategy") or {} for one in (there, wanted))
    is_whole = "rollingUpdate" not in was and not there["spec"].get("paused")
    return becomes.get("type") == "Recreate" and not is_whole


def _is_settled(deployment: Object, generation: int = 0) -> bool:
    """True if a Deployment of this generation or a later one has pods of one template."""
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
    """True if an object was applied here; controllers copy annotations to their own objects."""
    return bool(_applied(there)) and controller_of(there) is None


def is_applied(one: Object, owner: Manifest | None) -> bool:
    """True if an object was applied here for the workload of this reference."""
    owners = one["metadata"].get("ownerReferences") or ()
    uids = [each["uid"] for each in owners]
    is_owned = owner is None or owner["metadata"]["uid"] in uids
    return bool(_applied(one)) and (is_owned or takeover.is_recorded(one))


def _check_own(there: Object, wanted: Manifest) -> None:
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
    # Operators refuse it by their webhooks, which answers 403.
    if isinstance(error, KubernetesConflictError) or error.status_code not in (403, 422):
        return False
    said = error.message.lower()
    return "immutable" in said or "may not change fields" in said or "updates to" in said


def _names(manifest: Manifest) -> tuple[str, str, str]:
    metadata = manifest["metadata"]
    return manifest["kind"], str(metadata.get("namespace")), metadata["name"]


class Taking(NamedTuple):
    """That an object may be a user's own.

    Attributes:
        replaced: The names of the containers that the agent's takes the place of.
    """

    replaced: frozenset[str] = frozenset()


class WantedObjects(NamedTuple):
    manifests: Sequence[Manifest]
    taken: Manifest | None
    taking: Taking
    owner: Manifest | None
    known: Known
    timeout: float


class ApplyRetry:
    def __init__(
        self, applier: Applier, *, now: Callable[[], float], on_wait: Callable[[Key], None]
    ) -> None:
        self._applier = applier
        self._now = now
        self._on_wait = on_wait
        #: Why objects are not applied yet, by workload.
        self.reasons: dict[Key, str] = {}

    async def apply(self, key: Key, wanted: WantedObjects) -> list[Object]:
        async with self.within(key, wanted.timeout):
            return [await self._apply(key, manifest, wanted) for manifest in wanted.manifests]

    async def check_form(self, key: Key, wanted: WantedObjects) -> None:
        """Refuse a main object whose fields its kind does not have, before anything is changed."""
        main = wanted.manifests[-1]
        check = functools.partial(self._applier.check_form, main, wanted.owner, wanted.known)
        async with self.within(key, wanted.timeout):
            await self.until_taken(key, main, check)

    async def _apply(self, key: Key, manifest: Manifest, wanted: WantedObjects) -> Object:
        takes = wanted.taking if manifest is wanted.taken else None
        return await self.until_taken(
            key,
            manifest,
            lambda: self._applier.apply(
                manifest,
                owner=wanted.owner,
                takes=takes,
                known=wanted.known,
                on_wait=lambda reason: self._wait(key, reason),
            ),
        )

    @contextlib.asynccontextmanager
    async def within(self, key: Key, seconds: float) -> AsyncIterator[None]:
        """Bound the time of the requests for a workload."""
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

    async def until_taken(
        self, key: Key, manifest: Manifest, ask: Callable[[], Awaitable[_T]]
    ) -> _T:
        """Ask the API server for something about a manifest until it does it."""
        pauses = backoff.exponential(first=_AGAIN[0], limit=_AGAIN[1])
        while True:
            try:
                return await ask()
            except KubetorchError as error:
                verdict = diagnosis.judge_refusal(error, manifest, now=self._now())
                if verdict.error is error:
                    raise
                if verdict.error is not None:
                    raise verdict.error from error
                self._wait(key, verdict.reason)
                await asyncio.sleep(verdict.again or next(pauses))

    def _wait(self, key: Key, reason: str) -> None:
        self.reasons[key] = reason
        self._on_wait(key)
