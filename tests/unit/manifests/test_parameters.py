"""Rendering and reading agree: what one says, the other finds."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.errors import SpecError
from kubetorch.manifests import parameters, rendering, secrets
from kubetorch.specs import autoscaling
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.volume import VolumeSpec
from unit.manifests.users import manifests
from unit.specs.strategies import AUTOSCALING, SETTINGS, maybe

KINDS = sorted(manifests())
#: Fields that a manifest does not say, or not in full.
ELSEWHERE = (
    *("image", "logging", "volumes", "secrets", "gpus", "gpu_anti_affinity"),
    *("concurrency", "max_queue", "num_proc", "dispatch", "data"),
)
#: Fields that a manifest says in full.
WHOLE = [item.name for item in fields(ComputeSpec) if item.name not in ELSEWHERE]


def computes(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[ComputeSpec]:
    """Computes without a manifest, of any setting."""
    return st.fixed_dictionaries({}, optional=SETTINGS | more).map(
        lambda fields: ComputeSpec(**fields)
    )


def render(compute: ComputeSpec) -> dict[str, Any]:
    return rendering.render(compute, namespace="ns", name="mine", username="me")


@given(computes())
def test_reading_finds_what_was_rendered(compute: ComputeSpec) -> None:
    parsed_compute = parameters.read_compute(render(compute))
    for name in WHOLE:
        value, expected_value = getattr(parsed_compute, name), getattr(compute, name)
        if isinstance(expected_value, tuple) and name != "allowed_serialization":
            value, expected_value = set(value), set(expected_value)
        assert value == expected_value, name


@given(computes())
def test_reading_finds_what_a_manifest_can_say_of_the_rest(compute: ComputeSpec) -> None:
    parsed_compute = parameters.read_compute(render(compute))
    image_id = compute.image.image_id if compute.image else None
    assert parsed_compute.image == (ImageSpec(image_id=image_id) if image_id else None)
    assert parsed_compute.logging == LoggingConfig(level=compute.logging.level)
    assert parsed_compute.gpus == (
        compute.gpus or ("1" if compute.gpu_memory or compute.gpu_type else None)
    )
    assert parsed_compute.gpu_anti_affinity == (
        compute.gpu_anti_affinity and parsed_compute.gpus is None
    )
    assert {(volume.mount_path, volume.claim_name) for volume in parsed_compute.volumes} == {
        (volume.mount_path, volume.claim_name) for volume in compute.volumes
    }
    in_pod = {
        replace(secret, path=secret.path and secrets.path_in_pod(secret.path))
        for secret in compute.secrets
    }
    assert set(parsed_compute.secrets) == in_pod


def test_nodes_without_gpus_are_asked_for_and_that_is_read_again() -> None:
    template = render(ComputeSpec(cpus="1", gpu_anti_affinity=True))
    assert parameters.read_compute(template).gpu_anti_affinity is True
    assert parameters.read_compute(render(ComputeSpec(cpus="1"))).gpu_anti_affinity is not True


@given(AUTOSCALING)
def test_reading_finds_how_a_service_scales(scaling: Any) -> None:
    parsed_scaling = parameters.read_compute(render(ComputeSpec(autoscaling=scaling))).autoscaling
    # A manifest of Knative has no schedule and no buffer.
    expected = replace(scaling, min_scale=scaling.fewest_pods, min_schedule=(), buffer=None)
    assert parsed_scaling == expected


@given(st.integers(1, 300), st.sampled_from(["512Mi", "2Gi", "1G", "16Gi"]))
def test_a_percentage_of_the_memory_is_a_number_of_mebibytes_for_knative(
    target: int, memory: str
) -> None:
    scaling = autoscaling.parse({"metric": "memory", "target": target}, launch_timeout=300)
    manifest = render(ComputeSpec(memory=memory, autoscaling=scaling))
    parsed_scaling = parameters.read_compute(manifest).autoscaling
    assert parsed_scaling is not None
    assert render(ComputeSpec(memory=memory, autoscaling=parsed_scaling)) == manifest
    if memory != "512Mi":  # a percent of it is 5.12 MiB
        assert parsed_scaling.target == target


@given(computes())
def test_rendering_what_was_read_changes_nothing(compute: ComputeSpec) -> None:
    manifest = render(compute)
    assert render(parameters.read_manifest(manifest)) == manifest


@given(st.sampled_from(KINDS), computes(), st.data())
def test_what_is_set_on_a_users_manifest_is_read_from_it(
    kind: str, settings: ComputeSpec, data: st.DataObject
) -> None:
    declared = parameters.read_manifest(manifests()[kind])
    names = ["cpus", "memory", "gpus", "env_vars", "labels", "annotations", "tolerations"]
    if kind != "TrainJob":
        names += ["priority_class_name", "image_pull_policy", "working_dir", "launch_timeout"]
        names += ["shared_memory_limit", "queue", "server_port"]
    name = data.draw(st.sampled_from([*names, "queue_name", "inactivity_ttl", "node_selector"]))
    changed = replace(declared, **{name: getattr(settings, name)})
    parsed_value = getattr(parameters.read_compute(render(changed)), name)
    expected_value = getattr(settings, name)
    if name in ("env_vars", "labels", "annotations"):  # these only add
        assert set(parsed_value) >= set(expected_value)
    elif name == "tolerations":
        assert set(parsed_value) == set(expected_value)
    elif name == "node_selector":
        assert dict(parsed_value) == dict(expected_value)
    else:
        assert parsed_value == expected_value


def test_tolerations_that_were_taken_away_leave_a_users_manifest() -> None:
    spot, other_toleration = ({"key": name, "operator": "Exists"} for name in ("spot", "other"))
    manifest = copy.deepcopy(manifests()["Deployment"])
    manifest["spec"]["template"]["spec"]["tolerations"] = [spot, other_toleration]
    declared = parameters.read_manifest(manifest)
    (_, kept_toleration) = declared.tolerations
    rendered_manifest = render(replace(declared, tolerations=(kept_toleration,)))
    assert rendered_manifest["spec"]["template"]["spec"]["tolerations"] == [other_toleration]


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_manifest_that_nobody_changed_is_rendered_the_same_twice(kind: str) -> None:
    once = render(parameters.read_manifest(manifests()[kind]))
    assert render(parameters.read_manifest(once)) == once


@given(maybe(st.sampled_from(KINDS)), computes())
def test_a_manifest_is_plain_json(kind: str | None, compute: ComputeSpec) -> None:
    manifest = render(parameters.read_manifest(manifests()[kind]) if kind else compute)
    assert json.loads(json.dumps(manifest)) == manifest


# ------------------------------------------------------------------------------ special readings


def test_what_a_server_added_is_left_out() -> None:
    manifest = manifests()["Deployment"]
    manifest["status"] = {"replicas": 2}
    manifest["metadata"] |= {"uid": "1", "resourceVersion": "2", "managedFields": []}
    manifest["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "4"
    assert parameters.read_manifest(manifest) == parameters.read_manifest(manifests()["Deployment"])


def test_several_pods_of_a_training_job_are_called_together() -> None:
    assert parameters.read_manifest(manifests()["PyTorchJob"]).distribution is None
    manifest = manifests()["MPIJob"]
    manifest["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = 3
    compute = parameters.read_manifest(manifest)
    assert (compute.replicas, compute.distribution) == (3, DistributionSpec())
    assert compute.distribution.config(replicas=3, launch_timeout=9)["quorum_workers"] == 3


def test_a_ray_cluster_is_called_at_its_head() -> None:
    compute = parameters.read_manifest(manifests()["RayCluster"])
    assert (compute.replicas, compute.distribution) == (3, DistributionSpec("ray"))


def test_a_claim_of_a_manifest_is_a_volume_that_exists() -> None:
    manifest = manifests()["Pod"]
    manifest["spec"]["volumes"].append(
        {"name": "d", "persistentVolumeClaim": {"claimName": "data"}}
    )
    mounts = manifest["spec"]["containers"][0]["volumeMounts"]
    mounts.append({"name": "d", "mountPath": "/data"})
    assert parameters.read_manifest(manifest).volumes == (
        VolumeSpec("data", "/data", claim="data"),
    )


def test_name_and_namespace_are_read() -> None:
    manifest = manifests()["Job"]
    assert (parameters.name_of(manifest), parameters.namespace_of(manifest)) == ("mine", None)
    manifest["metadata"] = {"name": "", "namespace": "there"}
    assert (parameters.name_of(manifest), parameters.namespace_of(manifest)) == (None, "there")


def test_a_value_that_kubernetes_would_not_take_is_named() -> None:
    manifest = manifests()["Deployment"]
    manifest["spec"]["template"]["spec"]["containers"][0]["env"] = {"A": "1"}
    with pytest.raises(
        SpecError, match=r"cannot be read: spec\.template\.spec\.containers\[name=.*\]\.env"
    ):
        parameters.read_manifest(manifest)
