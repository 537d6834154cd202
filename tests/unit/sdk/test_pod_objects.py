"""Pods as Kubernetes describes them."""

import pytest

from kubetorch.sdk import pod_objects
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import PodView, WorkloadView


def view(*pods):
    spec = WorkloadSpec(
        "ns",
        "mine",
        CallableRef("fn", "f", "m", "f"),
        ComputeSpec(labels=(("team", "ml"),), annotations=(("owner", "ann"),)),
    )
    return WorkloadView(spec=spec, generation=1, status="Ready", pods=pods, updated=1e9)


def pod(phase="Running", **fields):
    pod_view = PodView(name="mine-0", ordinal=0, phase=phase, url="http://127.0.0.1:99", **fields)
    return pod_objects.pod_object(view(pod_view), pod_view)


def test_a_pod_is_a_dictionary_with_attributes():
    shown_pod = pod(started=1e9, is_ready=True, restarts=2)

    assert shown_pod["metadata"]["name"] == shown_pod.metadata.name == "mine-0"
    assert shown_pod.metadata.namespace == "ns"
    assert (
        shown_pod.metadata.creation_timestamp
        == shown_pod.status.startTime
        == "2001-09-09T01:46:40Z"
    )
    assert shown_pod.metadata.labels["team"] == "ml"
    assert shown_pod.metadata.labels["kubetorch.com/service"] == "mine"
    assert shown_pod.status.pod_ip == shown_pod["status"]["podIP"] == "127.0.0.1"
    assert shown_pod.status.container_statuses[0].restart_count == 2
    assert shown_pod == pod(started=1e9, is_ready=True, restarts=2)


def test_what_is_not_said_is_not_there():
    shown_pod = pod()

    assert "reason" not in shown_pod.status
    with pytest.raises(AttributeError, match="'reason'; the keys are phase"):
        _ = shown_pod.status.reason
    assert not hasattr(shown_pod, "_repr_html_")


@pytest.mark.parametrize(
    ("phase", "shown"),
    [
        ("Running", "Running"),
        ("Pending", "Pending"),
        ("Failed", "Failed"),
        ("Terminating", "Running"),
    ],
)
def test_a_pod_that_ends_has_the_phase_and_the_mark_of_kubernetes(phase, shown):
    shown_pod = pod(phase)

    assert shown_pod.status.phase == shown
    assert ("deletionTimestamp" in shown_pod.metadata) == (phase == "Terminating")


def test_a_pod_has_its_annotations_without_a_cluster_too():
    assert pod().metadata.annotations == {"owner": "ann"}


DESCRIBED = {
    "metadata": {"name": "mine-0", "uid": "5", "annotations": {"a": "b"}},
    "spec": {"nodeName": "node2", "containers": [{"name": "c"}]},
    "status": {"phase": "Pending", "podIP": None},
}


@pytest.mark.parametrize(("phase", "shown"), [("Running", "Running"), ("Unknown", "Pending")])
def test_the_description_of_the_cluster_but_for_what_has_answered(phase, shown):
    pod_view = PodView(name="mine-0", ordinal=0, phase=phase)
    described = pod_objects.pod_object(view(pod_view), pod_view, DESCRIBED)
    assert described.spec.node_name == "node2"
    assert (described.metadata.uid, described.metadata.annotations.a) == ("5", "b")
    assert described.status.phase == shown
