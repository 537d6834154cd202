from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.launch_failures import scheduling
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import (
    AUTOSCALER_STATUS,
    CLAIMS,
    NODE_POOLS,
    NODES,
    Cluster,
)
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from kubetorch.errors import UnschedulableError

Object = dict[str, Any]


def node(name: str, *, taints: list[Object] | None = None, **labels: str) -> Object:
    amounts = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints or []},
        "status": {"allocatable": amounts},
    }


def pod(**spec: Any) -> Object:
    message = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available."
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
        "lastTransitionTime": "2026-11-21T15:50:17Z",
    }
    return {
        "metadata": {"name": "web", "namespace": "team", "creationTimestamp": None},
        "spec": {"containers": [{"name": "c"}], **spec},
        "status": {"conditions": [condition]},
    }


def asking(**requests: str) -> Object:
    return {"resources": {"requests": requests}}


def affine(*expressions: Object, **more: Any) -> Object:
    term = {"matchExpressions": list(expressions), **more}
    required = {"nodeSelectorTerms": [term]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def judge(waiting_pod: Object, *nodes: Object, events: Any = (), **objects: Any) -> Verdict:
    cluster_objects = {
        NODES: list(nodes),
        CLAIMS: [],
        AUTOSCALER_STATUS: [],
        NODE_POOLS: [],
        **objects,
    }
    return scheduling.judge(waiting_pod, events, Cluster(0.0, cluster_objects))


def test_the_nearest_node_is_named_with_what_it_lacks() -> None:
    waiting_pod = pod(containers=[asking(cpu="10")])
    verdict = judge(waiting_pod, node("far", zone="b"), node("near", zone="a"))
    assert isinstance(verdict.error, UnschedulableError)
    assert "far has 4 cpus, 10 are asked" in verdict.error.message
    selected = {**waiting_pod, "spec": {**waiting_pod["spec"], "nodeSelector": {"zone": "a"}}}
    verdict = judge(selected, node("far", zone="b"), node("near", zone="a"))
    assert "the nearest, near has 4 cpus" in str(verdict.error)


def test_amounts_are_shown_as_people_write_them() -> None:
    waiting_pod = pod(containers=[asking(memory="100Gi", cpu="4500m")])
    text = str(judge(waiting_pod, node("one")).error)
    assert "has 4 cpus, 4.5 are asked" in text
    assert "has 8Gi of memory, 100Gi are asked" in text


def test_a_node_that_others_fill_may_take_it_later() -> None:
    verdict = judge(pod(containers=[asking(cpu="4")]), node("one"))
    assert not verdict.is_doomed
    assert verdict.reason == "no node takes it yet: 0/2 nodes are available: 2 Insufficient cpu"


def test_a_taint_may_go_away() -> None:
    taint = {"key": "maintenance", "effect": "NoSchedule"}
    assert not judge(pod(), node("one", taints=[taint])).is_doomed


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "In", "values": ["c"]}, False),
        ({"key": "zone", "operator": "NotIn", "values": ["c"]}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "nope", "operator": "Exists"}, False),
        ({"key": "nope", "operator": "DoesNotExist"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, False),
        ({"key": "size", "operator": "Gt", "values": ["3"]}, True),
        ({"key": "size", "operator": "Gt", "values": ["5"]}, False),
        ({"key": "size", "operator": "Lt", "values": ["5"]}, True),
        ({"key": "zone", "operator": "Gt", "values": ["5"]}, False),
    ],
)
def test_affinities_are_read_as_the_scheduler_does(expression: Object, fits: bool) -> None:
    waiting_pod = pod(affinity=affine(expression))
    assert judge(waiting_pod, node("one", zone="a", size="4")).is_doomed is not fits


def test_affinity_to_a_node_by_name() -> None:
    fields = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["two"]}]}
    waiting_pod = pod(affinity=affine(**fields))
    assert judge(waiting_pod, node("one")).is_doomed
    assert not judge(waiting_pod, node("one"), node("two")).is_doomed


def test_what_a_pod_asks_for_is_counted_as_the_scheduler_does() -> None:
    spec = {
        "containers": [asking(cpu="1"), asking(cpu="500m")],
        "initContainers": [
            {**asking(cpu="1"), "restartPolicy": "Always"},
            asking(cpu="2"),
        ],
        "overhead": {"cpu": "250m"},
    }
    assert scheduling.requests(spec)["cpu"] == 3.25  # the init container beside the sidecar
    limited = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]}
    assert scheduling.requests(limited)["nvidia.com/gpu"] == 2


