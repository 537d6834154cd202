"""The backend `kubernetes`: workloads as objects of a cluster, whose controllers make the pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime, timezone

from msgspec.structs import replace

from kubetorch.controller.backends.base import (
    Backend,
    EventLine,
    Listener,
    Manifest,
    PodStatus,
    PortRequest,
    Stores,
    Trouble,
)
from kubetorch.controller.backends.kubernetes import namespaces, objects, prepare
from kubetorch.controller.backends.kubernetes.apply import (
    Applier,
    ApplyPlan,
    ApplyRetry,
    LiveObjects,
    TakeoverPermission,
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
    retire_superseded,
)
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.controller.backends.kubernetes.scaling import (
    SCALED_DOWN,
    ControllerAddress,
    ControllerEndpoints,
    DeploymentScaler,
    Engine,
)
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import AdmissionError, KubernetesNotFoundError, KubetorchError, WorkloadError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Ref, is_leaving
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import agent, kinds, knative, pod_security, rendering, replicas
from kubetorch.manifests.desired_pods import MountedNames, read_mounted_names
from kubetorch.manifests.services import KubernetesServices
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.messages import Equipment, Runtime

RESTRICTED = "the pods are made anew with what the namespace admits"
AS_USER = f"it is made anew as user {pod_security.USER}"

_log = logging.getLogger(__name__)


class KubernetesBackend(Backend):
    name = "kubernetes"

    def __init__(  # noqa: PLR0913  # its collaborators
        self,
        client: Client,
        *,
        runtime: Runtime,
        stores: Stores,
        prerequisites: PodPrerequisites,
        owner: Callable[[str, str], Manifest | None],
        watched: tuple[str, ...] = (),
        engine: Engine = "auto",
        address: ControllerAddress | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._runtime = runtime
        self.stores = stores
        self._prerequisites = prerequisites
        self._owner = owner
        self._watched = watched
        self._applier = Applier(client)
        self._watch = PodWatch(client, self._changed, self._pod_deleted, namespaces=watched)
        self._cluster_watch = ClusterWatch(
            client, time=now, on_change=self._cluster_changed, namespaces=watched
        )
        self._verdicts = LaunchVerdicts(client, self._cluster_watch, self._watch.mark)
        self._pod_owners = PodOwners(client, owner, self._watch.pods_of, self._watch.mark)
        self._refused = RefusedPods(client, now)
        self._ordinals = OrdinalKeeper(client)
        self._engine = engine
        # Until when it is known whether the cluster has Knative, and that.
        self._knative_answer = (0.0, False)
        self._scaler = DeploymentScaler(
            client,
            self._applier,
            ControllerEndpoints(client, address, owner, watched),
            pods=self._members,
            on_change=self._changed,
        )
        self._now = now
        self._workloads: dict[Key, AppliedWorkload] = {}
        # The events of each workload that were reported to its deploys.
        self._reported: dict[Key, ReportedEvents] = {}
        self._apply_retry = ApplyRetry(self._applier, now=now, on_wait=self._changed)
        self._replacement = ObjectReplacement(client, self._applier, self._apply_retry)
        self._adopter = Adopter(self._adopt, self._changed)
        self._listener: Listener = lambda namespace, name: None
        self._changes = Changes()
        # Images that run as root, which a restricted namespace refuses.
        self._root_images: set[str] = set()
        # Tasks that apply a workload once more because its pods were refused.
        self._repeats: dict[Key, asyncio.Task[None]] = {}

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        await asyncio.gather(self._watch.start(), self._cluster_watch.start(), self._scaler.start())
        await self._adopter.start(specs)

    async def _adopt(self, specs: Sequence[WorkloadSpec]) -> None:
        """Adopt a workload that an earlier controller applied, maybe of another version."""
        key = (specs[0].namespace, specs[0].name)
        # Until the main object is read, pods of any template may be the right ones.
        self._workloads[key] = AppliedWorkload.of(specs[0])
        workload = await find_applied(self._applier, self._runtime, specs)
        self._workloads[key] = workload
        self._root_images |= workload.root_images
        if workload.main is not None:
            with contextlib.suppress(KubernetesNotFoundError):  # as in `find_applied`
                await self._cluster_watch.watch_object(workload.main)
        self._pod_owners.forget_foreign_owners(key)
        await self._select(workload.spec, workload.main)
        self._members(key)
        await self._pod_owners.wait_until_resolved(key)
        self._keep_ordinals(key)
        self._note_scaled(key, workload)

    # --------------------------------------------------------------------------------- workloads

    def check(self, spec: WorkloadSpec) -> None:
        namespaces.check_watched(spec.namespace, self._watched)

    async def apply(self, spec: WorkloadSpec) -> None:
        await self._stop_repeating((spec.namespace, spec.name))
        try:
            await self._apply(spec)
        except KubetorchError as error:
            if knative.forbids_no_pods(error, spec.compute):
                await self._apply(spec, starts_pod=True)
            elif isinstance(error, AdmissionError):
                # The API server refuses a bare Pod at once. Pods of a controller are refused later:
                # see `_repeat_if_it_helps`.
                await self._apply(spec, repeats=1)
            else:
                raise

    async def _apply(
        self, spec: WorkloadSpec, *, repeats: int = 0, starts_pod: bool = False
    ) -> None:
        key = (spec.namespace, spec.name)
        has_operator = await self._has_operator(spec)
        workload = AppliedWorkload.of(spec, has_operator=has_operator, starts_pod=starts_pod)
        main = workload.main
        previous_workload = self._workloads.get(key)
        if previous_workload is None and key in self._adopter.reasons:
            # Its objects are not known; it may have some, of this spec or of another one.
            previous_workload = AppliedWorkload.of(spec)
        self._adopter.forget(key)
        self._reported[key] = ReportedEvents(self._now(), self._reported.get(key))
        has_failed = self._has_failed_revision(key)
        live_objects, is_restricted = await self._prepare(spec, main, is_repeated=repeats > 0)
        root_images = self._root_images if is_restricted else None
        runtime = await self._runtime_of(spec, main, is_restricted=is_restricted)
        workload.equip(runtime, root_images)
        workload.repeats = repeats
        has_same_template = (
            previous_workload is not None and previous_workload.template == workload.template
        )
        workload.is_reported = has_same_template
        manifests = KubernetesServices.of(spec, main).render()
        if main is not None:
            manifests += await prepare.companion_objects(self._client, main, runtime, root_images)
            manifests.append(main)
        plan = self._plan(workload, manifests, live_objects)
        if main is not None:
            await self._apply_retry.check_form(key, plan)
        doomed_object = self._doomed_object(key)
        if doomed_object is not None:
            await self._applier.remove(doomed_object)
            live_objects.clear()
        # Up to here nothing has changed: if the checks fail, the earlier workload goes on.
        await self._replacement.remove_obsolete(key, plan, previous_workload)
        workload.objects = identities(manifests)
        self._workloads[key] = workload
        await self._select(spec, main)
        if main is not None:
            with contextlib.suppress(KubernetesNotFoundError):  # the apply raises it, with a hint
                await self._cluster_watch.watch_object(main)
        applied_objects = await self._apply_retry.apply(key, plan)
        if main is not None:
            is_tried_again = has_failed and has_same_template
            workload.note_applied(
                await self._applier.retry_revision(main) if is_tried_again else applied_objects[-1]
            )
        self._pod_owners.forget_foreign_owners(key)
        self._refused.forget(key)
        self._note_scaled(key, workload)
        self._watch.mark(key)

    def _plan(
        self, workload: AppliedWorkload, manifests: list[Manifest], live_objects: LiveObjects
    ) -> ApplyPlan:
        spec = workload.spec
        key = (spec.namespace, spec.name)
        return ApplyPlan(
            manifests,
            # The user of a manifest may have applied it already.
            workload.main if spec.compute.manifest is not None else None,
            TakeoverPermission(objects.replaced_containers(spec)),
            self._owner(*key),
            live_objects,
            spec.compute.launch_timeout,
            scaled_to=self._scaler.size(key) if workload.is_scaled else None,
        )

    async def _runtime_of(
        self, spec: WorkloadSpec, main: Manifest | None, *, is_restricted: bool
    ) -> Runtime:
        """The runtime of a workload's pods: those with data share it, where that is admitted."""
        runtime = self._runtime
        if not runtime.node_data or main is None:
            return runtime
        may_share = bool(spec.compute.data) and not is_restricted
        if may_share and await self._prerequisites.admits_node_data(main, spec, runtime.node_data):
            return runtime
        return replace(runtime, node_data="")

    def _note_scaled(self, key: Key, workload: AppliedWorkload) -> None:
        """Have the scaler give the Deployment of a workload its number of pods."""
        if workload.main is not None and workload.is_scaled:
            services = KubernetesServices.of(workload.spec, workload.main)
            called_name, size = services.called_name, workload.scaled_size
            self._scaler.applied(key, workload.main, called_name, given_size=size)

    async def _prepare(
        self, spec: WorkloadSpec, main: Manifest | None, *, is_repeated: bool
    ) -> tuple[LiveObjects, bool]:
        """Read the live objects of a workload, and whether its pods are to be restricted."""
        if main is not None and kinds.find(main) == knative.KIND:
            knative.check(spec.compute)
        # Both at the same time: a deploy that changes no object is to wait for the API server once.
        reading = asyncio.create_task(self._read_live_objects(spec, main))
        is_restricted = False
        try:
            if main is not None:
                is_restricted = await self._prerequisites.prepare(
                    main, spec.compute.pod_template_path, is_repeated=is_repeated
                )
            else:
                await self._prerequisites.prepare_selected(spec.namespace)
            return await reading, is_restricted
        finally:
            reading.cancel()

    def _repeat_if_it_helps(
        self, key: Key, error: KubetorchError, pod: Manifest | None = None
    ) -> bool:
        """Apply a workload once more if that may help against this refusal of its pods.

        A repeat makes the pods restricted, or gives them a user other than root. A workload with
        running pods stays as it is until its next deploy. Returns `True` if it is applied again.
        """
        workload = self._workloads.get(key)
        if workload is None or workload.main is None:
            return False
        if isinstance(error, AdmissionError):
            images: Set[str] = frozenset()
            may_help = not (workload.is_restricted or workload.repeats)
        else:
            images = frozenset() if pod is None else image_refused_as_root(pod, error)
            may_help = (
                bool(images) and workload.is_restricted and workload.repeats < LIMITS.launch_repeats
            )
        if not may_help or self._has_running(key, workload):
            return False
        if images:  # the pod may name its image by digest, and the manifest by tag
            self._root_images |= images | (set() if images <= workload.images else workload.images)
        if key not in self._repeats:
            _log.info("launch repeated workload=%s/%s because=%s", *key, error.message)
            work = self._repeat(key, workload)
            self._repeats[key] = asyncio.create_task(work, name=f"repeat {key}")
        return True

    def _has_running(self, key: Key, workload: AppliedWorkload) -> bool:
        """True if a pod of the present template runs."""
        members, template = self._members(key).values(), workload.template
        statuses = (pod_status(pod, ordinal=0, template=template) for pod in members)
        return any(status.phase == "Running" and not status.is_retiring for status in statuses)

    async def _repeat(self, key: Key, workload: AppliedWorkload) -> None:
        try:
            await self._apply(
                workload.spec, repeats=workload.repeats + 1, starts_pod=workload.starts_pod
            )
        except KubetorchError as error:
            _log.warning("launch not repeated workload=%s/%s error=%s", *key, error)
            # The next refusal fails the launch.
            self._workloads[key].repeats = LIMITS.launch_repeats
        del self._repeats[key]
        self._changed(key)

    async def _stop_repeating(self, key: Key) -> None:
        task = self._repeats.pop(key, None)
        if task is not None:
            await cancel_all([task])

    async def _has_operator(self, spec: WorkloadSpec) -> bool:
        """True if the cluster serves the operator's kind that a compute asks for, if any."""
        kind = rendering.operated_kind(spec.compute)
        if kind is None or (kind == knative.KIND and self._engine == "knative"):
            return True
        if kind == knative.KIND and self._engine == "kubetorch":
            return False
        try:
            await self._client.discovery.find(kind.api_version, kind.kind)
        except KubernetesNotFoundError:
            return False
        return True

    async def scales(self, spec: WorkloadSpec) -> bool:
        """See `Backend`: Knative decides where the cluster has it."""
        if rendering.operated_kind(spec.compute) == knative.KIND:
            until, has_knative = self._knative_answer
            if time.monotonic() >= until:
                has_knative = await self._has_operator(spec)
                until = time.monotonic() + TIMING.engine_recheck_seconds
                self._knative_answer = (until, has_knative)
            if not has_knative:
                return True
        await self._scaler.forget((spec.namespace, spec.name))
        return False

    def scale(self, namespace: str, name: str, size: int, leaving: Sequence[str] = ()) -> None:
        self._scaler.scale((namespace, name), size, leaving)

    def _doomed_object(self, key: Key) -> Manifest | None:
        """The Deployment of a workload, if its controller has failed to make any pod.

        The controller repeats its attempts after longer and longer pauses, even if the cause has
        been put right; the controller of a new Deployment begins at once. A user's object is not
        deleted. Nor is an autoscaled service, which has an earlier revision to lose that still
        serves (see `_has_failed_revision`).
        """
        workload = self._workloads.get(key)
        if workload is None or workload.main is None or workload.spec.compute.manifest is not None:
            return None
        if workload.main["kind"] != "Deployment":
            return None
        if self._members(key) or not self._verdicts.of_owner(key, workload.main).is_doomed:
            return None
        return workload.main

    def _has_failed_revision(self, key: Key) -> bool:
        """True if Knative has given up the present template of an autoscaled service.

        Knative makes a Revision of a template once, even if the cause of the failure is put right.
        """
        workload = self._workloads.get(key)
        if workload is None or workload.main is None or kinds.find(workload.main) != knative.KIND:
            return False
        if self._has_running(key, workload):
            return False
        pods = self._members(key).values()
        owners = self._cluster_watch.owners(workload.main)
        is_doomed = any(self._verdicts.of_pod(key, pod).is_doomed for pod in pods)
        return is_doomed or has_failed_revision(workload.main, owners)

    async def _read_live_objects(self, spec: WorkloadSpec, main: Manifest | None) -> LiveObjects:
        manifests = KubernetesServices.of(spec, main).render()
        return await self._applier.read_live_objects(
            manifests if main is None else (*manifests, main)
        )

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
        empty_manifest = rendering.merge_manifests(workload.main, changed)
        permission = None if compute.manifest is None else TakeoverPermission()
        owner = self._owner(*key)
        workload.note_applied(
            await self._applier.apply(empty_manifest, owner=owner, permission=permission)
        )

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        key = (namespace, name)
        await self._stop_repeating(key)
        workload = self._workloads.pop(key, None)
        self._reported.pop(key, None)
        self._adopter.forget(key)
        await self._scaler.forget(key)
        if workload is None:
            return []
        spec, main = workload.spec, workload.main
        leftovers: list[str | None] = []
        is_knative = main is not None and kinds.find(main) == knative.KIND
        if is_knative and spec.compute.manifest is None:  # else the object may stay
            await self._end_draining_pods(key, workload, grace)
        for service in KubernetesServices.of(spec, main).render():
            leftovers.append(await self._applier.delete_applied(await self._applier.ref(service)))
        if main is not None:
            try:
                leftovers.append(await self._applier.delete_applied(await self._applier.ref(main)))
            except KubernetesNotFoundError:  # the kind was removed, with all its objects
                _log.info("kind is gone kind=%s", main["kind"])
        leftovers += await self._replacement.delete_remaining(key, workload, self._owner(*key))
        if main is not None and not any(leftovers):
            # The pods of an object that stays are replaced by its controller.
            await self._end_pods(key, workload, grace)
        self._verdicts.forget_owner(key)
        self._pod_owners.forget(key)
        self._refused.forget(key)
        await self._watch.forget(key)
        if not any(used_namespace == namespace for used_namespace, _ in self._workloads):
            await self._cluster_watch.forget(namespace)
        return [leftover for leftover in leftovers if leftover is not None]

    async def _end_draining_pods(self, key: Key, workload: AppliedWorkload, grace: float) -> None:
        """Begin to end the pods of a Knative Service that is deleted next, within `grace`.

        Its queue-proxies wait 30 s for requests, in a hook before SIGTERM, and no later deletion
        with a shorter grace makes a kubelet leave that hook. `_end_pods` sees to what replaces the
        pods until the Service is gone.
        """
        seconds = max(1, int(grace))
        names = self._members(key, workload, is_ending=True)
        deletions = (
            self._applier.delete(Ref(PODS, name, key[0]), grace_seconds=seconds) for name in names
        )
        # Pods that are not ended here go with the Service, later.
        for error in await asyncio.gather(*deletions, return_exceptions=True):
            if isinstance(error, Exception):
                _log.warning("a pod is not ended before its service error=%s", error)

    async def _end_pods(self, key: Key, workload: AppliedWorkload, grace: float) -> None:
        """End the pods of a deleted workload within `grace`; returns when they have disappeared.

        Only pods that are being deleted get the shorter grace: the owner of another pod would
        replace it. Pods whose owner has disappeared count; pods of foreign owners do not.
        """

        def pods() -> Mapping[str, Manifest]:
            return self._members(key, workload, is_ending=True)

        seconds, timeout = max(1, int(grace)), grace + wire_tuning.TIMING.teardown_slack_seconds
        deleted_names: set[str] = set()
        try:
            async with deadlines.timeout(timeout):
                while remaining_pods := pods():
                    leaving_names = {
                        name for name, pod in remaining_pods.items() if is_leaving(pod)
                    } - deleted_names
                    if not leaving_names:
                        await self._changes.wait()
                    for name in leaving_names:
                        deleted_names.add(name)
                        await self._applier.delete(Ref(PODS, name, key[0]), grace_seconds=seconds)
        except TimeoutError as error:
            names = ", ".join(sorted(pods()))
            raise WorkloadError(
                f"{timeout:.0f} s after the end of {key[1]} it still has pods: {names}",
                hint=f"kubectl describe pod -n {key[0]} {names} says why",
            ) from error

    # -------------------------------------------------------------------------------------- pods

    def _members(
        self, key: Key, workload: AppliedWorkload | None = None, *, is_ending: bool = False
    ) -> Mapping[str, Manifest]:
        """The pods that belong to a workload, among the pods that have its labels.

        Those are the pods that its main object has made, or all that the user's selector finds.
        With `is_ending`, pods whose owner is not known, and refused pods, count as well.
        """
        selected_pods, workload = self._watch.pods_of(key), workload or self._workloads.get(key)
        if workload is None:
            return {}
        main = workload.main
        if main is None or workload.spec.compute.selector is not None:
            return selected_pods
        members = {}
        for name, pod in selected_pods.items():
            belongs = self._pod_owners.belongs(key, pod, main)
            if is_ending and belongs is None:
                belongs = True
            if belongs and (is_ending or not self._refused.has(pod)):
                members[name] = pod
        return members

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        key = (namespace, name)
        workload, ordinals = self._workloads.get(key), self._watch.ordinals(key)
        template = "" if workload is None else workload.template
        called_labels = None if workload is None else workload.called_labels
        statuses = []
        for pod_name, pod in self._members(key).items():
            number = ordinals[pod_name]
            status = pod_status(pod, ordinal=number, template=template, called_labels=called_labels)
            if workload is not None and workload.is_of_earlier_attempt(pod):
                status = replace(status, is_retiring=True)
            statuses.append(self._judged(key, pod, status))
        if any(pod.phase == "Failed" and not pod.is_retiring for pod in statuses):
            statuses = retire_superseded(statuses, self.expected(namespace, name))
        return sorted(statuses, key=lambda pod: (pod.ordinal, pod.is_retiring))

    def pod_manifests(self, namespace: str, name: str) -> list[Manifest]:
        return [*self._members((namespace, name)).values()]

    def _judged(self, key: Key, pod: Manifest, status: PodStatus) -> PodStatus:
        if is_leaving(pod):
            is_scaled_down = self._is_deleted_from_present_template(key, pod, status)
            is_scaled_down = is_scaled_down and self._scaler.is_surplus(key, pod)
            return replace(status, ending=SCALED_DOWN) if is_scaled_down else status
        verdict = self._verdicts.of_pod(key, pod, shows_log=status.is_ours)
        if verdict.error is not None and self._repeat_if_it_helps(key, verdict.error, pod):
            return replace(status, reason=f"{verdict.reason}; {AS_USER}")
        reason = verdict.reason or status.reason
        return replace(status, reason=reason, failure=_failure(verdict))

    def _is_deleted_from_present_template(self, key: Key, pod: Manifest, status: PodStatus) -> bool:
        workload = self._workloads.get(key)
        is_present = workload is not None and agent.digest_of(pod) == workload.template
        return is_present and status.ending is not None and status.ending.reason == "Deleted"

    def trouble(self, namespace: str, name: str) -> Trouble:
        key = (namespace, name)
        workload = self._workloads.get(key)
        for reasons in (self._apply_retry.reasons, self._adopter.reasons, self._scaler.reasons):
            if key in reasons:
                return Trouble(reasons[key])
        if workload is None or workload.main is None:
            return Trouble()
        if refused := self._refused.reason(key):
            return Trouble(refused)
        if not workload.is_observed(self._cluster_watch.owners(workload.main)):
            return Trouble()  # the watch still has the object of before the apply
        verdict = self._verdicts.of_owner(key, workload.main)
        if verdict.error is not None and self._repeat_if_it_helps(key, verdict.error):
            return Trouble(f"{verdict.reason}; {RESTRICTED}")
        return Trouble(verdict.reason, _failure(verdict))

    def event_lines(self, namespace: str, name: str) -> list[EventLine]:
        key = (namespace, name)
        workload, reported = self._workloads.get(key), self._reported.get(key)
        if workload is None or reported is None:
            return []
        owners = [] if workload.main is None else self._cluster_watch.owners(workload.main)
        events = self._verdicts.events_around(self._members(key).values(), owners)
        new_events = [reported.new(event) for event in events]
        news = [
            EventLine(event.line, event.object_name, event.is_warning)
            for event in new_events
            if event is not None
        ]
        if workload.is_restricted and not workload.is_reported:
            workload.is_reported = True
            news.insert(0, EventLine(_restricted(namespace)))
        return news

    def expected(self, namespace: str, name: str) -> int | None:
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return None
        size = self._scaler.size((namespace, name))
        if size is not None and workload.is_scaled:
            return size
        owners = [] if workload.main is None else self._cluster_watch.owners(workload.main)
        return workload.expected(owners)

    def _keep_ordinals(self, key: Key) -> None:
        """Write the ordinals of pods for the next controller, if ranks follow the ordinals."""
        workload = self._workloads.get(key)
        if workload is None or not workload.is_ranked:
            return
        if unwritten := self._watch.unwritten_ordinals(key):
            members = self._members(key)
            for name in unwritten.keys() & members.keys():
                self._ordinals.keep(members[name], unwritten[name])

    def _changed(self, key: Key) -> None:
        self._keep_ordinals(key)
        self._scaler.pods_changed(key)
        self._changes.notify()
        self._listener(*key)

    def _pod_deleted(self, pod: Manifest) -> None:
        self._verdicts.forget(pod)
        self._refused.forget_pod(pod)
        self._ordinals.forget_pod(pod)
        self._scaler.forget_pod(pod)

    def _cluster_changed(self, change: ClusterChange) -> None:
        if change.node:
            self._watch.mark_node(change.node)
            return
        if change.is_for_waiting:
            self._watch.mark_waiting(change.namespace)
            return
        labelled_key = (change.namespace or "", change.service)
        if change.namespace is not None and change.pod:
            changed_keys = self._watch.workloads_of(change.namespace, change.pod)
        elif labelled_key in self._workloads:
            changed_keys = [labelled_key]
        else:
            changed_keys = [key for key in self._workloads if change.namespace in (None, key[0])]
        for key in changed_keys:
            self._watch.mark(key)

    # ----------------------------------------------------------------------------------- the rest

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        if manifest["kind"] == "CronJob":
            schedule = manifest["spec"].get("schedule")
            return (f"pods of a CronJob start with its next run ({schedule}), and stay",)
        metadata = manifest["metadata"]
        workload = self._workloads.get((metadata["namespace"], metadata["name"]))
        return tuple(
            knative.warnings(
                compute,
                has_knative=self._plain(manifest) is None,
                starts_pod=workload is not None and workload.starts_pod,
            )
        )

    def _plain(self, manifest: Manifest) -> Manifest | None:
        """The main object that a workload has instead, if this kind has no operator here."""
        metadata = manifest["metadata"]
        workload = self._workloads.get((metadata["namespace"], metadata["name"]))
        main = None if workload is None else workload.main
        return main if main is not None and main["kind"] != manifest["kind"] else None

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        workload = self._workloads.get((spec.namespace, spec.name))
        return spec if workload is None else workload.spec

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        applied_manifest = self._plain(manifest) or manifest
        return self.scaler(spec, manifest) or KubernetesServices.of(spec, applied_manifest).url

    def scaler(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        services = KubernetesServices.of(spec, manifest)
        is_scaled_here = self._scaler.size((spec.namespace, spec.name)) is not None
        if not services.is_scaled or is_scaled_here or self._plain(manifest) is not None:
            return ""
        return objects.service_url(self._cluster_watch.owners(manifest)) or services.url

    def equipment(self, namespace: str, name: str) -> Equipment | None:
        workload = self._workloads.get((namespace, name))
        return None if workload is None else workload.equipment(self._runtime)

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        plain_manifest, metadata = self._plain(manifest), manifest["metadata"]
        workload = self._workloads.get((metadata["namespace"], metadata["name"]))
        is_restricted = workload is not None and workload.is_restricted
        restriction_notes = (_restricted(metadata["namespace"]),) if is_restricted else ()
        if plain_manifest is None:
            return restriction_notes
        if kinds.find(manifest) == knative.KIND:
            return (*self.warnings(compute, manifest), *restriction_notes)
        return (
            f"the cluster has no {manifest['kind']} (no operator): head and workers are pods of a "
            f"{plain_manifest['kind']}",
            *restriction_notes,
        )

    def mounted(self, namespace: str, name: str, pod: str) -> MountedNames:
        key = (namespace, name)
        workload, pod_manifest = self._workloads.get(key), self._watch.pods_of(key).get(pod)
        # A user who selects pods could have made them with any mounts: there is nothing to check.
        if pod_manifest is None or workload is None or workload.main is None:
            return MountedNames()
        return read_mounted_names(pod_manifest["spec"], agent_container(pod_manifest))

    def end_pod(self, namespace: str, name: str, pod: str, error: KubetorchError) -> None:
        pod_manifest = self._watch.pods_of((namespace, name)).get(pod)
        if pod_manifest is not None:
            self._refused.end((namespace, name), pod_manifest, error)
            self._watch.mark((namespace, name))

    def ports(self, namespace: str, name: str, request: PortRequest) -> tuple[int, ...]:
        # Each pod has its own address, so all its ports are free.
        return tuple(request.first + number % request.per_pod for number in range(request.count))

    async def announce(self, namespace: str, name: str, reason: str, message: str) -> None:
        owner = self._owner(namespace, name)
        if owner is None:
            return
        moment = datetime.fromtimestamp(self._now(), timezone.utc).isoformat(timespec="seconds")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{os.urandom(8).hex()}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": owner["apiVersion"],
                "kind": owner["kind"],
                "namespace": namespace,
                **owner["metadata"],
            },
            "type": "Normal",
            "reason": reason,
            "message": message,
            "source": {"component": "kubetorch"},
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        await self._client.create(event)

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        pod_manifest = self._watch.pod_named(namespace, pod)
        if pod_manifest is None:
            return []
        return await log_tail(self._client, pod_manifest, count)

    async def close(self, *, pods: bool) -> None:
        self._verdicts.close()
        await asyncio.gather(*map(self._stop_repeating, [*self._repeats]))
        await asyncio.gather(self._adopter.close(), self._pod_owners.close(), self._refused.close())
        await asyncio.gather(self._ordinals.close(), self._scaler.close())
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
