from __future__ import annotations

import pytest

from kubetorch import errors
from kubetorch.wire import exceptions
from unit.controller.backends.kubernetes.launch_failures import recorded

DOOMED = [
    ("pull-not-found", errors.ImagePullError, "there is no image 198.18.0.1:5000/nope:1"),
    ("pull-digest", errors.ImagePullError, "not found"),
    ("pull-localhost", errors.ImagePullError, "the node does not have it"),
    ("pull-never", errors.ImagePullError, "pull policy is Never"),
    ("image-name", errors.ImagePullError, "'UPPER/Case:1' is no name of an image"),
    ("big-cpu", errors.UnschedulableError, "node1 has 2 cpus, 1000 are asked"),
    ("big-gpu", errors.UnschedulableError, "node1 has 8 nvidia.com/gpu, 9 are asked"),
    ("no-label", errors.UnschedulableError, "node1 has no label disk, ssd is asked"),
    ("no-secret-env", errors.MissingObjectError, "there is no Secret 'nosecret'"),
    ("no-secret-vol", errors.MissingObjectError, "there is no Secret 'nosecret'"),
    ("no-key", errors.MissingObjectError, "has no key 'nokey'"),
    ("no-claim", errors.MissingObjectError, "no PersistentVolumeClaim 'nopvc' in namespace"),
    ("no-storage-class", errors.MissingObjectError, "there is no StorageClass 'nosuch'"),
    ("claim-mode", errors.StartupError, "only supports ReadWriteOnce"),
    ("no-scheduler", errors.OperatorMissingError, "'kai-scheduler'"),
    ("no-command", errors.PodContainerError, "/no/such/thing"),
    ("no-workdir", errors.PodContainerError, "mkdir /etc/passwd: not a directory"),
    ("shell-127", errors.PodContainerError, "was not found (exit code 127)"),
    ("run-as-root", errors.PodContainerError, "runAsNonRoot"),
    ("crash-loop", errors.ServiceHealthError, "again and again (exit code 3, started 8 times)"),
    ("init-fails", errors.PodContainerError, "the init container 'i' of bad-init failed"),
    ("out-of-memory", errors.OutOfMemoryError, "killed for its memory (limit 50Mi)"),
    ("probe-startup", errors.ProbeFailedError, "startup probe failed: dial tcp"),
    ("probe-liveness", errors.ProbeFailedError, "liveness probe failed: sick"),
    ("deadline", errors.PodTerminatedError, "DeadlineExceeded"),
    ("evicted", errors.PodTerminatedError, "ephemeral local storage"),
    ("owner-quota-small", errors.QuotaExceededError, "0.1 of requests.cpu altogether"),
    (
        "owner-quota-full",
        errors.QuotaExceededError,
        "3 of pods altogether, 1 are asked by each",
    ),
    ("owner-limit-range", errors.AdmissionError, "maximum memory usage per Container is 100Mi"),
    ("owner-pod-security", errors.AdmissionError, "hostNetwork=true"),
    ("owner-no-priority", errors.MissingObjectError, "there is no PriorityClass 'noprio'"),
    ("owner-job-no-account", errors.MissingObjectError, "no ServiceAccount 'nosa' in namespace"),
    ("owner-statefulset-no-account", errors.MissingObjectError, "no ServiceAccount 'nosa'"),
    ("owner-daemonset-no-account", errors.MissingObjectError, "no ServiceAccount 'nosa'"),
    ("owner-job-failed", errors.ServiceHealthError, "BackoffLimitExceeded"),
]
WAITING = [
    ("pull-no-host", "no such host"),
    ("pull-hub", "no such host"),
    ("pull-refused", "connection refused"),
    ("gated", "held back by example.com/wait"),
]


@pytest.mark.parametrize(("name", "kind", "text"), DOOMED, ids=[row[0] for row in DOOMED])
def test_what_can_never_succeed_is_doomed_with_its_own_error_and_a_next_step(
    name: str, kind: type[errors.KubetorchError], text: str
) -> None:
    verdict = recorded.judge(name)
    assert type(verdict.error) is kind
    assert text in verdict.error.message
    assert verdict.error.hint
    assert verdict.since is not None


@pytest.mark.parametrize(("name", "kind", "text"), DOOMED, ids=[row[0] for row in DOOMED])
def test_the_error_survives_the_wire(
    name: str, kind: type[errors.KubetorchError], text: str
) -> None:
    error = recorded.judge(name).error
    assert error is not None
    rebuilt = exceptions.rebuild(exceptions.parse_json(exceptions.describe(error).to_json()))
    assert type(rebuilt) is kind
    assert str(rebuilt) == str(error)


@pytest.mark.parametrize(("name", "text"), WAITING, ids=[row[0] for row in WAITING])
def test_what_may_still_come_right_is_progress(name: str, text: str) -> None:
    verdict = recorded.judge(name)
    assert not verdict.is_doomed
    assert text in verdict.reason
