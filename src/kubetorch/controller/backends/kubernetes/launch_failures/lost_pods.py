"""Pods that were ended, and pods on nodes that are lost."""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import snapshot
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import NODES, Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    doomed,
    waiting,
)
from kubetorch.errors import PodTerminatedError
from kubetorch.k8s.resources import Object
from kubetorch.wire.messages import Ending

#: Kinds of owners that replace a lost pod, however often.
_REPLACING_KINDS = ("ReplicaSet", "StatefulSet", "DaemonSet", "RayCluster", "LeaderWorkerSet")
#: Reasons of events by which a kubelet reports that it ends a pod.
_ENDING_EVENTS = ("Evicted", "DeadlineExceeded", "Preempting")
_DELETED_MESSAGE = "somebody deleted it"
_HINTS = {
    "Evicted": "ask for what it needs, so that nodes keep it free: memory and disk_size of Compute",
    "DeadlineExceeded": "raise activeDeadlineSeconds, or leave it out",
    "NodeLost": "kubectl get nodes; deploy again, and it gets another node",
    "Preempted": "give it a higher priority_class_name, or deploy again later",
    "Deleted": "deploy again",
}


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a pod that is being ended, has ended, or is on a lost node; else `NO_TROUBLE`."""
    if pod["metadata"].get("deletionTimestamp"):
        return _judge_deleted(pod, events, cluster)
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):
        return _judge_ended(pod, str(status["reason"]), str(status.get("message") or ""), events)
    ending_events = snapshot.events_of(events, "Pod", pod["metadata"]["name"], *_ENDING_EVENTS)
    if ending_events:
        # The kubelet ends the pod, and writes the status only after its containers have ended.
        return _judge_ended(
            pod,
            str(ending_events[-1]["reason"]),
            str(ending_events[-1].get("message") or ""),
            events,
        )
    return _on_lost_node(pod, events, cluster)


def is_replaced(pod: Object) -> bool:
    """True if the owner of a pod replaces it when it is lost."""
    owner = snapshot.controller_of(pod)
    return owner is not None and owner.get("kind") in _REPLACING_KINDS


def ending(pod: Object) -> Ending | None:
    """Why a pod was ended, or is about to be ended; else `None`.

    Source: https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
    """
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):
        message = str(status.get("message") or "")
        return Ending(reason=_scheduler_word(str(status["reason"])), message=message)
    disruption = snapshot.condition(pod, "DisruptionTarget")
    if disruption.get("status") != "True":
        since = _deleted_at(pod)
        if since is None:
            return None
        return Ending(reason="Deleted", message=_DELETED_MESSAGE, time=since)
    reason = str(disruption.get("reason") or "")
    word = "Preempted" if reason == "PreemptionByScheduler" else "Evicted"
    since = snapshot.time_of(disruption.get("lastTransitionTime")) or 0.0
    return Ending(reason=word, message=str(disruption.get("message") or reason), time=since)


def _on_lost_node(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    name = pod["spec"].get("nodeName")
    node = cluster.find(NODES, name) if name else None
    if node is None:
        if not name or not cluster.all(NODES):
            return NO_TROUBLE
        return _judge_lost(pod, "NodeLost", f"its node {name} is gone", events, None)
    ready = snapshot.condition(node, "Ready")
    since = snapshot.time_of(ready.get("lastTransitionTime"))
    if ready.get("status") == "Unknown":
        text = f"its node {name} is lost: {ready.get('message', '')}"
        return doomed(_error(pod, "NodeLost", text, events), since)
    if ready.get("status") == "False":
        return waiting(f"its node {name} is not ready: {ready.get('message', '')}", since)
    return NO_TROUBLE


def _deleted_at(pod: Object) -> float | None:
    deadline = snapshot.time_of(pod["metadata"].get("deletionTimestamp"))
    grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    return None if deadline is None else deadline - grace


def _judge_deleted(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    pod_ending = ending(pod) or Ending(reason="Deleted", message=_DELETED_MESSAGE)
    if pod_ending.reason == "Deleted" and (lost := _on_lost_node(pod, events, cluster)).is_doomed:
        return lost
    return _judge_lost(pod, pod_ending.reason, pod_ending.message, events, _deleted_at(pod))


def _judge_ended(pod: Object, reason: str, message: str, events: Sequence[Object]) -> Verdict:
    since = _end_time(pod, reason, events)
    word = _scheduler_word(reason)
    if word == "DeadlineExceeded":
        return doomed(_error(pod, word, message, events), since)
    return _judge_lost(pod, word, message, events, since)


def _scheduler_word(reason: str) -> str:
    """The reason of an ending: a kubelet's `Preempting` becomes the scheduler's `Preempted`."""
    return "Preempted" if reason == "Preempting" else reason


def _end_time(pod: Object, reason: str, events: Sequence[Object]) -> float | None:
    """The time of the decision to end a pod, or else of the end of its last container."""
    ending_events = snapshot.events_of(events, "Pod", pod["metadata"]["name"], reason)
    if ending_events:
        return snapshot.first_time(ending_events[0])
    end_times = [
        snapshot.time_of(((status.get("state") or {}).get("terminated") or {}).get("finishedAt"))
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
    ]
    return max((time for time in end_times if time is not None), default=None)


def _judge_lost(
    pod: Object, word: str, text: str, events: Sequence[Object], since: float | None
) -> Verdict:
    """Judge a lost pod: a doom, unless its owner makes another pod."""
    if is_replaced(pod):
        name = pod["metadata"]["name"]
        return waiting(f"{name} is replaced ({word}: {text.strip()})", since)
    if snapshot.controller_of(pod) is not None and word != "NodeLost":
        # A Job counts lost pods, and reports a failure when its limit is reached.
        return waiting(f"{pod['metadata']['name']} was lost ({word}: {text.strip()})", since)
    return doomed(_error(pod, word, text, events), since)


def _error(pod: Object, word: str, text: str, events: Sequence[Object]) -> PodTerminatedError:
    name = pod["metadata"]["name"]
    pod_events = [
        {
            "timestamp": snapshot.last_time(event),
            "reason": event.get("reason", ""),
            "message": event.get("message", ""),
        }
        for event in snapshot.events_of(events, "Pod", name)
        if event.get("type") == "Warning"
    ]
    pod_events.append({"timestamp": None, "reason": word, "message": text.strip()})
    return PodTerminatedError(name, word, events=pod_events, hint=_HINTS.get(word))
