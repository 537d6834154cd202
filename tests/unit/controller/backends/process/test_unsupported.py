"""What is said of a manifest on a machine that is no cluster."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.process.backend import (
    check_supported,
    unsupported_notes,
    unsupported_warnings,
)
from kubetorch.errors import SpecError
from kubetorch.manifests import desired_pods, parameters, rendering
from kubetorch.specs import autoscaling
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.endpoint import Endpoint

POD: dict[str, Any] = {"spec": {"containers": [{"name": "main", "image": "mine:1"}]}}


def rendered(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    manifest = {"apiVersion": api_version, "kind": kind, "metadata": {"name": "s"}, "spec": spec}
    compute = parameters.read_manifest(manifest)
    return rendering.render(compute, namespace="default", name="s")


def scaled(cpus: str | None = "1", **arguments: Any) -> tuple[ComputeSpec, dict[str, Any]]:
    scaling = autoscaling.parse(arguments, launch_timeout=900)
    compute = ComputeSpec(cpus=cpus, autoscaling=scaling)
    return compute, rendering.render(compute, namespace="default", name="s")


def test_an_autoscaled_service_scales_here_too() -> None:
    compute, manifest = scaled(min_scale=0, buffer=2)
    assert unsupported_warnings(compute, manifest) == ()
    assert unsupported_notes(compute, manifest) == (
        "the requests (cpu 1) reserve nothing on this machine",
    )


def test_annotations_that_only_knative_knows_are_named() -> None:
    compute, manifest = scaled(target_burst_capacity=0)
    (warning,) = unsupported_warnings(compute, manifest)
    assert warning == (
        "the scaler of Kubetorch does not know the annotation "
        "autoscaling.knative.dev/target-burst-capacity; it stays in the manifest"
    )
    assert warning in unsupported_notes(compute, manifest)


def test_a_percentage_of_nothing_is_said() -> None:
    (warning,) = unsupported_warnings(*scaled(cpus=None, metric="cpu", target=80))
    assert "these pods request none: kt.Compute(cpus=...) says how much" in warning
    assert unsupported_warnings(*scaled(metric="cpu", target=80)) == ()


@pytest.mark.parametrize(
    ("api_version", "kind", "spec"),
    [
        ("apps/v1", "Deployment", {"replicas": 2, "template": POD}),
        ("apps/v1", "ReplicaSet", {"replicas": 2, "template": POD}),
        ("apps/v1", "StatefulSet", {"replicas": 2, "template": POD}),
        ("batch/v1", "Job", {"parallelism": 2, "template": POD}),
        ("v1", "Pod", POD["spec"]),
    ],
)
def test_kinds_that_run_as_they_are_have_no_warning(
    api_version: str, kind: str, spec: dict[str, Any]
) -> None:
    manifest = rendered(api_version, kind, spec)
    check_supported(manifest)
    assert unsupported_warnings(ComputeSpec(), manifest) == ()
    assert desired_pods.read(manifest).replicas == (1 if kind == "Pod" else 2)


@pytest.mark.parametrize(
    ("api_version", "kind", "spec", "words"),
    [
        ("apps/v1", "DaemonSet", {"template": POD}, "one pod here"),
        (
            "batch/v1",
            "CronJob",
            {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": POD}}},
            "no schedule here: its 1 pod start",
        ),
        (
            "kubeflow.org/v1",
            "PyTorchJob",
            {
                "pytorchReplicaSpecs": {
                    "Master": {"replicas": 1, "template": POD},
                    "Worker": {"replicas": 2, "template": POD},
                }
            },
            "no operator of PyTorchJob here: its 3 pods are plain ones",
        ),
        (
            "ray.io/v1",
            "RayCluster",
            {"headGroupSpec": {"rayStartParams": {}, "template": POD}},
            "no Ray operator here: it has 1 pod without Ray",
        ),
    ],
)
def test_kinds_that_become_plain_pods_say_so(
    api_version: str, kind: str, spec: dict[str, Any], words: str
) -> None:
    manifest = rendered(api_version, kind, spec)
    check_supported(manifest)
    (line,) = unsupported_warnings(ComputeSpec(), manifest)
    assert words in line
    assert line in unsupported_notes(ComputeSpec(), manifest)


def test_pods_that_start_ray_themselves_need_no_operator() -> None:
    spec = {"headGroupSpec": {"rayStartParams": {}, "template": POD}}
    manifest = rendered("ray.io/v1", "RayCluster", spec)
    compute = ComputeSpec(distribution=DistributionSpec("ray"))
    assert unsupported_warnings(compute, manifest) == ()


def test_a_kind_that_is_not_known_is_refused() -> None:
    manifest = {"apiVersion": "example.com/v1", "kind": "Fleet", "spec": {"template": POD}}
    with pytest.raises(SpecError, match=r"'Fleet' of .* cannot be run"):
        check_supported(manifest)
    assert unsupported_warnings(ComputeSpec(), manifest) == ()
    assert unsupported_notes(ComputeSpec(), manifest) == ("a Fleet cannot be run on this machine",)


def test_what_has_no_meaning_here_is_noted() -> None:
    pod = {
        "spec": {
            "initContainers": [{"name": "prepare", "image": "a"}],
            "nodeSelector": {"disk": "fast"},
            "containers": [
                {
                    "name": "kubetorch",
                    "image": "mine:1",
                    "workingDir": "/app",
                    "resources": {
                        "requests": {"cpu": "1", "nvidia.com/gpu": "1"},
                        "limits": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "1"},
                    },
                },
                {"name": "side", "image": "b"},
            ],
        }
    }
    notes = unsupported_notes(ComputeSpec(), rendered("apps/v1", "Deployment", {"template": pod}))
    assert notes[:2] == (
        "the requests (cpu 1) reserve nothing on this machine",
        "the limits (cpu 2) are not kept on this machine",
    )
    assert any("the other containers (prepare, side) are not run" in note for note in notes)
    assert any("the image mine:1 is not run" in note for note in notes)
    assert any("nodeSelector choose nothing" in note for note in notes)


def test_a_plain_service_has_no_notes_but_those_of_its_requests() -> None:
    manifest = rendering.render(ComputeSpec(cpus="1"), namespace="default", name="s")
    assert unsupported_notes(ComputeSpec(), manifest) == (
        "the requests (cpu 1) reserve nothing on this machine",
    )


def test_the_selector_of_an_endpoint_is_noted() -> None:
    compute = ComputeSpec(cpus="1", endpoint=Endpoint(selector={"role": "head"}))
    manifest = rendering.render(compute, namespace="default", name="s")
    assert any("role=head" in note for note in unsupported_notes(compute, manifest))
