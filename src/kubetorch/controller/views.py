"""Workloads and pods as readers see them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import msgspec

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.rollout import Rollout
from kubetorch.controller.state import Summary
from kubetorch.controller.tuning import LIMITS
from kubetorch.errors import CallRefusedError, ServiceTimeoutError
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages

#: Statuses in which calls are served, or, for an app that has ended, were served.
_SERVED = ("Ready", "Scaling", "Running", "Succeeded")


class PodReport(msgspec.Struct, frozen=True):
    """The last messages of a pod over its session."""

    url: str = ""
    activity: messages.Activity | None = None
    stage: str = ""
    is_silent: bool = False
    memory_socket: str = ""

    @property
    def is_stopping(self) -> bool:
        """True if the agent takes no more calls, and ends."""
        return self.activity is not None and self.activity.is_stopping


def url(pod: PodStatus, report: PodReport | None) -> str:
    """Base URL of a pod's agent: from the backend, and until it has one from the pod's report."""
    return pod.url or ("" if report is None else report.url)


def pod_view(
    pod: PodStatus, report: PodReport | None, rollout: Rollout, *, is_ready: bool
) -> messages.PodView:
    activity = None if report is None else report.activity
    is_cut_off = pod.is_ours and report is None
    is_over = pod.is_down or (is_cut_off and pod.phase == "Terminating")
    phase: str = pod.phase
    if is_cut_off and phase == "Running":
        phase = "Unknown"
    elif report is not None and phase == "Pending":
        phase = "Running"  # its agent runs, though its kubelet has not reported it yet
    return messages.PodView(
        name=pod.name,
        ordinal=pod.ordinal,
        phase=phase,
        is_ready=is_ready,
        url=url(pod, report),
        generation=rollout.serving(pod.name) or 0,
        restarts=pod.restarts,
        reason="" if rollout.is_ready(pod.name) else waits_for(pod, report, rollout),
        pid=pod.pid,
        calls=0 if activity is None else activity.calls,
        started=pod.started,
        app=None if activity is None else activity.app,
        queue=None if activity is None else activity.queue,
        ended=pod.ending if is_over else None,
        address=pod.address,
        memory_socket="" if report is None else report.memory_socket,
        stopped=0 if activity is None else activity.stopped,
    )


def pod_views(
    pods: Sequence[PodStatus],
    reports: dict[str, PodReport],
    rollout: Rollout,
    cut_off: Set[str] = frozenset(),
    *,
    is_scaled: bool = False,
) -> tuple[messages.PodView, ...]:
    """All pods. Those of older templates are ready only until one of the wanted template serves.

    Of a scaled service they are until the wanted generation is reached: the load needs them.
    """
    serving = {pod.name for pod in pods if rollout.serving(pod.name) and pod.phase != "Terminating"}
    serving -= cut_off
    serving -= {name for name, report in reports.items() if report.is_stopping}
    current = {pod.name for pod in pods if not pod.is_retiring} & serving
    if is_scaled and rollout.good != rollout.wanted_generation:
        current = serving
    ready = {pod.name for pod in pods if pod.is_called} & (current or serving)
    return tuple(
        pod_view(pod, reports.get(pod.name), rollout, is_ready=pod.name in ready) for pod in pods
    )


def without_values(pod: Manifest) -> Manifest:
    """A pod as its cluster describes it, without the values of its containers' variables."""
    metadata, spec = dict(pod["metadata"]), dict(pod["spec"])
    annotations = metadata.get("annotations") or {}
    if labels.LAST_APPLIED in annotations:  # the values are there, too
        metadata["annotations"] = {
            key: text for key, text in annotations.items() if key != labels.LAST_APPLIED
        }
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        if kind in spec:
            spec[kind] = [
                {
                    **container,
                    "env": [_unvalued(variable) for variable in container.get("env") or ()],
                }
                for container in spec[kind]
            ]
    return {**pod, "metadata": metadata, "spec": spec}


def _unvalued(variable: Manifest) -> Manifest:
    return {key: text for key, text in variable.items() if key != "value"}


def status(
    pods: Sequence[PodStatus], reports: dict[str, PodReport], rollout: Rollout, spec: WorkloadSpec
) -> str:
    """The status of a workload: whether calls are served, be it by the generation before."""
    current = [pod for pod in pods if not pod.is_retiring]
    serving = [pod for pod in current if rollout.serving(pod.name)]
    activities = [reports[pod.name].activity for pod in serving if pod.name in reports]
    codes = [
        activity.app.exit_code
        for activity in activities
        if activity is not None and activity.app is not None
    ]
    if any(codes):
        return "Failed"
    if codes and None not in codes:
        return "Succeeded"
    app = spec.callable.app
    if codes and app is not None and app.port is None:
        return "Running"
    if serving:
        is_all = len(serving) == len(current) and rollout.is_complete
        return "Ready" if is_all else "Scaling"
    if _may_serve_again(pods, rollout):
        return "Creating"
    if rollout.failure is not None or any(pod.failure is not None for pod in current):
        return "Failed"
    if rollout.rests:
        return "Ready"
    return "Creating" if current else "No pods"


