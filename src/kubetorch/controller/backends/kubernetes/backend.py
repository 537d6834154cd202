"""The backend `kubernetes`: workloads as objects of a cluster, whose controllers make the pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence, Set

from msgspec.structs import replace

from kubetorch.controller.backends.base import Listener, Manifest, News, PodStatus, Trouble
from kubetorch.controller.backends.kubernetes import logs, refusals, runtimes, scaling, statuses
from kubetorch.controller.backends.kubernetes.applied import Applied, Identity, identities
from kubetorch.controller.backends.kubernetes.applying import Applier, Known
from kubetorch.controller.backends.kubernetes.dooms.happenings import Told
from kubetorch.controller.backends.kubernetes.insisting import Insisting, Wish
from kubetorch.controller.backends.kubernetes.judgements import Judgements
from kubetorch.controller.backends.kubernetes.preparing import Preparing
from kubetorch.controller.backends.kubernetes.replacing import Replacing
from kubetorch.controller.backends.kubernetes.surveying import Around, Survey
from kubetorch.controller.backends.kubernetes.taking_up import TakingUp
from kubetorch.controller.backends.kubernetes.watching import Key, PodWatch
from kubetorch.controller.backends.stores import Stores
from kubetorch.errors import (
    KubernetesNotFoundError,
    SpecError,
    WorkloadError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Ref
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.manifests import deployment, services
from kubetorch.manifests.agent import Runtime
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import failures, waits

_log = logging.getLogger(__name__)


class KubernetesBackend:
    """Runs workloads as objects of a cluster.

    Args:
        client: Asks the API server.
        runtime: Where pods get their agent from.
        stores: Keeps the secrets and volumes of pods.
        preparing: Sees to it that pods have what they need.
        owner: What the objects of a workload go away with, by its namespace and name.
        watched: Namespaces that workloads may be in; all if there are none.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        client: Client,
        *,
        runtime: Runtime,
        stores: Stores,
        preparing: Preparing,
        owner: Callable[[str, str], Manifest | None],
        watched: tuple[str, ...] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._runtime = runtime
        self._stores = stores
        self._preparing = preparing
        self._owner = owner
        self._watched = watched
        self._applier = Applier(client)
        self._watch = PodWatch(client, self._changed, self._gone, namespaces=watched)
        self._survey = Survey(client, time=now, on_change=self._around, namespaces=watched)
        self._judgements = Judgements(client, self._survey, self._watch.mark)
        self._now = now
        self._workloads: dict[Key, Applied] = {}
        # What those who wait for its pods were told.
        self._told: dict[Key, Told] = {}
        self._insisting = Insisting(self._applier, now=now, on_wait=self._changed)
        self._replacing = Replacing(client, self._applier, self._insisting)
        self._taking_up = TakingUp(self._take_up, self._changed)
        self._listener: Listener = _ignore
        self._changes = Changes()

    @property
    def name(self) -> str:  # noqa: D102  # Backend's
        return "kubernetes"

    @property
    def stores(self) -> Stores:  # noqa: D102  # Backend's
        return self._stores

    def watch(self, listener: Listener) -> None:  # noqa: D102  # Backend's
        self._listener = listener

    async def start(  # noqa: D102  # Backend's
        self, specs: Sequence[Sequence[WorkloadSpec]]
    ) -> None:
        await asyncio.gather(self._watch.start(), self._survey.start())
        await self._taking_up.start(specs)

    async def _take_up(self, specs: Sequence[WorkloadSpec]) -> None:
        """Know a workload that an earlier controller applied, maybe of another version."""
        key = (specs[0].namespace, specs[0].name)
        # Until its object is found, pods of any template may be the right ones.
        workload = self._workloads[key] = Applied.of(specs[0])
        if workload.main is not None:
            workload = self._workloads[key] = await self._found(workload, workload.main, specs[1:])
        if workload.main is not None:
            with contextlib.suppress(KubernetesNotFoundError):  # as in `_find`
                await self._survey.look_at(workload.main)
        await self._select(workload.spec, workload.main)

    async def _found(
        self, wanted: Applied, main: Manifest, earlier: Sequence[WorkloadSpec]
    ) -> Applied:
        """What was applied: what is wanted, or before that could be something of another kind."""
        there = await self._find(main)
        for spec in () if there is not None else earlier:
            with contextlib.suppress(SpecError):  # another version took it
                before = Applied.of(spec)
                if before.main is not None and (other := await self._find(before.main)):
                    before.found(other)
                    return before
        wanted.equip(self._runtime)
        wanted.found(there)
        if there is not None and len({_objects(spec) for spec in (wanted.spec, *earlier)}) == 1:
            wanted.objects = _objects(wanted.spec)
        return wanted

    async def _find(self, main: Manifest) -> Manifest | None:
        try:
            return await self._applier.find(await self._applier.ref(main))
        except KubernetesNotFoundError:  # its kind is not there any more
            return None

    # --------------------------------------------------------------------------------- workloads

    def check(self, spec: WorkloadSpec) -> None:  # noqa: D102  # Backend's
        refusals.check_watched(spec.namespace, self._watched)

    async def apply(self, spec: WorkloadSpec) -> None:  # noqa: D102  # Backend's
        key = (spec.namespace, spec.name)
        workload = Applied.of(spec)
        main = workload.main
        before = self._workloads.get(key)
        if before is None and key in self._taking_up.reasons:
            before = Applied.of(spec)  # there is something, and nobody knows what
        self._taking_up.forget(key)
        self._told[key] = Told(self._now(), self._told.get(key))
        # Meanwhile: an edit that changes no object is to wait for the API server once.
        looking = asyncio.create_task(self._look(spec, main))
        try:
            if main is not None:
                await self._preparing.prepare(main, spec.compute.pod_template_path)
            else:
                await self._preparing.prepare_selected(spec.namespace)
            known = await looking
        finally:
            looking.cancel()
        given_up = self._given_up(key)
        if given_up is not None:
            await self._applier.remove(given_up)
            known = {}
        workload.equip(self._runtime)
        manifests = services.render(spec.compute, main, namespace=key[0], name=key[1])
        if main is not None:
            manifests += await runtimes.beside(self._client, main, self._runtime)
            manifests.append(main)
        # Whoever brings a manifest may have applied it already.
        taken = main if spec.compute.manifest is not None else None
        wish = Wish(manifests, taken, self._owner(*key), known, spec.compute.launch_timeout)
        # Until then it is what it was before, which goes on if this cannot be made.
        await self._replacing.make_room(key, wish, before)
        workload.objects = identities(manifests)
        self._workloads[key] = workload
        await self._select(spec, main)
        if main is not None:
            with contextlib.suppress(KubernetesNotFoundError):  # to apply it says what is missing
                await self._survey.look_at(main)
        made = await self._insisting.apply(key, wish)
        if main is not None:
            workload.applied(made[-1])
        self._watch.mark(key)

    def _given_up(self, key: Key) -> Manifest | None:
        """The object of a workload, if its controller makes none of the pods.

        It tries again after longer and longer pauses, whatever was put right meanwhile, and a new
        object's at once. What a user brought is not ours to delete, and an autoscaled service has
        more to lose than its pods: the revision that served before.
        """
        before = self._workloads.get(key)
        if before is None or before.main is None or before.spec.compute.manifest is not None:
            return None
        if before.main["kind"] != "Deployment":
            return None
        if self._watch.of(key) or not self._judgements.of_owner(key, before.main).is_doomed:
            return None
        return before.main

    async def _look(self, spec: WorkloadSpec, main: Manifest | None) -> Known:
        """What is there of the objects of a workload."""
        wanted = services.render(spec.compute, main, namespace=spec.namespace, name=spec.name)
        return await self._applier.look(wanted if main is None else (*wanted, main))

    async def _select(self, spec: WorkloadSpec, main: Manifest | None) -> None:
        selector = services.pool(spec.compute, main, name=spec.name)
        await self._watch.select((spec.namespace, spec.name), selector)

    async def delete(self, namespace: str, name: str, *, grace: float) -> None:  # noqa: D102
        key = (namespace, name)
        workload = self._workloads.pop(key, None)
        self._told.pop(key, None)
        self._taking_up.forget(key)
        if workload is None:
            return
        spec, main = workload.spec, workload.main
        for service in services.render(spec.compute, main, namespace=namespace, name=name):
            await self._applier.delete_own(await self._applier.ref(service))
        if main is not None:
            try:
                await self._applier.delete_own(await self._applier.ref(main))
            except KubernetesNotFoundError:  # its kind is gone, and all objects of it
                _log.info("kind is gone kind=%s", main["kind"])
        await self._replacing.remove_left(key, workload, self._owner(*key))
        if main is not None:
            await self._end_pods(key, grace)
        self._judgements.forget_owner(key)
        await self._watch.forget(key)
        if not any(known == namespace for known, _ in self._workloads):
            await self._survey.forget(namespace)

    async def _end_pods(self, key: Key, grace: float) -> None:
        """End the pods with no more patience than `grace`; return when they are gone.

        Whoever owns them deletes them; asked to go earlier, one would only be replaced.
        """
        seconds, patience = max(1, int(grace)), grace + waits.DELETE_SLACK
        told: set[str] = set()
        try:
            async with deadlines.timeout(patience):
                while pods := self._watch.of(key):
                    going = {name for name, pod in pods.items() if statuses.is_leaving(pod)} - told
                    if not going:
                        await self._changes.wait()
                    for name in going:
                        told.add(name)
                        await self._applier.delete(Ref(PODS, name, key[0]), grace_seconds=seconds)
        except TimeoutError as error:
            left = ", ".join(sorted(self._watch.of(key)))
            raise WorkloadError(
                f"{patience:.0f} s after the end of {key[1]} it still has pods: {left}",
                hint=f"kubectl describe pod -n {key[0]} {left} says why",
            ) from error

    # -------------------------------------------------------------------------------------- pods

    def pods(self, namespace: str, name: str) -> list[PodStatus]:  # noqa: D102  # Backend's
        key = (namespace, name)
        workload, ordinals = self._workloads.get(key), self._watch.ordinals(key)
        wanted = "" if workload is None else workload.template
        called = None if workload is None else workload.called
        found = []
        for pod_name, pod in self._watch.of(key).items():
            number = ordinals[pod_name]
            status = statuses.status(pod, ordinal=number, wanted=wanted, called=called)
            found.append(self._judged(key, pod, status))
        return sorted(found, key=lambda pod: (pod.ordinal, pod.is_retiring))

    def _judged(self, key: Key, pod: Manifest, status: PodStatus) -> PodStatus:
        if statuses.is_leaving(pod):
            return status
        verdict = self._judgements.of_pod(key, pod, shows_log=status.is_ours)
        if verdict.error is None:
            return replace(status, reason=verdict.reason or status.reason)
        failure = failures.describe(verdict.error).to_dict() | {"traceback": ""}
        return replace(status, reason=verdict.reason, failure=failure)

    def trouble(self, namespace: str, name: str) -> Trouble:  # noqa: D102  # Backend's
        key = (namespace, name)
        workload = self._workloads.get(key)
        for reasons in (self._insisting.reasons, self._taking_up.reasons):
            if key in reasons:
                return Trouble(reasons[key])
        if workload is None or workload.main is None:
            return Trouble()
        verdict = self._judgements.of_owner(key, workload.main)
        if verdict.error is None:
            return Trouble(verdict.reason)
        failure = failures.describe(verdict.error).to_dict() | {"traceback": ""}
        return Trouble(verdict.reason, failure)

    def news(self, namespace: str, name: str) -> list[News]:  # noqa: D102  # Backend's
        key = (namespace, name)
        workload, told = self._workloads.get(key), self._told.get(key)
        if workload is None or told is None:
            return []
        owners = [] if workload.main is None else self._survey.owners(workload.main)
        events = self._judgements.events_around(self._watch.of(key).values(), owners)
        found = [told.new(event) for event in events]
        return [News(one.line, one.about, one.is_warning) for one in found if one is not None]

    def expected(self, namespace: str, name: str) -> int | None:  # noqa: D102  # Backend's
        workload = self._workloads.get((namespace, name))
        if workload is None:
            return None
        owners = [] if workload.main is None else self._survey.owners(workload.main)
        return workload.expected(owners)

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:  # noqa: D102
        # Who replaces pods here is the object's own controller, by the readiness probe.
        return None

    def _changed(self, key: Key) -> None:
        self._changes.notify()
        self._listener(*key)

    def _gone(self, pod: Manifest) -> None:
        self._judgements.forget(pod)

    def _around(self, around: Around) -> None:
        """Something around pods is different."""
        if around.node:
            self._watch.mark_node(around.node)
            return
        if around.is_for_waiting:
            self._watch.mark_waiting(around.namespace)
            return
        for key in self._concerned(around):
            self._watch.mark(key)

    def _concerned(self, around: Around) -> list[Key]:
        if around.namespace is not None and around.pod:
            return self._watch.whose(around.namespace, around.pod)
        named = (around.namespace or "", around.service)
        if named in self._workloads:
            return [named]
        return [key for key in self._workloads if around.namespace in (None, key[0])]

    # ----------------------------------------------------------------------------------- the rest

    def prepare(self) -> None:  # noqa: D102  # Backend's
        return None

    def warnings(self, manifest: Manifest) -> tuple[str, ...]:  # noqa: D102  # Backend's
        if manifest["kind"] != "CronJob":
            return ()
        schedule = manifest["spec"].get("schedule")
        return (f"pods of a CronJob start with its next run ({schedule}), and stay",)

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:  # noqa: D102  # Backend's
        found = self._workloads.get((spec.namespace, spec.name))
        return spec if found is None else found.spec

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:  # noqa: D102  # Backend's
        found = services.url(spec.compute, manifest, namespace=spec.namespace, name=spec.name)
        if services.is_scaled(spec.compute, manifest):
            return scaling.address(self._survey.owners(manifest)) or found
        return found

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:  # noqa: D102
        return ()

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:  # noqa: D102
        found = self._watch.named(namespace, pod)
        if found is None:
            return []
        return await logs.tail(self._client, found, count)

    async def close(self, *, pods: bool) -> None:  # noqa: D102  # Backend's
        self._judgements.close()
        await self._taking_up.close()
        await asyncio.gather(self._watch.close(), self._survey.close())


def _ignore(namespace: str, name: str) -> None:
    """Nobody listens yet."""


def _objects(spec: WorkloadSpec) -> frozenset[Identity]:
    """What a deploy applies for a workload, without what is asked of the cluster for it."""
    try:
        main = None if spec.compute.is_selector_only else deployment.of_workload(spec)
    except SpecError:  # another version took it
        return frozenset()
    beside = services.render(spec.compute, main, namespace=spec.namespace, name=spec.name)
    return identities(beside if main is None else [*beside, main])
