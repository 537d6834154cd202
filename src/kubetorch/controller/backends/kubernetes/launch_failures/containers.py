"""Containers that cannot start, end again and again, or are killed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kubetorch.controller.backends.kubernetes.launch_failures import image_pulls, snapshot, verdicts
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    doomed,
    unless_just_missing,
    waiting,
    worst,
)
from kubetorch.controller.tuning import TIMING
from kubetorch.errors import (
    KubetorchError,
    OutOfMemoryError,
    PodContainerError,
    ProbeFailedError,
    ServiceHealthError,
)
from kubetorch.k8s.resources import Object
from kubetorch.specs import quantity

#: Messages of kubelets about a start that may succeed the next time.
_TRANSIENT = re.compile(
    r"deadline exceeded|failed to reserve|timed out|connection refused|failed to sync \S+ cache"
    r"|resource temporarily unavailable|is being (?:created|removed)",
    re.I,
)
#: Reasons in the status of a container whose start has not begun.
_STARTING_REASONS = (None, "PodInitializing", "ContainerCreating")
#: Reasons of events about an attempt to start a container; the first ones report a failure.
_FAILURE_EVENTS = ("Failed", "InspectFailed", "ErrImageNeverPull")
_ATTEMPT_EVENTS = ("Pulling", "Pulled", "Created", "Started", *_FAILURE_EVENTS)
_PROBES = ("startup", "liveness")
#: Exit codes with which a shell reports that it could not start a program.
_EXEC_FAILURES = {126: "cannot be executed", 127: "was not found"}
_LINES_HINT = "its last lines say why; kt logs has the others"
#: The exit code of a container that the kernel killed for its memory.
_KILLED_EXIT_CODE = 137


class _Container(NamedTuple):
    """A container of a pod: its declaration, and its status from the kubelet."""

    pod: Object
    spec: Object
    status: Object
    is_init: bool

    @property
    def name(self) -> str:
        return str(self.status["name"])

    @property
    def title(self) -> str:
        return f"the {'init ' if self.is_init else ''}container {self.name!r}"


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge the containers of a pod that has a node."""
    return worst([_judge(container, events, cluster) for container in _containers(pod)])


def _containers(pod: Object) -> Iterator[_Container]:
    status = pod.get("status") or {}
    for status_field, spec_field, is_init in (
        ("initContainerStatuses", "initContainers", True),
        ("containerStatuses", "containers", False),
    ):
        declared = {container["name"]: container for container in pod["spec"].get(spec_field) or ()}
        for container_status in status.get(status_field) or ():
            yield _Container(
                pod, declared.get(container_status["name"], {}), container_status, is_init
            )


def _judge(container: _Container, events: Sequence[Object], cluster: Cluster) -> Verdict:
    state = container.status.get("state") or {}
    waiting_state = state.get("waiting") or {}
    if "waiting" in state and waiting_state.get("reason") in _STARTING_REASONS:
        waiting_state = _state_from_events(container, events) or waiting_state
    reason = str(waiting_state.get("reason") or "")
    if reason in image_pulls.REASONS:
        image = str(container.spec.get("image") or container.status.get("image") or "")
        return image_pulls.judge(container.pod, waiting_state, image, events)
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return _judge_not_created(
            container, str(waiting_state.get("message") or reason), events, cluster
        )
    if reason == "PostStartHookError":
        return doomed(
            _container_error(
                container, f"its postStart hook failed: {waiting_state.get('message')}"
            )
        )
    if reason == "CrashLoopBackOff":
        return _judge_termination(container, _last_termination(container), events, is_final=True)
    if "terminated" in state:
        return _judge_terminated(container, state["terminated"], events)
    return _judge_restarted(container, events, cluster) if "running" in state else NO_TROUBLE


# -------------------------------------------------------------------------------- cannot start


