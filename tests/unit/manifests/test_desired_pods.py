"""What a manifest attaches to its container, read for a backend that is no Kubernetes."""

from __future__ import annotations

import pytest

from kubetorch.errors import SpecError
from kubetorch.manifests import desired_pods, rendering
from kubetorch.manifests.desired_pods import ClaimMount, SecretFiles, SecretVariables
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec


def test_what_a_compute_attaches_is_found_in_its_manifest() -> None:
    compute = ComputeSpec(
        secrets=(
            SecretRef("a", "kt.secret.global.a", "env", ("x", "Y"), renamed=(("x", "X"),)),
            SecretRef("b", "kt.secret.global.b", "volume", ("f",), path="~/.b"),
            SecretRef("c", "c", "env", all_keys=True),
        ),
        volumes=(
            VolumeSpec("data", "/data", "1Gi"),
            VolumeSpec("ro", "/ro", "1Gi", access_mode="ReadOnlyMany"),
        ),
    )
    attached = desired_pods.read(rendering.render(compute, namespace="default", name="f")).attached
    assert set(attached.variables) == {
        SecretVariables("kt.secret.global.a", "X", "x"),
        SecretVariables("kt.secret.global.a", "Y", "Y"),
        SecretVariables("c"),
    }
    assert attached.files == (SecretFiles("kt.secret.global.b", "/root/.b"),)
    assert attached.claims == (ClaimMount("data", "/data"), ClaimMount("ro", "/ro", read_only=True))
    assert set(attached.required_secrets) == {"kt.secret.global.a", "kt.secret.global.b", "c"}
    assert attached.paths == ("/root/.b", "/data", "/ro")
    assert attached.other_mounts == (("/dev/shm", "emptyDir"),)


def test_a_manifest_of_the_users_can_say_more() -> None:
    pod = {
        "volumes": [
            {
                "name": "keys",
                "secret": {
                    "secretName": "keys",
                    "optional": True,
                    "items": [{"key": "a", "path": "sub/a.json"}],
                },
            },
            {"name": "data", "persistentVolumeClaim": {"claimName": "d", "readOnly": True}},
            {"name": "here", "hostPath": {"path": "/x"}},
        ]
    }
    container = {
        "envFrom": [{"prefix": "P_", "secretRef": {"name": "all", "optional": True}}],
        "env": [
            {"name": "PLAIN", "value": "1"},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "V", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
        "volumeMounts": [
            {"name": "keys", "mountPath": "/keys"},
            {"name": "data", "mountPath": "/data", "subPath": "part"},
            {"name": "here", "mountPath": "/here"},
        ],
    }
    attached = desired_pods.read_attached(pod, container)
    assert attached.variables == (
        SecretVariables("all", prefix="P_", optional=True),
        SecretVariables("s", "V", "k"),
    )
    assert attached.files == (SecretFiles("keys", "/keys", (("a", "sub/a.json"),), optional=True),)
    assert attached.claims == (ClaimMount("d", "/data", read_only=True, sub_path="part"),)
    assert attached.other_mounts == (("/here", "hostPath"),)
    assert attached.required_secrets == ("s",)
    assert set(attached.all_secrets) == {"s", "all", "keys"}


def test_a_mount_of_a_folder_of_each_pod_keeps_its_expression() -> None:
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "d"}}
    secret = {"name": "keys", "secret": {"secretName": "keys"}}
    mounts = [
        {"name": "data", "mountPath": "/data", "subPathExpr": "$(POD)"},
        {"name": "keys", "mountPath": "/keys", "subPathExpr": "$(POD)"},
    ]
    attached = desired_pods.read_attached({"volumes": [claim, secret]}, {"volumeMounts": mounts})
    assert attached.claims == (ClaimMount("d", "/data", sub_path_expression="$(POD)"),)
    assert (attached.files, attached.other_mounts) == ((), (("/keys", "secret"),))


def test_a_source_without_a_name_is_no_secret() -> None:
    sources = [{"secret": {"optional": True}}, {"secret": {"name": "s"}}, {"configMap": {}}]
    pod = {"volumes": [{"name": "v", "projected": {"sources": sources}}]}
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    assert desired_pods.read_mounted_names(pod, mounts).secrets == ("s",)


def test_the_home_of_a_manifest_is_that_of_the_user() -> None:
    assert desired_pods.path_of_machine("/root/.aws", "/home/alice") == "/home/alice/.aws"
    assert desired_pods.path_of_machine("/root", "/home/alice") == "/home/alice"
    assert desired_pods.path_of_machine("/rooted", "/home/alice") == "/rooted"


@pytest.mark.parametrize("path", ["/etc", "../other", "a/../../b", ".."])
def test_a_path_that_leads_out_of_its_volume_is_refused(path: str) -> None:
    claim = {"name": "v", "persistentVolumeClaim": {"claimName": "d"}}
    secret = {"name": "v", "secret": {"secretName": "s", "items": [{"key": "k", "path": path}]}}
    mount = {"name": "v", "mountPath": "/data"}
    with pytest.raises(SpecError, match="leads out of it"):
        desired_pods.read_attached(
            {"volumes": [claim]}, {"volumeMounts": [{**mount, "subPath": path}]}
        )
    with pytest.raises(SpecError, match="leads out of it"):
        desired_pods.read_attached({"volumes": [secret]}, {"volumeMounts": [mount]})


@pytest.mark.parametrize("name", ["../other/secret", "", "a/b", "/etc", ".."])
def test_a_name_that_no_object_can_have_is_refused(name: str) -> None:
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/data"}]}
    claim = {"name": "v", "persistentVolumeClaim": {"claimName": name}}
    secret = {"name": "v", "secret": {"secretName": name}}
    reference = {"name": "X", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}
    for volumes, container in (
        ([claim], mounts),
        ([secret], mounts),
        ([], {"env": [reference]}),
        ([], {"envFrom": [{"secretRef": {"name": name}}]}),
    ):
        with pytest.raises(SpecError, match="is no name"):
            desired_pods.read_attached({"volumes": volumes}, container)
