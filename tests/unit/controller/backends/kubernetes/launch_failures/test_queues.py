from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import (
    KAI_QUEUES,
    KUEUE_WORKLOADS,
    LOCAL_QUEUES,
    Cluster,
)
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.errors import MissingObjectError, OperatorMissingError, QueueUnschedulableError
from kubetorch.manifests import labels, rendering
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec

Object = dict[str, Any]
CREATION_TIME = "2026-11-21T15:50:17Z"
NOW = 1795276317.0  # 100 s later
QUEUE = {"metadata": {"name": "gold", "namespace": "team"}}


def job(**job_labels: str) -> Object:
    metadata = {"name": "train", "namespace": "team", "uid": "u1", "labels": job_labels}
    return {"kind": "Job", "metadata": {**metadata, "creationTimestamp": CREATION_TIME}, "spec": {}}


def workload(
    name: str, creation_time: str, message: str = "", *, owner: str = "", priority: int = 0
) -> Object:
    reserved = {"type": "QuotaReserved", "status": "False", "message": message}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "creationTimestamp": creation_time,
            "ownerReferences": [{"uid": owner}],
        },
        "spec": {"queueName": "gold", "priority": priority},
        "status": {"conditions": [reserved]},
    }


def judge(manifest: Object, absent: tuple[str, ...] = (), **objects: Any) -> Verdict:
    cluster = Cluster(NOW, objects, frozenset(absent))
    return diagnosis.judge_owner(manifest, [manifest], events=[], cluster=cluster)


def test_a_queue_name_needs_kueue() -> None:
    verdict = judge(job(**{labels.KUEUE: "gold"}), (LOCAL_QUEUES,))
    assert isinstance(verdict.error, OperatorMissingError)
    assert "queue_name is 'gold', and the cluster has no Kueue" in verdict.error.message


def test_a_queue_name_needs_its_queue() -> None:
    verdict = judge(job(**{labels.KUEUE: "silver"}), **{LOCAL_QUEUES: [QUEUE]})
    assert isinstance(verdict.error, MissingObjectError)
    assert (verdict.error.kind, verdict.error.name) == ("LocalQueue", "silver")
    assert not judge(job(**{labels.KUEUE: "gold"}), **{LOCAL_QUEUES: [QUEUE]}).reason


def test_the_queue_of_pods_that_are_one_group_is_judged_before_there_are_any() -> None:
    compute = ComputeSpec(queue_name="silver", distribution=DistributionSpec("pytorch", workers=2))
    manifest = rendering.render(compute, namespace="team", name="train")
    manifest["metadata"]["creationTimestamp"] = CREATION_TIME
    verdict = judge(manifest, **{LOCAL_QUEUES: [QUEUE]})
    assert isinstance(verdict.error, MissingObjectError)
    assert (verdict.error.kind, verdict.error.name) == ("LocalQueue", "silver")


def test_nobody_is_doomed_while_queues_are_not_known() -> None:
    assert not judge(job(**{labels.KUEUE: "gold"})).is_doomed
    assert not judge(job(**{labels.KAI: "gold"})).is_doomed


def test_a_queue_needs_the_kai_scheduler_and_its_queue() -> None:
    verdict = judge(job(**{labels.KAI: "gold"}), (KAI_QUEUES,))
    assert isinstance(verdict.error, OperatorMissingError)
    verdict = judge(job(**{labels.KAI: "gold"}), **{KAI_QUEUES: [{"metadata": {"name": "other"}}]})
    assert isinstance(verdict.error, MissingObjectError)
    assert not judge(job(**{labels.KAI: "g"}), **{KAI_QUEUES: [{"metadata": {"name": "g"}}]}).reason


def test_an_inactive_queue_may_become_active() -> None:
    condition = {"type": "Active", "status": "False", "message": "Can't submit new workloads"}
    queue = {**QUEUE, "status": {"conditions": [condition]}}
    verdict = judge(job(**{labels.KUEUE: "gold"}), **{LOCAL_QUEUES: [queue]})
    assert not verdict.is_doomed
    assert "is not active: Can't submit new workloads" in verdict.reason


def test_a_waiting_workload_shows_its_place_and_reason() -> None:
    message = (
        "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor f"
    )
    workloads = [
        workload("first", "2026-11-21T15:50:01Z"),
        workload("urgent", "2026-11-21T15:50:09Z", priority=9),
        workload("mine", "2026-11-21T15:50:05Z", message, owner="u1"),
        workload("last", "2026-11-21T15:50:07Z"),
    ]
    verdict = judge(job(), **{KUEUE_WORKLOADS: workloads})
    assert not verdict.is_doomed
    assert verdict.reason == f"it is number 3 of 4 in the queue 'gold': {message}"


@pytest.mark.parametrize(
    ("message", "is_doomed"),
    [
        ("insufficient quota for cpu in flavor a, request > maximum capacity (9 > 4)", True),
        (
            "insufficient quota for cpu in flavor a, request > maximum capacity (9 > 4), "
            "insufficient unused quota for cpu in flavor b, 1 more needed",
            False,
        ),
        (
            "insufficient quota for cpu in flavor a, request > maximum capacity (9 > 4), "
            "insufficient quota for cpu in flavor b, request > maximum capacity (9 > 5)",
            True,
        ),
        ("resource nvidia.com/gpu unavailable in ClusterQueue", True),
        ("insufficient unused quota for cpu in flavor a, 1 more needed", False),
    ],
)
def test_what_no_flavor_could_ever_hold_is_doomed(message: str, is_doomed: bool) -> None:
    text = f"couldn't assign flavors to pod set main: {message}"
    workloads = [workload("mine", CREATION_TIME, text, owner="u1")]
    verdict = judge(job(), **{KUEUE_WORKLOADS: workloads})
    assert verdict.is_doomed is is_doomed
    assert not is_doomed or type(verdict.error) is QueueUnschedulableError


def test_a_gated_pod_waits_with_the_reason_of_its_workload() -> None:
    gate = {"name": "kueue.x-k8s.io/admission"}
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    pod = {
        "kind": "Pod",
        "metadata": {"name": "web", "namespace": "team", "uid": "u7"},
        "spec": {"containers": [], "schedulingGates": [gate]},
        "status": {"conditions": [condition]},
    }
    objects = {KUEUE_WORKLOADS: [workload("mine", CREATION_TIME, owner="u7")]}
    verdict = diagnosis.judge_pod(pod, events=[], cluster=Cluster(NOW, objects))
    assert verdict.reason == "it is number 1 of 1 in the queue 'gold'"
    verdict = diagnosis.judge_pod(pod, events=[], cluster=Cluster(NOW))
    assert verdict.reason == "it is held back by kueue.x-k8s.io/admission"
