"""Queues: workloads that Kueue holds back, pods of a scheduler that nobody runs."""

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
    NOTHING,
    Verdict,
    doomed,
    settled,
    waiting,
)
from kubetorch.errors import MissingObjectError, OperatorMissingError, QueueUnschedulableError
from kubetorch.k8s.resources import Object
from kubetorch.manifests import labels, scheduling
from kubetorch.manifests.scheduling import KAI_SCHEDULER

#: Kueue's words for a request that a flavor of its queue could not hold if that were empty, and for
#: one that no flavor offers.
_FLAVOR = re.compile(r"in flavor ([^,\s]+)(, request > maximum capacity)?")
_UNOFFERED = "unavailable in ClusterQueue"


def judge_queue(manifest: Object, cluster: Cluster) -> Verdict:
    """Judge the queue that an object names by its labels, before or after it is applied."""
    metadata = manifest["metadata"]
    given = scheduling.queue_labels(manifest)
    made = snapshot.time_of(metadata.get("creationTimestamp"))
    if labels.KUEUE in given:
        return _kueue(given[labels.KUEUE], metadata.get("namespace") or "", cluster, made)
    if labels.KAI in given:
        return _kai(given[labels.KAI], cluster, made)
    return NOTHING


def _kueue(name: str, namespace: str, cluster: Cluster, made: float | None) -> Verdict:
    if LOCAL_QUEUES in cluster.absent:
        error = OperatorMissingError(
            f"queue_name is {name!r}, and the cluster has no Kueue",
            hint="leave queue_name out, or let an administrator install Kueue",
        )
        return doomed(error, made)
    if not cluster.knows(LOCAL_QUEUES):
        return NOTHING
    queue = cluster.find(LOCAL_QUEUES, name, namespace)
    if queue is None:
        return _missing(verdicts.missing_object("LocalQueue", name, namespace), cluster, made)
    active = snapshot.condition(queue, "Active")
    if active.get("status") == "False":
        return waiting(f"the queue {name!r} is not active: {active.get('message', '')}", made)
    return NOTHING


def _kai(name: str, cluster: Cluster, made: float | None) -> Verdict:
    if KAI_QUEUES in cluster.absent:
        return doomed(_no_kai(f"queue is {name!r}, and the cluster has no KAI scheduler"), made)
    if cluster.knows(KAI_QUEUES) and cluster.find(KAI_QUEUES, name) is None:
        return _missing(verdicts.missing_object("Queue", name), cluster, made)
    return NOTHING


def _no_kai(message: str) -> OperatorMissingError:
    hint = "leave queue out, or let an administrator install the KAI scheduler"
    return OperatorMissingError(message, hint=hint)


def _missing(error: MissingObjectError, cluster: Cluster, made: float | None) -> Verdict:
    if made is None:  # it is not applied yet, and may be the first of several objects
        return waiting(error.message)
    return settled(doomed(error, made), cluster.now)


def judge_scheduler(pod: Object, cluster: Cluster) -> Verdict:
    """Judge the scheduler of a pod that nobody has looked at."""
    if pod["spec"].get("schedulerName") != KAI_SCHEDULER or KAI_QUEUES not in cluster.absent:
        return NOTHING
    error = _no_kai(f"the pod is for the scheduler {KAI_SCHEDULER!r}, and the cluster has none")
    return doomed(error, snapshot.time_of(pod["metadata"].get("creationTimestamp")))


def judge_gated(pod: Object, cluster: Cluster) -> Verdict:
    owners = {one.get("uid") for one in pod["metadata"].get("ownerReferences") or ()}
    owners.add(pod["metadata"].get("uid"))
    verdict = judge_workload(owners, cluster)
    if verdict.reason:
        return verdict
    found = judge_queue(pod, cluster)
    if found.reason:
        return found
    gates = ", ".join(one["name"] for one in pod["spec"].get("schedulingGates") or ())
    return waiting(f"it is held back by {gates}")


def judge_workload(owners: set[object], cluster: Cluster) -> Verdict:
    """Judge Kueue's Workload of objects."""
    for one in cluster.all(KUEUE_WORKLOADS):
        if owners & {ref.get("uid") for ref in one["metadata"].get("ownerReferences") or ()}:
            return _workload(one, cluster)
    return NOTHING


def _workload(workload: Object, cluster: Cluster) -> Verdict:
    if snapshot.condition(workload, "Admitted").get("status") == "True":
        return NOTHING
    reserved = snapshot.condition(workload, "QuotaReserved")
    queue = str(workload["spec"].get("queueName") or "")
    said = str(reserved.get("message") or "")
    since = snapshot.time_of(
        reserved.get("lastTransitionTime") or workload["metadata"].get("creationTimestamp")
    )
    flavors = _FLAVOR.findall(said)
    too_small = {flavor for flavor, is_never in flavors if is_never}
    is_never_admitted = flavors and {one for one, _ in flavors} == too_small
    if _UNOFFERED in said or is_never_admitted:
        error = QueueUnschedulableError(
            f"the queue {queue!r} can never admit it: {said}",
            hint="ask for less, or for another queue (kubectl get clusterqueue)",
        )
        return doomed(error, since)
    place, length = _place(workload, cluster.all(KUEUE_WORKLOADS))
    text = f"it is number {place} of {length} in the queue {queue!r}"
    return waiting(f"{text}: {said}" if said else text, since)


def _place(workload: Object, workloads: Sequence[Object]) -> tuple[int, int]:
    """The workload's place among those that wait in its queue, and their number."""

    def key(one: Object) -> tuple[str, str]:
        return one["metadata"]["namespace"], str(one["spec"].get("queueName"))

    def order(one: Object) -> tuple[int, str, str]:
        metadata = one["metadata"]
        priority = -int(one["spec"].get("priority") or 0)
        return (priority, str(metadata.get("creationTimestamp")), metadata["name"])

    waiting_too = sorted(
        (one for one in workloads if key(one) == key(workload) and _is_waiting(one)), key=order
    )
    names = [one["metadata"]["name"] for one in waiting_too]
    name = workload["metadata"]["name"]
    return (names.index(name) + 1 if name in names else len(names) + 1), max(1, len(names))


def _is_waiting(workload: Object) -> bool:
    return not any(
        snapshot.condition(workload, kind).get("status") == "True"
        for kind in ("QuotaReserved", "Admitted", "Finished")
    )
