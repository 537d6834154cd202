"""Owners of pods that cannot make them, or have given them up."""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import (
    admission,
    image_pulls,
    snapshot,
)
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NOTHING,
    Verdict,
    doomed,
    waiting,
)
from kubetorch.errors import KnativeServiceConflictError, ServiceHealthError, StartupError
from kubetorch.k8s.resources import Object
from kubetorch.manifests import agent, labels

_FAILED_CREATE = ("FailedCreate", "FailedDaemonPod")
_REVISION = "serving.knative.dev/revision"
#: Kinds that say by a condition whether they can make pods at this moment.
_CONDITIONED = ("Deployment", "ReplicaSet", "RayCluster")
_KNATIVE = "serving.knative.dev/"
#: Reasons with which objects of Knative repeat what is wrong with a Revision.
_ECHOES = ("RevisionFailed", "RevisionMissing")


def current(manifest: Object, owners: Sequence[Object]) -> list[Object]:
    """The objects whose failures concern what was applied.

    A Deployment keeps the ReplicaSets of its earlier templates, and repeats what they say: that the
    one before could make no pods says nothing of the one that repairs it. So does a Service of
    Knative with its Revisions, of which two may have the same template.
    """
    if _is_knative(manifest):
        return _current_of_knative(manifest, owners)
    wanted = _digest(manifest)
    sets = [one for one in owners if one.get("kind") == "ReplicaSet"]
    if manifest.get("kind") != "Deployment" or not wanted or not sets:
        return list(owners)
    earlier = [one for one in sets if _digest(one) != wanted]
    kept = (one for one in owners if one not in earlier)
    return [
        _without(one, kind="ReplicaFailure") if one.get("kind") == "Deployment" else one
        for one in kept
    ]


def _is_knative(one: Object) -> bool:
    return str(one.get("apiVersion", "")).startswith(_KNATIVE)


def _current_of_knative(manifest: Object, owners: Sequence[Object]) -> list[Object]:
    services = (one for one in owners if _is_knative(one) and one["kind"] == "Service")
    service = next(services, None)
    if service is None or _digest(service) != _digest(manifest):
        return []
    attempt = _attempt(service)
    return [
        _without(one, *_ECHOES)
        for one in owners
        if _attempt(one) == attempt and (not _is_knative(one) or _is_observed(one))
    ]


def _attempt(owner: Object) -> tuple[str, str]:
    """The template of an object, and which attempt to make a Revision of it."""
    template = owner if owner.get("kind") == "Revision" else owner["spec"].get("template") or {}
    noted = (template.get("metadata") or {}).get("annotations") or {}
    return agent.digest_of(template), str(noted.get(labels.TRIED_AGAIN) or "")


def _is_observed(owner: Object) -> bool:
    """True if the status is not that of an earlier spec."""
    seen = (owner.get("status") or {}).get("observedGeneration", 0)
    return int(seen) >= int(owner["metadata"].get("generation") or 0)


def has_failed_revision(manifest: Object, owners: Sequence[Object]) -> bool:
    """True if Knative has given up the Revision of the present template."""
    revisions = (one for one in current(manifest, owners) if one.get("kind") == "Revision")
    return any(snapshot.condition(one, "Ready").get("status") == "False" for one in revisions)


def _digest(owner: Object) -> str:
    template = (owner.get("spec") or {}).get("template")
    return agent.digest_of(template) if isinstance(template, dict) else ""


def _without(owner: Object, *reasons: str, kind: str = "") -> Object:
    """An object without the conditions in which it repeats what is wrong with another one."""
    status = owner.get("status") or {}
    conditions = [
        one
        for one in status.get("conditions") or ()
        if one.get("type") != kind and one.get("reason") not in reasons
    ]
    return {**owner, "status": {**status, "conditions": conditions}}


