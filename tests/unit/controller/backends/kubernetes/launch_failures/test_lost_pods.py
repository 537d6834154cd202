from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import NODES, Cluster
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.errors import PodTerminatedError

Object = dict[str, Any]
REPLACED = {"controller": True, "kind": "ReplicaSet", "name": "web-1", "uid": "r"}
JOB = {"controller": True, "kind": "Job", "name": "train", "uid": "j"}


def pod(owner: Object | None = None, *, status: Object | None = None, **metadata: Any) -> Object:
    owners = [] if owner is None else [owner]
    return {
        "kind": "Pod",
        "metadata": {
            "name": "web",
            "namespace": "team",
            "uid": "p",
            "ownerReferences": owners,
            **metadata,
        },
        "spec": {"nodeName": "node1", "containers": []},
        "status": status or {"phase": "Running"},
    }


def node(ready: str, name: str = "node1") -> Object:
    message = "Kubelet stopped posting node status."
    condition = {"type": "Ready", "status": ready, "message": message}
    return {"metadata": {"name": name}, "status": {"conditions": [condition]}}


def judge(lost_pod: Object, *nodes: Object, events: Any = ()) -> Verdict:
    return diagnosis.judge_pod(lost_pod, events=events, cluster=Cluster(0.0, {NODES: list(nodes)}))


def reason(verdict: Verdict) -> str:
    assert isinstance(verdict.error, PodTerminatedError)
    assert verdict.error.hint
    return verdict.error.reason


EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
DELETED = {"deletionTimestamp": "2026-11-21T15:50:17Z", "deletionGracePeriodSeconds": 30}


def test_a_lost_node_dooms_the_pods_on_it() -> None:
    # Its owner replaces it only after minutes.
    assert reason(judge(pod(REPLACED), node("Unknown"))) == "NodeLost"
    assert "Kubelet stopped posting" in str(judge(pod(), node("Unknown")).error)


def test_a_node_whose_kubelet_lives_may_get_ready() -> None:
    verdict = judge(pod(), node("False"))
    assert not verdict.is_doomed
    assert "its node node1 is not ready" in verdict.reason
    assert not judge(pod(), node("True")).reason


def test_a_node_that_was_removed_takes_its_pods_along() -> None:
    assert reason(judge(pod(), node("True", "node2"))) == "NodeLost"
    assert not judge(pod()).reason  # nodes are not known


@pytest.mark.parametrize("owner", [REPLACED, JOB])
def test_a_pod_that_somebody_replaces_is_no_doom(owner: Object) -> None:
    for lost_pod in (pod(owner, status=EVICTED), pod(owner, **DELETED)):
        verdict = judge(lost_pod, node("True"))
        assert not verdict.is_doomed
        assert verdict.reason


def test_a_pod_that_nobody_replaces_is_doomed_with_what_happened() -> None:
    verdict = judge(pod(status=EVICTED), node("True"))
    assert reason(verdict) == "Evicted"
    assert isinstance(verdict.error, PodTerminatedError)
    assert verdict.error.evicted
    assert reason(judge(pod(**DELETED), node("True"))) == "Deleted"


@pytest.mark.parametrize(
    ("why", "word"),
    [("PreemptionByScheduler", "Preempted"), ("EvictionByEvictionAPI", "Evicted")],
)
def test_a_deleted_pod_says_why_if_the_cluster_does(why: str, word: str) -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": why, "message": "make room"}
    lost_pod = pod(status={"phase": "Running", "conditions": [target]}, **DELETED)
    assert reason(judge(lost_pod, node("True"))) == word


def test_the_fact_of_a_deletion_is_its_beginning() -> None:
    verdict = judge(pod(**DELETED), node("True"))
    assert verdict.since == 1795276187.0  # the time of the end is what Kubernetes notes


def test_a_kubelet_that_has_decided_is_not_waited_for() -> None:
    event = {
        "reason": "Evicted",
        "message": "The node was low on resource: memory.",
        "involvedObject": {"kind": "Pod", "name": "web", "uid": "p"},
        "metadata": {"name": "web.1"},
    }
    assert reason(judge(pod(), node("True"), events=[event])) == "Evicted"


def test_events_of_an_earlier_pod_of_that_name_count_nothing() -> None:
    event = {
        "reason": "Evicted",
        "message": "The node was low on resource: memory.",
        "involvedObject": {"kind": "Pod", "name": "web", "uid": "earlier"},
        "metadata": {"name": "web.1"},
    }
    assert not judge(pod(), node("True"), events=[event]).reason
