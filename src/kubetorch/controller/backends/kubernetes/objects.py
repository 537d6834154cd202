"""The objects of a workload: what was applied, how many pods it asks for, what is obsolete.

A spec of another kind makes other objects. The obsolete objects would go on beside them, with their
pods and GPUs, and their names may be in the way: a Service of ours where the new kind's controller
makes its own, or an object that the old kind's controller made. So the obsolete objects go first,
but not before the API server has accepted the new ones in a dry run. They are found by their
labels, so that a controller which starts in between finds them as well.

A controller that starts adopts the objects that an earlier controller applied. Many requests at
once may be refused (429), so a workload whose adoption fails is adopted later, without a new
deploy.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from kubetorch.controller.backends.kubernetes.apply import (
    Applier,
    ApplyPlan,
    ApplyRetry,
    is_applied,
    is_own,
    scaled_size,
)
from kubetorch.controller.backends.kubernetes.launch_failures import snapshot
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.controller.tuning import LIMITS, TIMING
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
from kubetorch.manifests import (
    agent,
    kinds,
    knative,
    labels,
    pod_security,
    rendering,
    replicas,
    trainjob,
)
from kubetorch.manifests.kinds import KINDS, Manifest, Path, named
from kubetorch.manifests.services import KubernetesServices
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest
from kubetorch.specs.compute import thaw
from kubetorch.specs.distribution import SINGLE_CONTROLLER
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Equipment, Runtime

_API = "serving.knative.dev/"
#: Group, kind and name of an object.
Identity = tuple[str, str, str]
_T = TypeVar("_T")
# Versions of the kinds that a deploy may make, by group and kind: no volumes, no secrets.
_DEPLOYED_KINDS: dict[tuple[str, str], tuple[str, ...]] = {
    **{(row.group, row.kind): row.versions for row in KINDS.values()},
    ("", "Service"): ("v1",),
    (trainjob.GROUP, trainjob.RUNTIME_KIND): KINDS["TrainJob", trainjob.GROUP].versions,
}
_log = logging.getLogger(__name__)


def expected(live_object: Object, path: Path | None = None) -> int | None:
    """The least number of pods of its latest template that an object asks for.

    Another writer may have changed the number since the apply, such as a HorizontalPodAutoscaler.
    `None` for a DaemonSet whose controller has not counted its nodes yet.
    """
    workload = WorkloadManifest.parse(live_object, path)
    kind = workload.kind
    if kind.is_autoscaled:
        return 1
    if kind.kind == "DaemonSet":
        status = live_object.get("status") or {}
        is_seen = status.get("observedGeneration", 0) >= live_object["metadata"].get(
            "generation", 1
        )
        return max(1, int(status.get("desiredNumberScheduled") or 0)) if is_seen else None
    return max(1, replicas.running(workload))


def is_scaled_to_zero(owners: Sequence[Object], template: str) -> bool:
    """True if Knative keeps a service without pods, since it has no calls."""
    ready = {
        (service.get("status") or {}).get("latestReadyRevisionName")
        for service in _knative_owners(owners, "Service")
    }
    for revision in _knative_owners(owners, "Revision"):
        status = revision.get("status") or {}
        if revision["metadata"]["name"] in ready and agent.digest_of(revision) == template:
            is_ready = snapshot.condition(revision, "Ready").get("status") == "True"
            # `desiredReplicas` is missing until the scaler has decided for the first time, which it
            # does not before the first call of a service that begins without pods.
            is_idle = snapshot.condition(revision, "Active").get("reason") == "NoTraffic"
            return is_ready and status.get("desiredReplicas", 0 if is_idle else None) == 0
    return False


def service_url(owners: Sequence[Object]) -> str:
    """The URL of the service for programs in the cluster; empty until Knative has named it."""
    for service in _knative_owners(owners, "Service"):
        address = (service.get("status") or {}).get("address") or {}
        if address.get("url"):
            return str(address["url"])
    return ""


def _knative_owners(owners: Sequence[Object], kind: str) -> list[Object]:
    knative_owners = (
        owner for owner in owners if str(owner.get("apiVersion", "")).startswith(_API)
    )
    return [owner for owner in knative_owners if owner["kind"] == kind]


class AppliedWorkload(msgspec.Struct):
    spec: WorkloadSpec
    #: Its main object, which has the pods; `None` where a selector alone finds the pods.
    main: Manifest | None
    #: Labels of the pods that take calls; empty if all pods take calls.
    called_labels: dict[str, str]
    #: Digest of its first pod template.
    template: str = ""
    #: The objects that were applied; empty if they are not known.
    objects: frozenset[Identity] = frozenset()
    #: Whether its pods comply with the Pod Security level `restricted`.
    is_restricted: bool = False
    #: Whether its deploys have reported that.
    is_reported: bool = False
    #: How often it was applied again because its pods were refused.
    repeats: int = 0
    #: Whether it starts a pod though its deploy wants none, since Knative forbids to start none.
    starts_pod: bool = False
    #: Its images that are known to run as root.
    root_images: frozenset[str] = frozenset()
    #: Version of the secrets that its pods see.
    secrets: str = ""
    #: The number of pods that the scaler has given its Deployment; `None` without one.
    scaled_size: int | None = None
    # Whether its pods mount the node's folder for declared data.
    _shares_data: bool = False
    # `metadata.generation` of the main object after the apply.
    _generation: int = 0
    # Which attempt to make a Revision of its template Knative was asked for.
    _attempt: str = ""

    @classmethod
    def of(
        cls, spec: WorkloadSpec, *, has_operator: bool = True, starts_pod: bool = False
    ) -> AppliedWorkload:
        """The workload of a spec before its apply; without an operator, of another kind."""
        main = None
        if not spec.compute.is_selector_only:
            main = rendering.of_workload(spec, has_operator=has_operator)
        if main is not None and starts_pod:
            knative.start_pod(main)
        is_all = spec.compute.broadcast is not None or _is_world(spec)
        called_labels = {} if is_all else KubernetesServices.of(spec, main).called
        return cls(spec, main, called_labels, starts_pod=starts_pod)

    @property
    def is_ranked(self) -> bool:
        """True if the processes have ranks, which follow the ordinals of the pods."""
        compute = self.spec.compute
        is_called_whole = compute.broadcast is not None or compute.is_pool
        return compute.distribution is not None or is_called_whole

    @property
    def is_scaled(self) -> bool:
        """True if Kubetorch itself scales the workload: its Deployment in place of Knative's."""
        is_knative_wanted = rendering.operated_kind(self.spec.compute) == knative.KIND
        return is_knative_wanted and self.main is not None and self.main["kind"] == "Deployment"

    def equip(self, runtime: Runtime, root_images: Collection[str] | None = None) -> None:
        """Put the agent into the pod templates; this is the last change of the manifest."""
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

    def adopt(self, live_object: Object | None) -> None:
        """Take over what is known of a live object that an earlier controller applied."""
        if live_object is not None:
            self.is_restricted = pod_security.is_complying(self._read(live_object))
            self.note_applied(live_object)

    def _read(self, manifest: Manifest) -> PodTemplate:
        """Read the first pod template of an equipped object."""
        templates = WorkloadManifest.parse(manifest, self.spec.compute.pod_template_path).templates
        self.template = agent.digest_of(templates[0].body)
        self.root_images = frozenset(pod_security.root_images(templates))
        volumes = templates[0].spec.get("volumes") or []
        self._shares_data = named(volumes, agent.NODE_DATA_VOLUME) is not None
        self.secrets = templates[0].read_pods("annotations").get(labels.SECRETS_VERSION, "")
        return templates[0]

    def equipment(self, runtime: Runtime) -> Equipment | None:
        if self.main is None:
            return None
        kind = rendering.operated_kind(self.spec.compute)
        return Equipment(
            runtime if self._shares_data else replace(runtime, node_data=""),
            tuple(sorted(self.root_images)) if self.is_restricted else None,
            self.secrets,
            has_operator=kind is None or kind.kind == self.main["kind"],
        )

    @property
    def images(self) -> set[str]:
        if self.main is None:
            return set()
        templates = WorkloadManifest.parse(self.main, self.spec.compute.pod_template_path).templates
        return {str(template.container.get("image")) for template in templates}

    def note_applied(self, live_object: Object) -> None:
        self._generation = _generation(live_object)
        self.scaled_size = scaled_size(live_object) if self.is_scaled else None
        self._attempt = _attempt((live_object.get("spec") or {}).get("template") or {})

    def is_of_earlier_attempt(self, pod: Object) -> bool:
        """True if a pod belongs to a failed Revision that Knative was asked to replace."""
        return _attempt(pod) != self._attempt

    def expected(self, owners: Sequence[Object]) -> int | None:
        """The number of pods, as in `Backend.expected`."""
        if self.main is None:
            return self.spec.compute.pods
        if is_scaled_to_zero(owners, self.template):
            return 0
        manifest = owners[0] if owners and self.is_observed(owners) else self.main
        return expected(manifest, self.spec.compute.pod_template_path)

    def is_observed(self, owners: Sequence[Object]) -> bool:
        """False if the last observed main object is older than the apply."""
        return all(_generation(owner) >= self._generation for owner in owners[:1])


