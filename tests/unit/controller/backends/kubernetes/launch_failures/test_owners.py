from __future__ import annotations

from typing import Any

import pytest

from kubetorch import errors
from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.manifests import labels

Object = dict[str, Any]
TIMESTAMP = "2026-11-21T15:50:17Z"
NOW = 1795276317.0


def owner(
    kind: str, version: str, *conditions: Object, spec: Object | None = None, **status: Any
) -> Object:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "web", "namespace": "team", "uid": "u"},
        "spec": spec or {},
        "status": {"conditions": list(conditions), **status},
    }


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Object:
    fields = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**fields, "lastTransitionTime": TIMESTAMP}


def template(digest: str) -> Object:
    return {"template": {"metadata": {"annotations": {labels.TEMPLATE_DIGEST: digest}}}}


def judge(*owners: Object, events: Any = ()) -> Verdict:
    return diagnosis.judge_owner(owners[0], owners, events=events, cluster=Cluster(NOW))


def knative(reason: str, message: str, kind: str = "Ready") -> Object:
    return owner("Service", "serving.knative.dev/v1", condition(kind, "False", reason, message))


@pytest.mark.parametrize(
    ("failed_owner", "kind", "words"),
    [
        (
            knative("NotOwned", 'There is an existing Service "web" that we do not own.'),
            errors.KnativeServiceConflictError,
            "that we do not own",
        ),
        (
            knative("ContainerMissing", 'Unable to fetch image "a:1": 404 Not Found'),
            errors.ImagePullError,
            "Knative cannot look up the image a:1: 404 Not Found",
        ),
        (
            knative("ProgressDeadlineExceeded", "Initial scale was never achieved"),
            errors.StartupError,
            "Knative has given up web: Initial scale was never achieved",
        ),
        (
            knative("ExitCode1", "Container failed with: ValueError"),
            errors.ServiceHealthError,
            "ValueError",
        ),
        (
            owner(
                "PyTorchJob",
                "kubeflow.org/v1",
                condition("Failed", "True", "PyTorchJobFailed", "1 Worker replica(s) failed."),
            ),
            errors.ServiceHealthError,
            "the PyTorchJob web has failed (PyTorchJobFailed): 1 Worker replica(s) failed.",
        ),
        (
            owner("JobSet", "jobset.x-k8s.io/v1alpha2", condition("Failed", "True", "FailedJobs")),
            errors.ServiceHealthError,
            "the JobSet web has failed",
        ),
        (
            owner(
                "RayCluster",
                "ray.io/v1",
                state="failed",
                reason="no head",
                lastUpdateTime=TIMESTAMP,
            ),
            errors.StartupError,
            "the RayCluster web has failed: no head",
        ),
        (
            owner(
                "RayCluster",
                "ray.io/v1",
                condition(
                    "ReplicaFailure",
                    "True",
                    "FailedCreateHeadPod",
                    'pods "w" is forbidden: no PriorityClass with name p was found',
                ),
            ),
            errors.MissingObjectError,
            "there is no PriorityClass 'p'",
        ),
    ],
)
def test_an_owner_that_has_failed_is_doomed(
    failed_owner: Object, kind: type[errors.KubetorchError], words: str
) -> None:
    verdict = judge(failed_owner)
    assert type(verdict.error) is kind
    assert words in verdict.error.message
    assert verdict.error.hint
    assert verdict.since


@pytest.mark.parametrize(
    ("waiting_owner", "words"),
    [
        (knative("Deploying", "Waiting for the revision"), "Deploying: Waiting for the revision"),
        (owner("Job", "batch/v1", condition("Suspended", "True", "Kueue", "not yet")), "not yet"),
    ],
)
def test_an_owner_that_waits_says_why(waiting_owner: Object, words: str) -> None:
    verdict = judge(waiting_owner)
    assert not verdict.is_doomed
    assert words in verdict.reason


def test_an_owner_that_is_well_says_nothing() -> None:
    assert not judge(owner("Deployment", "apps/v1", condition("Available", "True"))).reason
    assert not judge(owner("Job", "batch/v1", condition("Failed", "False"))).reason


FAILED = {
    "reason": "FailedCreate",
    "message": 'create Pod failed: pods "w" is forbidden: no PriorityClass with name p was found',
    "lastTimestamp": TIMESTAMP,
    "involvedObject": {"kind": "StatefulSet", "name": "web", "uid": "u"},
    "metadata": {"name": "web.1"},
}