def _state_from_events(container: _Container, events: Sequence[Object]) -> Object | None:
    """The waiting state of a container by its events, as its status will have it later.

    The status may be 15 s behind: after init containers it still is that of before the attempt.
    """
    attempt_events = [
        event for event in _events_of(container, events) if event.get("reason") in _ATTEMPT_EVENTS
    ]
    if not attempt_events:
        return None
    # Of several events in one second the failure is the last one: it ends the attempt.
    last = max(
        attempt_events,
        key=lambda event: (snapshot.last_time(event), event["reason"] in _FAILURE_EVENTS),
    )
    reason, text = str(last["reason"]), str(last.get("message") or "")
    if reason not in _FAILURE_EVENTS:
        return None
    if reason == "Failed" and text.startswith("Failed to pull image"):
        return {"reason": "ErrImagePull", "message": text.partition('": ')[2]}
    if reason == "InspectFailed":
        is_name = "parse image name" in text or "invalid reference" in text
        word = "InvalidImageName" if is_name else "ImageInspectError"
        return {"reason": word, "message": text}
    if reason == "ErrImageNeverPull":
        return {"reason": reason, "message": text}
    text = text.removeprefix("Error: ")
    if text in image_pulls.REASONS:  # another event has the cause
        causes = [
            event
            for event in attempt_events
            if event is not last and event["reason"] in _FAILURE_EVENTS
        ]
        return _state_from_events(container, causes) if causes else None
    return {"reason": "CreateContainerError", "message": text}


def _events_of(container: _Container, events: Sequence[Object]) -> list[Object]:
    pod_events = snapshot.events_of(events, "Pod", container.pod["metadata"]["name"])
    field = f"{{{container.name}}}"
    return [
        event
        for event in pod_events
        if field in str((event.get("involvedObject") or {}).get("fieldPath", ""))
    ]


def _judge_not_created(
    container: _Container, message: str, events: Sequence[Object], cluster: Cluster
) -> Verdict:
    since = _failed_since(container, events)
    error = verdicts.missing_object_in(
        message, namespace=container.pod["metadata"].get("namespace") or ""
    )
    if error is not None:
        return unless_just_missing(doomed(error, since), cluster.now)
    if _TRANSIENT.search(message):
        return waiting(f"{container.title} is not made yet: {message}", since)
    return doomed(_start_error(container, message), since)


def _failed_since(container: _Container, events: Sequence[Object]) -> float | None:
    failures = [event for event in _events_of(container, events) if event.get("reason") == "Failed"]
    if failures:
        return min(map(snapshot.first_time, failures))
    # The event has not arrived yet.
    scheduled = snapshot.condition(container.pod, "PodScheduled")
    return snapshot.time_of(scheduled.get("lastTransitionTime"))


def _start_error(container: _Container, message: str) -> PodContainerError:
    text = message.rpartition("unable to start container process: ")[2].removesuffix(": unknown")
    program = re.search(r'exec: "([^"]+)"', text)
    if "exec format error" in message:
        hint = "the image is for another architecture: build it for the nodes', or choose others"
    elif program:
        hint = f"the image has no {program[1]} that can be executed: correct the command or image"
    elif "runAsNonRoot" in message:
        hint = "give a runAsUser, or an image whose user is a number other than 0"
    else:
        hint = "correct what the message names"
    return _container_error(container, f"it cannot start: {text}", hint)


def _container_error(
    container: _Container, text: str, hint: str | None = None
) -> PodContainerError:
    pod_name = container.pod["metadata"]["name"]
    return PodContainerError(f"{container.title} of {pod_name}: {text}", hint=hint)


# -------------------------------------------------------------------------------------- ended


def _last_termination(container: _Container) -> Object:
    termination: Object = (container.status.get("lastState") or {}).get("terminated") or {}
    return termination


def _judge_terminated(
    container: _Container, termination: Object, events: Sequence[Object]
) -> Verdict:
    code = int(termination.get("exitCode") or 0)
    if container.is_init and code == 0:
        return NO_TROUBLE
    own_policy = container.spec.get("restartPolicy")
    policy = own_policy or container.pod["spec"].get("restartPolicy") or "Always"
    stays = policy == "Never" or (policy == "OnFailure" and code == 0)
    if stays and container.pod["metadata"].get("ownerReferences"):
        # The owner, a job, makes another pod, or reports that it has failed.
        since = snapshot.time_of(termination.get("finishedAt"))
        return waiting(
            f"{container.title} of {container.pod['metadata']['name']} ended with {code}", since
        )
    return _judge_termination(
        container, termination, events, is_final=stays or _is_repeated(container, termination)
    )


def _is_repeated(container: _Container, termination: Object) -> bool:
    """True if the container had ended before, within the time that a kubelet counts.

    A kubelet reports `CrashLoopBackOff` only once its pause begins, which may be 15 s later.
    """
    before = snapshot.time_of(_last_termination(container).get("finishedAt"))
    now = snapshot.time_of(termination.get("finishedAt"))
    return (
        before is not None
        and now is not None
        and now - before < TIMING.kubelet_backoff_reset_seconds
    )


