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
#: Prefixes of labels on nodes by autoscalers that leave no other trace in the cluster.
_AUTOSCALER_NODE_LABELS = ("karpenter.sh/", "provisioner.cast.ai/")
#: Reporters of events that are autoscalers, and reasons that only autoscalers give.
_AUTOSCALERS = ("cluster-autoscaler", "karpenter")
_AUTOSCALER_REASONS = ("TriggeredScaleUp", "NotTriggerScaleUp", "Nominated")


@dataclass(frozen=True)
class Watch:
    """A kind of objects to watch.

    Attributes:
        name: The name by which a `Cluster` has the objects.
        resource: The kind.
        fields: A field selector.
        is_optional: Whether a cluster may not serve the kind.
        is_everywhere: Whether to watch all namespaces, even if the controller works in a few.
    """

    name: str
    resource: Resource
    fields: str = ""
    is_optional: bool = False
    is_everywhere: bool = False


#: The kinds that a backend watches, beside pods, their owners, and the `EVENTS` of both.
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
    """The watched objects of a cluster at one moment.

    Attributes:
        now: Seconds since the epoch.
        objects: The objects of each known kind, by `Watch.name`.
        absent: The kinds that the cluster does not serve.
        reporting_autoscaler: The autoscaler that has reported an event, if any.
        memo: Values that were computed from these objects.
    """

    now: float
    objects: Mapping[str, Sequence[Object]] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    reporting_autoscaler: str | None = None
    memo: dict[object, Any] = field(default_factory=dict)

    def knows(self, name: str) -> bool:
        return name in self.objects or name in self.absent

    def all(self, name: str) -> Sequence[Object]:
        return self.objects.get(name, ())

    def find(self, name: str, object_name: str, namespace: str = "") -> Object | None:
        objects_by_key = self.memoized(
            ("index", name),
            lambda: {key(cluster_object): cluster_object for cluster_object in self.all(name)},
        )
        return objects_by_key.get((namespace, object_name))

    def memoized(self, memo_key: object, compute: Callable[[], _T]) -> _T:
        """Compute a value once while the objects stay the same."""
        if memo_key not in self.memo:
            self.memo[memo_key] = compute()
        memoized: _T = self.memo[memo_key]
        return memoized

    @property
    def autoscaler(self) -> str | None:
        return self.memoized("autoscaler", self._autoscaler)

    def _autoscaler(self) -> str | None:
        if self.all(NODE_POOLS):
            return "Karpenter"
        if self.all(AUTOSCALER_STATUS):
            return "the cluster autoscaler"
        node_labels = (
            label for node in self.all(NODES) for label in node["metadata"].get("labels") or ()
        )
        if any(label.startswith(_AUTOSCALER_NODE_LABELS) for label in node_labels):
            return "the autoscaler"
        return self.reporting_autoscaler


def time_of(text: object) -> float | None:
    """A time of the API in seconds since the epoch."""
    if not isinstance(text, str) or not text:
        return None
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    # A container that never started has the start 1970-01-01.
    return moment.timestamp() or None


def reporter(event: Object) -> str:
    source = (event.get("source") or {}).get("component")
    return str(event.get("reportingComponent") or source or "")


def autoscaler(event: Object) -> str | None:
    """The autoscaler that reports an event; `None` for another reporter."""
    component = reporter(event)
    if component in _AUTOSCALERS or event.get("reason") in _AUTOSCALER_REASONS:
        return component or "the autoscaler"
    return None


def last_time(event: Object) -> float:
    series = event.get("series") or {}
    timestamps = (
        event.get("lastTimestamp"),
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        event["metadata"].get("creationTimestamp"),
    )
    return next((moment for moment in map(time_of, timestamps) if moment is not None), 0.0)


def first_time(event: Object) -> float:
    timestamps = (event.get("firstTimestamp"), event.get("eventTime"))
    return next(
        (moment for moment in map(time_of, timestamps) if moment is not None), last_time(event)
    )


def events_of(events: Iterable[Object], kind: str, name: str, *reasons: str) -> list[Object]:
    """The events of one object, the oldest first; with `reasons`, only those with such a reason."""
    object_events = [
        event
        for event in events
        if (event.get("involvedObject") or {}).get("kind") == kind
        and (event.get("involvedObject") or {}).get("name") == name
        and (not reasons or event.get("reason") in reasons)
    ]
    return sorted(object_events, key=last_time)


def without_earlier_objects(events: Iterable[Object], objects: Iterable[Object]) -> list[Object]:
    """The events without those of earlier objects with the same names."""
    uids = {}
    for live_object in objects:
        metadata = live_object["metadata"]
        uids[live_object.get("kind"), metadata["name"]] = metadata.get("uid")
    current_events = []
    for event in events:
        involved_object = event.get("involvedObject") or {}
        uid = uids.get((involved_object.get("kind"), involved_object.get("name")))
        if None in (uid, involved_object.get("uid")) or uid == involved_object["uid"]:
            current_events.append(event)
    return current_events


def container_statuses(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def controller_of(manifest: Object) -> Object | None:
    owners: list[Object] = manifest["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)


def condition(manifest: Object, kind: str) -> Object:
    """A condition in the status of an object; empty without a condition of that type."""
    for status_condition in (manifest.get("status") or {}).get("conditions") or ():
        if status_condition.get("type") == kind:
            matching_condition: dict[str, Any] = status_condition
            return matching_condition
    return {}
