"""Containers that cannot start, end again and again, or are killed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kubetorch.controller.backends.kubernetes.launch_failures import image_pulls, snapshot, verdicts
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NOTHING,
    Verdict,
    doomed,
    settled,
    waiting,
    worst,
)
from kubetorch.errors import (
    KubetorchError,
    OutOfMemoryError,
    PodContainerError,
    ProbeFailedError,
    ServiceHealthError,
)
from kubetorch.k8s.resources import Object
from kubetorch.specs import quantity

#: What kubelets say of a start that may succeed the next time.
_PASSING = re.compile(
    r"deadline exceeded|failed to reserve|timed out|connection refused|failed to sync \S+ cache"
    r"|resource temporarily unavailable|is being (?:created|removed)",
    re.I,
)
#: Reasons of a container that is about to be started, as far as its status knows.
_BEGINNING = (None, "PodInitializing", "ContainerCreating")
#: Events of an attempt to start a container, and those of them that say that it failed.
_FAILURES = ("Failed", "InspectFailed", "ErrImageNeverPull")
_ATTEMPTS = ("Pulling", "Pulled", "Created", "Started", *_FAILURES)
_PROBES = ("startup", "liveness")
#: Exit codes by which a shell says that it could not start a program.
_NOT_STARTED = {126: "cannot be executed", 127: "was not found"}
_LINES = "its last lines say why; kt logs has the others"
#: What ended a container that its first process did not end.
_KILLED = 137
#: Seconds after which a kubelet takes the next end of a container for the first one.
_REMEMBERED = 600.0
#: Seconds for which the end of a container is news after it runs again.
_MOMENT = 10.0


class _Container(NamedTuple):
    """A container, as declared and as the kubelet sees it."""

    pod: Object
    spec: Object
    status: Object
    is_init: bool

    @property
    def name(self) -> str:
        return str(self.status["name"])

    @property
    def called(self) -> str:
        return f"the {'init ' if self.is_init else ''}container {self.name!r}"


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge the containers of a pod that has a node."""
    return worst([_judge(one, events, cluster) for one in _containers(pod)])


def _containers(pod: Object) -> Iterator[_Container]:
    status = pod.get("status") or {}
    for of_status, of_spec, is_init in (
        ("initContainerStatuses", "initContainers", True),
        ("containerStatuses", "containers", False),
    ):
        declared = {one["name"]: one for one in pod["spec"].get(of_spec) or ()}
        for one in status.get(of_status) or ():
            yield _Container(pod, declared.get(one["name"], {}), one, is_init)


def _judge(one: _Container, events: Sequence[Object], cluster: Cluster) -> Verdict:
    state = one.status.get("state") or {}
    waits = state.get("waiting") or {}
    if "waiting" in state and waits.get("reason") in _BEGINNING:
        waits = _told(one, events) or waits
    reason = str(waits.get("reason") or "")
    if reason in image_pulls.REASONS:
        image = str(one.spec.get("image") or one.status.get("image") or "")
        return image_pulls.judge(one.pod, waits, image, events)
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return _not_created(one, str(waits.get("message") or reason), events, cluster)
    if reason == "PostStartHookError":
        return doomed(_container_error(one, f"its postStart hook failed: {waits.get('message')}"))
    if reason == "CrashLoopBackOff":
        return _ended(one, _last(one), events, is_final=True)
    if "terminated" in state:
        return _terminated(one, state["terminated"], events)
    return _restarted(one, events, cluster) if "running" in state else NOTHING


# -------------------------------------------------------------------------------- cannot start


def _told(one: _Container, events: Sequence[Object]) -> Object | None:
    """The state of a container that a kubelet reported by events, as the status will have it.

    The status may be 15 s behind: after init containers it is the one from before the attempt.
    """
    said = [event for event in _events_of(one, events) if event.get("reason") in _ATTEMPTS]
    if not said:
        return None
    # Of events in one second the failure is the last: they come in the order of the attempt.
    last = max(said, key=lambda event: (snapshot.when(event), event["reason"] in _FAILURES))
    reason, text = str(last["reason"]), str(last.get("message") or "")
    if reason not in _FAILURES:
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
        causes = [event for event in said if event is not last and event["reason"] in _FAILURES]
        return _told(one, causes) if causes else None
    return {"reason": "CreateContainerError", "message": text}


