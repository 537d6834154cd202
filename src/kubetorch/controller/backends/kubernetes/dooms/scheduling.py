"""Pods that no node has taken: whether one ever could, and what the scheduler says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kubetorch.controller.backends.kubernetes.dooms import cluster as reading
from kubetorch.controller.backends.kubernetes.dooms import nodes, queues, volumes
from kubetorch.controller.backends.kubernetes.dooms.cluster import NODES, Cluster
from kubetorch.controller.backends.kubernetes.dooms.verdicts import (
    NOTHING,
    Verdict,
    doomed,
    waiting,
    worst,
)
from kubetorch.errors import UnschedulableError
from kubetorch.k8s.resources import Object

DEFAULT_SCHEDULER = "default-scheduler"
#: Seconds for which no node may be able to take a pod: an autoscaler speaks after the scheduler,
#: and a node that is set up anew is away for a moment.
SETTLE = 2.5
#: Seconds after which a pod that no scheduler has looked at is worth a line.
_SILENCE = 4.0
#: Karpenter's word for an offer that no instance type can meet; each pool has its own clause.
_NO_INSTANCE = "no instance type has enough resources"
_POOL = "incompatible with nodepool"


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a pod that has no node."""
    scheduled = reading.condition(pod, "PodScheduled")
    found = [volumes.judge(pod, events, cluster)]
    if scheduled.get("reason") == "SchedulingGated":
        found.append(queues.judge_gated(pod, cluster))
    elif scheduled.get("status") == "False":
        found.append(_unschedulable(pod, scheduled, events, cluster))
    else:
        found.append(queues.judge_scheduler(pod, cluster))
        found.append(_unnoticed(pod, cluster))
    return worst(found)


def _unschedulable(
    pod: Object, scheduled: Object, events: Sequence[Object], cluster: Cluster
) -> Verdict:
    message = brief(str(scheduled.get("message") or "no node has taken it yet"))
    since = reading.time_of(scheduled.get("lastTransitionTime"))
    waits = waiting(f"no node takes it yet: {message}", since)
    if scheduled.get("reason") != "Unschedulable":
        return waits
    autoscaler = cluster.autoscaler or _heard_of(pod, events)
    if autoscaler is not None:
        return _autoscaled(pod, message, events, autoscaler, since)
    if not (cluster.knows_capacity and cluster.all(NODES)):
        return waits
    asked = ("misfits", nodes.demand(pod["spec"]))
    found = cluster.once(asked, lambda: nodes.misfits(pod, cluster.all(NODES)))
    if found is None:
        return waits
    near = found[0]
    error = UnschedulableError(
        f"no node can ever take the pod: {message}; the nearest, {near}",
        hint=_hint(near),
    )
    return replace(doomed(error, since), settles=SETTLE)


def _hint(near: nodes.Misfit) -> str:
    if near.shortfall:
        return "ask for less, or add a node that is large enough"
    return "correct node_selector or the affinity (kubectl get nodes --show-labels), or add a node"


def _heard_of(pod: Object, events: Sequence[Object]) -> str | None:
    """An autoscaler that has said something of a pod."""
    said = reading.about(events, "Pod", pod["metadata"]["name"])
    return next((one for one in map(reading.autoscaler, said) if one is not None), None)


def _autoscaled(
    pod: Object, message: str, events: Sequence[Object], autoscaler: str, since: float | None
) -> Verdict:
    name = pod["metadata"]["name"]
    said = [
        str(event.get("message", ""))
        for event in reading.about(events, "Pod", name, "FailedScheduling")
        if reading.reporter(event).startswith("karpenter")
    ]
    if said and said[-1].count(_NO_INSTANCE) >= max(1, said[-1].count(_POOL)):
        error = UnschedulableError(
            f"no node can ever take the pod: Karpenter says: {said[-1]}",
            hint="ask for less, or let an administrator add larger instance types to a NodePool",
        )
        return doomed(error, since)
    return waiting(f"{autoscaler} may add a node: {message}", since)


def _unnoticed(pod: Object, cluster: Cluster) -> Verdict:
    """A pod that its scheduler has not looked at."""
    made = reading.time_of(pod["metadata"].get("creationTimestamp"))
    if made is None or (pod.get("status") or {}).get("conditions"):
        return NOTHING
    age = cluster.now - made
    if age < _SILENCE:
        return Verdict(again=_SILENCE - age)
    scheduler = pod["spec"].get("schedulerName") or DEFAULT_SCHEDULER
    return waiting(f"the scheduler {scheduler!r} has not looked at it yet", made)


def brief(message: str) -> str:
    """The scheduler's message without what it says of preemption and of claims."""
    kept = re.sub(r"\.?\s*(?:no new claims to deallocate,? ?)?preemption: .*$", "", message)
    kept = re.sub(r"\.?\s*(?:no new claims to deallocate|not found),?\s*$", "", kept)
    return kept.strip().rstrip(".,")
