"""The backend `kubernetes`: workloads as objects of a cluster, whose controllers make the pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set

from msgspec.structs import replace

from kubetorch.controller.backends.base import (
    Backend,
    Listener,
    Manifest,
    News,
    PodStatus,
    PortsWanted,
    Stores,
    Trouble,
)
from kubetorch.controller.backends.kubernetes import namespaces, objects, prepare
from kubetorch.controller.backends.kubernetes.apply import (
    Applier,
    ApplyRetry,
    Known,
    Taking,
    WantedObjects,
)
from kubetorch.controller.backends.kubernetes.launch_failures.events import ReportedEvents
from kubetorch.controller.backends.kubernetes.launch_failures.owners import has_failed_revision
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.controller.backends.kubernetes.launch_watch import (
    ClusterChange,
    ClusterWatch,
    LaunchVerdicts,
)
from kubetorch.controller.backends.kubernetes.objects import (
    Adopter,
    AppliedWorkload,
    ObjectReplacement,
    find_applied,
    identities,
)
from kubetorch.controller.backends.kubernetes.pod_owners import PodOwners, RefusedPods
from kubetorch.controller.backends.kubernetes.pods import (
    Key,
    OrdinalKeeper,
    PodWatch,
    agent_container,
    image_refused_as_root,
    log_tail,
    pod_status,
    superseded,
)
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.errors import AdmissionError, KubernetesNotFoundError, KubetorchError, WorkloadError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Ref, is_leaving
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import kinds, knative, pod_security, rendering, replicas
from kubetorch.manifests.desired_pods import Mounted, read_mounted
from kubetorch.manifests.services import KubernetesServices
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, routes
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.messages import Equipment, Runtime

#: How often a launch is repeated because its pods were refused: for their rights, for their users.
REPEATS = 3
RESTRICTED = "the pods are made anew with what the namespace admits"
AS_USER = f"it is made anew as user {pod_security.USER}"

_log = logging.getLogger(__name__)


class KubernetesBackend(Backend):
    name = "kubernetes"

    def __init__(
        self,
        client: Client,
        *,
        runtime: Runtime,
        stores: Stores,
        prerequisites: PodPrerequisites,
        owner: Callable[[str, str], Manifest | None],
        watched: tuple[str, ...] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._runtime = runtime
        self.stores = stores
        self._prerequisites = prerequisites
        self._owner = owner
        self._watched = watched
        self._applier = Applier(client)
        self._watch = PodWatch(client, self._changed, self._gone, namespaces=watched)
        self._cluster_watch = ClusterWatch(
            client, time=now, on_change=self._cluster_changed, namespaces=watched
        )
        self._verdicts = LaunchVerdicts(client, self._cluster_watch, self._watch.mark)
        self._pod_owners = PodOwners(client, owner, self._watch.of, self._watch.mark)
        self._refused = RefusedPods(client, now)
        self._ordinals = OrdinalKeeper(client)
        self._now = now
        self._workloads: dict[Key, AppliedWorkload] = {}
        # The events of each workload that were reported to its deploys.
        self._reported: dict[Key, ReportedEvents] = {}
        self._apply_retry = ApplyRetry(self._applier, now=now, on_wait=self._changed)
        self._replacement = ObjectReplacement(client, self._applier, self._apply_retry)
        self._adopter = Adopter(self._adopt, self._changed)
        self._listener: Listener = lambda namespace, name: None
        self._changes = Changes()
        # Images whose user is root, which pods of a restricted namespace cannot be.
        self._root_images: set[str] = set()
        # Workloads that are applied once more, because their pods were refused.
        self._repeats: dict[Key, asyncio.Task[None]] = {}

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        await asyncio.gather(self._watch.start(), self._cluster_watch.start())
        await self._adopter.start(specs)

    async def _adopt(self, specs: Sequence[WorkloadSpec]) -> None:
        """Adopt a workload that an earlier controller applied, maybe of another version."""
        key = (specs[0].namespace, specs[0].name)
        # Until its object is found, pods of any template may be the right ones.
        self._workloads[key] = AppliedWorkload.of(specs[0])
        workload = await find_applied(self._applier, self._runtime, specs)
        self._workloads[key] = workload
        self._root_images |= workload.root_images
        if workload.main is not None:
            with contextlib.suppress(KubernetesNotFoundError):  # as in `find_applied`
                await self._cluster_watch.look_at(workload.main)
        self._pod_owners.look_again(key)
        await self._select(workload.spec, workload.main)
        self._members(key)
        await self._pod_owners.settle(key)
        self._keep_ordinals(key)

    # --------------------------------------------------------------------------------- workloads

    def check(self, spec: WorkloadSpec) -> None:
        namespaces.check_watched(spec.namespace, self._watched)

    async def apply(self, spec: WorkloadSpec) -> None:
        await self._stop_repeating((spec.namespace, spec.name))
        try:
            await self._apply(spec)
        except AdmissionError:
            # A pod by itself is refused at once; others when their maker makes them.
            await self._apply(spec, repeats=1)

    async def _apply(self, spec: WorkloadSpec, *, repeats: int = 0) -> None:
        key = (spec.namespace, spec.name)
        workload = AppliedWorkload.of(spec, has_operator=await self._has_operator(spec))
        main = workload.main
        before = self._workloads.get(key)
        if before is None and key in self._adopter.reasons:
            before = AppliedWorkload.of(spec)  # there is something, and nobody knows what
        self._adopter.forget(key)
        self._reported[key] = ReportedEvents(self._now(), self._reported.get(key))
        has_failed = self._has_failed_revision(key)
        known, is_restricted = await self._prepare(spec, main, is_repeated=repeats > 0)
        root_images = self._root_images if is_restricted else None
        workload.equip(self._runtime, root_images)
        workload.repeats = repeats
        workload.is_reported = before is not None and before.template == workload.template
        manifests = KubernetesServices.of(spec, main).render()
        if main is not None:
            manifests += await prepare.beside(self._client, main, self._runtime, root_images)
            manifests.append(main)
        # Whoever brings a manifest may have applied it already.
        taken = main if spec.compute.manifest is not None else None
        taking = Taking(objects.replaced_containers(spec))
        wanted = WantedObjects(
            manifests, taken, taking, self._owner(*key), known, spec.compute.launch_timeout
        )
        if main is not None:
            await self._apply_retry.check_form(key, wanted)
        given_up = self._given_up(key)
        if given_up is not None:
            await self._applier.remove(given_up)
            known.clear()
        # Until then it is what it was before, which goes on if this cannot be made.
        await self._replacement.make_room(key, wanted, before)
        workload.objects = identities(manifests)
        self._workloads[key] = workload
        await self._select(spec, main)
        if main is not None:
            with contextlib.suppress(KubernetesNotFoundError):  # to apply it says what is missing
                await self._cluster_watch.look_at(main)
        made = await self._apply_retry.apply(key, wanted)
        if main is not None:
            is_repeated = before is not None and before.template == workload.template
            is_tried_again = has_failed and is_repeated
            workload.applied(await self._applier.try_again(main) if is_tried_again else made[-1])
        self._pod_owners.look_again(key)
        self._refused.forget(key)
        self._watch.mark(key)

    async def _prepare(
        self, spec: WorkloadSpec, main: Manifest | None, *, is_repeated: bool
    ) -> tuple[Known, bool]:
        """The objects of a workload as they are, and whether its pods are to be restricted."""
        # Meanwhile: an edit that changes no object is to wait for the API server once.
        looking = asyncio.create_task(self._look(spec, main))
        is_restricted = False
        try:
            if main is not None:
                is_restricted = await self._prerequisites.prepare(
                    main, spec.compute.pod_template_path, is_repeated=is_repeated
                )
            else:
                await self._prerequisites.prepare_selected(spec.namespace)
            return await looking, is_restricted
        finally:
            looking.cancel()

    def _is_repeated(self, key: Key, error: KubetorchError, pod: Manifest | None = None) -> bool:
        """Apply a workload once more if that may help against this refusal of its pods.

        Other workloads whose pods run stay as they are until their next deploy.
        """
        workload = self._workloads.get(key)
        if workload is None or workload.main is None:
            return False
        if isinstance(error, AdmissionError):
            images: Set[str] = frozenset()
            is_worth_it = not (workload.is_restricted or workload.repeats)
        else:
            images = frozenset() if pod is None else image_refused_as_root(pod, error)
            is_worth_it = bool(images) and workload.is_restricted and workload.repeats < REPEATS
        if not is_worth_it or self._has_running(key, workload):
            return False
        if images:  # in the pod it may have another name: that of its digest
            self._root_images |= images | (set() if images <= workload.images else workload.images)
        if key not in self._repeats:
            _log.info("launch repeated workload=%s/%s because=%s", *key, error.message)
            work = self._repeat(key, workload)
            self._repeats[key] = asyncio.create_task(work, name=f"repeat {key}")
        return True

    def _has_running(self, key: Key, workload: AppliedWorkload) -> bool:
        """True if a pod of the present template runs."""
        members, wanted = self._members(key).values(), workload.template
        found = (pod_status(pod, ordinal=0, wanted=wanted) for pod in members)
        return any(one.phase == "Running" and not one.is_retiring for one in found)

    async def _repeat(self, key: Key, workload: AppliedWorkload) -> None:
        try:
            await self._apply(workload.spec, repeats=workload.repeats + 1)
        except KubetorchError as error:
            _log.warning("launch not repeated workload=%s/%s error=%s", *key, error)
            self._workloads[key].repeats = REPEATS  # what it was refused for counts
        del self._repeats[key]
        self._changed(key)

    async def _stop_repeating(self, key: Key) -> None:
        task = self._repeats.pop(key, None)
        if task is not None:
            await cancel_all([task])

    async def _has_operator(self, spec: WorkloadSpec) -> bool:
        """True if the cluster serves the kind that is meant for a declaration."""
        kind = rendering.operated_kind(spec.compute)
        if kind is not None:
            try:
                await self._client.discovery.find(kind.api_version, kind.kind)
            except KubernetesNotFoundError:
                return False
        return True

    def _given_up(self, key: Key) -> Manifest | None:
        """The object of a workload, if its controller makes none of the pods.

        It tries again after longer and longer pauses, whatever was put right meanwhile, and a new
        object's at once. What a user brought is not ours to delete, and an autoscaled service has
        more to lose than its pods: the revision that served before (`_has_failed_revision`).
        """
        before = self._workloads.get(key)
        if before is None or before.main is None or before.spec.compute.manifest is not None:
            return None
        if before.main["kind"] != "Deployment":
            return None
        if self._members(key) or not self._verdicts.of_owner(key, before.main).is_doomed:
            return None
        return before.main

    def _has_failed_revision(self, key: Key) -> bool:
        """True if Knative has given up the present template of an autoscaled service.

        It makes a Revision of a template once, whatever was put right since.
        """
        before = self._workloads.get(key)
        if before is None or before.main is None or kinds.find(before.main) != knative.KIND:
            return False
        if self._has_running(key, before):
            return False
        pods = self._members(key).values()
        owners = self._cluster_watch.owners(before.main)
        is_doomed = any(self._verdicts.of_pod(key, pod).is_doomed for pod in pods)
        return is_doomed or has_failed_revision(before.main, owners)

    async def _look(self, spec: WorkloadSpec, main: Manifest | None) -> Known:
        wanted = KubernetesServices.of(spec, main).render()
        return await self._applier.look(wanted if main is None else (*wanted, main))

    async def _select(self, spec: WorkloadSpec, main: Manifest | None) -> None:
        selector = KubernetesServices.of(spec, main).pool
        await self._watch.select((spec.namespace, spec.name), selector)

    async def release(self, namespace: str, name: str) -> None:
        key = (namespace, name)
        await self._stop_repeating(key)
        workload = self._workloads.get(key)
        if workload is None or workload.main is None:
            return
        compute = workload.spec.compute
        changed = replicas.patch_to_none(
            WorkloadManifest.parse(workload.main, compute.pod_template_path)
        )
        empty = rendering.merge_manifests(workload.main, changed)
        takes = None if compute.manifest is None else Taking()
        owner = self._owner(*key)
        workload.applied(await self._applier.apply(empty, owner=owner, takes=takes))

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        key = (namespace, name)
        await self._stop_repeating(key)
        workload = self._workloads.pop(key, None)
        self._reported.pop(key, None)
        self._adopter.forget(key)
        if workload is None:
            return []
        spec, main = workload.spec, workload.main
        left: list[str | None] = []
        for service in KubernetesServices.of(spec, main).render():
            left.append(await self._applier.delete_own(await self._applier.ref(service)))
        if main is not None:
            try:
                left.append(await self._applier.delete_own(await self._applier.ref(main)))
            except KubernetesNotFoundError:  # its kind is gone, and all objects of it
                _log.info("kind is gone kind=%s", main["kind"])
        left += await self._replacement.remove_left(key, workload, self._owner(*key))
        if main is not None and not any(left):
            # The pods of what is left are replaced by its own controller, in its own time.
            await self._end_pods(key, workload, grace)
        self._verdicts.forget_owner(key)
        self._pod_owners.forget(key)
        self._refused.forget(key)
        await self._watch.forget(key)
        if not any(known == namespace for known, _ in self._workloads):
            await self._cluster_watch.forget(namespace)
        return [one for one in left if one is not None]

    async def _end_pods(self, key: Key, workload: AppliedWorkload, grace: float) -> None:
        """End the pods with no more patience than `grace`; return when they are gone.

        Whoever owns them deletes them; asked to go earlier, one would only be replaced. Those whose
        owner is gone by now count, those of others do not.
        """

        def pods() -> Mapping[str, Manifest]:
            return self._members(key, workload, is_ending=True)

        seconds, patience = max(1, int(grace)), grace + routes.DELETE_SLACK
        asked: set[str] = set()
        try:
            async with deadlines.timeout(patience):
                while left := pods():
                    going = {name for name, pod in left.items() if is_leaving(pod)} - asked
                    if not going:
                        await self._changes.wait()
                    for name in going:
                        asked.add(name)
                        await self._applier.delete(Ref(PODS, name, key[0]), grace_seconds=seconds)
        except TimeoutError as error:
            names = ", ".join(sorted(pods()))
            raise WorkloadError(
                f"{patience:.0f} s after the end of {key[1]} it still has pods: {names}",
                hint=f"kubectl describe pod -n {key[0]} {names} says why",
            ) from error

    # -------------------------------------------------------------------------------------- pods

    def _members(
        self, key: Key, workload: AppliedWorkload | None = None, *, is_ending: bool = False
    ) -> Mapping[str, Manifest]:
        """The pods that are a workload's, among those that have its labels.

        They are what its object made, or what a selector finds that its user declared.
        """
        found, workload = self._watch.of(key), workload or self._workloads.get(key)
        if workload is None:
            return {}
        main = workload.main
        if main is None or workload.spec.compute.selector is not None:
            return found
        members = {}
        for name, pod in found.items():
            is_made = self._pod_owners.is_made(key, pod, main)
            if is_ending and is_made is None:
                is_made = True
            if is_made and (is_ending or not self._refused.has(pod)):
                members[name] = pod
        return members

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        key = (namespace, name)
        workload, ordinals = self._workloads.get(key), self._watch.ordinals(key)
        wanted = "" if workload is None else workload.template
        called = None if workload is None else workload.called
        found = []
        for pod_name, pod in self._members(key).items():
            number = ordinals[pod_name]
            status = pod_status(pod, ordinal=number, wanted=wanted, called=called)
            if workload is not None and workload.has_given_up(pod):
                status = replace(status, is_retiring=True)
            found.append(self._judged(key, pod, status))
        if any(pod.phase == "Failed" and not pod.is_retiring for pod in found):
            found = superseded(found, self.expected(namespace, name))
        return sorted(found, key=lambda pod: (pod.ordinal, pod.is_retiring))

    def described(self, namespace: str, name: str) -> list[Manifest]:
        return [*self._members((namespace, name)).values()]

    def _judged(self, key: Key, pod: Manifest, status: PodStatus) -> PodStatus:
        if is_leaving(pod):
            return status
        verdict = self._verdicts.of_pod(key, pod, shows_log=status.is_ours)
        if verdict.error is not None and self._is_repeated(key, verdict.error, pod):
            return replace(status, reason=f"{verdict.reason}; {AS_USER}")
        reason = verdict.reason or status.reason
        return replace(status, reason=reason, failure=_failure(verdict))

    def trouble(self, namespace: str, name: str) -> Trouble:
        key = (namespace, name)
        workload = self._workloads.get(key)
        for reasons in (self._apply_retry.reasons, self._adopter.reasons):
            if key in reasons:
                return Trouble(reasons[key])
        if workload is None or workload.main is None:
            return Trouble()
        if refused := self._refused.reason(key):
            return Trouble(refused)
        if not workload.is_seen(self._cluster_watch.owners(workload.main)):
            return Trouble()  # what is known is of the object before it was applied
        verdict = self._verdicts.of_owner(key, workload.main)
        if verdict.error is not None and self._is_repeated(key, verdict.error):
            return Trouble(f"{verdict.reason}; {RESTRICTED}")
        return Trouble(verdict.reason, _failure(verdict))

    def news(self, namespace: str, name: str) -> list[News]:
        key = (namespace, name)
        workload, reported = self._workloads.get(key), self._reported.get(key)
        if workload is None or reported is None:
            return []
        owners = [] if workload.main is None else self._cluster_watch.owners(workload.main)
        events = self._verdicts.events_around(self._members(key).values(), owners)
        found = [reported.new(event) for event in events]
        news = [News(one.line, one.about, one.is_warning) for one in found if one is not None]
        if workload.is_restricted and not workload.is_reported:
            workload.is_reported = True
            news.insert(0, News(_restricted(namespace)))
        return news

    def expected(self, namespace: str, name: str) -> int | None:
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return None
        owners = [] if workload.main is None else self._cluster_watch.owners(workload.main)
        return workload.expected(owners)

    def _keep_ordinals(self, key: Key) -> None:
        """Keep the numbers of pods under the next controller, where ranks follow them."""
        workload = self._workloads.get(key)
        if workload is None or not workload.is_ranked:
            return
        if unsaid := self._watch.unsaid(key):
            members = self._members(key)
            for name in unsaid.keys() & members.keys():
                self._ordinals.keep(members[name], unsaid[name])

    def _changed(self, key: Key) -> None:
        self._keep_ordinals(key)
        self._changes.notify()
        self._listener(*key)

    def _gone(self, pod: Manifest) -> None:
        self._verdicts.forget(pod)
        self._refused.gone(pod)
        self._ordinals.gone(pod)

    def _cluster_changed(self, around: ClusterChange) -> None:
        if around.node:
            self._watch.mark_node(around.node)
            return
        if around.is_for_waiting:
            self._watch.mark_waiting(around.namespace)
            return
        named = (around.namespace or "", around.service)
        if around.namespace is not None and around.pod:
            concerned = self._watch.whose(around.namespace, around.pod)
        elif named in self._workloads:
            concerned = [named]
        else:
            concerned = [key for key in self._workloads if around.namespace in (None, key[0])]
        for key in concerned:
            self._watch.mark(key)

    # ----------------------------------------------------------------------------------- the rest

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        del compute
        if manifest["kind"] == "CronJob":
            schedule = manifest["spec"].get("schedule")
            return (f"pods of a CronJob start with its next run ({schedule}), and stay",)
        is_unscaled = kinds.find(manifest) == knative.KIND and self._plain(manifest) is not None
        return (knative.unscaled_note(manifest),) if is_unscaled else ()

    def _plain(self, manifest: Manifest) -> Manifest | None:
        """The object that a workload has instead of this one, whose kind has no operator here."""
        metadata = manifest["metadata"]
        workload = self._workloads.get((metadata["namespace"], metadata["name"]))
        main = None if workload is None else workload.main
        return main if main is not None and main["kind"] != manifest["kind"] else None

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        found = self._workloads.get((spec.namespace, spec.name))
        return spec if found is None else found.spec

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        there = self._plain(manifest) or manifest
        return self.scaler(spec, manifest) or KubernetesServices.of(spec, there).url

    def scaler(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        services = KubernetesServices.of(spec, manifest)
        if not services.is_scaled or self._plain(manifest) is not None:
            return ""
        return objects.address(self._cluster_watch.owners(manifest)) or services.url

    def equipment(self, namespace: str, name: str) -> Equipment | None:
        found = self._workloads.get((namespace, name))
        return None if found is None else found.equipment(self._runtime)

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        there, metadata = self._plain(manifest), manifest["metadata"]
        workload = self._workloads.get((metadata["namespace"], metadata["name"]))
        is_restricted = workload is not None and workload.is_restricted
        found = (_restricted(metadata["namespace"]),) if is_restricted else ()
        if there is None:
            return found
        if kinds.find(manifest) == knative.KIND:
            return (*self.warnings(compute, manifest), *found)
        return (
            f"the cluster has no {manifest['kind']} (no operator): head and workers are pods of a "
            f"{there['kind']}",
            *found,
        )

    def mounted(self, namespace: str, name: str, pod: str) -> Mounted:
        key = (namespace, name)
        workload, found = self._workloads.get(key), self._watch.of(key).get(pod)
        # Whoever may select pods could have made them, with whatever they have mounted.
        if found is None or workload is None or workload.main is None:
            return Mounted()
        return read_mounted(found["spec"], agent_container(found))

    def end_pod(self, namespace: str, name: str, pod: str, error: KubetorchError) -> None:
        found = self._watch.of((namespace, name)).get(pod)
        if found is not None:
            self._refused.end((namespace, name), found, error)
            self._watch.mark((namespace, name))

    def ports(self, namespace: str, name: str, wanted: PortsWanted) -> tuple[int, ...]:
        # Each pod has an address, and all ports, of its own.
        return tuple(wanted.first + number % wanted.per_pod for number in range(wanted.count))

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        found = self._watch.named(namespace, pod)
        if found is None:
            return []
        return await log_tail(self._client, found, count)

    async def close(self, *, pods: bool) -> None:
        self._verdicts.close()
        await asyncio.gather(*map(self._stop_repeating, [*self._repeats]))
        await asyncio.gather(self._adopter.close(), self._pod_owners.close(), self._refused.close())
        await self._ordinals.close()
        await asyncio.gather(self._watch.close(), self._cluster_watch.close())


def _restricted(namespace: str) -> str:
    return (
        f"namespace {namespace} admits restricted pods only: they run as the user of their image, "
        f"or as user {pod_security.USER} where that is root, who cannot install system packages or "
        "write outside of home, working directory, /tmp and volumes"
    )


def _failure(verdict: Verdict) -> Failure | None:
    if verdict.error is None:
        return None
    return exceptions.describe_refusal(verdict.error)
