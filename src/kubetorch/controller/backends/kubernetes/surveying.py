"""What happens around the pods of workloads: events, nodes, claims, queues, and what owns the pods.

It is kept to judge launches (`dooms`). What concerns all workloads (nodes, storage classes, queues)
is watched from the start; events and owners are watched in a namespace, and by kind, from the first
workload there on. What cannot be watched is not known, and nobody is doomed by what is not known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kubetorch.controller.backends.kubernetes.dooms import cluster as reading
from kubetorch.controller.backends.kubernetes.dooms.cluster import (
    EVENTS,
    NODES,
    WATCHED,
    Cluster,
    Watch,
)
from kubetorch.errors import KubernetesNotFoundError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Resource, Selection, key, version
from kubetorch.k8s.watching import Change
from kubetorch.manifests import labels

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

_log = logging.getLogger(__name__)

#: Namespace, kind and name of what an event is about.
_About = tuple[str, str, str]


class Around(NamedTuple):
    """Where something is different.

    Attributes:
        namespace: The namespace; `None` is all of them.
        service: The workload whose object it is about, if its labels say so.
        pod: The pod that it is about.
        node: The node that it is about: it matters to pods there, and to those without a node.
        is_for_waiting: It matters only to pods without a node.
    """

    namespace: str | None
    service: str = ""
    pod: str = ""
    node: str = ""
    is_for_waiting: bool = False


class Survey:
    """Knows what happens around pods.

    Args:
        client: Asks the API server.
        time: Seconds since the epoch.
        on_change: Told where something is different.
        namespaces: Where workloads may be; everywhere if there are none.
    """

    def __init__(
        self,
        client: Client,
        *,
        time: Callable[[], float],
        on_change: Callable[[Around], None],
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
        """Stop watching."""
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        kept = [informer for informers in self._kept.values() for informer in informers]
        for informer in (*kept, *self._owners.values(), *self._of_events.values()):
            await informer.close()

    async def look_at(self, manifest: Object) -> None:
        """Watch what can happen to an object, and to what it owns above its pods.

        Raises:
            KubernetesNotFoundError: The cluster does not serve its kind.
        """
        namespace = manifest["metadata"]["namespace"]
        if _QUEUES & set(manifest["metadata"].get("labels") or {}):
            # Somebody may have installed a moment ago what the last launch lacked.
            await asyncio.gather(
                *(self._is_served(watch) for watch in WATCHED if watch.is_optional)
            )
        if namespace not in self._of_events:
            events = Selection(EVENTS.resource, namespace)
            informer = Informer(self._client, events, self._on_event)
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
        """There is no workload in a namespace any more: watch nothing there."""
        gone = [self._owners.pop(key) for key in [*self._owners] if key[1] == namespace]
        if namespace in self._of_events:
            gone.append(self._of_events.pop(namespace))
        for known in (self._events, self._stamps):
            for about in [one for one in known if one[0] == namespace]:
                del known[about]
        await asyncio.gather(*(informer.close() for informer in gone))

    # ---------------------------------------------------------------------------------- questions

    def cluster(self) -> Cluster:
        """What is known that concerns all workloads."""
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
        """The events of objects, by kind and name."""
        return [
            event
            for kind, name in names
            for event in self._events.get((namespace, kind, name), {}).values()
        ]

    def basis(self, pod: Object, names: Iterator[tuple[str, str]]) -> tuple[object, ...]:
        """What a verdict on a pod is made of, beside the pod: it is judged again when this changes.

        Once it has a node, no other one matters, nor does what it lacked before.

        Args:
            pod: The pod.
            names: What its events are about, by kind and name.
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
            found += [one for one in of_namespace if _is_owned(one, uid)]
            begun += 1
        return found

    # ------------------------------------------------------------------------------------- inside

    async def _keep(self, watch: Watch) -> None:
        given = watch.selection
        is_everywhere = watch.is_everywhere or not given.resource.is_namespaced
        where = (None,) if is_everywhere else self._namespaces
        self._kept[watch.name] = [
            Informer(
                self._client,
                Selection(given.resource, namespace, given.labels, given.fields),
                self._on_cluster,
            )
            for namespace in where
        ]
        for informer in self._kept[watch.name]:
            await informer.__aenter__()

    async def _look_for(self, watch: Watch) -> None:
        """Watch a kind as soon as the cluster serves it."""
        while True:
            if await self._is_served(watch):
                return
            await asyncio.sleep(ABSENT_SECONDS)

    async def _is_served(self, watch: Watch) -> bool:
        """Whether the cluster serves a kind; if so, it is watched."""
        resource = watch.selection.resource
        try:
            await self._client.discovery.find(resource.api_version, resource.kind)
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
            self._on_change(Around(None, node=name))
        elif change.object.get("kind") == "PersistentVolumeClaim":
            self._on_change(Around(namespace, is_for_waiting=True))
        else:
            self._on_change(Around(None))

    def _on_owner(self, change: Change) -> None:
        self._on_change(_around(change.object))

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
            self._on_change(Around(namespace, pod=about[2]))
        else:
            owners = (informer.get(about[2], namespace) for informer in self._owners.values())
            same = (one for one in owners if one is not None and one["kind"] == about[1])
            found = next(same, None)
            self._on_change(Around(namespace) if found is None else _around(found))

    def _hear(self, event: Object) -> None:
        """One event of an autoscaler is enough to know that the cluster has one."""
        self._heard = reading.autoscaler(event)
        if self._heard is not None:
            self.stamp += 1
            self._on_change(Around(None, is_for_waiting=True))


def _is_known(informer: Informer) -> bool:
    return informer.is_listed and informer.error is None


def _around(one: Object) -> Around:
    """Whose an object is."""
    metadata = one["metadata"]
    service = (metadata.get("labels") or {}).get(labels.SERVICE, "")
    return Around(metadata["namespace"], service)


def _is_owned(one: Object, uid: str) -> bool:
    references: Sequence[Mapping[str, str]] = one["metadata"].get("ownerReferences") or ()
    return any(reference.get("uid") == uid for reference in references)