def _events_of(one: _Container, events: Sequence[Object]) -> list[Object]:
    found = snapshot.about(events, "Pod", one.pod["metadata"]["name"])
    field = f"{{{one.name}}}"
    return [
        event
        for event in found
        if field in str((event.get("involvedObject") or {}).get("fieldPath", ""))
    ]


def _not_created(one: _Container, said: str, events: Sequence[Object], cluster: Cluster) -> Verdict:
    since = _failed_since(one, events)
    error = verdicts.missing_object_in(said, namespace=one.pod["metadata"].get("namespace") or "")
    if error is not None:
        return settled(doomed(error, since), cluster.now)
    if _PASSING.search(said):
        return waiting(f"{one.called} is not made yet: {said}", since)
    return doomed(_start_error(one, said), since)


def _failed_since(one: _Container, events: Sequence[Object]) -> float | None:
    mine = [event for event in _events_of(one, events) if event.get("reason") == "Failed"]
    if mine:
        return min(map(snapshot.began, mine))
    # Its event is on the way.
    scheduled = snapshot.condition(one.pod, "PodScheduled")
    return snapshot.time_of(scheduled.get("lastTransitionTime"))


def _start_error(one: _Container, said: str) -> PodContainerError:
    text = said.rpartition("unable to start container process: ")[2].removesuffix(": unknown")
    program = re.search(r'exec: "([^"]+)"', text)
    if "exec format error" in said:
        hint = "the image is for another architecture: build it for the nodes', or choose others"
    elif program:
        hint = f"the image has no {program[1]} that can be executed: correct the command or image"
    elif "runAsNonRoot" in said:
        hint = "give a runAsUser, or an image whose user is a number other than 0"
    else:
        hint = "correct what the message names"
    return _container_error(one, f"it cannot start: {text}", hint)


def _container_error(one: _Container, text: str, hint: str | None = None) -> PodContainerError:
    where = one.pod["metadata"]["name"]
    return PodContainerError(f"{one.called} of {where}: {text}", hint=hint)


# -------------------------------------------------------------------------------------- ended


def _last(one: _Container) -> Object:
    found: Object = (one.status.get("lastState") or {}).get("terminated") or {}
    return found


def _terminated(one: _Container, ended: Object, events: Sequence[Object]) -> Verdict:
    code = int(ended.get("exitCode") or 0)
    if one.is_init and code == 0:
        return NOTHING
    policy = one.spec.get("restartPolicy") or one.pod["spec"].get("restartPolicy") or "Always"
    stays = policy == "Never" or (policy == "OnFailure" and code == 0)
    if stays and one.pod["metadata"].get("ownerReferences"):
        # A job makes another pod, or says that it has failed.
        since = snapshot.time_of(ended.get("finishedAt"))
        return waiting(f"{one.called} of {one.pod['metadata']['name']} ended with {code}", since)
    return _ended(one, ended, events, is_final=stays or _is_repeated(one, ended))


def _is_repeated(one: _Container, ended: Object) -> bool:
    """True if the container had ended before, within the memory of a kubelet.

    A kubelet says `CrashLoopBackOff` only once its pause begins, which may be 15 s later.
    """
    before = snapshot.time_of(_last(one).get("finishedAt"))
    now = snapshot.time_of(ended.get("finishedAt"))
    return before is not None and now is not None and now - before < _REMEMBERED