@pytest.mark.parametrize(
    "objects",
    [
        {NODE_POOLS: [{"metadata": {"name": "default"}}]},
        {AUTOSCALER_STATUS: [{"metadata": {"name": "cluster-autoscaler-status"}}]},
    ],
)
def test_an_autoscaler_may_bring_a_node(objects: Object) -> None:
    verdict = judge(pod(containers=[asking(cpu="100")]), node("one"), **objects)
    assert not verdict.is_doomed
    assert "may add a node" in verdict.reason


def test_an_autoscaler_is_known_by_its_nodes_and_its_events() -> None:
    waiting_pod = pod(containers=[asking(cpu="100")])
    label = {"karpenter.sh/nodepool": "default"}
    assert not judge(waiting_pod, node("one", **label)).is_doomed
    assert not judge(waiting_pod, node("one"), events=[karpenter("cannot yet")]).is_doomed


@pytest.mark.parametrize("reason", ["TriggeredScaleUp", "NotTriggerScaleUp"])
def test_an_autoscaler_is_known_by_what_it_says_of_the_pod_whoever_reports_it(reason: str) -> None:
    waiting_pod = pod(containers=[asking(cpu="100")])
    event = {**karpenter("wait"), "reason": reason, "reportingComponent": "our-scaler"}
    assert "our-scaler may add a node" in judge(waiting_pod, node("one"), events=[event]).reason


def test_one_that_was_heard_of_another_pod_may_bring_a_node_for_this_one() -> None:
    cluster_objects = {NODES: [node("one")], AUTOSCALER_STATUS: [], NODE_POOLS: [], CLAIMS: []}
    cluster = Cluster(0.0, cluster_objects, reporting_autoscaler="cluster-autoscaler")
    assert not scheduling.judge(pod(containers=[asking(cpu="100")]), [], cluster).is_doomed


def test_devices_that_cannot_be_had_just_now_may_come_back() -> None:
    broken = node("one")
    broken["status"] = {
        "allocatable": {"cpu": "4", "nvidia.com/gpu": "0"},
        "capacity": {"cpu": "8", "nvidia.com/gpu": "2"},
    }
    assert not judge(pod(containers=[asking(**{"nvidia.com/gpu": "2"})]), broken).is_doomed
    verdict = judge(pod(containers=[asking(**{"nvidia.com/gpu": "3"})]), broken)
    assert "has 2 nvidia.com/gpu, 3 are asked" in str(verdict.error)
    # What the node keeps for itself it does not give back.
    assert judge(pod(containers=[asking(cpu="5")]), broken).is_doomed


def test_pods_that_ask_for_different_things_are_not_taken_for_each_other() -> None:
    cluster_objects = {
        NODES: [node("one", zone="a")],
        AUTOSCALER_STATUS: [],
        NODE_POOLS: [],
        CLAIMS: [],
    }
    cluster = Cluster(0.0, cluster_objects)
    large, small = pod(containers=[asking(cpu="10")]), pod(containers=[asking(cpu="1")])
    elsewhere = pod(nodeSelector={"zone": "b"})
    never = pod(affinity=affine({"key": "zone", "operator": "In", "values": ["b"]}))
    waiting_pods = [small, large, elsewhere, pod(nodeSelector={"zone": "a"}), never]
    dooms = [scheduling.judge(waiting_pod, [], cluster).is_doomed for waiting_pod in waiting_pods]
    assert dooms == [False, True, True, False, True]


def karpenter(message: str) -> Object:
    return {
        "reason": "FailedScheduling",
        "message": message,
        "reportingComponent": "karpenter",
        "involvedObject": {"kind": "Pod", "name": "web"},
        "metadata": {"name": "web.1"},
    }


def test_karpenter_may_know_that_no_instance_is_large_enough() -> None:
    pools = {NODE_POOLS: [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]}
    clause = 'incompatible with nodepool "%s", %s'
    never = "no instance type satisfied resources (no instance type has enough resources)"
    waiting_pod = pod(containers=[asking(cpu="1000")])
    message = f"{clause % ('a', never)}; {clause % ('b', never)}"
    assert judge(waiting_pod, node("one"), events=[karpenter(message)], **pools).is_doomed
    message = f"{clause % ('a', never)}; {clause % ('b', 'limits exceeded')}"
    assert not judge(waiting_pod, node("one"), events=[karpenter(message)], **pools).is_doomed


def test_nobody_is_doomed_by_what_is_not_known() -> None:
    waiting_pod = pod(containers=[asking(cpu="1000")])
    assert not scheduling.judge(waiting_pod, [], Cluster(0.0, {NODES: [node("one")]})).is_doomed
    assert not judge(waiting_pod).is_doomed  # there are no nodes at all yet
