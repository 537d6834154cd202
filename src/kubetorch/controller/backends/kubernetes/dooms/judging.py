"""Whether a launch can still succeed: the questions that a backend asks.

    pod, events ──────┐
    owners, events ───┼──> verdict: doomed (a typed error) | waits (a sentence) | nothing
    cluster ──────────┘

What may still come right is no doom, it is progress. Nothing here waits or asks anybody: whoever
watches the cluster calls again when something changes, and after `Verdict.again` seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.dooms import (
    admission,
    containers,
    endings,
    queues,
    scheduling,
    volumes,
)
from kubetorch.controller.backends.kubernetes.dooms import cluster as reading
from kubetorch.controller.backends.kubernetes.dooms import (
    owners as owning,
)
from kubetorch.controller.backends.kubernetes.dooms.cluster import CLAIMS, Cluster
from kubetorch.controller.backends.kubernetes.dooms.verdicts import (
    Verdict,
    doomed,
    waiting,
    worst,
)
from kubetorch.errors import (
    KubernetesRequestError,
    KubernetesUnavailableError,
    KubetorchError,
    OperatorMissingError,
)
from kubetorch.k8s import failures
from kubetorch.k8s.resources import Object

#: What `kubetorch.k8s.discovery` says of a kind that the cluster does not serve.
_NO_KIND = "NoKindMatch"


def judge_pod(pod: Object, *, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a pod.

    Args:
        pod: The pod.
        events: Its events and those of its claims; others are not looked at.
        cluster: What else was watched.
    """
    verdict = _judge_pod(pod, events, cluster)
    if verdict.error is not None:
        verdict.error.pod_name = pod["metadata"]["name"]
    return verdict


def _judge_pod(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    namespace = pod["metadata"].get("namespace") or ""
    claims = (cluster.find(CLAIMS, name, namespace) for name in volumes.claims(pod["spec"]))
    events = reading.of_these(events, [pod, *filter(None, claims)])
    ended = endings.judge(pod, events, cluster)
    if ended.reason:
        return ended
    if not pod["spec"].get("nodeName"):
        return scheduling.judge(pod, events, cluster)
    found = containers.judge(pod, events, cluster)
    if found.reason or not _waits_for_volumes(pod):
        return found
    return worst([found, volumes.judge_mounts(pod, events, cluster)])


def judge_owner(
    manifest: Object, owners: Sequence[Object], *, events: Sequence[Object], cluster: Cluster
) -> Verdict:
    """Judge what makes the pods of a workload.

    Args:
        manifest: The object that was applied, or is about to be.
        owners: It, as the API server has it, and what it owns above the pods: ReplicaSets, Jobs,
            Revisions; empty before it is applied.
        events: Their events; others are not looked at.
        cluster: What else was watched.
    """
    applied = next((one for one in owners if _is_same(one, manifest)), manifest)
    found = [queues.judge_queue(applied, cluster)]
    uids: set[object] = {one["metadata"].get("uid") for one in owners} - {None}
    found.append(queues.judge_workload(uids, cluster))
    events = reading.of_these(events, owners)
    found += [owning.judge(one, events, cluster) for one in owning.current(manifest, owners)]
    return worst(found)


def judge_refusal(error: KubetorchError, manifest: Object, *, now: float) -> Verdict:
    """Judge why the API server refused an object that was applied.

    Args:
        error: What the client raised.
        manifest: What was applied.
        now: Seconds since the epoch.

    Returns:
        A typed error where the message is understood, a reason to wait and apply it again, else
        the error itself.
    """
    if not isinstance(error, KubernetesRequestError):
        is_away = isinstance(error, KubernetesUnavailableError)
        return waiting(error.message, now) if is_away else doomed(error, now)
    namespace = manifest["metadata"].get("namespace") or error.namespace or ""
    if error.reason == _NO_KIND or failures.is_unserved(error.message):
        kind, version = manifest.get("kind"), manifest.get("apiVersion")
        unserved = OperatorMissingError(
            f"the cluster does not serve the kind {kind} of {version}: its operator is missing",
            hint="let an administrator install it (kubectl api-resources lists what is there)",
        )
        return doomed(unserved, now)
    verdict = admission.judge(error.message, namespace=namespace, since=None, now=now)
    if verdict.reason:
        return verdict
    return waiting(error.message, now) if _is_passing(error) else doomed(error, now)


def _is_passing(error: KubernetesRequestError) -> bool:
    """Whether the API server only cannot do it just now."""
    if error.status_code == 409:
        return "Apply failed with" not in error.message
    return failures.is_passing(error)


def _is_same(one: Object, manifest: Object) -> bool:
    return (
        one.get("kind") == manifest.get("kind")
        and one["metadata"]["name"] == manifest["metadata"]["name"]
    )


def _waits_for_volumes(pod: Object) -> bool:
    """Whether no container has been made yet."""
    status = pod.get("status") or {}
    statuses = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    words = ("ContainerCreating", "PodInitializing")
    return all(
        ((one.get("state") or {}).get("waiting") or {}).get("reason") in words for one in statuses
    )
