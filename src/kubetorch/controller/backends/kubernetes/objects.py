"""The objects of a workload: what was applied, how many pods it asks for, what has to go first.

A spec of another kind makes other objects. Those of before would go on beside them, with their pods
and GPUs, and their names may be in the way: of a Service of ours where the new kind's controller
makes its own, or of what the old kind's controller made. So they go first, but not before the API
server has said that it would take the new ones. They are found by their labels, so that a
controller which starts in between finds them, too.

A controller that starts adopts what an earlier one applied. It asks for much at once then, and one
request too many is refused: a workload that is not known for that reason is adopted later, without
a new deploy.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

import msgspec

from kubetorch.controller.backends.kubernetes.apply import (
    Applier,
    ApplyRetry,
    WantedObjects,
    is_applied,
    is_own,
)
from kubetorch.controller.backends.kubernetes.launch_failures import snapshot
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.errors import (
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesUnavailableError,
    KubetorchError,
    SpecError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import SERVICES, Object, Ref, Resource, Selection
from kubetorch.lib import backoff
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import agent, kinds, labels, pod_security, rendering, replicas, trainjob
from kubetorch.manifests.kinds import KINDS, Manifest, Path
from kubetorch.manifests.services import KubernetesServices
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest
from kubetorch.specs.compute import thaw
from kubetorch.specs.distribution import SINGLE_CONTROLLER
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Equipment, Runtime

_API = "serving.knative.dev/"
#: Group, kind and name of an object: with another one of these it is another object.
Identity = tuple[str, str, str]
_T = TypeVar("_T")
# What a deploy may make, with its versions: never volumes or secrets.
_VERSIONS: dict[tuple[str, str], tuple[str, ...]] = {
    **{(row.group, row.kind): row.versions for row in KINDS.values()},
    ("", "Service"): ("v1",),
    (trainjob.GROUP, trainjob.RUNTIME_KIND): KINDS["TrainJob", trainjob.GROUP].versions,
}
# Owners between an object and what it owns: a Knative Service, its Route, that one's Service.
_DEPTH = 4
# Workloads that are adopted at one time.
_AT_ONCE = 16
# Seconds until the adoption of one is tried again: at first, and at most.
_AGAIN = (1.0, 30.0)
_log = logging.getLogger(__name__)


def expected(there: Object, path: Path | None = None) -> int | None:
    """The least number of pods of its latest template that an object asks for.

    Somebody else may have changed the number since it was applied, such as a
    HorizontalPodAutoscaler.
    """
    workload = WorkloadManifest.parse(there, path)
    kind = workload.kind
    if kind.is_autoscaled:
        return 1
    if kind.kind == "DaemonSet":
        status = there.get("status") or {}
        is_seen = status.get("observedGeneration", 0) >= there["metadata"].get("generation", 1)
        return max(1, int(status.get("desiredNumberScheduled") or 0)) if is_seen else None
    return max(1, replicas.running(workload))


def rests(owners: Sequence[Object], template: str) -> bool:
    """True if the scaler keeps the service without pods because nobody calls it."""
    ready = {
        (one.get("status") or {}).get("latestReadyRevisionName")
        for one in _of_kind(owners, "Service")
    }
    for revision in _of_kind(owners, "Revision"):
        status = revision.get("status") or {}
        if revision["metadata"]["name"] in ready and agent.digest_of(revision) == template:
            is_ready = snapshot.condition(revision, "Ready").get("status") == "True"
            # Noted when the scaler has first decided.
            return is_ready and status.get("desiredReplicas") == 0
    return False


def address(owners: Sequence[Object]) -> str:
    """The URL of the service for programs in the cluster; empty until Knative has named it."""
    for service in _of_kind(owners, "Service"):
        found = (service.get("status") or {}).get("address") or {}
        if found.get("url"):
            return str(found["url"])
    return ""


def _of_kind(owners: Sequence[Object], kind: str) -> list[Object]:
    found = (one for one in owners if str(one.get("apiVersion", "")).startswith(_API))
    return [one for one in found if one["kind"] == kind]


class AppliedWorkload(msgspec.Struct):
    spec: WorkloadSpec
    main: Manifest | None
    called: dict[str, str]
    template: str = ""
    objects: frozenset[Identity] = frozenset()
    #: Whether its pods comply with the Pod Security level `restricted`.
    is_restricted: bool = False
    #: Whether the user who deploys it knows that.
    is_reported: bool = False
    #: How often it was applied once more because its pods were refused.
    repeats: int = 0
    #: Its images that are known to run as root.
    root_images: frozenset[str] = frozenset()
    #: Version of the secrets that its pods see.
    secrets: str = ""
    # That of the object which it was applied as (`metadata.generation`).
    _generation: int = 0
    # The attempt that Knative makes at a Revision of its template.
    _attempt: str = ""

    @classmethod
    def of(cls, spec: WorkloadSpec, *, has_operator: bool = True) -> AppliedWorkload:
        """The objects of a spec, whether the operator of its kind is there or not."""
        main = None
        if not spec.compute.is_selector_only:
            main = rendering.of_workload(spec, has_operator=has_operator)
        is_all = spec.compute.broadcast is not None or _is_world(spec)
        called = {} if is_all else KubernetesServices.of(spec, main).called
        return cls(spec, main, called)

    @property
    def is_ranked(self) -> bool:
        """True if its processes have ranks, which follow the numbers of pods."""
        compute = self.spec.compute
        is_called_whole = compute.broadcast is not None or compute.is_pool
        return compute.distribution is not None or is_called_whole

    def equip(self, runtime: Runtime, root_images: Collection[str] | None = None) -> None:
        """Put the agent into its pods: the last that is written into its object."""
        self.is_restricted = root_images is not None
        if self.main is not None:
            agent.equip(
                self.main,
                workload=self.spec.name,
                runtime=runtime,
                path=self.spec.compute.pod_template_path,
                working_dir=agent.working_dir(self.spec),
                root_images=root_images,
            )
            self._read(self.main)

    def found(self, there: Object | None) -> None:
        """An earlier controller applied it, maybe with another agent; it is left as it is."""
        if there is not None:
            self.is_restricted = pod_security.is_complying(self._read(there))
            self.applied(there)

    def _read(self, one: Manifest) -> PodTemplate:
        """The first pod template of an equipped object."""
        templates = WorkloadManifest.parse(one, self.spec.compute.pod_template_path).templates
        self.template = agent.digest_of(templates[0].body)
        self.root_images = frozenset(pod_security.root_images(templates))
        self.secrets = templates[0].read_pods("annotations").get(labels.SECRETS_VERSION, "")
        return templates[0]

    def equipment(self, runtime: Runtime) -> Equipment | None:
        if self.main is None:
            return None
        kind = rendering.operated_kind(self.spec.compute)
        return Equipment(
            runtime,
            tuple(sorted(self.root_images)) if self.is_restricted else None,
            self.secrets,
            has_operator=kind is None or kind.kind == self.main["kind"],
        )

    @property
    def images(self) -> set[str]:
        if self.main is None:
            return set()
        found = WorkloadManifest.parse(self.main, self.spec.compute.pod_template_path).templates
        return {str(one.container.get("image")) for one in found}

    def applied(self, there: Object) -> None:
        self._generation = _generation(there)
        self._attempt = _attempt((there.get("spec") or {}).get("template") or {})

    def has_given_up(self, pod: Object) -> bool:
        """True if a pod is of a Revision in whose place Knative was asked for another one."""
        return _attempt(pod) != self._attempt

    def expected(self, owners: Sequence[Object]) -> int | None:
        """The number of pods, as in `Backend.expected`."""
        if self.main is None:
            return self.spec.compute.pods
        if rests(owners, self.template):
            return 0
        there = owners[0] if owners and self.is_seen(owners) else self.main
        return expected(there, self.spec.compute.pod_template_path)

    def is_seen(self, owners: Sequence[Object]) -> bool:
        """False if what was seen last of its object is older than what was applied."""
        return all(_generation(one) >= self._generation for one in owners[:1])


def replaced_containers(spec: WorkloadSpec) -> frozenset[str]:
    """The containers of a user's own object that are the agent's in what a deploy applies."""
    compute = spec.compute
    if compute.manifest is None:
        return frozenset()
    parsed = WorkloadManifest.parse(thaw(compute.manifest), compute.pod_template_path)
    return frozenset(one.container.get("name", "") for one in parsed.templates)


def _is_world(spec: WorkloadSpec) -> bool:
    """True if any pod takes a call for all pods: a pod that calls are routed to may be lost."""
    compute = spec.compute
    framework = compute.distribution and compute.distribution.distribution_type
    has_own = compute.endpoint is not None and compute.endpoint.selector is not None
    return framework is not None and framework not in SINGLE_CONTROLLER and not has_own


def identity(manifest: Manifest) -> Identity:
    group = str(manifest["apiVersion"]).rpartition("/")[0]
    return group, manifest["kind"], manifest["metadata"]["name"]


def identities(manifests: Iterable[Manifest]) -> frozenset[Identity]:
    return frozenset(map(identity, manifests))


def _attempt(one: Object) -> str:
    noted = (one.get("metadata") or {}).get("annotations") or {}
    return str(noted.get(labels.TRIED_AGAIN) or "")


def _generation(there: Object) -> int:
    return int(there["metadata"].get("generation") or 0)


class ObjectReplacement:
    def __init__(self, client: Client, applier: Applier, apply_retry: ApplyRetry) -> None:
        self._client = client
        self._applier = applier
        self._apply_retry = apply_retry

    async def make_room(
        self, key: Key, wanted: WantedObjects, before: AppliedWorkload | None
    ) -> None:
        """Remove what is not wanted any more, once the API server would take what is."""
        if before is None or before.objects == identities(wanted.manifests):
            return
        before.objects = frozenset()
        async with self._apply_retry.within(key, wanted.timeout):
            find = functools.partial(self._find, key, wanted.manifests, wanted.owner, before.main)
            found = await self._retry(key, wanted, find)
            uids = {one["metadata"]["uid"] for one in found}
            look = functools.partial(self._in_the_way, wanted.manifests, uids)
            going = await self._retry(key, wanted, look)
            if found or going:
                await self._check(key, wanted, going)
                refs = [await self._applier.ref(one) for one in found]
                names = ",".join(f"{ref.resource}/{ref.name}" for ref in refs)
                _log.info("objects not wanted any more workload=%s/%s objects=%s", *key, names)
                await self._retry(key, wanted, functools.partial(self._remove, refs, going))
                wanted.known.clear()

    async def remove_left(
        self, key: Key, workload: AppliedWorkload, owner: Manifest | None
    ) -> list[str]:
        """Delete what else there may be of a workload that is deleted; without an owner it goes.

        Returns what is left, in words.
        """
        if workload.objects or owner is None:
            return []
        found = await self._find(key, (), owner, workload.main)
        left = [await self._applier.delete_own(await self._applier.ref(one)) for one in found]
        return [one for one in left if one is not None]

    async def _retry(self, key: Key, wanted: WantedObjects, ask: Callable[[], Awaitable[_T]]) -> _T:
        nothing: Manifest = {"metadata": {"namespace": key[0]}}
        about = wanted.manifests[-1] if wanted.manifests else nothing
        return await self._apply_retry.until_taken(key, about, ask)

    async def _check(self, key: Key, wanted: WantedObjects, going: Iterable[Ref]) -> None:
        """Raise what there is against what is wanted, but for what is in its way."""
        blocked = {(ref.resource.group, ref.resource.kind, ref.name) for ref in going}
        for manifest in wanted.manifests:
            if identity(manifest) not in blocked:
                takes = wanted.taking if manifest is wanted.taken else None
                check = functools.partial(self._applier.check, manifest, wanted.owner, takes=takes)
                await self._apply_retry.until_taken(key, manifest, check)

    async def _find(
        self,
        key: Key,
        wanted: Sequence[Manifest],
        owner: Manifest | None,
        before: Manifest | None,
    ) -> list[Object]:
        """The objects that were applied for a workload, but for those that are wanted."""
        versions = dict(_VERSIONS)
        if before is not None:
            group, kind, _ = identity(before)
            version = str(before["apiVersion"]).rpartition("/")[2]
            versions.setdefault((group, kind), (version,))
        resources = await asyncio.gather(*map(self._served, versions, versions.values()))
        lists = await asyncio.gather(*(self._list(one, key) for one in resources if one))
        kept = identities(wanted)
        return [
            one
            for found in lists
            for one in found
            if identity(one) not in kept and is_own(one) and is_applied(one, owner)
        ]

    async def _served(self, kind: tuple[str, str], versions: Sequence[str]) -> Resource | None:
        """The resource of a kind, if the cluster serves the kind."""
        group, name = kind
        for version in versions:
            try:
                return await self._client.discovery.find(
                    f"{group}/{version}" if group else version, name
                )
            except KubernetesNotFoundError:
                continue
        return None

    async def _list(self, resource: Resource, key: Key) -> list[Object]:
        selection = Selection(resource, key[0], labels=f"{labels.SERVICE}={key[1]}")
        try:
            return list((await self._client.list(selection)).items)
        except (KubernetesNotFoundError, KubernetesForbiddenError):
            return []  # whoever may not list a kind has made none of it

    async def _in_the_way(self, wanted: Sequence[Manifest], uids: set[str]) -> list[Ref]:
        """The objects with the name of a wanted one that are about to go with their owners."""
        refs = []
        for ref in [await self._applier.ref(one) for one in wanted] + _made_by(wanted):
            there = await self._applier.find(ref)
            if there is not None and await self._goes(there, uids):
                refs.append(ref)
        return refs

    async def _goes(self, one: Object, uids: set[str]) -> bool:
        """True if an object is, or goes with, one of these objects or one that is being deleted."""
        for _ in range(_DEPTH):
            metadata = one["metadata"]
            if metadata["uid"] in uids or metadata.get("deletionTimestamp"):
                return True
            owner = snapshot.controller_of(one)
            if owner is None:
                return False
            try:
                resource = await self._client.discovery.resource_of(owner)
                ref = Ref(resource, owner["name"], metadata["namespace"])
                one = await self._client.get(ref)
            except KubernetesNotFoundError:
                return True
            except KubernetesForbiddenError:
                return False
            if one["metadata"]["uid"] != owner["uid"]:
                return True
        return False

    async def _remove(self, refs: Iterable[Ref], going: Iterable[Ref]) -> None:
        """Delete objects, and wait until they and those that go with them are gone."""
        refs = list(refs)
        left = await asyncio.gather(*map(self._applier.delete_own, refs))
        gone = [ref for ref, what in zip(refs, left, strict=True) if what is None]
        await asyncio.gather(*map(self._applier.gone, (*gone, *going)))


def _made_by(wanted: Sequence[Manifest]) -> list[Ref]:
    """The objects that the controller of the wanted object names after it."""
    main = wanted[-1] if wanted else {}
    kind = kinds.find(main)
    if kind is None or not (kind.is_autoscaled or kind.has_service):
        return []
    return [Ref(SERVICES, main["metadata"]["name"], main["metadata"]["namespace"])]


class Adopter:
    def __init__(
        self,
        adopt: Callable[[Sequence[WorkloadSpec]], Awaitable[None]],
        on_change: Callable[[Key], None],
    ) -> None:
        self._adopt = adopt
        self._on_change = on_change
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        #: Why workloads are not adopted yet.
        self.reasons: dict[Key, str] = {}

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Try each workload once; those that fail are tried again, and concern no other one."""
        await asyncio.gather(*map(self._try_first, specs))
        for of_one in specs:
            key = _key_of(of_one)
            if key in self.reasons:
                self._tasks[key] = asyncio.create_task(
                    self._adopt_later(of_one), name=f"adopt {key}"
                )

    def forget(self, key: Key) -> None:
        """Stop adopting a workload that is gone, or was applied."""
        self.reasons.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        await cancel_all(self._tasks.values())

    async def _try_first(self, specs: Sequence[WorkloadSpec]) -> None:
        error = await self._try(specs)
        if isinstance(error, KubernetesUnavailableError):
            raise error

    async def _adopt_later(self, specs: Sequence[WorkloadSpec]) -> None:
        pauses = backoff.jittered(backoff.exponential(first=_AGAIN[0], limit=_AGAIN[1]))
        for pause in pauses:
            await asyncio.sleep(pause)
            if await self._try(specs) is None:
                break
        key = _key_of(specs)
        _log.info("workload adopted after all workload=%s/%s", *key)
        del self._tasks[key]
        self._on_change(key)

    async def _try(self, specs: Sequence[WorkloadSpec]) -> Exception | None:
        """Adopt a workload; returns the error if that fails."""
        key = _key_of(specs)
        try:
            async with self._room:
                await self._adopt(specs)
        except Exception as error:  # noqa: BLE001  # a user may have written its object
            self._note(key, error)
            return error
        self.reasons.pop(key, None)
        return None

    def _note(self, key: Key, error: Exception) -> None:
        is_refusal = isinstance(error, KubetorchError)
        reason = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        if self.reasons.get(key) != reason:
            trace = None if is_refusal else error
            _log.warning(
                "workload not adopted workload=%s/%s error=%s", *key, error, exc_info=trace
            )
        self.reasons[key] = reason


