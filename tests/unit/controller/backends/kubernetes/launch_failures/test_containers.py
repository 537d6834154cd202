from __future__ import annotations

from typing import Any

import pytest

from kubetorch import errors
from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict

Object = dict[str, Any]
NOW = 1795276317.0  # 15:51:57
JOB = {"controller": True, "kind": "Job", "name": "train", "uid": "j"}


def ended(code: int, time: str = "15:51:50", **more: Any) -> Object:
    finished = f"2026-11-21T{time}Z"
    return {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": finished, **more}}


def judge(
    state: Object,
    last: Object | None = None,
    *,
    restarts: int = 0,
    policy: str = "Always",
    owner: Object | None = None,
    events: Any = (),
) -> Verdict:
    status = {"name": "c", "state": state, "lastState": last or {}, "restartCount": restarts}
    metadata = {"name": "web", "namespace": "team", "uid": "p"}
    pod = {
        "kind": "Pod",
        "metadata": {**metadata, "ownerReferences": [] if owner is None else [owner]},
        "spec": {"nodeName": "n", "restartPolicy": policy, "containers": [{"name": "c"}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }
    return diagnosis.judge_pod(pod, events=events, cluster=Cluster(NOW))


def test_the_first_end_may_be_an_accident() -> None:
    verdict = judge(ended(1))
    assert not verdict.is_doomed
    assert verdict.reason == "the container 'c' ended with exit code 1"


def test_the_second_end_is_a_loop() -> None:
    verdict = judge(ended(1), ended(1, "15:51:40"), restarts=1)
    assert type(verdict.error) is errors.ServiceHealthError
    assert verdict.log_container == "c"
    assert not verdict.log_is_of_previous_run
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    verdict = judge(waits, ended(1), restarts=1)
    assert verdict.is_doomed
    assert verdict.log_is_of_previous_run


def test_two_ends_that_lie_far_apart_are_two_accidents() -> None:
    assert not judge(ended(1), ended(1, "12:00:00"), restarts=1).is_doomed


def test_a_container_that_runs_again_is_not_doomed() -> None:
    running = {"running": {"startedAt": "2026-11-21T15:51:51Z"}}
    verdict = judge(running, ended(137, reason="OOMKilled"), restarts=1)
    assert not verdict.is_doomed
    assert "was killed for its memory" in verdict.reason
    assert verdict.recheck_seconds is not None
    assert not judge(running, ended(1, "15:40:00"), restarts=1).reason


def test_a_program_that_is_not_there_needs_no_second_try() -> None:
    assert judge(ended(127)).is_doomed
    assert judge(ended(128, reason="StartError", message='exec: "kt": not found')).is_doomed


def test_a_pod_of_a_job_may_end_and_one_of_nobody_may_not() -> None:
    assert not judge(ended(5), policy="Never", owner=JOB).is_doomed
    assert type(judge(ended(5), policy="Never").error) is errors.PodContainerError
    assert judge(ended(0), policy="Never").is_doomed


def test_the_last_lines_are_in_the_error() -> None:
    verdict = judge(ended(1, message="Traceback\nValueError: no"), ended(1, "15:51:40"))
    assert verdict.log_container is None
    assert "its last lines:\n  Traceback\n  ValueError: no" in str(verdict.error)
    fetched = judge(ended(1), ended(1, "15:51:40")).with_log([f"line {n}" for n in range(100)])
    assert "line 99" in str(fetched.error)
    assert "line 79" not in str(fetched.error)
    assert fetched.with_log([]).error == fetched.error


@pytest.mark.parametrize(
    "message",
    [
        "failed to sync secret cache: timed out waiting for the condition",
        'failed to reserve container name "c": name "c" is reserved for "abc"',
        "context deadline exceeded",
    ],
)
def test_a_start_that_fails_for_what_passes_is_tried_again(message: str) -> None:
    for reason in ("CreateContainerError", "CreateContainerConfigError", "RunContainerError"):
        verdict = judge({"waiting": {"reason": reason, "message": message}})
        assert not verdict.is_doomed
        assert message in verdict.reason


def test_an_image_of_another_architecture_says_so() -> None:
    message = "failed to create containerd task: exec /bin/sh: exec format error: unknown"
    verdict = judge({"waiting": {"reason": "RunContainerError", "message": message}})
    assert verdict.error is not None
    assert "architecture" in str(verdict.error.hint)


def test_a_liveness_probe_may_fail_once() -> None:
    about = {"kind": "Pod", "name": "web", "uid": "p"}
    killing = {
        "reason": "Killing",
        "message": "Container c failed liveness probe, will be restarted",
        "involvedObject": about,
        "metadata": {"name": "web.1"},
    }
    unhealthy = {
        "reason": "Unhealthy",
        "message": "Liveness probe failed: HTTP probe failed with statuscode: 500",
        "involvedObject": about,
        "metadata": {"name": "web.2"},
    }
    events = [killing, unhealthy]
    verdict = judge(ended(137), events=events)
    assert not verdict.is_doomed
    assert "liveness probe failed: HTTP probe failed with statuscode: 500" in verdict.reason
    verdict = judge(ended(137), ended(137, "15:51:40"), restarts=1, events=events)
    assert type(verdict.error) is errors.ProbeFailedError


def pod_event(reason: str, message: str, time: str = "15:51:50", *, container: str = "c") -> Object:
    field = f"spec.containers{{{container}}}"
    return {
        "reason": reason,
        "message": message,
        "lastTimestamp": f"2026-11-21T{time}Z",
        "involvedObject": {"kind": "Pod", "name": "web", "uid": "p", "fieldPath": field},
        "metadata": {"name": f"web.{reason}.{time}"},
    }


PULL = 'Failed to pull image "a:1": rpc error: code = NotFound desc = a:1: not found'
RUN = 'Error: failed to create containerd task: exec: "kt": executable file not found in $PATH'


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (
            [
                pod_event("Pulling", "a:1"),
                pod_event("Failed", PULL),
                pod_event("Failed", "Error: ErrImagePull"),
            ],
            1,
        ),
        (
            [
                pod_event("InspectFailed", "couldn't parse image name A"),
                pod_event("Failed", "Error: x"),
            ],
            1,
        ),
        ([pod_event("ErrImageNeverPull", "is not present with pull policy of Never")], 1),
        ([pod_event("Pulled", "a:1"), pod_event("Created", "c"), pod_event("Failed", RUN)], 2),
    ],
)
def test_a_status_that_is_behind_its_events_is_not_waited_for(events: Any, kind: int) -> None:
    waits = {"waiting": {"reason": "PodInitializing"}}
    expected = {1: errors.ImagePullError, 2: errors.PodContainerError}[kind]
    events = [event for event in events if event["message"] != "Error: x"]
    verdict = judge(waits, events=events)
    assert type(verdict.error) is expected
    assert verdict.since == NOW - 7


def test_an_attempt_that_went_on_after_a_failure_counts() -> None:
    waits = {"waiting": {"reason": "ContainerCreating"}}
    before = pod_event("Failed", PULL, "15:51:20")
    assert not judge(waits, events=[before, pod_event("Pulled", "a:1")]).reason
    side_failure = pod_event("Failed", PULL, container="other")
    assert not judge(waits, events=[side_failure]).reason


def test_a_registry_that_is_away_is_waited_for_by_its_events_too() -> None:
    away = 'Failed to pull image "a:1": dial tcp 10.0.0.1:443: connect: connection refused'
    verdict = judge({"waiting": {"reason": "PodInitializing"}}, events=[pod_event("Failed", away)])
    assert not verdict.is_doomed
    assert "connection refused" in verdict.reason
