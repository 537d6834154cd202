"""A pod of a cluster as `PodStatus`: pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kubetorch.controller.backends.base import Manifest, Phase, PodStatus
from kubetorch.controller.backends.kubernetes.dooms import endings
from kubetorch.manifests import kinds, labels
from kubetorch.manifests.agent import digest_of
from kubetorch.manifests.kinds import Manifest as Object
from kubetorch.wire import podenv
from kubetorch.wire.messages import Ending

#: Label or annotation that says the number of a pod in its set, by kind of owner.
_INDEXES = (
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
)
_REPLICA_TYPE = "training.kubeflow.org/replica-type"
_JOBS, _JOB = "jobset.sigs.k8s.io/replicatedjob-replicas", "jobset.sigs.k8s.io/job-index"


def status(
    pod: Object, *, ordinal: int, wanted: str, called: Mapping[str, str] | None = None
) -> PodStatus:
    """What is known of a pod, but for why it cannot run.

    Args:
        pod: As the API server has it.
        ordinal: Its number in the workload.
        wanted: Digest of the template that pods should be made from; empty if that is not known.
        called: Labels of the pods that calls go to; all if not given.
    """
    container = agent_status(pod)
    digest = digest_of(pod)
    is_old = bool(wanted and digest and digest != wanted)
    return PodStatus(
        name=pod["metadata"]["name"],
        ordinal=ordinal,
        phase=_phase(pod, container),
        url=_url(pod),
        # A pod that its kubelet evicted stays after its successor is there, as `Failed`.
        is_retiring=is_old or is_leaving(pod) or (is_over(pod) and endings.is_replaced(pod)),
        restarts=int(container.get("restartCount") or 0),
        reason=_reason(pod, container),
        started=_started(container),
        is_down=_is_down(pod, container),
        uid=pod["metadata"].get("uid") or "",
        is_called=(called or {}).items() <= (pod["metadata"].get("labels") or {}).items(),
        ending=_ending(pod, container),
        is_ours=is_ours(pod),
    )


def is_leaving(pod: Object) -> bool:
    """Whether it is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_over(pod: Object) -> bool:
    """Whether its containers ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def agent_container(pod: Object) -> Manifest:
    """The container that the agent runs in; the first one if none is marked."""
    return dict(_marked(pod) or pod["spec"]["containers"][0])


def is_ours(pod: Object) -> bool:
    """Whether Kubetorch rendered it: pods that other labels find may be anybody's.

    Some operators pass no labels on, and some pods of an object have no agent.
    """
    return labels.SERVICE in (pod["metadata"].get("labels") or {}) or _marked(pod) is not None


def _marked(pod: Object) -> Manifest | None:
    containers: list[Any] = pod["spec"]["containers"]
    for one in containers:
        if any(variable["name"] == podenv.WORKLOAD for variable in one.get("env") or ()):
            return dict(one)
    return None


def agent_status(pod: Object) -> Manifest:
    """What the kubelet says of the agent's container; empty before it says anything."""
    name = agent_container(pod)["name"]
    statuses: list[Any] = (pod.get("status") or {}).get("containerStatuses") or []
    return next((dict(one) for one in statuses if one["name"] == name), {})


def index(pod: Object) -> int | None:
    """Its number among the pods of its workload, where its owner gives it one."""
    metadata = pod["metadata"]
    said = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    found = next((said[name] for name in _INDEXES if name in said), "")
    if not found.isdigit():
        return None
    number = int(found)
    if said.get(_REPLICA_TYPE) == "worker" and not _leads_by_workers(metadata):
        return number + 1  # the only pod of the other type goes first
    # Each Job of a JobSet counts its own pods.
    jobs, job = said.get(_JOBS, ""), said.get(_JOB, "")
    return number * int(jobs) + int(job) if jobs.isdigit() and job.isdigit() else number


def _leads_by_workers(metadata: Manifest) -> bool:
    """Whether workers are what is called in the kind of object that a pod is of."""
    owners = [kinds.KINDS.get((one["kind"], "kubeflow.org")) for one in _owners(metadata)]
    return any(kind is not None and (_REPLICA_TYPE, "worker") in kind.routing for kind in owners)


def _owners(metadata: Manifest) -> list[Manifest]:
    return metadata.get("ownerReferences") or []


def _phase(pod: Object, container: Manifest) -> Phase:
    if is_leaving(pod):
        return "Terminating"
    if is_over(pod):
        return "Failed"
    return "Running" if "running" in (container.get("state") or {}) else "Pending"


def _is_down(pod: Object, container: Manifest) -> bool:
    if is_over(pod):
        return True
    state = container.get("state") or {}
    has_run = bool(container.get("lastState")) or int(container.get("restartCount") or 0) > 0
    return "terminated" in state or ("waiting" in state and has_run)


def _ending(pod: Object, container: Manifest) -> Ending | None:
    """Why it, or its agent, ends or has ended."""
    ended = (container.get("state") or {}).get("terminated") or {}
    if ended.get("reason") == "OOMKilled":
        said = f"its container ended with exit code {ended.get('exitCode')}"
        return Ending(reason="OOMKilled", message=said, time=seconds(ended.get("finishedAt")))
    return endings.ending(pod)


def _url(pod: Object) -> str:
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return ""
    container = agent_container(pod)
    port = next(
        (
            variable.get("value")
            for variable in container.get("env") or ()
            if variable["name"] == podenv.PORT
        ),
        None,
    )
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}" if port else ""


def _reason(pod: Object, container: Manifest) -> str:
    """Why it does not run, in the words of Kubernetes."""
    if is_leaving(pod):
        return ""
    found = pod.get("status") or {}
    if found.get("phase") == "Failed":
        return _joined(found.get("reason"), found.get("message")) or "its containers failed"
    for one in [*(found.get("initContainerStatuses") or ()), container]:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return _joined(waiting["reason"], waiting.get("message"))
    for condition in found.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _joined(condition.get("reason"), condition.get("message"))
    return ""


def _joined(reason: str | None, message: str | None) -> str:
    return ": ".join(part for part in (reason, message) if part)


def _started(container: Manifest) -> float:
    running = (container.get("state") or {}).get("running") or {}
    return seconds(running.get("startedAt"))


def seconds(stamp: str | None) -> float:
    """A time of Kubernetes (RFC 3339) as seconds since the epoch; 0 if there is none."""
    if not stamp:
        return 0.0
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
