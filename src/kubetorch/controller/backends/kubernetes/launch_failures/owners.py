"""Owners of pods that cannot make their pods, or have stopped trying."""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import (
    admission,
    image_pulls,
    snapshot,
)
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    doomed,
    waiting,
)
from kubetorch.errors import KnativeServiceConflictError, ServiceHealthError, StartupError
from kubetorch.k8s.resources import Object
from kubetorch.manifests import agent, labels

_FAILED_CREATE = ("FailedCreate", "FailedDaemonPod")
_REVISION = "serving.knative.dev/revision"
#: Kinds whose condition `ReplicaFailure` says whether they can make pods at this moment.
_KINDS_WITH_CONDITION = ("Deployment", "ReplicaSet", "RayCluster")
_KNATIVE = "serving.knative.dev/"
#: Reasons with which objects of Knative repeat the failure of a Revision.
_REPEATING_REASONS = ("RevisionFailed", "RevisionMissing")


def current_owners(manifest: Object, owners: Sequence[Object]) -> list[Object]:
    """The owners whose failures concern the applied object.

    A Deployment keeps the ReplicaSets of its earlier templates, and its conditions repeat theirs. A
    failure of an earlier ReplicaSet says nothing of the one that repairs it. The same holds for a
    Service of Knative and its Revisions, two of which may have the same template.
    """
    if _is_knative(manifest):
        return _current_of_knative(manifest, owners)
    template = _digest(manifest)
    replica_sets = [owner for owner in owners if owner.get("kind") == "ReplicaSet"]
    if manifest.get("kind") != "Deployment" or not template or not replica_sets:
        return list(owners)
    earlier_sets = [replica_set for replica_set in replica_sets if _digest(replica_set) != template]
    current_objects = (owner for owner in owners if owner not in earlier_sets)
    return [
        _without_conditions(owner, kind="ReplicaFailure")
        if owner.get("kind") == "Deployment"
        else owner
        for owner in current_objects
    ]


def _is_knative(owner: Object) -> bool:
    return str(owner.get("apiVersion", "")).startswith(_KNATIVE)


def _current_of_knative(manifest: Object, owners: Sequence[Object]) -> list[Object]:
    services = (owner for owner in owners if _is_knative(owner) and owner["kind"] == "Service")
    service = next(services, None)
    if service is None or _digest(service) != _digest(manifest):
        return []
    attempt = _attempt(service)
    return [
        _without_conditions(owner, *_REPEATING_REASONS)
        for owner in owners
        if _attempt(owner) == attempt and (not _is_knative(owner) or _is_observed(owner))
    ]


def _attempt(owner: Object) -> tuple[str, str]:
    """The digest of an object's template, and which attempt to make a Revision of it this is."""
    template = owner if owner.get("kind") == "Revision" else owner["spec"].get("template") or {}
    template_annotations = (template.get("metadata") or {}).get("annotations") or {}
    return agent.digest_of(template), str(template_annotations.get(labels.TRIED_AGAIN) or "")


def _is_observed(owner: Object) -> bool:
    """True if the status belongs to the latest spec."""
    observed_generation = (owner.get("status") or {}).get("observedGeneration", 0)
    return int(observed_generation) >= int(owner["metadata"].get("generation") or 0)


def has_failed_revision(manifest: Object, owners: Sequence[Object]) -> bool:
    """True if Knative has given up the Revision of the present template."""
    revisions = (
        owner for owner in current_owners(manifest, owners) if owner.get("kind") == "Revision"
    )
    return any(
        snapshot.condition(revision, "Ready").get("status") == "False" for revision in revisions
    )


def _digest(owner: Object) -> str:
    template = (owner.get("spec") or {}).get("template")
    return agent.digest_of(template) if isinstance(template, dict) else ""


def _without_conditions(owner: Object, *reasons: str, kind: str = "") -> Object:
    """An object without the conditions that repeat the failure of another object."""
    status = owner.get("status") or {}
    conditions = [
        condition
        for condition in status.get("conditions") or ()
        if condition.get("type") != kind and condition.get("reason") not in reasons
    ]
    return {**owner, "status": {**status, "conditions": conditions}}


