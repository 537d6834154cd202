"""Events, nodes and owners around the pods of workloads, and the verdicts on launches.

Events, nodes, claims, queues and what owns the pods are kept to judge launches
(`launch_failures`). What concerns all workloads (nodes, storage classes, queues) is watched from
the start; events and owners are watched in a namespace, and by kind, from the first workload there
on. What cannot be watched is not known, and no launch is given up for what is not known.

A verdict holds until the pod, its events or the cluster change, or its time is over. The last lines
of a container that a verdict asks for are fetched once for each run of it; until they are there,
the pod waits for its reason.
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
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import LOG_LINES, Verdict
from kubetorch.controller.backends.kubernetes.launch_failures.volumes import claims
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.errors import KubernetesNotFoundError, KubetorchError
from kubetorch.k8s import podlogs
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.podlogs import LogOptions
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection, key, version
from kubetorch.k8s.watching import Change
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import labels, scheduling

#: Seconds after which a kind that the cluster does not serve is looked for again.
ABSENT_SECONDS = 30.0
#: Kinds between an object and its pods, by the object's kind.
_BETWEEN = {
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
_QUEUES = {labels.KUEUE, labels.KAI}
#: Namespace, kind and name of what an event is about.
_About = tuple[str, str, str]
#: Seconds for the last lines of a container.
LOG_TIMEOUT = 3.0

_log = logging.getLogger(__name__)


class ClusterChange(NamedTuple):
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
        self._kept: dict[str, list[Informer]] = {}
        self._absent: set[str] = set()
        self._looking: list[asyncio.Task[None]] = []
        self._owners: dict[tuple[Resource, str], Informer] = {}
        self._of_events: dict[str, Informer] = {}
        self._events: dict[_About, dict[str, Object]] = {}
        self._stamps: dict[_About, int] = {}
        self._heard: str | None = None
        self._cluster: Cluster | None = None
        self._basis: object = None
        #: Counts what has changed for all workloads.
        self.stamp = 0

    async def start(self) -> None:
        """Begin to watch what concerns all workloads."""
        for watch in WATCHED:
            if watch.is_optional:
                self._looking.append(asyncio.create_task(self._look_for(watch)))
            else:
                await self._keep(watch)

    async def close(self) -> None:
        await cancel_all(self._looking)
        kept = [informer for informers in self._kept.values() for informer in informers]
        for informer in (*kept, *self._owners.values(), *self._of_events.values()):
            await informer.close()

    async def look_at(self, manifest: Object) -> None:
        """Watch what can happen to an object, and to what it owns above its pods."""
        namespace = manifest["metadata"]["namespace"]
        if _QUEUES & set(scheduling.queue_labels(manifest)):
            # Somebody may have installed a moment ago what the last launch lacked.
            await asyncio.gather(
                *(self._is_served(watch) for watch in WATCHED if watch.is_optional)
            )
        if namespace not in self._of_events:
            informer = Informer(self._client, Selection(EVENTS, namespace), self._on_event)
            self._of_events[namespace] = informer
            await informer.__aenter__()
        between = _BETWEEN.get(manifest["kind"], ())
        for api_version, kind in ((manifest["apiVersion"], manifest["kind"]), *between):
            try:
                resource = await self._client.discovery.find(api_version, kind)
            except KubernetesNotFoundError:
                if kind == manifest["kind"]:
                    raise
                continue
            if (resource, namespace) not in self._owners:
                informer = Informer(self._client, Selection(resource, namespace), self._on_owner)
                self._owners[resource, namespace] = informer
                await informer.__aenter__()

    async def forget(self, namespace: str) -> None:
        """Stop watching a namespace that has no workload any more."""
        gone = [self._owners.pop(key) for key in [*self._owners] if key[1] == namespace]
        if namespace in self._of_events:
            gone.append(self._of_events.pop(namespace))
        for known in (self._events, self._stamps):
            for about in [one for one in known if one[0] == namespace]:
                del known[about]
        await asyncio.gather(*(informer.close() for informer in gone))

    # ---------------------------------------------------------------------------------- questions

    def cluster(self) -> Cluster:
        kept = self._kept.items()
        known = frozenset(name for name, informers in kept if all(map(_is_known, informers)))
        gone = {
            name
            for name, informers in kept
            if any(isinstance(one.error, KubernetesNotFoundError) for one in informers)
        }
        absent = frozenset(self._absent | gone)
        basis = (self.stamp, known, absent)
        if self._cluster is None or self._basis != basis:
            objects = {
                name: [one for informer in informers for one in informer.objects.values()]
                for name, informers in kept
                if name in known
            }
            self._cluster, self._basis = Cluster(0.0, objects, absent, self._heard), basis
        return replace(self._cluster, now=self._time())

    def events(self, namespace: str, names: Iterator[tuple[str, str]]) -> list[Object]:
        return [
            event
            for kind, name in names
            for event in self._events.get((namespace, kind, name), {}).values()
        ]

    def basis(self, pod: Object, names: Iterator[tuple[str, str]]) -> tuple[object, ...]:
        """The facts that a verdict on a pod depends on, beside the pod itself.

        Once it has a node, no other one matters, nor does what it lacked before.
        """
        namespace, node = pod["metadata"]["namespace"], pod["spec"].get("nodeName")
        events = tuple(self._stamps.get((namespace, *name), 0) for name in names)
        if not node:
            return self.stamp, events
        informers = self._kept.get(NODES, ())
        found = (informer.get(node) for informer in informers if _is_known(informer))
        return next((version(one) if one else None for one in found), False), events

    def owners(self, manifest: Object) -> list[Object]:
        """An applied object, and what it owns above the pods."""
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        of_namespace = [
            one
            for (_, where), informer in self._owners.items()
            if where == namespace
            for one in informer.objects.values()
        ]
        found = [
            one
            for one in of_namespace
            if one["kind"] == manifest["kind"] and one["metadata"]["name"] == name
        ]
        begun = 0
        while begun < len(found):
            uid = found[begun]["metadata"]["uid"]
            found += [
                one
                for one in of_namespace
                if uid in [ref["uid"] for ref in one["metadata"].get("ownerReferences") or ()]
            ]
            begun += 1
        return found

    # ------------------------------------------------------------------------------------- inside

    async def _keep(self, watch: Watch) -> None:
        is_everywhere = watch.is_everywhere or not watch.resource.is_namespaced
        where = (None,) if is_everywhere else self._namespaces
        self._kept[watch.name] = [
            Informer(
                self._client,
                Selection(watch.resource, namespace, fields=watch.fields),
                self._on_cluster,
            )
            for namespace in where
        ]
        for informer in self._kept[watch.name]:
            await informer.__aenter__()

    async def _look_for(self, watch: Watch) -> None:
        while True:
            if await self._is_served(watch):
                return
            await asyncio.sleep(ABSENT_SECONDS)

    async def _is_served(self, watch: Watch) -> bool:
        """True if the cluster serves a kind, which is watched then."""
        try:
            await self._client.discovery.find(watch.resource.api_version, watch.resource.kind)
        except KubernetesNotFoundError:
            self._absent.add(watch.name)
            return False
        except KubetorchError:  # it does not say
            return False
        self._absent.discard(watch.name)
        if watch.name not in self._kept:
            await self._keep(watch)
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
        self._on_change(_cluster_changed(change.object))

    def _on_event(self, change: Change) -> None:
        event = change.object
        regarding: Mapping[str, str] = event.get("involvedObject") or {}
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        about = (namespace, regarding.get("kind", ""), regarding.get("name", ""))
        if change.kind == "deleted":
            self._events.get(about, {}).pop(name, None)
            if not self._events.get(about):
                self._events.pop(about, None)
                self._stamps.pop(about, None)
            return
        self._events.setdefault(about, {})[name] = event
        self._stamps[about] = self._stamps.get(about, 0) + 1
        if self._heard is None and about[1] == "Pod":
            self._hear(event)
        if about[1] == "Pod":
            self._on_change(ClusterChange(namespace, pod=about[2]))
        else:
            owners = (informer.get(about[2], namespace) for informer in self._owners.values())
            same = (one for one in owners if one is not None and one["kind"] == about[1])
            found = next(same, None)
            self._on_change(ClusterChange(namespace) if found is None else _cluster_changed(found))

    def _hear(self, event: Object) -> None:
        """One event of an autoscaler is enough to know that the cluster has one."""
        self._heard = snapshot.autoscaler(event)
        if self._heard is not None:
            self.stamp += 1
            self._on_change(ClusterChange(None, is_for_waiting=True))


def _is_known(informer: Informer) -> bool:
    return informer.is_listed and informer.error is None


def _cluster_changed(one: Object) -> ClusterChange:
    """The owner of an object that changed."""
    metadata = one["metadata"]
    service = (metadata.get("labels") or {}).get(labels.SERVICE, "")
    return ClusterChange(metadata["namespace"], service)


class LaunchVerdicts:
    def __init__(
        self, client: Client, cluster_watch: ClusterWatch, on_change: Callable[[Key], None]
    ) -> None:
        self._client = client
        self._cluster_watch = cluster_watch
        self._on_change = on_change
        # By `uid`, what a verdict was made of, and the verdict.
        self._judged: dict[str, tuple[tuple[object, ...], Verdict]] = {}
        # Since when there is a doom that has to settle.
        self._doomed: dict[str, float] = {}
        # By the `uid` of a pod, or namespace/name of a workload.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._lines: dict[tuple[str, str, int], list[str]] = {}
        self._fetching: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._fetching.values():
            task.cancel()

    def of_pod(self, key: Key, pod: Object, *, shows_log: bool = True) -> Verdict:
        metadata = pod["metadata"]
        uid = metadata["uid"]
        basis = (version(pod), *self._cluster_watch.basis(pod, _names(pod)))
        known = self._judged.get(uid)
        if known is not None and known[0] == basis:
            return known[1]
        events = self._cluster_watch.events(key[0], _names(pod))
        cluster = self._cluster_watch.cluster()
        verdict = diagnosis.judge_pod(pod, events=events, cluster=cluster)
        verdict = self._settled(uid, verdict, cluster.now)
        self._judged[uid] = (basis, verdict)
        self._judge_again(key, uid, verdict)
        if verdict.log is not None and shows_log:
            verdict = self._with_lines(key, pod, verdict)
            self._judged[uid] = (basis, verdict)
        return verdict

    def of_owner(self, key: Key, manifest: Object) -> Verdict:
        owners = self._cluster_watch.owners(manifest)
        names = ((one["kind"], one["metadata"]["name"]) for one in owners)
        verdict = diagnosis.judge_owner(
            manifest,
            owners,
            events=self._cluster_watch.events(key[0], names),
            cluster=self._cluster_watch.cluster(),
        )
        self._judge_again(key, "/".join(key), verdict)
        return verdict

    def events_around(self, pods: Iterable[Object], owners: Iterable[Object]) -> list[Object]:
        """The events of pods, their claims and what owns them, the oldest first."""
        found = [
            event
            for pod in pods
            for event in self._cluster_watch.events(pod["metadata"]["namespace"], _names(pod))
        ]
        for one in owners:
            name = (one["kind"], one["metadata"]["name"])
            found += self._cluster_watch.events(one["metadata"]["namespace"], iter([name]))
        return sorted(found, key=snapshot.began)

    def forget(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        self._judged.pop(uid, None)
        self._doomed.pop(uid, None)
        self._cancel(uid)
        for known in [one for one in self._lines if one[0] == uid]:
            del self._lines[known]

    def forget_owner(self, key: Key) -> None:
        self._cancel("/".join(key))

    def _cancel(self, what: str) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()

    def _judge_again(self, key: Key, what: str, verdict: Verdict) -> None:
        self._cancel(what)
        if verdict.again is not None:
            loop = asyncio.get_running_loop()
            self._timers[what] = loop.call_later(verdict.again, self._is_over, key, what)

    def _is_over(self, key: Key, what: str) -> None:
        self._timers.pop(what, None)
        self._judged.pop(what, None)
        self._on_change(key)

    def _settled(self, uid: str, verdict: Verdict, now: float) -> Verdict:
        """The verdict; a doom that is too new is only what a pod waits for."""
        if not verdict.settles:
            self._doomed.pop(uid, None)
            return verdict
        rest = self._doomed.setdefault(uid, now) + verdict.settles - now
        return verdict if rest <= 0 else replace(verdict, error=None, again=rest)

    # ------------------------------------------------------------------------------- last lines

    def _with_lines(self, key: Key, pod: Object, verdict: Verdict) -> Verdict:
        container = verdict.log or ""
        run = (pod["metadata"]["uid"], container, _restarts(pod, container))
        lines = self._lines.get(run)
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
        options = LogOptions(run[1], tail=LOG_LINES)
        read = podlogs.read_ended if verdict.is_previous else podlogs.read
        try:
            found = await asyncio.wait_for(read(self._client, ref, options), LOG_TIMEOUT)
            self._lines[run] = found.decode("utf-8", "replace").splitlines()
        except (KubetorchError, asyncio.TimeoutError) as error:
            _log.info("log not read pod=%s container=%s error=%s", ref.name, run[1], error)
            self._lines[run] = []
        finally:
            self._fetching.pop(run, None)
        self._judged.pop(run[0], None)
        self._on_change(key)


def _names(pod: Object) -> Iterator[tuple[str, str]]:
    """Kinds and names of the objects whose events concern a pod: itself, and its claims."""
    yield "Pod", pod["metadata"]["name"]
    for claim in claims(pod["spec"]):
        yield "PersistentVolumeClaim", claim


def _restarts(pod: Object, container: str) -> int:
    statuses = snapshot.container_statuses(pod)
    return sum(int(one.get("restartCount") or 0) for one in statuses if one["name"] == container)
