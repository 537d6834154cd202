"""GPUs as they are declared: their type on the nodes of any cloud, and memory of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.launch_failures import scheduling as scheduler
from kubetorch.manifests import parameters, rendering
from kubetorch.specs.compute import ComputeSpec
from unit.manifests.users import manifests

H200 = {
    "feature discovery": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "shared": {"nvidia.com/gpu.product": "NVIDIA-H200-SHARED"},
    "as it is written": {"nvidia.com/gpu.product": "H200"},
    "GKE": {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"},
    "Karpenter": {"karpenter.k8s.aws/instance-gpu-name": "h200"},
    "EKS": {"eks.amazonaws.com/instance-gpu-name": "h200"},
    "CoreWeave": {"gpu.nvidia.com/class": "H200"},
}


def render(compute: ComputeSpec) -> dict[str, Any]:
    return rendering.render(compute, namespace="ns", name="mine", username="me")


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = manifest["spec"]["template"]
    return template


def fits(compute: ComputeSpec, labels: dict[str, str]) -> bool:
    """Whether the scheduler could put a pod on a node with these labels."""
    pod = {"spec": pod_of(render(compute))["spec"]}
    has = {"nvidia.com/gpu": "8", "cpu": "8", "memory": "64Gi", "ephemeral-storage": "64Gi"}
    node = {"metadata": {"name": "node", "labels": labels}, "status": {"allocatable": has}}
    return scheduler.misfits(pod, [node]) is None


@pytest.mark.parametrize("where", H200)
def test_a_type_of_gpu_is_found_by_the_labels_of_every_cloud(where: str) -> None:
    assert fits(ComputeSpec(gpu_type="H200"), H200[where])
    assert not fits(ComputeSpec(gpu_type="H100"), H200[where])


@pytest.mark.parametrize(
    ("gpu_type", "product"),
    [
        ("A100", "NVIDIA-A100-SXM4-80GB"),
        ("h100", "NVIDIA-H100-80GB-HBM3"),
        ("T4", "Tesla-T4"),
        ("V100", "Tesla-V100-SXM2-16GB"),
        ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-SXM4-80GB"),
        ("RTX-4090", "NVIDIA-GeForce-RTX-4090"),
        ("A6000", "NVIDIA-RTX-A6000"),
        ("X999", "NVIDIA-X999"),
    ],
)
def test_a_type_is_the_products_that_have_its_name(gpu_type: str, product: str) -> None:
    assert fits(ComputeSpec(gpu_type=gpu_type), {"nvidia.com/gpu.product": product})
    assert not fits(ComputeSpec(gpu_type=gpu_type), {"nvidia.com/gpu.product": "NVIDIA-L4"})


def test_a_product_is_that_product_alone() -> None:
    compute = ComputeSpec(gpu_type="NVIDIA-A100-SXM4-80GB")

    assert not fits(compute, {"nvidia.com/gpu.product": "NVIDIA-A100-PCIE-40GB"})


def test_a_label_of_nodes_stays_a_selector() -> None:
    spec = pod_of(render(ComputeSpec(gpu_type="cloud.google.com/gke-accelerator: l4")))["spec"]

    assert spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "l4"}
    assert "affinity" not in spec


def test_a_type_alone_asks_for_one_gpu() -> None:
    pod = pod_of(render(ComputeSpec(gpu_type="H200", gpu_anti_affinity=True)))["spec"]

    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {toleration["key"] for toleration in pod["tolerations"]} == {
        "nvidia.com/gpu",
        "dedicated",
    }
    several = pod_of(render(ComputeSpec(gpu_type="H200", gpus="4")))["spec"]
    assert several["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_the_users_own_affinity_holds_beside_the_type() -> None:
    manifest = manifests()["Deployment"]
    zone_terms = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}
        for zone in ("a", "b")
    ]
    path = "requiredDuringSchedulingIgnoredDuringExecution"
    manifest["spec"]["template"]["spec"]["affinity"] = {
        "nodeAffinity": {path: {"nodeSelectorTerms": zone_terms}}
    }
    declared = parameters.read_manifest(manifest)
    compute = replace(declared, gpu_type="H200")

    assert fits(compute, {"zone": "b", **H200["GKE"]})
    assert not fits(compute, {"zone": "c", **H200["GKE"]})
    assert not fits(compute, {"zone": "a"})
    assert parameters.read_compute(render(compute)).gpu_type == "H200"
    changed = replace(parameters.read_manifest(render(compute)), gpu_type="L4")
    assert fits(changed, {"zone": "b", "nvidia.com/gpu.product": "NVIDIA-L4"})
    back = render(replace(parameters.read_manifest(render(changed)), gpu_type=None))
    terms = pod_of(back)["spec"]["affinity"]["nodeAffinity"][path]["nodeSelectorTerms"]
    assert terms == zone_terms


@pytest.mark.parametrize(("gpus", "devices"), [(None, None), ("1", None), ("2", "2")])
def test_memory_of_a_gpu_is_shared_by_the_queue_of_kai(
    gpus: str | None, devices: str | None
) -> None:
    compute = ComputeSpec(gpu_memory="4Gi", queue="batch", gpus=gpus, gpu_anti_affinity=True)
    manifest = render(compute)
    pod = pod_of(manifest)

    assert pod["metadata"]["annotations"].get("gpu-memory") == "4096"  # KAI counts in MiB
    assert pod["metadata"]["annotations"].get("gpu-fraction-num-devices") == devices
    assert pod["spec"]["containers"][0]["resources"] == {}
    assert {toleration["key"] for toleration in pod["spec"]["tolerations"]} == {
        "nvidia.com/gpu",
        "dedicated",
    }
    assert "affinity" not in pod["spec"]
    # What was written is what is read.
    assert manifest["metadata"]["annotations"]["gpu-memory"] == "4Gi"
    assert parameters.read_compute(manifest).gpu_memory == "4Gi"
    assert render(parameters.read_manifest(manifest)) == manifest


def test_memory_of_a_gpu_is_rounded_up() -> None:
    pod = pod_of(render(ComputeSpec(gpu_memory="1G", queue="batch")))

    assert pod["metadata"]["annotations"]["gpu-memory"] == "954"


def test_a_queue_that_is_set_later_shares_the_gpu() -> None:
    manifest = render(ComputeSpec(gpu_memory="4Gi"))
    assert pod_of(manifest)["spec"]["containers"][0]["resources"]["limits"]
    assert "gpu-memory" not in (pod_of(manifest)["metadata"].get("annotations") or {})

    pod = pod_of(render(replace(parameters.read_manifest(manifest), queue="batch")))

    assert pod["metadata"]["annotations"]["gpu-memory"] == "4096"
    assert pod["spec"]["containers"][0]["resources"] == {}
