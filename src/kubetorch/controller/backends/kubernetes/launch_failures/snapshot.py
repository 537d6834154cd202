"""The objects of a cluster that verdicts on launches depend on, at one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TypeVar

from kubetorch.k8s.resources import Object, Resource, key

_T = TypeVar("_T")
EVENTS = Resource("", "v1", "events", "Event")
NODES = "nodes"
CLAIMS = "claims"
STORAGE_CLASSES = "storage_classes"
AUTOSCALER_STATUS = "autoscaler_status"
NODE_POOLS = "node_pools"
LOCAL_QUEUES = "local_queues"
KUEUE_WORKLOADS = "kueue_workloads"
KAI_QUEUES = "kai_queues"
#: Labels of nodes that an autoscaler made which leaves no other trace in the cluster.
_AUTOSCALED = ("karpenter.sh/", "provisioner.cast.ai/")
#: Reporters of events, and reasons that only an autoscaler gives.
_AUTOSCALERS = ("cluster-autoscaler", "karpenter")
_SCALING = ("TriggeredScaleUp", "NotTriggerScaleUp", "Nominated")


@dataclass(frozen=True)
class Watch:
    name: str
    resource: Resource
    fields: str = ""
    is_optional: bool = False
    is_everywhere: bool = False


#: What a backend keeps, beside pods, what owns them, and `EVENTS` of both.
WATCHED = (
    Watch(NODES, Resource("", "v1", "nodes", "Node", is_namespaced=False)),
    Watch(CLAIMS, Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")),
    Watch(
        STORAGE_CLASSES,
        Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", is_namespaced=False),
    ),
    Watch(
        AUTOSCALER_STATUS,
        Resource("", "v1", "configmaps", "ConfigMap"),
        fields="metadata.name=cluster-autoscaler-status",
        is_everywhere=True,
    ),
    Watch(
        NODE_POOLS,
        Resource("karpenter.sh", "v1", "nodepools", "NodePool", is_namespaced=False),
        is_optional=True,
    ),
    Watch(
        LOCAL_QUEUES,
        Resource("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue"),
        is_optional=True,
    ),
    Watch(
        KUEUE_WORKLOADS,
        Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload"),
        is_optional=True,
    ),
    Watch(
        KAI_QUEUES,
        Resource("scheduling.run.ai", "v2", "queues", "Queue", is_namespaced=False),
        is_optional=True,
    ),
)


@dataclass(frozen=True)
class Cluster:
    now: float
    objects: Mapping[str, Sequence[Object]] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    heard: str | None = None
    memo: dict[object, Any] = field(default_factory=dict)

    def knows(self, name: str) -> bool:
        return name in self.objects or name in self.absent

    def all(self, name: str) -> Sequence[Object]:
        return self.objects.get(name, ())

    def find(self, name: str, which: str, namespace: str = "") -> Object | None:
        found = self.once(("index", name), lambda: {key(one): one for one in self.all(name)})
        return found.get((namespace, which))

    def once(self, what: object, find: Callable[[], _T]) -> _T:
        """Compute a value once for as long as the objects stay the same."""
        if what not in self.memo:
            self.memo[what] = find()
        found: _T = self.memo[what]
        return found

    @property
    def autoscaler(self) -> str | None:
        return self.once("autoscaler", self._autoscaler)

    def _autoscaler(self) -> str | None:
        if self.all(NODE_POOLS):
            return "Karpenter"
        if self.all(AUTOSCALER_STATUS):
            return "the cluster autoscaler"
        made = (label for node in self.all(NODES) for label in node["metadata"].get("labels") or ())
        if any(label.startswith(_AUTOSCALED) for label in made):
            return "the autoscaler"
        return self.heard


def time_of(text: object) -> float | None:
    """A time of the API in seconds since the epoch."""
    if not isinstance(text, str) or not text:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    if found.tzinfo is None:
        found = found.replace(tzinfo=timezone.utc)
    # A container that never started has a start in 1970.
    return found.timestamp() or None


def reporter(event: Object) -> str:
    source = (event.get("source") or {}).get("component")
    return str(event.get("reportingComponent") or source or "")


def autoscaler(event: Object) -> str | None:
    """The autoscaler that says it, if it is one's."""
    says = reporter(event)
    if says in _AUTOSCALERS or event.get("reason") in _SCALING:
        return says or "the autoscaler"
    return None


def when(event: Object) -> float:
    """The last time of an event."""
    series = event.get("series") or {}
    given = (
        event.get("lastTimestamp"),
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        event["metadata"].get("creationTimestamp"),
    )
    return next((at for at in map(time_of, given) if at is not None), 0.0)


def began(event: Object) -> float:
    """The first time of an event."""
    given = (event.get("firstTimestamp"), event.get("eventTime"))
    return next((at for at in map(time_of, given) if at is not None), when(event))


def about(events: Iterable[Object], kind: str, name: str, *reasons: str) -> list[Object]:
    """Events of one object with one of the reasons (any, when none is given), the oldest first."""
    found = [
        event
        for event in events
        if (event.get("involvedObject") or {}).get("kind") == kind
        and (event.get("involvedObject") or {}).get("name") == name
        and (not reasons or event.get("reason") in reasons)
    ]
    return sorted(found, key=when)


def of_these(events: Iterable[Object], things: Iterable[Object]) -> list[Object]:
    """Events without those of earlier objects that had the names of these."""
    uids = {
        (one.get("kind"), one["metadata"]["name"]): one["metadata"].get("uid") for one in things
    }
    found = []
    for event in events:
        about = event.get("involvedObject") or {}
        uid = uids.get((about.get("kind"), about.get("name")))
        if None in (uid, about.get("uid")) or uid == about["uid"]:
            found.append(event)
    return found


def container_statuses(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def controller_of(one: Object) -> Object | None:
    """The reference to what made an object and keeps it, if something does."""
    owners: list[Object] = one["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)


def condition(manifest: Object, kind: str) -> Object:
    """A condition in the status of an object; empty if it has none of that type."""
    for one in (manifest.get("status") or {}).get("conditions") or ():
        if one.get("type") == kind:
            found: dict[str, Any] = one
            return found
    return {}
