"""Pods that were ended, and pods on nodes that are lost."""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import snapshot
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import NODES, Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NOTHING,
    Verdict,
    doomed,
    waiting,
)
from kubetorch.errors import PodTerminatedError
from kubetorch.k8s.resources import Object
from kubetorch.wire.messages import Ending

#: Owners that replace a pod that is lost, however often.
_REPLACING = ("ReplicaSet", "StatefulSet", "DaemonSet", "RayCluster", "LeaderWorkerSet")
#: Events by which a kubelet says that it ends a pod.
_DECIDED = ("Evicted", "DeadlineExceeded", "Preempting")
_DELETED = "somebody deleted it"
_HINTS = {
    "Evicted": "ask for what it needs, so that nodes keep it free: memory and disk_size of Compute",
    "DeadlineExceeded": "raise activeDeadlineSeconds, or leave it out",
    "NodeLost": "kubectl get nodes; deploy again, and it gets another node",
    "Preempted": "give it a higher priority_class_name, or deploy again later",
    "Deleted": "deploy again",
}


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a pod that is ended or whose node is lost; `NOTHING` when it is neither."""
    if pod["metadata"].get("deletionTimestamp"):
        return _deleted(pod, events, cluster)
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):
        return _ended(pod, str(status["reason"]), str(status.get("message") or ""), events)
    said = snapshot.about(events, "Pod", pod["metadata"]["name"], *_DECIDED)
    if said:
        # The kubelet is about to end it, and says so in the status when its containers have ended.
        return _ended(pod, str(said[-1]["reason"]), str(said[-1].get("message") or ""), events)
    return _on_lost_node(pod, events, cluster)


def is_replaced(pod: Object) -> bool:
    """True if the owner replaces a lost pod, whose object may stay for long."""
    owner = snapshot.controller_of(pod)
    return owner is not None and owner.get("kind") in _REPLACING


def ending(pod: Object) -> Ending | None:
    """Why a pod was ended or is about to be; `None` if it is not.

    Source: https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
    """
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):
        said = str(status.get("message") or "")
        return Ending(reason=_word(str(status["reason"])), message=said)
    found = snapshot.condition(pod, "DisruptionTarget")
    if found.get("status") != "True":
        since = _deleted_at(pod)
        return None if since is None else Ending(reason="Deleted", message=_DELETED, time=since)
    reason = str(found.get("reason") or "")
    word = "Preempted" if reason == "PreemptionByScheduler" else "Evicted"
    since = snapshot.time_of(found.get("lastTransitionTime")) or 0.0
    return Ending(reason=word, message=str(found.get("message") or reason), time=since)


def _on_lost_node(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    name = pod["spec"].get("nodeName")
    node = cluster.find(NODES, name) if name else None
    if node is None:
        if not name or not cluster.all(NODES):
            return NOTHING
        return _gone(pod, "NodeLost", f"its node {name} is gone", events, None)
    ready = snapshot.condition(node, "Ready")
    since = snapshot.time_of(ready.get("lastTransitionTime"))
    if ready.get("status") == "Unknown":
        text = f"its node {name} is lost: {ready.get('message', '')}"
        return doomed(_error(pod, "NodeLost", text, events), since)
    if ready.get("status") == "False":
        return waiting(f"its node {name} is not ready: {ready.get('message', '')}", since)
    return NOTHING


def _deleted_at(pod: Object) -> float | None:
    until = snapshot.time_of(pod["metadata"].get("deletionTimestamp"))
    grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    return None if until is None else until - grace


def _deleted(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    found = ending(pod) or Ending(reason="Deleted", message=_DELETED)
    if found.reason == "Deleted" and (lost := _on_lost_node(pod, events, cluster)).is_doomed:
        return lost
    return _gone(pod, found.reason, found.message, events, _deleted_at(pod))


def _ended(pod: Object, reason: str, message: str, events: Sequence[Object]) -> Verdict:
    since = _end(pod, reason, events)
    word = _word(reason)
    if word == "DeadlineExceeded":
        return doomed(_error(pod, word, message, events), since)
    return _gone(pod, word, message, events, since)


def _word(reason: str) -> str:
    """The scheduler's word also for what a kubelet preempts."""
    return "Preempted" if reason == "Preempting" else reason


def _end(pod: Object, reason: str, events: Sequence[Object]) -> float | None:
    """The time of the decision to end a pod, or else of the end of its last container."""
    said = snapshot.about(events, "Pod", pod["metadata"]["name"], reason)
    if said:
        return snapshot.began(said[0])
    ended = [
        snapshot.time_of(((one.get("state") or {}).get("terminated") or {}).get("finishedAt"))
        for one in (pod.get("status") or {}).get("containerStatuses") or ()
    ]
    return max((at for at in ended if at is not None), default=None)


def _gone(
    pod: Object, word: str, text: str, events: Sequence[Object], since: float | None
) -> Verdict:
    """A pod that is lost: a doom, unless its owner makes another one."""
    if is_replaced(pod):
        name = pod["metadata"]["name"]
        return waiting(f"{name} is replaced ({word}: {text.strip()})", since)
    if snapshot.controller_of(pod) is not None and word != "NodeLost":
        # Jobs count it against their limit, and say so when it is reached.
        return waiting(f"{pod['metadata']['name']} was lost ({word}: {text.strip()})", since)
    return doomed(_error(pod, word, text, events), since)


def _error(pod: Object, word: str, text: str, events: Sequence[Object]) -> PodTerminatedError:
    name = pod["metadata"]["name"]
    said = [
        {
            "timestamp": snapshot.when(event),
            "reason": event.get("reason", ""),
            "message": event.get("message", ""),
        }
        for event in snapshot.about(events, "Pod", name)
        if event.get("type") == "Warning"
    ]
    said.append({"timestamp": None, "reason": word, "message": text.strip()})
    return PodTerminatedError(name, word, events=said, hint=_HINTS.get(word))
