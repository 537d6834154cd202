"""The watch on the cluster around the pods of workloads, and the verdicts on launches.

`ClusterWatch` keeps events, nodes, claims, queues and owners of pods, from which `launch_failures`
judges launches. Kinds that concern all workloads (nodes, storage classes, queues) are watched from
the start; events and owners are watched in a namespace, and by kind, from the first workload there
on. A kind that cannot be watched is not known, and no launch fails for facts that are not known.

`LaunchVerdicts` keeps a verdict until the pod, its events or the cluster change, or its time is
over. It fetches the last log lines of a container once for each run of the container; until then
the pod waits with the reason of the verdict.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis, snapshot
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import (
    EVENTS,
    NODES,
    WATCHED,
    Cluster,
    Watch,
)
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.controller.backends.kubernetes.launch_failures.volumes import claims
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import KubernetesNotFoundError, KubetorchError
from kubetorch.k8s import pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Change, Informer
from kubetorch.k8s.pod_streams import LogOptions
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection, key, version
from kubetorch.lib import deadlines
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import labels, scheduling

#: Kinds between an object and its pods, by kind of the object.
_KINDS_BETWEEN = {
    "Deployment": (("apps/v1", "ReplicaSet"),),
    "CronJob": (("batch/v1", "Job"),),
    "JobSet": (("batch/v1", "Job"),),
    "TrainJob": (("jobset.x-k8s.io/v1alpha2", "JobSet"), ("batch/v1", "Job")),
    "Service": (
        ("serving.knative.dev/v1", "Configuration"),
        ("serving.knative.dev/v1", "Revision"),
    ),
    "LeaderWorkerSet": (("apps/v1", "StatefulSet"),),
}

#: Labels by which objects name a queue.
_QUEUE_LABELS = {labels.KUEUE, labels.KAI}
#: Namespace, kind and name of the object that an event regards.
_EventKey = tuple[str, str, str]

_log = logging.getLogger(__name__)


class ClusterChange(NamedTuple):
    """A change around the pods of workloads, and which workloads it concerns.

    Attributes:
        namespace: The namespace of the change; `None` if it concerns all namespaces.
        service: The workload whose owner changed; empty if that is not known.
        pod: The pod that an event regards.
        node: The node that changed.
        is_for_waiting: Whether the change matters to pods without a node only.
    """

    namespace: str | None
    service: str = ""
    pod: str = ""
    node: str = ""
    is_for_waiting: bool = False


class ClusterWatch:
    def __init__(
        self,
        client: Client,
        *,
        time: Callable[[], float],
        on_change: Callable[[ClusterChange], None],
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._client = client
        self._time = time
        self._on_change = on_change
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._informers: dict[str, list[Informer]] = {}
        self._absent: set[str] = set()
        self._searches: list[asyncio.Task[None]] = []
        self._owner_informers: dict[tuple[Resource, str], Informer] = {}
        self._event_informers: dict[str, Informer] = {}
        self._events: dict[_EventKey, dict[str, Object]] = {}
        self._stamps: dict[_EventKey, int] = {}
        self._reporting_autoscaler: str | None = None
        self._cluster: Cluster | None = None
        self._basis: object = None
        #: Counts the changes that concern all workloads.
        self.stamp = 0

    async def start(self) -> None:
        """Begin to watch the kinds that concern all workloads."""
        for watch in WATCHED:
            if watch.is_optional:
                self._searches.append(asyncio.create_task(self._search(watch)))
            else:
                await self._watch_kind(watch)

    async def close(self) -> None:
        await cancel_all(self._searches)
        kind_informers = [
            informer for informers in self._informers.values() for informer in informers
        ]
        for informer in (
            *kind_informers,
            *self._owner_informers.values(),
            *self._event_informers.values(),
        ):
            await informer.close()

    async def watch_object(self, manifest: Object) -> None:
        """Watch the events around an object, and the kinds between the object and its pods."""
        namespace = manifest["metadata"]["namespace"]
        if _QUEUE_LABELS & set(scheduling.queue_labels(manifest)):
            # An administrator may have installed the missing operator since the last launch.
            await asyncio.gather(
                *(self._is_served(watch) for watch in WATCHED if watch.is_optional)
            )
        if namespace not in self._event_informers:
            informer = Informer(self._client, Selection(EVENTS, namespace), self._on_event)
            self._event_informers[namespace] = informer
            await informer.__aenter__()
        between = _KINDS_BETWEEN.get(manifest["kind"], ())
        for api_version, kind in ((manifest["apiVersion"], manifest["kind"]), *between):
            try:
                resource = await self._client.discovery.find(api_version, kind)
            except KubernetesNotFoundError:
                if kind == manifest["kind"]:
                    raise
                continue
            if (resource, namespace) not in self._owner_informers:
                informer = Informer(self._client, Selection(resource, namespace), self._on_owner)
                self._owner_informers[resource, namespace] = informer
                await informer.__aenter__()

    async def forget(self, namespace: str) -> None:
        """Stop watching a namespace without workloads."""
        keys = [key for key in self._owner_informers if key[1] == namespace]
        ended_informers = [self._owner_informers.pop(key) for key in keys]
        if namespace in self._event_informers:
            ended_informers.append(self._event_informers.pop(namespace))
        for table in (self._events, self._stamps):
            for stale_key in [event_key for event_key in table if event_key[0] == namespace]:
                del table[stale_key]
        await asyncio.gather(*(informer.close() for informer in ended_informers))

    # ---------------------------------------------------------------------------------- questions

    def cluster(self) -> Cluster:
        kind_informers = self._informers.items()
        known_kinds = frozenset(
            name for name, informers in kind_informers if all(map(_is_current, informers))
        )
        unserved_kinds = {
            name
            for name, informers in kind_informers
            if any(isinstance(informer.error, KubernetesNotFoundError) for informer in informers)
        }
        absent = frozenset(self._absent | unserved_kinds)
        basis = (self.stamp, known_kinds, absent)
        if self._cluster is None or self._basis != basis:
            objects = {
                name: [
                    watched_object
                    for informer in informers
                    for watched_object in informer.objects.values()
                ]
                for name, informers in kind_informers
                if name in known_kinds
            }
            self._cluster, self._basis = (
                Cluster(0.0, objects, absent, self._reporting_autoscaler),
                basis,
            )
        return replace(self._cluster, now=self._time())

    def events(self, namespace: str, names: Iterator[tuple[str, str]]) -> list[Object]:
        return [
            event
            for kind, name in names
            for event in self._events.get((namespace, kind, name), {}).values()
        ]

    def basis(self, pod: Object, names: Iterator[tuple[str, str]]) -> tuple[object, ...]:
        """The facts that a verdict on a pod depends on, beside the pod itself.

        For a pod with a node these are its events and that node. For a pod without a node it is
        the whole cluster.
        """
        namespace, node = pod["metadata"]["namespace"], pod["spec"].get("nodeName")
        events = tuple(self._stamps.get((namespace, *name), 0) for name in names)
        if not node:
            return self.stamp, events
        informers = self._informers.get(NODES, ())
        node_objects = (informer.get(node) for informer in informers if _is_current(informer))
        return next(
            (version(node_object) if node_object else None for node_object in node_objects), False
        ), events

    def owners(self, manifest: Object) -> list[Object]:
        """An applied object, and the objects between it and its pods."""
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        informers = [
            informer for key, informer in self._owner_informers.items() if key[1] == namespace
        ]
        candidates = [owner for informer in informers for owner in informer.objects.values()]
        owners = [
            owner
            for owner in candidates
            if owner["kind"] == manifest["kind"] and owner["metadata"]["name"] == name
        ]
        position = 0
        while position < len(owners):
            uid = owners[position]["metadata"]["uid"]
            owners += [
                owner
                for owner in candidates
                if uid in [ref["uid"] for ref in owner["metadata"].get("ownerReferences") or ()]
            ]
            position += 1
        return owners

    # ------------------------------------------------------------------------------------- inside

    async def _watch_kind(self, watch: Watch) -> None:
        is_everywhere = watch.is_everywhere or not watch.resource.is_namespaced
        namespaces = (None,) if is_everywhere else self._namespaces
        selections = [Selection(watch.resource, name, fields=watch.fields) for name in namespaces]
        self._informers[watch.name] = [
            Informer(self._client, selection, self._on_cluster) for selection in selections
        ]
        for informer in self._informers[watch.name]:
            await informer.__aenter__()

    async def _search(self, watch: Watch) -> None:
        while True:
            if await self._is_served(watch):
                return
            await asyncio.sleep(TIMING.absent_kind_interval_seconds)

    async def _is_served(self, watch: Watch) -> bool:
        """Watch a kind if the cluster serves it; returns `False` if it does not."""
        try:
            await self._client.discovery.find(watch.resource.api_version, watch.resource.kind)
        except KubernetesNotFoundError:
            self._absent.add(watch.name)
            return False
        except KubetorchError:  # the API server does not answer
            return False
        self._absent.discard(watch.name)
        if watch.name not in self._informers:
            await self._watch_kind(watch)
        return True

    def _on_cluster(self, change: Change) -> None:
        self.stamp += 1
        namespace, name = key(change.object)
        if change.object.get("kind") == "Node":
            self._on_change(ClusterChange(None, node=name))
        elif change.object.get("kind") == "PersistentVolumeClaim":
            self._on_change(ClusterChange(namespace, is_for_waiting=True))
        else:
            self._on_change(ClusterChange(None))

    def _on_owner(self, change: Change) -> None:
        self._on_change(_owner_change(change.object))

    def _on_event(self, change: Change) -> None:
        event = change.object
        involved_object: Mapping[str, str] = event.get("involvedObject") or {}
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        event_key = (namespace, involved_object.get("kind", ""), involved_object.get("name", ""))
        if change.kind == "deleted":
            self._events.get(event_key, {}).pop(name, None)
            if not self._events.get(event_key):
                self._events.pop(event_key, None)
                self._stamps.pop(event_key, None)
            return
        self._events.setdefault(event_key, {})[name] = event
        self._stamps[event_key] = self._stamps.get(event_key, 0) + 1
        if self._reporting_autoscaler is None and event_key[1] == "Pod":
            self._note_autoscaler(event)
        if event_key[1] == "Pod":
            self._on_change(ClusterChange(namespace, pod=event_key[2]))
        else:
            owners = (
                informer.get(event_key[2], namespace) for informer in self._owner_informers.values()
            )
            matching_owners = (
                owner for owner in owners if owner is not None and owner["kind"] == event_key[1]
            )
            changed_owner = next(matching_owners, None)
            self._on_change(
                ClusterChange(namespace) if changed_owner is None else _owner_change(changed_owner)
            )

    def _note_autoscaler(self, event: Object) -> None:
        """Note the autoscaler that reported an event: the first event shows that there is one."""
        self._reporting_autoscaler = snapshot.autoscaler(event)
        if self._reporting_autoscaler is not None:
            self.stamp += 1
            self._on_change(ClusterChange(None, is_for_waiting=True))


def _is_current(informer: Informer) -> bool:
    return informer.is_listed and informer.error is None


def _owner_change(owner: Object) -> ClusterChange:
    metadata = owner["metadata"]
    service = (metadata.get("labels") or {}).get(labels.SERVICE, "")
    return ClusterChange(metadata["namespace"], service)


class LaunchVerdicts:
    def __init__(
        self, client: Client, cluster_watch: ClusterWatch, on_change: Callable[[Key], None]
    ) -> None:
        self._client = client
        self._cluster_watch = cluster_watch
        self._on_change = on_change
        # The facts and the verdict on a pod, by uid of the pod.
        self._verdicts: dict[str, tuple[tuple[object, ...], Verdict]] = {}
        # Since when a pod has a doom that has to settle, by uid.
        self._doomed_since: dict[str, float] = {}
        # Timers of the next judgement, by uid of a pod or namespace/name of a workload.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # Last lines by run: uid of the pod, name of the container, number of the run.
        self._log_lines: dict[tuple[str, str, int], list[str]] = {}
        self._fetching: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._fetching.values():
            task.cancel()

    def of_pod(self, key: Key, pod: Object, *, shows_log: bool = True) -> Verdict:
        metadata = pod["metadata"]
        uid = metadata["uid"]
        basis = (version(pod), *self._cluster_watch.basis(pod, _event_objects(pod)))
        last_judgement = self._verdicts.get(uid)
        if last_judgement is not None and last_judgement[0] == basis:
            return last_judgement[1]
        events = self._cluster_watch.events(key[0], _event_objects(pod))
        cluster = self._cluster_watch.cluster()
        verdict = diagnosis.judge_pod(pod, events=events, cluster=cluster)
        verdict = self._settled(uid, verdict, cluster.now)
        self._verdicts[uid] = (basis, verdict)
        self._schedule_recheck(key, uid, verdict)
        if verdict.log_container is not None and shows_log:
            verdict = self._with_lines(key, pod, verdict)
            self._verdicts[uid] = (basis, verdict)
        return verdict

    def of_owner(self, key: Key, manifest: Object) -> Verdict:
        owners = self._cluster_watch.owners(manifest)
        names = ((owner["kind"], owner["metadata"]["name"]) for owner in owners)
        verdict = diagnosis.judge_owner(
            manifest,
            owners,
            events=self._cluster_watch.events(key[0], names),
            cluster=self._cluster_watch.cluster(),
        )
        self._schedule_recheck(key, "/".join(key), verdict)
        return verdict

    def events_around(self, pods: Iterable[Object], owners: Iterable[Object]) -> list[Object]:
        """The events of pods, their claims and their owners, the oldest first."""
        events = [
            event
            for pod in pods
            for event in self._cluster_watch.events(
                pod["metadata"]["namespace"], _event_objects(pod)
            )
        ]
        for owner in owners:
            name = (owner["kind"], owner["metadata"]["name"])
            events += self._cluster_watch.events(owner["metadata"]["namespace"], iter([name]))
        return sorted(events, key=snapshot.first_time)

    def forget(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        self._verdicts.pop(uid, None)
        self._doomed_since.pop(uid, None)
        self._cancel(uid)
        for stale_run in [run for run in self._log_lines if run[0] == uid]:
            del self._log_lines[stale_run]

    def forget_owner(self, key: Key) -> None:
        self._cancel("/".join(key))

    def _cancel(self, timer_key: str) -> None:
        timer = self._timers.pop(timer_key, None)
        if timer is not None:
            timer.cancel()

    def _schedule_recheck(self, key: Key, timer_key: str, verdict: Verdict) -> None:
        self._cancel(timer_key)
        if verdict.recheck_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[timer_key] = loop.call_later(
                verdict.recheck_seconds, self._expire, key, timer_key
            )

    def _expire(self, key: Key, timer_key: str) -> None:
        self._timers.pop(timer_key, None)
        self._verdicts.pop(timer_key, None)
        self._on_change(key)

    def _settled(self, uid: str, verdict: Verdict, now: float) -> Verdict:
        """The verdict; a doom that is younger than its settling time is only a reason to wait."""
        if not verdict.settle_seconds:
            self._doomed_since.pop(uid, None)
            return verdict
        remaining_seconds = self._doomed_since.setdefault(uid, now) + verdict.settle_seconds - now
        if remaining_seconds <= 0:
            return verdict
        return replace(verdict, error=None, recheck_seconds=remaining_seconds)

    # ------------------------------------------------------------------------------- last lines

    def _with_lines(self, key: Key, pod: Object, verdict: Verdict) -> Verdict:
        container = verdict.log_container or ""
        run = (pod["metadata"]["uid"], container, _restarts(pod, container))
        lines = self._log_lines.get(run)
        if lines is not None:
            return verdict.with_log(lines)
        if run not in self._fetching:
            work = self._fetch(key, pod, verdict, run)
            self._fetching[run] = asyncio.create_task(work, name=f"log of {container}")
        return replace(verdict, error=None)

    async def _fetch(
        self, key: Key, pod: Object, verdict: Verdict, run: tuple[str, str, int]
    ) -> None:
        ref = Ref(PODS, pod["metadata"]["name"], key[0])
        options = LogOptions(run[1], tail=LIMITS.container_log_lines)
        is_ended = verdict.log_is_of_previous_run
        read = pod_streams.read_ended_log if is_ended else pod_streams.read_log
        try:
            async with deadlines.timeout(TIMING.container_log_seconds):
                content = await read(self._client, ref, options)
            self._log_lines[run] = content.decode("utf-8", "replace").splitlines()
        except (KubetorchError, TimeoutError) as error:
            _log.info("log not read pod=%s container=%s error=%s", ref.name, run[1], error)
            self._log_lines[run] = []
        finally:
            self._fetching.pop(run, None)
        self._verdicts.pop(run[0], None)
        self._on_change(key)


def _event_objects(pod: Object) -> Iterator[tuple[str, str]]:
    """Kinds and names of the objects whose events concern a pod: itself, and its claims."""
    yield "Pod", pod["metadata"]["name"]
    for claim in claims(pod):
        yield "PersistentVolumeClaim", claim


def _restarts(pod: Object, container: str) -> int:
    statuses = snapshot.container_statuses(pod)
    return sum(
        int(status.get("restartCount") or 0) for status in statuses if status["name"] == container
    )