def _key_of(specs: Sequence[WorkloadSpec]) -> Key:
    return specs[0].namespace, specs[0].name


async def find_applied(
    applier: Applier, runtime: Runtime, specs: Sequence[WorkloadSpec]
) -> AppliedWorkload:
    """Find the applied spec: the wanted one, which is first, or an earlier one of another kind."""
    wanted = AppliedWorkload.of(specs[0])
    if wanted.main is None:
        return wanted
    there = await _find_main(applier, wanted.main)
    if there is None and rendering.operated_kind(specs[0].compute) is not None:
        plain = AppliedWorkload.of(specs[0], has_operator=False)
        other = None if plain.main is None else await _find_main(applier, plain.main)
        if other is not None and _template_label(other) == _template_label(plain.main or {}):
            wanted, there = plain, other
    for spec in () if there is not None else specs[1:]:
        with contextlib.suppress(SpecError):  # another version took it
            before = AppliedWorkload.of(spec)
            if before.main is not None and (other := await _find_main(applier, before.main)):
                before.found(other)
                return before
    wanted.equip(runtime)
    wanted.found(there)
    is_known = there is not None and identity(there) in _identities_of(wanted.spec)
    if is_known and len({_identities_of(spec) for spec in specs}) == 1:
        wanted.objects = _identities_of(wanted.spec)
    return wanted


def _template_label(one: Manifest) -> str | None:
    found: str | None = (one["metadata"].get("labels") or {}).get(labels.TEMPLATE)
    return found


async def _find_main(applier: Applier, main: Manifest) -> Manifest | None:
    try:
        return await applier.find(await applier.ref(main))
    except KubernetesNotFoundError:  # its kind is not there any more
        return None


def _identities_of(spec: WorkloadSpec) -> frozenset[Identity]:
    """The objects that a deploy applies, but for those that depend on the cluster."""
    try:
        main = None if spec.compute.is_selector_only else rendering.of_workload(spec)
    except SpecError:  # another version took it
        return frozenset()
    beside = KubernetesServices.of(spec, main).render()
    return identities(beside if main is None else [*beside, main])