def _judge_restarted(container: _Container, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a container that runs again: its end is reported for a moment, and is no doom."""
    termination = _last_termination(container)
    finished = snapshot.time_of(termination.get("finishedAt"))
    if finished is None or cluster.now - finished > TIMING.restart_report_seconds:
        return NO_TROUBLE
    verdict = _judge_termination(container, termination, events, is_final=False)
    return waiting(
        f"{verdict.reason}; it runs again",
        verdict.since,
        recheck_seconds=TIMING.restart_report_seconds,
    )


def _judge_termination(
    container: _Container, termination: Object, events: Sequence[Object], *, is_final: bool
) -> Verdict:
    since = snapshot.time_of(termination.get("finishedAt"))
    reason, code = str(termination.get("reason") or ""), int(termination.get("exitCode") or 0)
    message = str(termination.get("message") or "").strip()
    if reason == "StartError":
        error = _start_error(container, message)
        is_passing = _TRANSIENT.search(message)
        return waiting(error.message, since) if is_passing else doomed(error, since)
    if reason == "OOMKilled":
        return doomed(_memory_error(container), since)
    probe = _probe(container, events, since)
    if probe is not None and (is_final or probe[0] == "startup"):
        failed = ProbeFailedError(
            f"{container.title} of {container.pod['metadata']['name']} was killed because its "
            f"{probe[0]} probe failed: {probe[1]}",
            hint="correct the probe, or give it more time (failureThreshold, periodSeconds); "
            "kt logs has what the container said",
        )
        return doomed(failed, since)
    if not (is_final or code in _EXEC_FAILURES):
        outcome = f"ended with exit code {code}"
        if probe is not None:
            outcome = f"was killed: its {probe[0]} probe failed: {probe[1]}"
        return waiting(f"{container.title} {outcome}", since)
    verdict = doomed(_exit_error(container, code, reason), since)
    if message:  # it has the last lines of the log, which are fetched otherwise
        return verdict.with_log(message.splitlines())
    log_is_of_previous_run = "terminated" not in (container.status.get("state") or {})
    return replace(
        verdict, log_container=container.name, log_is_of_previous_run=log_is_of_previous_run
    )


def _exit_error(container: _Container, code: int, reason: str) -> KubetorchError:
    name = container.pod["metadata"]["name"]
    if code in _EXEC_FAILURES:
        hint = "correct the command, or use an image that has the program"
        return _container_error(
            container, f"its program {_EXEC_FAILURES[code]} (exit code {code})", hint
        )
    count = int(container.status.get("restartCount") or 0)
    outcome = f"exit code {code}" if reason in ("", "Error", "Completed") else f"{reason}, {code}"
    if container.is_init:
        text = f"{container.title} of {name} failed ({outcome})"
        return PodContainerError(text, hint=f"kubectl logs {name} -c {container.name}")
    if count:
        starts = f"started {count + 1} times"
        text = f"{container.title} of {name} ends again and again ({outcome}, {starts})"
        return ServiceHealthError(text, hint=_LINES_HINT)
    return _container_error(container, f"it ended ({outcome})", _LINES_HINT)


def _memory_error(container: _Container) -> OutOfMemoryError:
    limit = ((container.spec.get("resources") or {}).get("limits") or {}).get("memory")
    text = f"{container.title} of {container.pod['metadata']['name']} was killed for its memory"
    error = OutOfMemoryError(
        f"{text} (limit {limit})" if limit else f"{text}: its node had none left",
        exit_code=_KILLED_EXIT_CODE,
        hint="use less, or raise the limit of memory"
        if limit
        else "ask for the memory that it needs: kt.Compute(memory=…)",
    )
    error.limit_bytes = None if limit is None else quantity.size_bytes(limit)
    return error


# -------------------------------------------------------------------------------------- probes


def _probe(
    container: _Container, events: Sequence[Object], since: float | None
) -> tuple[str, str] | None:
    """The probe that ended the container, and the message of the probe; `None` without one."""
    name = container.pod["metadata"]["name"]
    killings = snapshot.events_of(events, "Pod", name, "Killing")
    for event in reversed(killings):
        text = str(event.get("message", ""))
        for probe in _PROBES:
            if text.startswith(f"Container {container.name} failed {probe} probe"):
                return probe, _probe_message(name, probe, events)
    return None


def _probe_message(name: str, probe: str, events: Sequence[Object]) -> str:
    prefix = f"{probe.capitalize()} probe failed: "
    for event in reversed(snapshot.events_of(events, "Pod", name, "Unhealthy")):
        text = str(event.get("message", ""))
        if text.startswith(prefix):
            return text[len(prefix) :].strip()
    return "it gave no reason"
