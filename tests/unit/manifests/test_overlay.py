"""`service_template` over a manifest: what it says holds, what it does not say stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given

from kubetorch.errors import SpecError
from kubetorch.manifests import rendering
from kubetorch.manifests.kinds import Manifest, named
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec, freeze
from unit.specs.strategies import OBJECTS


def render(template: Manifest, *, has_operator: bool = True, **settings: Any) -> Manifest:
    spec = ComputeSpec(service_template=freeze(template, parameter="service_template"), **settings)
    return rendering.render(spec, namespace="ns", name="mine", has_operator=has_operator)


def pods(**spec: Any) -> Manifest:
    return {"spec": {"template": {"spec": spec}}}


@given(OBJECTS, OBJECTS)
def test_merging_again_changes_nothing(under: Manifest, over: Manifest) -> None:
    once = rendering.merge_manifests(under, over)
    assert rendering.merge_manifests(once, over) == once


@given(OBJECTS, OBJECTS)
def test_merging_changes_neither_of_the_two(under: Manifest, over: Manifest) -> None:
    before = copy.deepcopy((under, over))
    rendering.merge_manifests(under, over)
    assert (under, over) == before


@given(OBJECTS, OBJECTS)
def test_what_is_laid_over_holds_and_the_rest_stays(under: Manifest, over: Manifest) -> None:
    merged = rendering.merge_manifests(under, over)
    assert set(merged) == {*under, *over}
    for key, value in merged.items():
        if key not in over:
            assert value == under[key]
        elif not isinstance(over[key], dict):
            assert value == over[key]


@given(OBJECTS)
def test_merging_with_nothing_or_with_itself_changes_nothing(manifest: Manifest) -> None:
    assert rendering.merge_manifests(manifest, {}) == manifest
    assert rendering.merge_manifests({}, manifest) == manifest
    assert rendering.merge_manifests(manifest, manifest) == manifest


def test_a_list_replaces_the_list() -> None:
    toleration = {"key": "spot", "operator": "Exists"}
    manifest = render(pods(tolerations=[toleration]), gpus="1")
    assert manifest["spec"]["template"]["spec"]["tolerations"] == [toleration]


def test_containers_of_a_template_stand_beside_the_agents() -> None:
    manifest = render(pods(containers=[{"name": "sidecar", "image": "x"}]), cpus="1")
    containers = manifest["spec"]["template"]["spec"]["containers"]
    assert [container["name"] for container in containers] == ["kubetorch", "sidecar"]
    assert containers[0]["resources"] == {"requests": {"cpu": "1"}}


@pytest.mark.parametrize("name", [{}, {"name": "kubetorch"}])
def test_a_container_without_a_name_or_with_ours_is_the_agents(name: dict[str, str]) -> None:
    limits = {"resources": {"limits": {"memory": "64Mi"}}}
    manifest = render(pods(containers=[{**name, **limits}]), cpus="1")
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "1"}, "limits": {"memory": "64Mi"}}
    assert container["command"] == ["/bin/bash", "-c"]


def test_volumes_that_the_agent_mounts_outlive_a_list_of_volumes() -> None:
    manifest = render(pods(volumes=[{"name": "mine", "emptyDir": {}}]), cpus="1")
    volumes = manifest["spec"]["template"]["spec"]["volumes"]
    assert {volume["name"] for volume in volumes} == {"mine", "dshm"}
    assert named(volumes, "mine") == {"name": "mine", "emptyDir": {}}


@pytest.mark.parametrize("has_operator", [True, False])
def test_the_number_of_pods_of_an_autoscaled_service_is_not_said_in_it(has_operator: bool) -> None:
    template = {"spec": {"replicas": 3}}
    with pytest.raises(SpecError, match=r"has spec\.replicas = 3"):
        render(template, has_operator=has_operator, autoscaling=AutoscalingSpec(min_scale=0))
    assert render(template)["spec"]["replicas"] == 3
