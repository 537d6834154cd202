"""Pods that comply with the Pod Security level `restricted`, of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.manifests import agent, parameters, rendering
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.workload import WorkloadSpec
from unit.manifests.test_agent import RUNTIME
from unit.manifests.users import manifests

RESTRICTED_CONTEXT = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
MINE = ComputeSpec(image=ImageSpec(image_id="mine"))


def equipped(compute: ComputeSpec, *root_images: str) -> dict[str, Any]:
    spec = WorkloadSpec("team", "train", CallableRef("fn", "f", "m", "f"), compute)
    manifest = rendering.of_workload(spec)
    agent.equip(manifest, workload="train", runtime=RUNTIME, root_images=root_images)
    return manifest


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [template.spec for template in WorkloadManifest.parse(manifest).templates]


@pytest.mark.parametrize("kind", [kind for kind in manifests() if kind != "TrainJob"])
def test_all_containers_of_every_kind_comply(kind: str) -> None:
    manifest = manifests()[kind]
    for spec in pods(equipped(parameters.read_manifest(manifest))):
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            context = container["securityContext"]
            assert {key: context.get(key) for key in RESTRICTED_CONTEXT} == RESTRICTED_CONTEXT, (
                container["name"]
            )
            assert "runAsUser" not in context
        assert {"name": "kubetorch-home", "emptyDir": {}} in spec["volumes"]


def test_no_pod_asks_for_more_than_the_level_baseline_allows() -> None:
    for compute in (ComputeSpec(), MINE, ComputeSpec(freeze=True)):
        manifest = rendering.render(compute, namespace="team", name="train")
        assert "securityContext" not in str(manifest)


def test_a_pod_runs_as_the_user_of_its_image_unless_that_is_root() -> None:
    for root_images, user in (((), None), (("other",), None), (("mine",), 65532)):
        [spec] = pods(equipped(MINE, *root_images))
        assert spec["containers"][0]["securityContext"].get("runAsUser") == user
        assert spec["securityContext"]["fsGroup"] == 65532


def test_what_a_user_has_said_of_rights_stays() -> None:
    manifest = manifests()["Deployment"]
    user_context = {"runAsUser": 1000, "fsGroup": 5}
    spec = manifest["spec"]["template"]["spec"]
    spec["securityContext"] = user_context
    spec["containers"][0] |= {"image": "mine", "securityContext": {"readOnlyRootFilesystem": True}}
    [rendered_spec] = pods(equipped(parameters.read_manifest(manifest), "mine"))
    assert rendered_spec["containers"][0]["securityContext"] == {
        **RESTRICTED_CONTEXT,
        "readOnlyRootFilesystem": True,
    }
    assert rendered_spec["securityContext"].items() >= user_context.items()


def test_secrets_can_be_read_where_pods_have_no_group_of_their_own() -> None:
    secret = SecretRef("s", "kt.secret.s", "volume", keys=("k",), path="~/.s")
    compute = ComputeSpec(secrets=(secret,), autoscaling=AutoscalingSpec())
    [spec] = pods(equipped(compute))
    assert "securityContext" not in spec
    [volume] = [volume for volume in spec["volumes"] if "secret" in volume]
    assert volume["secret"]["defaultMode"] == 0o644


def test_a_home_that_a_user_has_mounted_is_theirs() -> None:
    manifest = manifests()["Deployment"]
    spec = manifest["spec"]["template"]["spec"]
    spec.setdefault("volumes", []).append({"name": "mine", "emptyDir": {}})
    container = spec["containers"][0]
    container.setdefault("volumeMounts", []).append({"name": "mine", "mountPath": "/root"})
    [rendered_spec] = pods(equipped(parameters.read_manifest(manifest)))
    mounts = [
        mount
        for mount in rendered_spec["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/root"
    ]
    assert mounts == [{"name": "mine", "mountPath": "/root"}]


def test_the_runtime_of_a_trainjob_has_the_rights() -> None:
    manifest = equipped(parameters.read_manifest(manifests()["TrainJob"]))
    train = {"spec": {"containers": [{"name": "node", "image": "mine"}]}}
    node = {"name": "node", "template": {"spec": {"template": train}}}
    base = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "metadata": {"name": "torch"},
        "spec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    train_runtime = agent.runtime_of_trainjob(manifest, base, runtime=RUNTIME, root_images=["mine"])
    job = train_runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["securityContext"] == {**RESTRICTED_CONTEXT, "runAsUser": 65532}