def replaced_containers(spec: WorkloadSpec) -> frozenset[str]:
    """The names of containers in a user's manifest that the agent's container replaces."""
    compute = spec.compute
    if compute.manifest is None:
        return frozenset()
    parsed = WorkloadManifest.parse(thaw(compute.manifest), compute.pod_template_path)
    return frozenset(template.container.get("name", "") for template in parsed.templates)


def _is_world(spec: WorkloadSpec) -> bool:
    """True if any pod takes calls for all pods: routing to a single pod would depend on it."""
    compute = spec.compute
    framework = compute.distribution and compute.distribution.distribution_type
    has_endpoint_selector = compute.endpoint is not None and compute.endpoint.selector is not None
    return (
        framework is not None and framework not in SINGLE_CONTROLLER and not has_endpoint_selector
    )


def identity(manifest: Manifest) -> Identity:
    group = str(manifest["apiVersion"]).rpartition("/")[0]
    return group, manifest["kind"], manifest["metadata"]["name"]


def identities(manifests: Iterable[Manifest]) -> frozenset[Identity]:
    return frozenset(map(identity, manifests))


def _attempt(manifest: Object) -> str:
    tags = (manifest.get("metadata") or {}).get("annotations") or {}
    return str(tags.get(labels.TRIED_AGAIN) or "")


