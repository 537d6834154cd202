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
    return pod_objects.of_pod(view(pod_view), pod_view)


def test_a_pod_is_a_dictionary_with_attributes():
    pod_object = pod(started=1e9, is_ready=True, restarts=2)

    assert pod_object["metadata"]["name"] == pod_object.metadata.name == "mine-0"
    assert pod_object.metadata.namespace == "ns"
    assert (
        pod_object.metadata.creation_timestamp
        == pod_object.status.startTime
        == "2001-09-09T01:46:40Z"
    )
    assert pod_object.metadata.labels["team"] == "ml"
    assert pod_object.metadata.labels["kubetorch.com/service"] == "mine"
    assert pod_object.status.pod_ip == pod_object["status"]["podIP"] == "127.0.0.1"
    assert pod_object.status.container_statuses[0].restart_count == 2
    assert pod_object == pod(started=1e9, is_ready=True, restarts=2)


def test_what_is_not_said_is_not_there():
    pod_object = pod()

    assert "reason" not in pod_object.status
    with pytest.raises(AttributeError, match="'reason'; the keys are phase"):
        _ = pod_object.status.reason
    assert not hasattr(pod_object, "_repr_html_")


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
    pod_object = pod(phase)

    assert pod_object.status.phase == shown
    assert ("deletionTimestamp" in pod_object.metadata) == (phase == "Terminating")


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
    described = pod_objects.of_pod(view(pod_view), pod_view, DESCRIBED)
    assert described.spec.node_name == "node2"
    assert (described.metadata.uid, described.metadata.annotations.a) == ("5", "b")
    assert described.status.phase == shown