def _may_serve_again(pods: Iterable[PodStatus], rollout: Rollout) -> bool:
    """True if a pod that only has to connect again will serve the generation before.

    After a start of the controller, or of an agent, no pod is connected; then calls do not wait
    because the wanted generation was given up.
    """
    return rollout.good > 0 and any(
        pod.started and pod.phase != "Terminating" and not pod.failure
        for pod in pods
        if rollout.serving(pod.name) is None
    )


def waits_for(pod: PodStatus, report: PodReport | None, rollout: Rollout) -> str:
    """Why a pod does not serve the wanted generation."""
    if pod.is_retiring:
        return "it is being replaced" if pod.phase != "Terminating" else "it is ending"
    if pod.reason:
        return pod.reason
    if report is None:
        return "its agent has not connected"
    if report.is_silent:
        return "its agent has not been heard of"
    if rollout.failure is not None:
        return f"it failed to load generation {rollout.wanted_generation}"
    stage = f": {report.stage}" if report.stage else ""
    return f"it loads generation {rollout.wanted_generation}{stage}"


def waits_in_words(
    pods: Sequence[PodStatus], reports: dict[str, PodReport], rollout: Rollout, trouble: str = ""
) -> str:
    """The pods that a deploy still waits for; `trouble` is why some pods are missing."""
    lagging = rollout.lagging()
    reasons = [
        f"pod {pod.name}: {waits_for(pod, reports.get(pod.name), rollout)}"
        for pod in pods
        if pod.name in lagging
    ]
    ready, lacking = len(rollout.pods) - len(lagging), rollout.total - len(rollout.pods)
    if not pods:
        reasons = ["there are no pods"]
    elif lacking:
        reasons.append(f"{lacking} of the pods {'is' if lacking == 1 else 'are'} not there yet")
    served = f"{ready} of {rollout.total} pods serve generation {rollout.wanted_generation}"
    return "; ".join([served, *reasons, *filter(None, [trouble])])


def timed_out(name: str, seconds: float, waits: str) -> ServiceTimeoutError:
    return ServiceTimeoutError(
        f"{name} is not ready after {seconds:.0f} s: {waits}",
        hint="kt.Compute(launch_timeout=...) allows more time; kt logs shows what the pods say",
    )


def not_ready(view: messages.WorkloadView) -> CallRefusedError:
    """The error of a request that no pod can take, with the reason and the lines of a pod."""
    name, failure = view.spec.name, view.failure or {}
    lines = messages.last_lines(view.pods)
    if failure:
        cause = f"{failure.get('error_type')}: {failure.get('message')}"
        error = CallRefusedError(
            f"no pod of {name} can start: {cause}{lines}", hint=f"kt describe {name}"
        )
        error.remote_traceback = failure.get("traceback") or None
        return error
    reasons = [f"pod {pod.name}: {pod.reason}" for pod in view.pods if pod.reason]
    why = "; ".join([*reasons[-LIMITS.named_pods :], *filter(None, [view.reason])])
    return CallRefusedError(
        f"no pod of {name} is ready{': ' if why else ''}{why}{lines}", hint=f"kt status {name}"
    )


def stage(pod: str, message: messages.StageReport) -> messages.Stage:
    return messages.Stage(
        stage=message.stage,
        message=message.message,
        pod=pod,
        warning=message.warning,
        step=message.step,
        steps=message.steps,
    )


def served(pod: str, rollout: Rollout) -> messages.Stage:
    return messages.Stage(stage="ready", pod=pod, ready=len(rollout.ready), pods=rollout.total)


def line(pod: str, message: messages.LogReport) -> messages.DeployLog:
    return messages.DeployLog(
        text=message.text, pod=pod, source=message.source, level=message.level, time=message.time
    )


def summary(view: messages.WorkloadView, now: float) -> Summary:
    failure = view.failure or {}
    waiting = (pod.reason for pod in view.pods if not pod.is_ready and pod.reason)
    return Summary(
        phase=view.status,
        kind=view.kind,
        ready=sum(pod.is_ready and pod.generation == view.generation for pod in view.pods),
        pods=view.pods_wanted or view.spec.compute.pods,
        is_ready=view.status in _SERVED,
        reason=str(failure.get("error_type") or ""),
        message=str(failure.get("message") or view.reason or next(waiting, "")),
        ttl=view.spec.compute.inactivity_ttl or "",
        time=now,
    )