def judge(owner: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge one owner of pods, directly or through other owners."""
    failure = _failure(owner, events)
    if failure is not None:
        message, since = failure
        namespace = owner["metadata"].get("namespace") or ""
        verdict = admission.judge(
            message, namespace=namespace, since=since, now=cluster.now, count=_desired_pods(owner)
        )
        return (
            verdict if verdict.reason else waiting(f"its pods cannot be made yet: {message}", since)
        )
    if _is_knative(owner):
        return _judge_knative(owner)
    return _judge_ray(owner) if owner.get("kind") == "RayCluster" else _judge_job(owner)


def _failure(owner: Object, events: Sequence[Object]) -> tuple[str, float | None] | None:
    """The message and the time of an owner's last failure to make a pod; `None` after a success."""
    kind, name = str(owner.get("kind")), owner["metadata"]["name"]
    creation_events = snapshot.events_of(events, kind, name, *_FAILED_CREATE, "SuccessfulCreate")
    # Of two events in one second the failure is the later one: it ends a round of attempts.
    creation_events.sort(
        key=lambda event: (snapshot.last_time(event), event["reason"] in _FAILED_CREATE)
    )
    failed_event = (
        creation_events[-1]
        if creation_events and creation_events[-1]["reason"] in _FAILED_CREATE
        else None
    )
    condition = snapshot.condition(owner, "ReplicaFailure")
    if condition.get("status") == "True":
        # The condition keeps the first message for as long as it holds; events have the last.
        message = condition if failed_event is None else failed_event
        return str(message.get("message", "")), snapshot.time_of(
            condition.get("lastTransitionTime")
        )
    if kind in _KINDS_WITH_CONDITION or failed_event is None or _is_complete(owner):
        return None
    return str(failed_event.get("message", "")), snapshot.first_time(failed_event)


def _is_complete(owner: Object) -> bool:
    status = owner.get("status") or {}
    if owner.get("kind") == "DaemonSet":
        desired_pods = int(status.get("desiredNumberScheduled") or 0)
        return int(status.get("currentNumberScheduled") or 0) >= desired_pods
    present_pods = sum(int(status.get(name) or 0) for name in ("replicas", "active", "succeeded"))
    return present_pods >= _desired_pods(owner)


def _desired_pods(owner: Object) -> int:
    if _REVISION in (owner["metadata"].get("labels") or {}):
        return 1  # the scaler of an autoscaled service chooses the number
    spec = owner.get("spec") or {}
    pod_counts = [spec[name] for name in ("replicas", "parallelism") if spec.get(name) is not None]
    return int(pod_counts[0]) if pod_counts else 1


def _judge_job(owner: Object) -> Verdict:
    for kind in ("Failed", "FailureTarget"):
        failed = snapshot.condition(owner, kind)
        if failed.get("status") == "True":
            owner_kind, name = owner.get("kind"), owner["metadata"]["name"]
            reason, message = failed.get("reason", ""), failed.get("message", "")
            error = ServiceHealthError(
                f"the {owner_kind} {name} has failed ({reason}): {message}",
                hint="kt logs has what its pods said; a Job tries backoffLimit times",
            )
            return doomed(error, snapshot.time_of(failed.get("lastTransitionTime")))
    suspended = snapshot.condition(owner, "Suspended")
    if suspended.get("status") == "True":
        message = str(suspended.get("message") or "it is suspended")
        since = snapshot.time_of(suspended.get("lastTransitionTime"))
        return waiting(f"the {owner.get('kind')} is held back: {message}", since)
    return NO_TROUBLE


def _judge_knative(owner: Object) -> Verdict:
    for kind in ("Ready", "ConfigurationsReady", "RoutesReady", "ContainerHealthy"):
        condition = snapshot.condition(owner, kind)
        if condition.get("status") == "False":
            return _knative_failure(owner, condition)
    return NO_TROUBLE


def _knative_failure(owner: Object, condition: Object) -> Verdict:
    reason, message = str(condition.get("reason") or ""), str(condition.get("message") or "")
    since = snapshot.time_of(condition.get("lastTransitionTime"))
    if reason == "NotOwned":
        error = KnativeServiceConflictError(
            f"a Service that Knative does not own has the name that it needs: {message}",
            hint="delete that Service, or choose another name",
        )
        return doomed(error, since)
    if reason == "ContainerMissing":
        return image_pulls.judge_digest(message, since)
    if reason.startswith("ExitCode"):
        error_of_exit = ServiceHealthError(
            f"the container of {owner['metadata']['name']} ended: {message}",
            hint="kt logs has what it said",
        )
        return doomed(error_of_exit, since)
    if reason == "ProgressDeadlineExceeded":
        startup_error = StartupError(
            f"Knative has given up {owner['metadata']['name']}: {message} ({reason})",
            hint="kt logs has what its pods said; the next deploy has Knative try again",
        )
        return doomed(startup_error, since)
    namespace = owner["metadata"].get("namespace") or ""
    verdict = admission.judge(message, namespace=namespace, since=since, now=since or 0.0)
    return verdict if verdict.reason else waiting(f"Knative says {reason}: {message}", since)


def _judge_ray(owner: Object) -> Verdict:
    status = owner.get("status") or {}
    failed = snapshot.condition(owner, "ReplicaFailure")
    if status.get("state") == "failed" or failed.get("status") == "True":
        message = str(status.get("reason") or failed.get("message") or "it gave no reason")
        since = snapshot.time_of(failed.get("lastTransitionTime") or status.get("lastUpdateTime"))
        error = StartupError(
            f"the RayCluster {owner['metadata']['name']} has failed: {message}",
            hint="kt logs has what its head said",
        )
        return doomed(error, since)
    return NO_TROUBLE