def _generation(live_object: Object) -> int:
    return int(live_object["metadata"].get("generation") or 0)


class ObjectReplacement:
    def __init__(self, client: Client, applier: Applier, apply_retry: ApplyRetry) -> None:
        self._client = client
        self._applier = applier
        self._apply_retry = apply_retry

    async def remove_obsolete(
        self, key: Key, plan: ApplyPlan, previous_workload: AppliedWorkload | None
    ) -> None:
        """Delete obsolete objects of a workload, once the API server would accept the new ones."""
        if previous_workload is None or previous_workload.objects == identities(plan.manifests):
            return
        previous_workload.objects = frozenset()
        async with self._apply_retry.within(key, plan.timeout):
            find = functools.partial(
                self._find, key, plan.manifests, plan.owner, previous_workload.main
            )
            obsolete_objects = await self._retry(key, plan, find)
            uids = {obsolete_object["metadata"]["uid"] for obsolete_object in obsolete_objects}
            # Objects with a desired name that disappear with the obsolete objects are waited for.
            find_vanishing = functools.partial(self._vanishing_refs, plan.manifests, uids)
            vanishing_refs = await self._retry(key, plan, find_vanishing)
            if obsolete_objects or vanishing_refs:
                await self._check(key, plan, vanishing_refs)
                refs = [
                    await self._applier.ref(obsolete_object) for obsolete_object in obsolete_objects
                ]
                names = ",".join(f"{ref.resource}/{ref.name}" for ref in refs)
                _log.info("objects not wanted any more workload=%s/%s objects=%s", *key, names)
                await self._retry(key, plan, functools.partial(self._remove, refs, vanishing_refs))
                plan.live_objects.clear()

    async def delete_remaining(
        self, key: Key, workload: AppliedWorkload, owner: Manifest | None
    ) -> list[str]:
        """Delete the unknown objects of a deleted workload, such as those of another kind.

        Returns a phrase on each object that stays.
        """
        if workload.objects or owner is None:
            return []
        applied_objects = await self._find(key, (), owner, workload.main)
        leftovers = [
            await self._applier.delete_applied(await self._applier.ref(applied_object))
            for applied_object in applied_objects
        ]
        return [leftover for leftover in leftovers if leftover is not None]

    async def _retry(self, key: Key, plan: ApplyPlan, request: Callable[[], Awaitable[_T]]) -> _T:
        placeholder: Manifest = {"metadata": {"namespace": key[0]}}
        manifest = plan.manifests[-1] if plan.manifests else placeholder
        return await self._apply_retry.until_accepted(key, manifest, request)

    async def _check(self, key: Key, plan: ApplyPlan, vanishing_refs: Iterable[Ref]) -> None:
        """Raise the API server's refusal of a new object, unless its name becomes free."""
        blocked_identities = {
            (ref.resource.group, ref.resource.kind, ref.name) for ref in vanishing_refs
        }
        for manifest in plan.manifests:
            if identity(manifest) not in blocked_identities:
                permission = plan.permission if manifest is plan.user_manifest else None
                check = functools.partial(
                    self._applier.check, manifest, plan.owner, permission=permission
                )
                await self._apply_retry.until_accepted(key, manifest, check)

    async def _find(
        self,
        key: Key,
        desired_manifests: Sequence[Manifest],
        owner: Manifest | None,
        previous_main: Manifest | None,
    ) -> list[Object]:
        """The objects that were applied for a workload, without the desired ones."""
        versions = dict(_DEPLOYED_KINDS)
        if previous_main is not None:
            group, kind, _ = identity(previous_main)
            version = str(previous_main["apiVersion"]).rpartition("/")[2]
            versions.setdefault((group, kind), (version,))
        resources = await asyncio.gather(*map(self._served, versions, versions.values()))
        listings = await asyncio.gather(
            *(self._list(resource, key) for resource in resources if resource)
        )
        desired_identities = identities(desired_manifests)
        return [
            live_object
            for live_objects in listings
            for live_object in live_objects
            if identity(live_object) not in desired_identities
            and is_own(live_object)
            and is_applied(live_object, owner)
        ]

    async def _served(self, kind: tuple[str, str], versions: Sequence[str]) -> Resource | None:
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
            return []  # a controller that may not list a kind has made no object of it

    async def _vanishing_refs(
        self, desired_manifests: Sequence[Manifest], uids: set[str]
    ) -> list[Ref]:
        """The live objects with the name of a desired one that disappear with these objects."""
        refs = []
        for ref in [
            await self._applier.ref(manifest) for manifest in desired_manifests
        ] + _controller_service_refs(desired_manifests):
            live_object = await self._applier.find(ref)
            if live_object is not None and await self._is_vanishing(live_object, uids):
                refs.append(ref)
        return refs

    async def _is_vanishing(self, live_object: Object, uids: set[str]) -> bool:
        """True if an object, or one of its owners, has one of these uids or is being deleted."""
        for _ in range(LIMITS.object_owners):
            metadata = live_object["metadata"]
            if metadata["uid"] in uids or metadata.get("deletionTimestamp"):
                return True
            owner = snapshot.controller_of(live_object)
            if owner is None:
                return False
            try:
                resource = await self._client.discovery.resource_of(owner)
                ref = Ref(resource, owner["name"], metadata["namespace"])
                live_object = await self._client.get(ref)
            except KubernetesNotFoundError:
                return True
            except KubernetesForbiddenError:
                return False
            if live_object["metadata"]["uid"] != owner["uid"]:
                return True
        return False

    async def _remove(self, refs: Iterable[Ref], vanishing_refs: Iterable[Ref]) -> None:
        """Delete objects; returns when they, and the vanishing ones, have disappeared."""
        refs = list(refs)
        leftovers = await asyncio.gather(*map(self._applier.delete_applied, refs))
        deleted_refs = [
            ref for ref, leftover in zip(refs, leftovers, strict=True) if leftover is None
        ]
        await asyncio.gather(
            *map(self._applier.wait_until_deleted, (*deleted_refs, *vanishing_refs))
        )


