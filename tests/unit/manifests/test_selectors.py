"""Pods that a user selects have the labels that they are selected by."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.errors import SpecError
from kubetorch.manifests import parameters, rendering
from kubetorch.manifests.services import KubernetesServices
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec
from unit.manifests.users import manifests


def render(compute: ComputeSpec) -> dict[str, Any]:
    return rendering.render(compute, namespace="ns", name="mine", username="me")


def finds_its_pods(compute: ComputeSpec) -> bool:
    """Whether the Service of a compute finds its pods."""
    manifest = render(compute)
    (service, *_) = KubernetesServices(compute, manifest, namespace="ns", name="mine").render()
    labels = manifest["spec"]["template"]["metadata"]["labels"]
    return bool(service["spec"]["selector"].items() <= labels.items())


@pytest.mark.parametrize("selector", [(("team", "ml"),), (("app", "workers"), ("tier", "gpu"))])
def test_new_pods_carry_the_labels_of_their_selector(
    selector: tuple[tuple[str, str], ...],
) -> None:
    assert finds_its_pods(ComputeSpec(cpus="1", selector=selector))
    scaled = render(ComputeSpec(cpus="1", selector=selector, autoscaling=AutoscalingSpec()))
    assert dict(selector).items() <= scaled["spec"]["template"]["metadata"]["labels"].items()


def test_pods_of_a_manifest_get_the_labels_that_they_lack() -> None:
    declared = parameters.read_manifest(manifests()["Deployment"])
    before = render(declared)["spec"]["template"]["metadata"]["labels"]

    assert "team" not in before
    assert finds_its_pods(replace(declared, selector=(("team", "ml"),)))


def test_pods_that_have_other_labels_than_their_selector_are_refused() -> None:
    manifest = copy.deepcopy(manifests()["Deployment"])
    (name, text), *_ = manifest["spec"]["template"]["metadata"]["labels"].items()
    with pytest.raises(
        SpecError, match=rf"pods with {name}=other, .* Deployment have {name}={text}"
    ):
        kt.Compute.from_manifest(manifest, selector={name: "other"})
    compute = kt.Compute(cpus=1, labels={"team": "web"})
    with pytest.raises(SpecError, match=r"pods with team=ml, .* have team=web"):
        compute.selector = {"team": "ml"}


def test_labels_that_controllers_give_are_left_to_them() -> None:
    manifest = manifests()["PyTorchJob"]
    selector = {"training.kubeflow.org/job-name": "mine"}
    compute = kt.Compute.from_manifest(manifest, selector=selector)

    assert selector.keys().isdisjoint(compute.pod_template["metadata"].get("labels") or {})


def test_a_selector_may_be_of_some_pods_of_an_object() -> None:
    manifest = manifests()["RayCluster"]
    templates = [manifest["spec"]["headGroupSpec"]["template"]]
    templates += [group["template"] for group in manifest["spec"]["workerGroupSpecs"]]
    for template, role in zip(templates, ["head", "worker", "worker"], strict=False):
        template.setdefault("metadata", {})["labels"] = {"role": role}

    compute = kt.Compute.from_manifest(manifest, selector={"role": "head"})

    groups = compute.manifest["spec"]["workerGroupSpecs"]
    assert {group["template"]["metadata"]["labels"]["role"] for group in groups} == {"worker"}
