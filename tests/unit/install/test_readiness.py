"""What a Deployment and its pods say about a controller that does not get ready."""

import pytest

from kubetorch.errors import ImagePullError, InstallError
from kubetorch.install import readiness


def deployment(**status):
    metadata = {"generation": 2, "annotations": {"deployment.kubernetes.io/revision": "7"}}
    return {"metadata": metadata, "spec": {"replicas": 2}, "status": status}


def pod(state, **container):
    status = {"containerStatuses": [{"image": "i:1", "state": state, **container}]}
    return {"metadata": {"name": "p", "uid": "u"}, "status": status}


@pytest.mark.parametrize(
    ("status", "is_rolled_out"),
    [
        ((2, 2, 2, 2), True),
        ((1, 2, 2, 2), False),
        ((2, 3, 2, 2), False),
        ((2, 2, 1, 2), False),
        ((2, 2, 2, 1), False),
    ],
)
def test_it_is_rolled_out_when_all_replicas_are_of_the_present_generation(status, is_rolled_out):
    observed, replicas, updated, available = status
    rolling_deployment = deployment(
        observedGeneration=observed,
        replicas=replicas,
        updatedReplicas=updated,
        availableReplicas=available,
    )
    assert readiness.is_rolled_out(rolling_deployment) == is_rolled_out


def test_pods_of_the_template_before_are_told_apart():
    old, new = (
        {
            "metadata": {
                "annotations": {"deployment.kubernetes.io/revision": revision},
                "labels": {"pod-template-hash": name},
            }
        }
        for revision, name in (("6", "old"), ("7", "new"))
    )
    assert readiness.newest_hash(deployment(), [old, new]) == "new"
    assert readiness.newest_hash(deployment(), [old]) is None


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_a_failed_pull_is_final_and_has_the_cause_of_the_event(reason):
    waiting = pod({"waiting": {"reason": reason, "message": "Back-off"}})
    event_messages = ["Failed to pull image: no such host", "Error: ErrImagePull"]
    doom = readiness.doom_of(waiting, event_messages)
    assert doom.kind is ImagePullError
    assert "i:1 cannot be pulled: Failed to pull image: no such host" in doom.message


def test_one_restart_is_no_doom_and_two_are():
    crashed = {"terminated": {"reason": "Error", "exitCode": 3}}
    first = pod({"running": {}}, restartCount=1, lastState=crashed)
    assert readiness.doom_of(first) is None
    second = readiness.doom_of(pod({"running": {}}, restartCount=2, lastState=crashed))
    assert (second.kind, second.has_log) == (InstallError, True)
    assert "Error, exit code 3" in second.message


@pytest.mark.parametrize(
    ("state", "container", "word"),
    [
        ({"waiting": {"reason": "ContainerCreating"}}, {}, "ContainerCreating"),
        ({"running": {}}, {}, "running"),
        ({"running": {}}, {"ready": True}, "ready"),
        ({"terminated": {"exitCode": 1}}, {}, "ended with 1"),
    ],
)
def test_the_state_of_a_pod_is_a_word(state, container, word):
    assert readiness.state_of(pod(state, **container)) == word


def test_a_pod_that_finds_no_node_says_why():
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pending_pod = {"status": {"conditions": [{**condition, "message": "0/2 nodes"}]}}
    assert readiness.state_of(pending_pod) == "Unschedulable: 0/2 nodes"


def test_a_refused_pod_is_a_doom_with_the_clusters_words():
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    doom = readiness.refusal_of(deployment(conditions=[failure]))
    assert "exceeded quota" in doom.message
    assert readiness.refusal_of(deployment()) is None


def test_the_namespaces_of_a_controller_are_read_from_its_variables():
    variable = {"name": "KT_WATCH_NAMESPACES", "value": "a,b"}
    for env, expected_namespaces in (([variable], ["a", "b"]), ([], [])):
        template = {"spec": {"containers": [{"env": env}]}}
        assert readiness.watched({"spec": {"template": template}}) == expected_namespaces