def _controller_service_refs(desired_manifests: Sequence[Manifest]) -> list[Ref]:
    """The Service that the controller of the main object makes, with the same name."""
    main = desired_manifests[-1] if desired_manifests else {}
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
        self._slots = asyncio.Semaphore(LIMITS.concurrent_adoptions)
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        #: Why a workload is not adopted yet, by workload.
        self.reasons: dict[Key, str] = {}

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Adopt each workload; a workload whose adoption fails is adopted later.

        Raises:
            KubernetesUnavailableError: The API server does not answer.
        """
        await asyncio.gather(*map(self._try_first, specs))
        for workload_specs in specs:
            key = _key_of(workload_specs)
            if key in self.reasons:
                self._tasks[key] = asyncio.create_task(
                    self._adopt_later(workload_specs), name=f"adopt {key}"
                )

    def forget(self, key: Key) -> None:
        """Stop adopting a workload that was deleted, or applied."""
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
        pauses = backoff.jittered(
            first=TIMING.adoption_first_delay_seconds, limit=TIMING.adoption_longest_delay_seconds
        )
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
            async with self._slots:
                await self._adopt(specs)
        except Exception as error:  # noqa: BLE001  # a user may have edited the object
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
    """Find which spec of a workload was applied: the latest, or an earlier one of another kind.

    Args:
        applier: Reads the objects.
        runtime: The runtime of the agents.
        specs: The specs that may have been applied, the latest first.
    """
    workload = AppliedWorkload.of(specs[0])
    if workload.main is None:
        return workload
    live_object = await _find_main(applier, workload.main)
    if live_object is None and rendering.operated_kind(specs[0].compute) is not None:
        plain_workload = AppliedWorkload.of(specs[0], has_operator=False)
        plain_object = (
            None if plain_workload.main is None else await _find_main(applier, plain_workload.main)
        )
        if plain_object is not None and _template_label(plain_object) == _template_label(
            plain_workload.main or {}
        ):
            workload, live_object = plain_workload, plain_object
    for spec in () if live_object is not None else specs[1:]:
        with contextlib.suppress(SpecError):  # another version of Kubetorch accepted the spec
            previous_workload = AppliedWorkload.of(spec)
            if previous_workload.main is not None and (
                plain_object := await _find_main(applier, previous_workload.main)
            ):
                previous_workload.adopt(plain_object)
                return previous_workload
    workload.equip(runtime)
    workload.adopt(live_object)
    is_known = live_object is not None and identity(live_object) in _identities_of(workload.spec)
    if is_known and len({_identities_of(spec) for spec in specs}) == 1:
        workload.objects = _identities_of(workload.spec)
    return workload


def _template_label(manifest: Manifest) -> str | None:
    template: str | None = (manifest["metadata"].get("labels") or {}).get(labels.TEMPLATE)
    return template


async def _find_main(applier: Applier, main: Manifest) -> Manifest | None:
    try:
        return await applier.find(await applier.ref(main))
    except KubernetesNotFoundError:  # the cluster does not serve the kind any more
        return None


def _identities_of(spec: WorkloadSpec) -> frozenset[Identity]:
    """The objects that a deploy applies, without those that depend on the cluster."""
    try:
        main = None if spec.compute.is_selector_only else rendering.of_workload(spec)
    except SpecError:  # another version of Kubetorch accepted the spec
        return frozenset()
    manifests = KubernetesServices.of(spec, main).render()
    return identities(manifests if main is None else [*manifests, main])
