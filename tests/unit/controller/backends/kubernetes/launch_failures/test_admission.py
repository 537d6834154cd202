from __future__ import annotations

import pytest

from kubetorch import errors
from kubetorch.controller.backends.kubernetes.launch_failures import admission, diagnosis
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.k8s import failures
from kubetorch.k8s.failures import Action

MANIFEST = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web", "namespace": "team"},
}


def judge(message: str, count: int = 1) -> Verdict:
    return admission.judge(message, namespace="team", since=100.0, now=110.0, count=count)


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        (
            'admission webhook "validate.kyverno.svc-fail" denied the request: resource Pod/team/w '
            "was blocked due to the following policies: no latest tags",
            errors.AdmissionError,
            "no latest tags",
        ),
        (
            'admission webhook "check.example.com" denied the request without explanation',
            errors.AdmissionError,
            "it gave no reason",
        ),
        (
            'pods "w" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
            errors.AdmissionError,
            "runAsNonRoot != true",
        ),
        (
            'pods "w" is forbidden: failed quota: q: must specify limits.cpu for: c',
            errors.AdmissionError,
            "demands that pods say limits.cpu for: c",
        ),
        (
            'pods "w" is forbidden: [maximum cpu usage per Pod is 1, but limit is 2, minimum '
            "memory usage per Container is 1Gi, but request is 1Mi]",
            errors.AdmissionError,
            "a LimitRange refuses it",
        ),
        (
            'pods "w" is forbidden: pod rejected: RuntimeClass "gvisor" not found',
            errors.MissingObjectError,
            "there is no RuntimeClass 'gvisor'",
        ),
    ],
)
def test_a_refusal_has_its_own_error(
    message: str, kind: type[errors.KubetorchError], words: str
) -> None:
    verdict = judge(message)
    assert type(verdict.error) is kind
    assert words in verdict.error.message
    assert verdict.error.hint


@pytest.mark.parametrize(
    "message",
    [
        'Internal error occurred: failed calling webhook "a.example.com": failed to call webhook: '
        'Post "https://a.team.svc:443/?timeout=10s": context deadline exceeded',
        'Internal error occurred: failed calling webhook "a.example.com": failed to call webhook: '
        'Post "https://a.team.svc:443/": no endpoints available for service "a"',
    ],
)
def test_a_webhook_that_is_away_may_come_back(message: str) -> None:
    verdict = judge(message)
    assert not verdict.is_doomed
    assert "'a.example.com' does not answer" in verdict.reason


def test_a_runtime_that_was_just_made_may_not_have_come_to_the_webhook() -> None:
    verdict = judge(
        'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
        'spec.runtimeRef: Invalid value: v1alpha1.RuntimeRef{Name:"mine"}: '
        'TrainingRuntime.trainer.kubeflow.org "mine" not found: specified trainingRuntime must be '
        "created before the TrainJob is created"
    )
    assert not verdict.is_doomed
    assert "does not know the TrainingRuntime 'mine' yet" in verdict.reason


QUOTA = (
    'pods "w" is forbidden: exceeded quota: q, requested: requests.cpu=2,requests.memory=1Gi, '
    "used: requests.cpu={used},requests.memory=1Gi, "
    "limited: requests.cpu={hard},requests.memory=8Gi"
)


def test_a_full_quota_is_waited_for_and_one_that_is_too_small_is_not() -> None:
    verdict = judge(QUOTA.format(used=3, hard=4))
    assert not verdict.is_doomed
    assert "3 of 4 requests.cpu are used, 2 more are asked" in verdict.reason
    verdict = judge(QUOTA.format(used=0, hard=1))
    assert isinstance(verdict.error, errors.QuotaExceededError)
    assert "allows 1 of requests.cpu altogether, 2 are asked" in verdict.error.message


def test_a_quota_that_is_not_counted_yet_is_waited_for() -> None:
    verdict = judge('pods "w" is forbidden: status unknown for quota: q, resources: cpu, pods')
    assert (verdict.error, verdict.reason.startswith("the quota 'q' is new")) == (None, True)


def test_a_quota_has_to_hold_all_pods_together() -> None:
    message = QUOTA.format(used=4, hard=5)
    assert not judge(message, count=2).is_doomed
    assert judge(message, count=3).is_doomed


def test_what_is_missing_has_a_moment_to_come() -> None:
    message = (
        'pods "w" is forbidden: error looking up service account: serviceaccount "sa" not found'
    )
    early = admission.judge(message, namespace="team", since=100.0, now=100.5)
    assert not early.is_doomed
    assert early.recheck_seconds == 1.5
    assert judge(message).is_doomed


def refusal(status_code: int, message: str) -> errors.KubernetesRequestError:
    action = Action("patch", "deployments.apps", "team", "web")
    return failures.refused_by(action, {"code": status_code, "message": message})


def test_what_rbac_forbids_stays_what_it_is_with_the_role_to_grant() -> None:
    error = refusal(
        403,
        'deployments.apps "web" is forbidden: User "u" cannot patch resource "deployments" in API '
        'group "apps" in the namespace "team"',
    )
    verdict = diagnosis.judge_refusal(error, MANIFEST, now=0.0)
    assert verdict.error is error
    assert "grant it with a Role" in str(error.hint)


def test_a_kind_that_is_not_served_lacks_its_operator() -> None:
    error = refusal(404, "the server could not find the requested resource")
    verdict = diagnosis.judge_refusal(error, MANIFEST, now=0.0)
    assert isinstance(verdict.error, errors.OperatorMissingError)


@pytest.mark.parametrize(
    "error",
    [
        errors.KubernetesUnavailableError("the API server did not answer"),
        refusal(429, "too many requests"),
        refusal(500, "etcdserver: leader changed"),
        refusal(409, "Operation cannot be fulfilled: the object has been modified"),
        refusal(409, "object is being deleted: deployments.apps already exists"),
    ],
)
def test_an_api_server_that_cannot_just_now_is_asked_again(error: errors.KubetorchError) -> None:
    verdict = diagnosis.judge_refusal(error, MANIFEST, now=0.0)
    assert not verdict.is_doomed
    assert verdict.reason


def test_fields_that_another_manager_owns_stay_a_conflict() -> None:
    error = refusal(409, "Apply failed with 1 conflict: .spec.replicas")
    assert diagnosis.judge_refusal(error, MANIFEST, now=0.0).error is error