def test_a_failure_counts_until_a_pod_could_be_made() -> None:
    stateful_set = owner("StatefulSet", "apps/v1", spec={"replicas": 2}, replicas=1)
    assert judge(stateful_set, events=[FAILED]).is_doomed
    later = {**FAILED, "reason": "SuccessfulCreate", "lastTimestamp": "2026-11-21T15:50:20Z"}
    assert not judge(stateful_set, events=[FAILED, later]).reason
    beside = {**later, "lastTimestamp": TIMESTAMP}
    assert judge(stateful_set, events=[FAILED, beside]).is_doomed
    complete = owner("StatefulSet", "apps/v1", spec={"replicas": 2}, replicas=2)
    assert not judge(complete, events=[FAILED]).reason


def test_failures_of_an_earlier_object_of_that_name_count_nothing() -> None:
    stateful_set = owner("StatefulSet", "apps/v1", spec={"replicas": 2}, replicas=0)
    earlier = {**FAILED, "involvedObject": {**FAILED["involvedObject"], "uid": "earlier"}}
    assert not judge(stateful_set, events=[earlier]).reason


def test_how_many_pods_an_autoscaler_wants_is_nobodys_demand() -> None:
    message = (
        'pods "w" is forbidden: exceeded quota: q, requested: pods=1, used: pods=3, limited: pods=3'
    )
    failure = condition("ReplicaFailure", "True", "FailedCreate", message)
    deployment = owner("Deployment", "apps/v1", failure, spec={"replicas": 4})
    assert judge(deployment).is_doomed
    deployment["metadata"]["labels"] = {"serving.knative.dev/revision": "web-1"}
    assert not judge(deployment).is_doomed


def test_what_the_template_before_failed_by_does_not_doom_the_one_that_repairs_it() -> None:
    message = 'pods "web-1" is forbidden: violates PodSecurity "baseline:latest": SYS_PTRACE'
    failed = condition("ReplicaFailure", "True", "FailedCreate", message)
    old = owner("ReplicaSet", "apps/v1", failed, spec=template("old"))
    new = owner("ReplicaSet", "apps/v1", spec=template("new"))
    deployment = owner("Deployment", "apps/v1", failed, spec=template("new"))
    assert judge(deployment, old, new).error is None
    assert judge(deployment, old).error is None
    same = {**deployment, "spec": template("old")}
    assert isinstance(judge(same, old, new).error, errors.AdmissionError)


def revision(number: int, *conditions: Object, attempt: str = "", digest: str = "d") -> Object:
    noted = {labels.TEMPLATE_DIGEST: digest} | ({labels.TRIED_AGAIN: attempt} if attempt else {})
    manifest = owner("Revision", "serving.knative.dev/v1", *conditions)
    metadata = {"name": f"web-0000{number}", "annotations": noted, "uid": f"r{number}"}
    return {**manifest, "metadata": {**manifest["metadata"], **metadata}}


def service(
    *conditions: Object, attempt: str = "", generation: int = 1, observed_generation: int = 1
) -> Object:
    spec = template("d")
    if attempt:
        spec["template"]["metadata"]["annotations"][labels.TRIED_AGAIN] = attempt
    manifest = owner("Service", "serving.knative.dev/v1", *conditions, spec=spec)
    manifest["metadata"]["generation"] = generation
    manifest["status"]["observedGeneration"] = observed_generation
    return manifest


FAILED_REVISION = condition(
    "Ready", "False", "ContainerMissing", 'Unable to fetch image "a:1": 404'
)
ECHO = condition("Ready", "False", "RevisionMissing", 'Configuration "web" has no ready Revision.')


def test_a_revision_that_failed_says_nothing_of_the_attempt_after_it() -> None:
    assert judge(service(ECHO), revision(1, FAILED_REVISION)).is_doomed
    retried_service = service(ECHO, attempt="7", generation=2, observed_generation=2)
    assert not judge(retried_service, revision(1, FAILED_REVISION)).reason
    assert not judge(retried_service, revision(1, FAILED_REVISION), revision(2, attempt="7")).reason
    assert judge(
        retried_service, revision(1, FAILED_REVISION), revision(2, FAILED_REVISION, attempt="7")
    ).is_doomed


def test_what_knative_said_of_an_earlier_spec_is_not_believed() -> None:
    conflict = condition("RoutesReady", "False", "NotOwned", "it is not ours")
    assert judge(service(conflict)).is_doomed
    assert not judge(service(conflict, generation=2, observed_generation=1)).reason
    assert not judge(service(), revision(1, FAILED_REVISION, digest="other")).reason
