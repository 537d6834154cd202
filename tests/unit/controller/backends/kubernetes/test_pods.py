"""Pods of a cluster as `PodStatus`."""

from __future__ import annotations

import copy

import pytest

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.backends.kubernetes import pods
from kubetorch.manifests import labels
from kubetorch.wire.messages import Ending

POD = {
    "metadata": {"name": "train-abc", "namespace": "team", "annotations": {}},
    "spec": {
        "containers": [
            {"name": "sidecar"},
            {
                "name": "kubetorch",
                "env": [
                    {"name": "KT_POD_WORKLOAD", "value": "train"},
                    {"name": "KT_POD_PORT", "value": "32300"},
                ],
            },
        ]
    },
    "status": {"phase": "Pending"},
}


def pod(*, annotations: dict | None = None, leaving: bool = False, **status) -> dict:
    manifest = copy.deepcopy(POD)
    manifest["metadata"]["annotations"] = annotations or {}
    if leaving:
        manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    manifest["status"].update(status)
    return manifest


def container(state: dict, **more) -> dict:
    return {"containerStatuses": [{"name": "kubetorch", "state": state, **more}]}


def of(manifest: dict, template: str = "") -> pods.PodStatus:
    return pods.pod_status(manifest, ordinal=0, template=template)


def test_a_running_pod_has_a_url_and_a_start():
    running = {"running": {"startedAt": "2026-01-01T00:00:10Z"}}
    status = of(pod(phase="Running", podIP="10.0.0.7", **container(running, restartCount=2)))

    assert (status.phase, status.url, status.restarts) == ("Running", "http://10.0.0.7:32300", 2)
    assert status.started == 1767225610.0
    assert not status.is_down


@pytest.mark.parametrize(
    ("owner", "is_retiring"), [("ReplicaSet", True), ("Job", False), (None, False)]
)
def test_what_is_left_of_a_pod_that_has_a_successor_is_not_waited_for(owner, is_retiring):
    evicted_pod = pod(phase="Failed", reason="Evicted")
    if owner is not None:
        evicted_pod["metadata"]["ownerReferences"] = [{"kind": owner, "controller": True}]
    status = of(evicted_pod)
    assert (status.is_retiring, status.phase, status.is_down) == (is_retiring, "Failed", True)


def test_what_is_left_of_a_pod_says_what_ended_it():
    evicted = of(pod(phase="Failed", reason="Evicted", message="low on memory"))
    assert evicted.ending == Ending(reason="Evicted", message="low on memory")
    assert of(pod(phase="Failed", reason="Preempting")).ending == Ending(reason="Preempted")
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    assert of(pod(phase="Running", **container(killed))).ending.reason == "OOMKilled"
    ended = {"terminated": {"reason": "Completed", "exitCode": 0}}
    assert of(pod(phase="Running", **container(ended))).ending is None
    restarted = of(
        pod(phase="Running", **container({"running": {}}, restartCount=1, lastState=killed))
    )
    assert (restarted.restarts, restarted.ending, restarted.last_ending.reason) == (
        1,
        None,
        "OOMKilled",
    )


def test_a_pod_that_is_about_to_be_evicted_says_why():
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
        "lastTransitionTime": "2026-01-01T00:00:10Z",
    }
    eviction = Ending(reason="Evicted", message="Eviction API: evicting", time=1767225610.0)
    assert of(pod(phase="Running", conditions=[target])).ending == eviction
    assert of(pod(phase="Running", conditions=[{**target, "status": "False"}])).ending is None
    deleted = of(pod(phase="Running", leaving=True)).ending
    assert deleted is not None
    assert deleted.reason == "Deleted"
    assert of(pod(phase="Running", leaving=True, conditions=[target])).ending == eviction
    assert of(pod(phase="Running")).ending is None


def test_a_pod_that_never_started_is_pending_and_may_have_a_session_before_it_is_said_to_run():
    status = of(pod(**container({"waiting": {"reason": "ContainerCreating"}})))

    assert (status.phase, status.reason, status.is_down) == ("Pending", "", False)


@pytest.mark.parametrize(
    "ended_pod",
    [
        pod(**container({"terminated": {"exitCode": 1}})),
        pod(**container({"waiting": {"reason": "CrashLoopBackOff"}}, restartCount=3)),
        pod(phase="Failed", reason="Evicted"),
        pod(phase="Succeeded"),
    ],
)
def test_a_pod_whose_agent_ended_is_down(ended_pod):
    assert of(ended_pod).is_down


def test_what_it_waits_for_is_said_in_the_words_of_kubernetes():
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    assert of(pod(**container(waiting))).reason == "ErrImagePull: no such image"

    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    status = of(pod(conditions=[{**condition, "message": "0/2 nodes are available"}]))
    assert status.reason == "Unschedulable: 0/2 nodes are available"


def test_a_pod_of_another_template_or_on_its_way_out_is_retiring():
    old = {labels.TEMPLATE_DIGEST: "old"}
    assert of(pod(annotations=old), template="new").is_retiring
    assert not of(pod(annotations=old), template="old").is_retiring
    assert not of(pod(), template="new").is_retiring, "an operator did not pass the annotation on"
    leaving = of(pod(leaving=True))
    assert (leaving.phase, leaving.is_retiring) == ("Terminating", True)


def test_calls_go_to_the_pods_with_these_labels_or_to_all():
    worker_pod = pod()
    worker_pod["metadata"]["labels"] = {"ray.io/node-type": "worker", "app": "train"}
    for called, is_called in (
        (None, True),
        ({}, True),
        ({"app": "train"}, True),
        ({"app": "train", "ray.io/node-type": "head"}, False),
    ):
        status = pods.pod_status(worker_pod, ordinal=0, template="", called_labels=called)
        assert status.is_called is is_called


def test_a_pod_with_neither_our_label_nor_our_agent_is_somebody_elses() -> None:
    assert pods.pod_status(pod(), ordinal=0, template="").is_ours
    foreign_pod = pod()
    for container in foreign_pod["spec"]["containers"]:
        container["env"] = [{"name": "KT_SERVICE", "value": "train"}]
    assert not pods.pod_status(foreign_pod, ordinal=0, template="").is_ours
    foreign_pod["metadata"]["labels"] = {labels.SERVICE: "train"}
    assert pods.pod_status(foreign_pod, ordinal=0, template="").is_ours


@pytest.mark.parametrize(
    ("phases", "expected", "surplus"),
    [
        ("Failed Running Running", 2, [True, False, False]),
        ("Failed Pending Running", 2, [True, False, False]),
        ("Failed Running", 2, [False, False]),
        ("Failed Running", None, [False, False]),
    ],
)
def test_a_pod_that_has_ended_is_surplus_once_another_is_in_its_place(phases, expected, surplus):
    statuses = [PodStatus(f"job-{n}", n, phase, "") for n, phase in enumerate(phases.split())]
    assert [pod.is_retiring for pod in pods.retire_superseded(statuses, expected)] == surplus
