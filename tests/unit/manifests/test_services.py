"""Services of a workload: which pods are called, by which port and name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kubetorch.manifests import parameters, rendering, services
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs import autoscaling, distribution
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.endpoint import Endpoint
from unit.manifests.users import manifests

OURS = {"kubetorch.com/service": "mine"}


def render(compute: ComputeSpec, name: str = "mine") -> list[Manifest]:
    manifest = None
    if not compute.is_selector_only:
        manifest = rendering.render(compute, namespace="ns", name=name)
    return services.KubernetesServices(compute, manifest, namespace="ns", name=name).render()


def user(kind: str, **settings: Any) -> ComputeSpec:
    return replace(parameters.read_manifest(manifests()[kind]), **settings)


def test_one_pod_is_called_by_the_name_of_its_service() -> None:
    (service,) = render(ComputeSpec(cpus="1"))
    assert service["metadata"]["name"] == "mine"
    assert service["metadata"]["namespace"] == "ns"
    ports = [{"name": "http", "port": 80, "targetPort": 32300}]
    assert service["spec"] == {"selector": OURS, "ports": ports}


def test_the_port_is_that_of_the_agent() -> None:
    (service,) = render(ComputeSpec(cpus="1", server_port=8080))
    assert service["spec"]["ports"][0]["targetPort"] == 8080


@pytest.mark.parametrize(
    "several",
    [{"replicas": 3}, {"distribution": distribution.parse({"workers": 3})[0]}],
    ids=["replicas", "distributed"],
)
def test_several_pods_have_names_of_their_own_before_they_are_ready(several: Any) -> None:
    _, headless = render(ComputeSpec(cpus="1", **several))
    assert headless["metadata"]["name"] == "mine-headless"
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert headless["spec"]["selector"] == OURS


def test_a_knative_service_makes_its_own() -> None:
    assert render(ComputeSpec(autoscaling=autoscaling.parse({}, launch_timeout=300))) == []


def test_nothing_leads_to_pods_that_are_called_elsewhere() -> None:
    endpoint = Endpoint(url="http://mine.example.com")
    assert render(ComputeSpec(cpus="1", endpoint=endpoint)) == []


def test_an_endpoint_chooses_some_of_the_pods() -> None:
    endpoint = Endpoint(selector={"app": "mine", "role": "head"})
    called, headless = render(ComputeSpec(cpus="1", replicas=2, endpoint=endpoint))
    assert called["spec"]["selector"] == {"app": "mine", "role": "head"}
    assert headless["spec"]["selector"] == OURS


def test_pods_that_are_there_are_found_by_the_users_selector() -> None:
    (service,) = render(ComputeSpec(selector=(("app", "workers"),)))
    assert service["spec"]["selector"] == {"app": "workers"}


def test_the_selector_of_a_users_manifest_is_that_of_the_service() -> None:
    service, *_ = render(user("Deployment"))
    chosen = manifests()["Deployment"]["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == chosen


@pytest.mark.parametrize(
    ("kind", "routing"),
    [
        ("RayCluster", {"ray.io/node-type": "head"}),
        ("PyTorchJob", {"training.kubeflow.org/replica-type": "master"}),
        ("TFJob", {"training.kubeflow.org/replica-type": "chief"}),
        ("LeaderWorkerSet", {"leaderworkerset.sigs.k8s.io/worker-index": "0"}),
    ],
)
def test_calls_go_to_the_first_of_unequal_pods(kind: str, routing: dict[str, str]) -> None:
    service, *_ = render(user(kind))
    assert service["spec"]["selector"] == OURS | routing


def test_a_selector_may_leave_the_name_of_the_job_open() -> None:
    compute = user("PyTorchJob", selector=(("training.kubeflow.org/job-name", ""),))
    service, *_ = render(compute)
    assert service["spec"]["selector"]["training.kubeflow.org/job-name"] == "mine"


@pytest.mark.parametrize("length", [1, 53, 54, 63])
def test_names_of_headless_services_are_short_enough_and_differ(length: int) -> None:
    name = "a" * length
    headless_name = services.headless_name(name)
    assert len(headless_name) <= 63 and headless_name.endswith("-headless")
    assert headless_name != services.headless_name(name[:-1] + "b")