def _restarted(one: _Container, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """A container that runs again is not doomed, whatever ended it; that is news for a moment."""
    last = _last(one)
    at = snapshot.time_of(last.get("finishedAt"))
    if at is None or cluster.now - at > _MOMENT:
        return NOTHING
    verdict = _ended(one, last, events, is_final=False)
    return waiting(f"{verdict.reason}; it runs again", verdict.since, again=_MOMENT)


def _ended(one: _Container, ended: Object, events: Sequence[Object], *, is_final: bool) -> Verdict:
    since = snapshot.time_of(ended.get("finishedAt"))
    reason, code = str(ended.get("reason") or ""), int(ended.get("exitCode") or 0)
    said = str(ended.get("message") or "").strip()
    if reason == "StartError":
        error = _start_error(one, said)
        is_passing = _PASSING.search(said)
        return waiting(error.message, since) if is_passing else doomed(error, since)
    if reason == "OOMKilled":
        return doomed(_memory_error(one), since)
    probe = _probe(one, events, since)
    if probe is not None and (is_final or probe[0] == "startup"):
        failed = ProbeFailedError(
            f"{one.called} of {one.pod['metadata']['name']} was killed because its {probe[0]} "
            f"probe failed: {probe[1]}",
            hint="correct the probe, or give it more time (failureThreshold, periodSeconds); "
            "kt logs has what the container said",
        )
        return doomed(failed, since)
    if not (is_final or code in _NOT_STARTED):
        how = f"ended with exit code {code}"
        if probe is not None:
            how = f"was killed: its {probe[0]} probe failed: {probe[1]}"
        return waiting(f"{one.called} {how}", since)
    verdict = doomed(_exit_error(one, code, reason), since)
    if said:  # the last lines of its log, which are fetched otherwise
        return verdict.with_log(said.splitlines())
    is_previous = "terminated" not in (one.status.get("state") or {})
    return replace(verdict, log=one.name, is_previous=is_previous)


def _exit_error(one: _Container, code: int, reason: str) -> KubetorchError:
    name = one.pod["metadata"]["name"]
    if code in _NOT_STARTED:
        hint = "correct the command, or use an image that has the program"
        return _container_error(one, f"its program {_NOT_STARTED[code]} (exit code {code})", hint)
    count = int(one.status.get("restartCount") or 0)
    how = f"exit code {code}" if reason in ("", "Error", "Completed") else f"{reason}, {code}"
    if one.is_init:
        text = f"{one.called} of {name} failed ({how})"
        return PodContainerError(text, hint=f"kubectl logs {name} -c {one.name}")
    if count:
        text = f"{one.called} of {name} ends again and again ({how}, started {count + 1} times)"
        return ServiceHealthError(text, hint=_LINES)
    return _container_error(one, f"it ended ({how})", _LINES)


def _memory_error(one: _Container) -> OutOfMemoryError:
    limit = ((one.spec.get("resources") or {}).get("limits") or {}).get("memory")
    text = f"{one.called} of {one.pod['metadata']['name']} was killed for its memory"
    error = OutOfMemoryError(
        f"{text} (limit {limit})" if limit else f"{text}: its node had none left",
        exit_code=_KILLED,
        hint="use less, or raise the limit of memory"
        if limit
        else "ask for the memory that it needs: kt.Compute(memory=…)",
    )
    error.limit_bytes = None if limit is None else quantity.size_bytes(limit)
    return error


# -------------------------------------------------------------------------------------- probes


def _probe(
    one: _Container, events: Sequence[Object], since: float | None
) -> tuple[str, str] | None:
    """The probe that ended the container, and its message."""
    name = one.pod["metadata"]["name"]
    killings = snapshot.about(events, "Pod", name, "Killing")
    for event in reversed(killings):
        text = str(event.get("message", ""))
        for probe in _PROBES:
            if text.startswith(f"Container {one.name} failed {probe} probe"):
                return probe, _probe_said(name, probe, events)
    return None


def _probe_said(name: str, probe: str, events: Sequence[Object]) -> str:
    prefix = f"{probe.capitalize()} probe failed: "
    for event in reversed(snapshot.about(events, "Pod", name, "Unhealthy")):
        text = str(event.get("message", ""))
        if text.startswith(prefix):
            return text[len(prefix) :].strip()
    return "it gave no reason"
