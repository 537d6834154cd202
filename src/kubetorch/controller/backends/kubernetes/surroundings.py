"""What is watched beside pods, so that launches can be judged (`dooms`).

One informer for each of `WATCHED`, one for events, and one for each kind of object that makes the
pods of a workload, from the first such workload on. A kind that the cluster does not serve, or that
we may not list, is tried again when `refresh` says so; nobody is doomed by what is not known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

from kubetorch.controller.backends.base import Manifest
from kubetorch.controller.backends.kubernetes.dooms.cluster import (
    EVENTS,
    WATCHED,
    Cluster,
    Watch,
)
from kubetorch.errors import KubernetesError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Resource, Selection
from kubetorch.k8s.watching import DELETED, Change
from kubetorch.lib.clock import Clock, SystemClock
from kubetorch.manifests import labels

#: Seconds until all objects of a kind have to be known; it is not waited for longer.
LIST_TIMEOUT = 10.0
#: Namespace, kind and name.
Identity = tuple[str, str, str]

#: What stands between an object and its pods, and has the labels of the pods.
_BETWEEN: Mapping[tuple[str, str], tuple[Resource, ...]] = {
    ("Deployment", "apps"): (Resource("apps", "v1", "replicasets", "ReplicaSet"),),
    ("Service", "serving.knative.dev"): (
        Resource("serving.knative.dev", "v1", "revisions", "Revision"),
        Resource("apps", "v1", "replicasets", "ReplicaSet"),
    ),
    ("CronJob", "batch"): (Resource("batch", "v1", "jobs", "Job"),),
    ("JobSet", "jobset.x-k8s.io"): (Resource("batch", "v1", "jobs", "Job"),),
    ("TrainJob", "trainer.kubeflow.org"): (
        Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
        Resource("batch", "v1", "jobs", "Job"),
    ),
}

_log = logging.getLogger(__name__)


class Surroundings:
    """Keeps what judges need.

    Args:
        client: Asks the API server.
        on_change: Told of each new event and each change of an owner (namespace, kind, name of what
            it is about), and with `None` of a change of the cluster itself.
        namespaces: Where workloads are; everywhere if there are none.
        clock: The time.
    """

    def __init__(
        self,
        client: Client,
        on_change: Callable[[Identity | None], None],
        *,
        namespaces: tuple[str, ...] = (),
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._on_change = on_change
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._clock = clock or SystemClock()
        self._stack = AsyncExitStack()
        self._kept: dict[str, list[Informer]] = {}
        self._absent: set[str] = set()
        self._owners: dict[Resource, list[Informer]] = {}
        self._events: dict[Identity, dict[str, Object]] = {}

    async def start(self) -> None:
        """Know all of it, as far as it is allowed; a cluster that does not tell is no failure."""
        events = [replace(EVENTS, namespace=one) for one in self._namespaces]
        await asyncio.gather(self._keep(events, self._told), *map(self._start, WATCHED))

    async def close(self) -> None:
        """Stop watching."""
        await self._stack.aclose()

    async def refresh(self) -> None:
        """Look again for kinds that were not served, or could not be listed, the last time.

        A deploy asks for it: somebody may have installed what the last one lacked.
        """
        missing = [watch for watch in WATCHED if watch.name not in self._kept]
        await asyncio.gather(*map(self._start, missing))

    async def follow(self, main: Manifest) -> None:
        """Know the objects of the kind of `main`, and what they own above pods."""
        try:
            resource = await self._client.discovery.resource_of(main)
        except KubernetesError:  # the deploy itself says why
            return
        between = _BETWEEN.get((resource.kind, resource.group), ())
        await asyncio.gather(*(self._follow(one) for one in (resource, *between)))

    # ---------------------------------------------------------------------------------- questions

    @property
    def cluster(self) -> Cluster:
        """What is known of the cluster at this moment."""
        objects = {
            name: [one for informer in informers for one in informer.objects.values()]
            for name, informers in self._kept.items()
        }
        gone = {name for name, informers in self._kept.items() if any(map(_is_gone, informers))}
        known = {name: found for name, found in objects.items() if name not in gone}
        return Cluster(self._clock.time(), known, frozenset(self._absent | gone))

    def owners(self, namespace: str, name: str) -> list[Object]:
        """The objects above the pods of a workload."""
        return [
            one
            for informers in self._owners.values()
            for informer in informers
            for one in informer.objects.values()
            if one["metadata"].get("namespace") == namespace
            and (one["metadata"].get("labels") or {}).get(labels.SERVICE) == name
        ]

    def events(self, namespace: str, things: Collection[tuple[str, str]]) -> list[Object]:
        """The events about some things, each a kind and a name."""
        return [
            event
            for kind, name in things
            for event in self._events.get((namespace, kind, name), {}).values()
        ]

    def events_of_pod(self, pod: Object) -> list[Object]:
        """The events about a pod and its claims."""
        volumes = pod["spec"].get("volumes") or ()
        claims = [
            ("PersistentVolumeClaim", one["persistentVolumeClaim"]["claimName"])
            for one in volumes
            if "persistentVolumeClaim" in one
        ]
        metadata = pod["metadata"]
        return self.events(metadata["namespace"], [("Pod", metadata["name"]), *claims])

    # ------------------------------------------------------------------------------------- inside

    async def _start(self, watch: Watch) -> None:
        selection = watch.selection
        scoped = selection.resource.is_namespaced and selection.namespace is None
        everywhere = self._namespaces if scoped else (selection.namespace,)
        selections = [replace(selection, namespace=one) for one in everywhere]
        try:
            informers = await self._keep(selections, lambda _: self._on_change(None))
        except KubernetesNotFoundError:
            self._absent.add(watch.name)
        except KubernetesError as error:
            self._absent.discard(watch.name)
            _log.warning("not watched kind=%s why=%s", selection.resource, error.message)
        else:
            self._absent.discard(watch.name)
            self._kept[watch.name] = informers

    async def _follow(self, resource: Resource) -> None:
        if resource in self._owners:
            return
        self._owners[resource] = []
        selections = [Selection(resource, one, labels=labels.SERVICE) for one in self._namespaces]
        try:
            self._owners[resource] = await self._keep(selections, self._changed)
        except KubernetesError as error:
            del self._owners[resource]
            _log.warning("not watched kind=%s why=%s", resource, error.message)

    async def _keep(
        self, selections: Collection[Selection], on_change: Callable[[Change], None]
    ) -> list[Informer]:
        """Watch selections until `close`.

        Raises:
            KubernetesError: One of them cannot be listed; none is watched then.
        """
        async with AsyncExitStack() as stack:
            informers = [
                await stack.enter_async_context(Informer(self._client, one, on_change))
                for one in selections
            ]
            await asyncio.gather(*(one.listed(timeout=LIST_TIMEOUT) for one in informers))
            self._stack.push_async_exit(stack.pop_all())
        return informers

    def _told(self, change: Change) -> None:
        """An event: kept by what it is about, until the API server forgets it."""
        about = change.object.get("involvedObject") or {}
        identity = (about.get("namespace") or "", about.get("kind") or "", about.get("name") or "")
        name = change.object["metadata"]["name"]
        there = self._events.setdefault(identity, {})
        if change.kind != DELETED:
            there[name] = change.object
            self._on_change(identity)
            return
        there.pop(name, None)
        if not there:
            del self._events[identity]

    def _changed(self, change: Change) -> None:
        metadata = change.object["metadata"]
        self._on_change((metadata["namespace"], change.object["kind"], metadata["name"]))


def _is_gone(informer: Informer) -> bool:
    """Whether the kind is not served any more."""
    return isinstance(informer.error, KubernetesNotFoundError)
