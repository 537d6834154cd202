"""Queues: workloads that wait in a queue of Kueue, pods whose scheduler is not installed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import snapshot, verdicts
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import (
    KAI_QUEUES,
    KUEUE_WORKLOADS,
    LOCAL_QUEUES,
    Cluster,
)
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    doomed,
    unless_just_missing,
    waiting,
)
from kubetorch.errors import MissingObjectError, OperatorMissingError, QueueUnschedulableError
from kubetorch.k8s.resources import Object
from kubetorch.manifests import labels, scheduling
from kubetorch.manifests.scheduling import KAI_SCHEDULER

#: Messages of Kueue about a request that exceeds even an empty flavor, and about a resource that no
#: flavor offers.
_FLAVOR_REASON = re.compile(r"in flavor ([^,\s]+)(, request > maximum capacity)?")
_UNOFFERED_FLAVOR = "unavailable in ClusterQueue"


def judge_queue(manifest: Object, cluster: Cluster) -> Verdict:
    """Judge the queue that the labels of an object name, before or after its apply."""
    metadata = manifest["metadata"]
    queue_names = scheduling.queue_labels(manifest)
    created = snapshot.time_of(metadata.get("creationTimestamp"))
    if labels.KUEUE in queue_names:
        return _kueue(queue_names[labels.KUEUE], metadata.get("namespace") or "", cluster, created)
    if labels.KAI in queue_names:
        return _kai(queue_names[labels.KAI], cluster, created)
    return NO_TROUBLE


def _kueue(name: str, namespace: str, cluster: Cluster, created: float | None) -> Verdict:
    if LOCAL_QUEUES in cluster.absent:
        error = OperatorMissingError(
            f"queue_name is {name!r}, and the cluster has no Kueue",
            hint="leave queue_name out, or let an administrator install Kueue",
        )
        return doomed(error, created)
    if not cluster.knows(LOCAL_QUEUES):
        return NO_TROUBLE
    queue = cluster.find(LOCAL_QUEUES, name, namespace)
    if queue is None:
        return _missing(verdicts.missing_object("LocalQueue", name, namespace), cluster, created)
    active = snapshot.condition(queue, "Active")
    if active.get("status") == "False":
        return waiting(f"the queue {name!r} is not active: {active.get('message', '')}", created)
    return NO_TROUBLE


def _kai(name: str, cluster: Cluster, created: float | None) -> Verdict:
    if KAI_QUEUES in cluster.absent:
        return doomed(_no_kai(f"queue is {name!r}, and the cluster has no KAI scheduler"), created)
    if cluster.knows(KAI_QUEUES) and cluster.find(KAI_QUEUES, name) is None:
        return _missing(verdicts.missing_object("Queue", name), cluster, created)
    return NO_TROUBLE


def _no_kai(message: str) -> OperatorMissingError:
    hint = "leave queue out, or let an administrator install the KAI scheduler"
    return OperatorMissingError(message, hint=hint)


def _missing(error: MissingObjectError, cluster: Cluster, created: float | None) -> Verdict:
    if created is None:  # the object is not applied yet, and the queue may be applied with it
        return waiting(error.message)
    return unless_just_missing(doomed(error, created), cluster.now)


def judge_scheduler(pod: Object, cluster: Cluster) -> Verdict:
    """Judge the scheduler of a pod that no scheduler has looked at."""
    if pod["spec"].get("schedulerName") != KAI_SCHEDULER or KAI_QUEUES not in cluster.absent:
        return NO_TROUBLE
    error = _no_kai(f"the pod is for the scheduler {KAI_SCHEDULER!r}, and the cluster has none")
    return doomed(error, snapshot.time_of(pod["metadata"].get("creationTimestamp")))


def judge_gated(pod: Object, cluster: Cluster) -> Verdict:
    owners = {reference.get("uid") for reference in pod["metadata"].get("ownerReferences") or ()}
    owners.add(pod["metadata"].get("uid"))
    verdict = judge_workload(owners, cluster)
    if verdict.reason:
        return verdict
    queue_verdict = judge_queue(pod, cluster)
    if queue_verdict.reason:
        return queue_verdict
    gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates") or ())
    return waiting(f"it is held back by {gates}")


def judge_workload(owners: set[object], cluster: Cluster) -> Verdict:
    """Judge the Workload of Kueue that has one of these owners, by uid."""
    for workload in cluster.all(KUEUE_WORKLOADS):
        if owners & {ref.get("uid") for ref in workload["metadata"].get("ownerReferences") or ()}:
            return _workload(workload, cluster)
    return NO_TROUBLE


def _workload(workload: Object, cluster: Cluster) -> Verdict:
    if snapshot.condition(workload, "Admitted").get("status") == "True":
        return NO_TROUBLE
    reserved = snapshot.condition(workload, "QuotaReserved")
    queue = str(workload["spec"].get("queueName") or "")
    message = str(reserved.get("message") or "")
    since = snapshot.time_of(
        reserved.get("lastTransitionTime") or workload["metadata"].get("creationTimestamp")
    )
    flavors = _FLAVOR_REASON.findall(message)
    too_small = {flavor for flavor, is_never in flavors if is_never}
    is_never_admitted = flavors and {flavor for flavor, _ in flavors} == too_small
    if _UNOFFERED_FLAVOR in message or is_never_admitted:
        error = QueueUnschedulableError(
            f"the queue {queue!r} can never admit it: {message}",
            hint="ask for less, or for another queue (kubectl get clusterqueue)",
        )
        return doomed(error, since)
    position, length = _queue_position(workload, cluster.all(KUEUE_WORKLOADS))
    text = f"it is number {position} of {length} in the queue {queue!r}"
    return waiting(f"{text}: {message}" if message else text, since)


def _queue_position(workload: Object, workloads: Sequence[Object]) -> tuple[int, int]:
    """The position of a workload in its queue, and the length of the queue."""

    def key(candidate: Object) -> tuple[str, str]:
        return candidate["metadata"]["namespace"], str(candidate["spec"].get("queueName"))

    def order(candidate: Object) -> tuple[int, str, str]:
        metadata = candidate["metadata"]
        priority = -int(candidate["spec"].get("priority") or 0)
        return (priority, str(metadata.get("creationTimestamp")), metadata["name"])

    rivals = (rival for rival in workloads if key(rival) == key(workload) and _is_waiting(rival))
    waiting_workloads = sorted(rivals, key=order)
    names = [waiting_workload["metadata"]["name"] for waiting_workload in waiting_workloads]
    name = workload["metadata"]["name"]
    return (names.index(name) + 1 if name in names else len(names) + 1), max(1, len(names))


def _is_waiting(workload: Object) -> bool:
    return not any(
        snapshot.condition(workload, kind).get("status") == "True"
        for kind in ("QuotaReserved", "Admitted", "Finished")
    )
