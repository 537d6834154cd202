"""The diagnosis of a launch: whether it can still succeed, and why it waits. Pure.

    pod, events ──────┐
    owners, events ───┼──> verdict: doomed (a typed error) | waits (a sentence) | nothing
    cluster ──────────┘

A problem that may still pass is no doom, only a reason to wait. `launch_watch` judges a pod again
when the cluster changes, and after `Verdict.recheck_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import (
    admission,
    containers,
    lost_pods,
    queues,
    scheduling,
    snapshot,
    volumes,
)
from kubetorch.controller.backends.kubernetes.launch_failures import owners as owning
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import CLAIMS, Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
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

#: The reason that `kubetorch.k8s.client` gives for a kind that the cluster does not serve.
_NO_KIND = "NoKindMatch"


def judge_pod(pod: Object, *, events: Sequence[Object], cluster: Cluster) -> Verdict:
    verdict = _judge_pod(pod, events, cluster)
    if verdict.error is not None:
        verdict.error.pod_name = pod["metadata"]["name"]
    return verdict


def _judge_pod(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    namespace = pod["metadata"].get("namespace") or ""
    claims = (cluster.find(CLAIMS, name, namespace) for name in volumes.claims(pod))
    events = snapshot.without_earlier_objects(events, [pod, *filter(None, claims)])
    loss = lost_pods.judge(pod, events, cluster)
    if loss.reason:
        return loss
    if not pod["spec"].get("nodeName"):
        return scheduling.judge(pod, events, cluster)
    container_verdict = containers.judge(pod, events, cluster)
    if container_verdict.reason or not _waits_for_volumes(pod):
        return container_verdict
    return worst([container_verdict, volumes.judge_mounts(pod, events, cluster)])


def judge_owner(
    manifest: Object, owners: Sequence[Object], *, events: Sequence[Object], cluster: Cluster
) -> Verdict:
    identity = (manifest.get("kind"), manifest["metadata"]["name"])
    matching_owners = (
        owner for owner in owners if (owner.get("kind"), owner["metadata"]["name"]) == identity
    )
    live_object = next(matching_owners, manifest)
    found_verdicts = [queues.judge_queue(live_object, cluster)]
    uids: set[object] = {owner["metadata"].get("uid") for owner in owners} - {None}
    found_verdicts.append(queues.judge_workload(uids, cluster))
    events = snapshot.without_earlier_objects(events, owners)
    found_verdicts += [
        owning.judge(owner, events, cluster) for owner in owning.current_owners(manifest, owners)
    ]
    return worst(found_verdicts)


def judge_refusal(error: KubetorchError, manifest: Object, *, now: float) -> Verdict:
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
    is_passing = failures.may_pass(error)
    if error.status_code == 409:
        is_passing = "Apply failed with" not in error.message
    return waiting(error.message, now) if is_passing else doomed(error, now)


def _waits_for_volumes(pod: Object) -> bool:
    """True if the kubelet has created no container yet."""
    starting_reasons = ("ContainerCreating", "PodInitializing")
    return all(
        ((status.get("state") or {}).get("waiting") or {}).get("reason") in starting_reasons
        for status in snapshot.container_statuses(pod)
    )
