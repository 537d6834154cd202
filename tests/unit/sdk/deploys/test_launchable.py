"""What is declared and cannot be launched yet."""

import pytest

import kubetorch as kt
from kubetorch.sdk.deploys import launchable
from unit.manifests.users import manifests


@pytest.mark.parametrize("kind", ["spmd", "pytorch", "ray", "monarch", "jax", "tensorflow"])
def test_what_is_distributed_is_refused_by_its_kind(kind):
    spec = kt.Compute().distribute(kind, workers=2).to_spec()

    with pytest.raises(kt.SpecError, match=rf"train cannot be launched.*\({kind}\).*to come"):
        launchable.check("train", spec)


@pytest.mark.parametrize("compute", [kt.Compute(replicas=3), kt.Compute().autoscale(max_scale=2)])
def test_other_services_can_be_launched(compute):
    launchable.check("train", compute.to_spec())


def test_what_follows_from_the_kind_of_a_manifest_is_left_to_the_backend():
    launchable.check("train", kt.Compute.from_manifest(manifests()["RayCluster"]).to_spec())
    asked = kt.Compute.from_manifest(manifests()["Deployment"]).distribute("pytorch", workers=2)
    with pytest.raises(kt.SpecError, match="pytorch"):
        launchable.check("train", asked.to_spec())


def test_an_endpoint_that_calls_cannot_go_to_is_refused():
    compute = kt.Compute(endpoint=kt.Endpoint(url="https://example.com"))
    with pytest.raises(kt.SpecError, match=r"https://example\.com"):
        launchable.check("f", compute.to_spec())
    inside = kt.Compute(endpoint=kt.Endpoint(url="example.com:80"))
    launchable.check("f", inside.to_spec())
