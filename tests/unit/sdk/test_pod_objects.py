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
    found = PodView(name="mine-0", ordinal=0, phase=phase, url="http://127.0.0.1:99", **fields)
    return pod_objects.of_pod(view(found), found)


def test_a_pod_is_a_dictionary_with_attributes():
    found = pod(started=1e9, is_ready=True, restarts=2)

    assert found["metadata"]["name"] == found.metadata.name == "mine-0"
    assert found.metadata.namespace == "ns"
    assert found.metadata.creation_timestamp == found.status.startTime == "2001-09-09T01:46:40Z"
    assert found.metadata.labels["team"] == "ml"
    assert found.metadata.labels["kubetorch.com/service"] == "mine"
    assert found.status.pod_ip == found["status"]["podIP"] == "127.0.0.1"
    assert found.status.container_statuses[0].restart_count == 2
    assert found == pod(started=1e9, is_ready=True, restarts=2)


def test_what_is_not_said_is_not_there():
    found = pod()

    assert "reason" not in found.status
    with pytest.raises(AttributeError, match="'reason'; the keys are phase"):
        _ = found.status.reason
    assert not hasattr(found, "_repr_html_")


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
    found = pod(phase)

    assert found.status.phase == shown
    assert ("deletionTimestamp" in found.metadata) == (phase == "Terminating")


def test_a_pod_has_its_annotations_without_a_cluster_too():
    assert pod().metadata.annotations == {"owner": "ann"}


DESCRIBED = {
    "metadata": {"name": "mine-0", "uid": "5", "annotations": {"a": "b"}},
    "spec": {"nodeName": "node2", "containers": [{"name": "c"}]},
    "status": {"phase": "Pending", "podIP": None},
}


@pytest.mark.parametrize(("phase", "shown"), [("Running", "Running"), ("Unknown", "Pending")])
def test_the_description_of_the_cluster_but_for_what_has_answered(phase, shown):
    found = PodView(name="mine-0", ordinal=0, phase=phase)
    described = pod_objects.of_pod(view(found), found, DESCRIBED)
    assert described.spec.node_name == "node2"
    assert (described.metadata.uid, described.metadata.annotations.a) == ("5", "b")
    assert described.status.phase == shown