def judge(owner: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge one object that makes pods, or makes what makes them."""
    failure = _failure(owner, events)
    if failure is not None:
        said, since = failure
        namespace = owner["metadata"].get("namespace") or ""
        verdict = admission.judge(
            said, namespace=namespace, since=since, now=cluster.now, count=_wanted(owner)
        )
        return verdict if verdict.reason else waiting(f"its pods cannot be made yet: {said}", since)
    if _is_knative(owner):
        return _knative(owner)
    return _ray(owner) if owner.get("kind") == "RayCluster" else _job(owner)


def _failure(owner: Object, events: Sequence[Object]) -> tuple[str, float | None] | None:
    """Why it could not make a pod the last time, unless it could since."""
    kind, name = str(owner.get("kind")), owner["metadata"]["name"]
    said = snapshot.about(events, kind, name, *_FAILED_CREATE, "SuccessfulCreate")
    # Of two in one second the failure is the later one: it ends a round of attempts.
    said.sort(key=lambda event: (snapshot.when(event), event["reason"] in _FAILED_CREATE))
    failed = said[-1] if said and said[-1]["reason"] in _FAILED_CREATE else None
    found = snapshot.condition(owner, "ReplicaFailure")
    if found.get("status") == "True":
        # The condition keeps the first message for as long as it holds; events have the last.
        message = found if failed is None else failed
        return str(message.get("message", "")), snapshot.time_of(found.get("lastTransitionTime"))
    if kind in _CONDITIONED or failed is None or _is_complete(owner):
        return None
    return str(failed.get("message", "")), snapshot.began(failed)


def _is_complete(owner: Object) -> bool:
    status = owner.get("status") or {}
    if owner.get("kind") == "DaemonSet":
        wanted = int(status.get("desiredNumberScheduled") or 0)
        return int(status.get("currentNumberScheduled") or 0) >= wanted
    there = sum(int(status.get(name) or 0) for name in ("replicas", "active", "succeeded"))
    return there >= _wanted(owner)


def _wanted(owner: Object) -> int:
    if _REVISION in (owner["metadata"].get("labels") or {}):
        return 1  # how many pods of an autoscaled service there are is nobody's demand
    spec = owner.get("spec") or {}
    given = [spec[name] for name in ("replicas", "parallelism") if spec.get(name) is not None]
    return int(given[0]) if given else 1


def _job(owner: Object) -> Verdict:
    """Jobs of every kind say by conditions that they have failed."""
    for kind in ("Failed", "FailureTarget"):
        failed = snapshot.condition(owner, kind)
        if failed.get("status") == "True":
            what, name = owner.get("kind"), owner["metadata"]["name"]
            reason, said = failed.get("reason", ""), failed.get("message", "")
            error = ServiceHealthError(
                f"the {what} {name} has failed ({reason}): {said}",
                hint="kt logs has what its pods said; a Job tries backoffLimit times",
            )
            return doomed(error, snapshot.time_of(failed.get("lastTransitionTime")))
    suspended = snapshot.condition(owner, "Suspended")
    if suspended.get("status") == "True":
        said = str(suspended.get("message") or "it is suspended")
        since = snapshot.time_of(suspended.get("lastTransitionTime"))
        return waiting(f"the {owner.get('kind')} is held back: {said}", since)
    return NOTHING


def _knative(owner: Object) -> Verdict:
    for kind in ("Ready", "ConfigurationsReady", "RoutesReady", "ContainerHealthy"):
        found = snapshot.condition(owner, kind)
        if found.get("status") == "False":
            return _knative_failure(owner, found)
    return NOTHING


def _knative_failure(owner: Object, found: Object) -> Verdict:
    reason, said = str(found.get("reason") or ""), str(found.get("message") or "")
    since = snapshot.time_of(found.get("lastTransitionTime"))
    if reason == "NotOwned":
        error = KnativeServiceConflictError(
            f"a Service that Knative does not own has the name that it needs: {said}",
            hint="delete that Service, or choose another name",
        )
        return doomed(error, since)
    if reason == "ContainerMissing":
        return image_pulls.judge_digest(said, since)
    if reason.startswith("ExitCode"):
        error_of_exit = ServiceHealthError(
            f"the container of {owner['metadata']['name']} ended: {said}",
            hint="kt logs has what it said",
        )
        return doomed(error_of_exit, since)
    if reason == "ProgressDeadlineExceeded":
        given_up = StartupError(
            f"Knative has given up {owner['metadata']['name']}: {said} ({reason})",
            hint="kt logs has what its pods said; the next deploy has Knative try again",
        )
        return doomed(given_up, since)
    namespace = owner["metadata"].get("namespace") or ""
    verdict = admission.judge(said, namespace=namespace, since=since, now=since or 0.0)
    return verdict if verdict.reason else waiting(f"Knative says {reason}: {said}", since)


def _ray(owner: Object) -> Verdict:
    status = owner.get("status") or {}
    failed = snapshot.condition(owner, "ReplicaFailure")
    if status.get("state") == "failed" or failed.get("status") == "True":
        said = str(status.get("reason") or failed.get("message") or "it gave no reason")
        since = snapshot.time_of(failed.get("lastTransitionTime") or status.get("lastUpdateTime"))
        error = StartupError(
            f"the RayCluster {owner['metadata']['name']} has failed: {said}",
            hint="kt logs has what its head said",
        )
        return doomed(error, since)
    return NOTHING
