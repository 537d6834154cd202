"""A program knows of the object of its service what the controller has applied, all of it."""

from __future__ import annotations

import pytest

import kubetorch as kt
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.k8s.resources import Object
from kubetorch.manifests import labels
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import WorkloadView
from tests.unit.controller.backends.kubernetes.test_pod_security import Admission, run

KNATIVE = "serving.knative.dev/v1"


def applied(cluster: Admission, api_version: str = "apps/v1", kind: str = "Deployment") -> Object:
    """What was applied, without the marks that no manifest has."""
    manifest = cluster.take(api_version, kind)
    metadata = {
        key: value
        for key, value in manifest["metadata"].items()
        if key not in ("uid", "generation", "resourceVersion", "ownerReferences")
    }
    annotations = dict(metadata["annotations"])
    del annotations[labels.APPLIED]
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def shown(spec: WorkloadSpec, backend: KubernetesBackend) -> Object | None:
    """What the program has that deployed this."""
    compute = kt.Compute.from_spec(spec.compute, namespace="team", service_name="f")
    equipment = backend.equipment("team", "f")
    compute.deployed_as(WorkloadView(spec=spec, generation=1, status="Ready", equipment=equipment))
    return compute.manifest


def workload(compute: kt.Compute, app: AppSpec | None = None) -> WorkloadSpec:
    callable = CallableRef("fn" if app is None else "app", "f", "m", "f", app=app)
    return WorkloadSpec("team", "f", callable, compute.to_spec(), "me")


@pytest.mark.parametrize("is_restricted", [True, False])
@pytest.mark.parametrize("image", ["mine:1", None])
def test_a_manifest_is_what_was_applied(is_restricted: bool, image: str | None) -> None:
    cluster = Admission()
    cluster.is_restricted = is_restricted
    spec = workload(kt.Compute(cpus=1, replicas=2, image=kt.Image(image_id=image)))

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(spec)
        assert shown(spec, backend) == applied(cluster)

    run(cluster, scenario)

    async def scenario_after_restart(backend: KubernetesBackend) -> None:
        assert shown(spec, backend) == applied(cluster)

    run(cluster, scenario_after_restart, spec)


def test_the_object_of_a_command_is_shown_as_it_was_applied() -> None:
    cluster = Admission()
    compute = kt.Compute.from_manifest(kt.Compute(cpus=1).manifest or {})
    spec = workload(compute, AppSpec("sleep 1", port=8000))

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(spec)
        assert shown(spec, backend) == applied(cluster)

    run(cluster, scenario)


@pytest.mark.parametrize("has_operator", [True, False])
def test_without_an_operator_the_manifest_is_what_there_is_instead(
    has_operator: bool,
) -> None:
    cluster = Admission()
    applied_kind = (KNATIVE, "Service") if has_operator else ("apps/v1", "Deployment")
    cluster.unserved |= set() if has_operator else {KNATIVE}
    spec = workload(kt.Compute(cpus=1).autoscale(min_scale=2))

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(spec)
        assert shown(spec, backend) == applied(cluster, *applied_kind)

    run(cluster, scenario)


@pytest.mark.parametrize(
    ("data", "is_restricted", "admits_host_paths", "shares"),
    [
        ({"/models": "models/base"}, False, True, True),
        ({"/models": "models/base"}, False, False, False),
        ({"/models": "models/base"}, True, True, False),
        ({}, False, True, False),
    ],
)
def test_pods_with_data_share_it_on_their_node_where_the_namespace_admits_that(
    data: dict[str, str], is_restricted: bool, admits_host_paths: bool, shares: bool
) -> None:
    cluster = Admission()
    cluster.is_restricted, cluster.admits_host_paths = is_restricted, admits_host_paths
    spec = workload(kt.Compute(cpus=1, data=data))

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(spec)
        volumes = applied(cluster)["spec"]["template"]["spec"]["volumes"]
        folders = [volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume]
        assert folders == (["/node/team"] if shares else [])
        assert shown(spec, backend) == applied(cluster)

    run(cluster, scenario, node_data="/node")
