"""The manifest is what a deploy applies, what is shown is a copy, and what pods are can be set."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import yaml

import kubetorch as kt
from kubetorch.manifests import labels
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Equipment, Runtime, WorkloadView
from unit.manifests.users import manifests

Manifest = dict[str, Any]
#: An installation, and pods that have to comply and see secrets.
EQUIPMENT = Equipment(
    Runtime("registry/kubetorch:1", "registry/pod:1", "http://there:1", "Always"),
    root_images=("registry.example/mine:1",),
    secrets="abc",
)
#: What a compute shows that has everything, and is a dictionary or has some in it.
SHOWN = {
    "manifest": "compute.pod_spec = ",
    "_manifest": "compute.service_template = ",
    "pod_template": "compute.add_pod_template_labels(",
    "pod_spec": "compute.pod_spec = ",
    "resources": "compute.cpus = ",
    "labels": "compute.add_labels(",
    "user_labels": "compute.add_labels(",
    "annotations": "compute.add_annotations(",
    "user_annotations": "compute.add_annotations(",
    "gpu_annotations": "compute.gpu_memory = ",
    "env_vars": "compute.add_env_vars(",
    "node_selector": "compute.node_selector = ",
    "selector": "compute.selector = ",
    "service_template": "compute.service_template = ",
    "tolerations": "compute.add_tolerations(",
    "volume_mounts": "compute.volumes = ",
    "secret_env_vars": "compute.secrets = ",
    "allowed_serialization": "compute.allowed_serialization = ",
    "distributed_config": "compute.distributed_config = ",
    "raycluster": "compute.pod_spec = ",
}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")


def everything() -> kt.Compute:
    return kt.Compute(
        cpus=1,
        memory="1Gi",
        gpus=1,
        gpu_memory="4Gi",
        labels={"team": "ml"},
        annotations={"owner": "me"},
        env_vars={"A": "1"},
        node_selector={"disk": "ssd"},
        selector={"app": "mine"},
        service_template={"spec": {"template": {"spec": {"hostNetwork": True}}}},
        tolerations=[{"key": "spot", "operator": "Exists"}],
        volumes=["data"],
        secrets=["openai"],
    ).distribute("ray", workers=2)


def ran(compute: kt.Compute, name: str = "train") -> kt.Compute:
    """As after a deploy."""
    deployed_compute = compute.for_service(name)
    spec = WorkloadSpec(
        "team", name, CallableRef("fn", "f", "m", "f"), deployed_compute.to_spec(), "me"
    )
    deployed_compute.deployed_as(
        WorkloadView(spec=spec, generation=1, status="Ready", equipment=EQUIPMENT)
    )
    return deployed_compute


def container(compute: kt.Compute) -> Manifest:
    agent_container: Manifest = compute.pod_spec["containers"][0]
    return agent_container


# ------------------------------------------------------------------------------- as it is applied


def test_a_manifest_has_the_agent_before_there_is_a_deploy() -> None:
    compute = kt.Compute(cpus=1, image=kt.Image(image_id="mine:1"))
    (copying,) = compute.pod_spec["initContainers"]

    assert copying["image"] == f"ghcr.io/kubetorch/kubetorch:{kt.__version__}"
    assert container(compute)["command"] == ["/kubetorch/bin/kt-agent"]
    url = compute.get_env_vars("KT_POD_CONTROLLER_URL")["KT_POD_CONTROLLER_URL"]
    assert url == "http://kubetorch-controller.kubetorch.svc.cluster.local:8080"
    assert compute.env_vars == {}
    assert "KT_POD_WORKLOAD" not in compute.get_env_vars()
    assert "kubetorch.com/module" not in compute.labels


def test_a_dry_run_shows_what_a_deploy_would_apply() -> None:
    remote = kt.fn(container, name="of-dry-run").to(kt.Compute(cpus=1), dryrun=True)
    assert remote.compute is not None

    assert remote.compute.get_env_vars("KT_POD_WORKLOAD") == {"KT_POD_WORKLOAD": "of-dry-run"}
    assert remote.compute.labels["kubetorch.com/module"].endswith("test_deployed_manifest")


def test_the_installation_that_it_was_deployed_to_says_what_its_pods_get() -> None:
    compute = ran(kt.Compute(cpus=1))

    assert container(compute)["image"] == "registry/pod:1"
    assert container(compute)["imagePullPolicy"] == "Always"
    assert container(compute)["securityContext"]["runAsNonRoot"] is True
    assert compute.pod_template["metadata"]["annotations"]["kubetorch.com/secrets-version"] == "abc"
    assert compute.labels["kubetorch.com/module"] == "m"
    other_compute = compute.for_service("other")
    assert "kubetorch.com/module" not in other_compute.labels
    assert pickle.loads(pickle.dumps(compute)).manifest == compute.manifest


@pytest.mark.parametrize("kind", manifests())
def test_a_manifest_that_was_applied_is_read_as_what_it_was_made_of(kind: str) -> None:
    manifest = manifests()[kind]
    manifest["metadata"]["name"] = "mine"
    before = kt.Compute.from_manifest(manifest)
    applied = copy.deepcopy(ran(before, "mine").manifest)
    assert applied is not None
    owner = {"apiVersion": "kubetorch.com/v1alpha1", "kind": "KubetorchWorkload", "uid": "1"}
    applied["metadata"]["ownerReferences"] = [owner]
    applied["metadata"]["annotations"][labels.APPLIED] = "0123"
    after = kt.Compute.from_template({"resource": applied})

    assert after.env_vars == before.env_vars
    kept_manifest = after.to_spec().manifest or ""
    of_agent = ("KT_POD_", "KT_BACKEND", "kubetorch-", "ownerReferences", "-digest", "/applied")
    assert [
        marker
        for marker in of_agent
        if marker in kept_manifest.replace("kubetorch-service-account", "")
    ] == []
    assert ran(after, "mine").manifest == ran(before, "mine").manifest


def test_a_manifest_without_a_name_can_be_one_of_a_service() -> None:
    compute = kt.Compute.from_manifest(kt.Compute(cpus=2).manifest or {})
    manifest = compute.for_service("late").manifest

    assert manifest is not None
    assert manifest["metadata"]["name"] == "late"
    assert manifest["spec"]["selector"] == {"matchLabels": {"kubetorch.com/service": "late"}}
    assert compute.cpus == "2"


# -------------------------------------------------------------------------------------- read only


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_cannot_be_changed_and_names_its_setter(name: str) -> None:
    compute = everything()
    before = copy.deepcopy(getattr(compute, name))
    assert before
    pending = [getattr(compute, name)]
    while pending:
        section = pending.pop()
        if isinstance(section, dict):
            pending += section.values()
            attempts = [
                lambda section=section: section.update(a=1),
                lambda section=section: section.setdefault("a", 1),
                lambda section=section: section.__setitem__("a", 1),
                lambda section=section: section.__ior__({"a": 1}),
                lambda section=section: section.pop("a", None),
                lambda section=section: section.clear(),
            ]
        elif isinstance(section, list):
            pending += section
            attempts = [
                lambda section=section: section.append(1),
                lambda section=section: section.__iadd__([1]),
                lambda section=section: section.sort(key=str),
                lambda section=section: section.clear(),
            ]
        else:
            continue
        for attempt in attempts:
            with pytest.raises(kt.SpecError) as raised:
                attempt()
            assert SHOWN[name] in str(raised.value)
    assert getattr(compute, name) == before


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_for_all_else_a_plain_dictionary(name: str) -> None:
    section = getattr(everything(), name)
    plain = json.loads(json.dumps(section))

    assert isinstance(section, dict | list)
    assert section == plain
    assert repr(section) == repr(copy.deepcopy(section))
    for duplicate in (
        copy.deepcopy(section),
        pickle.loads(pickle.dumps(section)),
        copy.copy(section),
    ):
        assert duplicate == plain
        assert type(duplicate) in (dict, list)
        duplicate.clear()
    deep: Any = copy.deepcopy(section)
    while isinstance(deep, dict | list) and deep:
        assert type(deep) in (dict, list)
        deep = next(iter(deep.values())) if isinstance(deep, dict) else deep[0]
    if isinstance(section, dict):
        assert type(section | {"a": 1}) is dict


class _OwnDumper(yaml.SafeDumper):
    """As programs have it that write text of several lines as a block."""


_OwnDumper.add_representer(str, lambda dumper, text: dumper.represent_str(text))


@pytest.mark.parametrize("dumper", [yaml.SafeDumper, yaml.Dumper, yaml.CSafeDumper, _OwnDumper])
def test_yaml_of_what_is_shown_is_plain(dumper: Any) -> None:
    manifest = everything().manifest

    assert yaml.dump(manifest, Dumper=dumper) == yaml.dump(copy.deepcopy(manifest), Dumper=dumper)


# ------------------------------------------------------------------------------ what the pods are


def test_the_spec_of_pods_can_be_set() -> None:
    image = kt.Image(image_id="mine:1").pip_install(["numpy"])
    compute = kt.Compute(cpus=1, memory="1Gi", env_vars={"A": "1"}, image=image, replicas=2)
    pod_spec = copy.deepcopy(compute.pod_spec)
    del pod_spec["containers"][0]["resources"]["requests"]["memory"]
    pod_spec["containers"][0]["env"].insert(0, {"name": "B", "value": "2"})
    pod_spec["containers"].append({"name": "beside", "image": "other:1"})
    pod_spec["hostNetwork"] = True
    compute.pod_spec = pod_spec

    assert compute.pod_spec == pod_spec
    assert compute.memory is None
    assert compute.env_vars == {"A": "1", "B": "2"}
    assert (compute.cpus, compute.replicas) == ("1", 2)
    assert compute.image == image
    compute.cpus = 4
    compute.add_env_vars({"A": "3"})
    assert container(compute)["resources"]["requests"] == {"cpu": "4"}
    assert compute.env_vars == {"A": "3", "B": "2"}
    assert compute.pod_spec["hostNetwork"] is True
    manifest = compute.for_service("train").manifest
    assert manifest is not None
    assert manifest["metadata"]["name"] == "train"
    assert manifest["spec"]["selector"] == {"matchLabels": {"kubetorch.com/service": "train"}}


def test_a_spec_of_pods_replaces_what_was_laid_over_it() -> None:
    template = {"spec": {"template": {"spec": {"hostNetwork": True}}, "paused": True}}
    compute = kt.Compute(cpus=1, service_template=template, volumes=["data"], secrets=["openai"])
    pod_spec = copy.deepcopy(compute.pod_spec)
    del pod_spec["hostNetwork"]
    pod_spec["volumes"] = [volume for volume in pod_spec["volumes"] if volume["name"] != "data"]
    mounts = container(compute)["volumeMounts"]
    pod_spec["containers"][0]["volumeMounts"] = [
        mount for mount in mounts if mount["name"] != "data"
    ]
    compute.pod_spec = pod_spec

    assert compute.pod_spec == pod_spec
    assert compute.volumes == []
    assert [secret.name for secret in compute.to_spec().secrets] == ["openai"]
    assert (compute.manifest or {})["spec"]["paused"] is True


def test_a_small_spec_of_pods_gets_what_the_agent_needs() -> None:
    compute = kt.Compute(cpus=1, image=kt.Image(image_id="mine:1"))
    compute.pod_spec = {"containers": [{"name": "own", "image": "other:1", "command": ["sleep"]}]}

    assert compute.cpus is None
    assert compute.server_image == "other:1"
    assert container(compute)["name"] == "kubetorch"
    assert container(compute)["command"] == ["/kubetorch/bin/kt-agent"]
    assert "readinessProbe" in container(compute)


@pytest.mark.parametrize("kind", manifests())
def test_the_spec_of_pods_of_a_users_object_can_be_set(kind: str) -> None:
    manifest = manifests()[kind]
    manifest["metadata"]["name"] = "mine"
    compute = kt.Compute.from_manifest(manifest)
    pod_spec = copy.deepcopy(compute.pod_spec)
    pod_spec["nodeSelector"] = {"disk": "ssd"}
    compute.pod_spec = pod_spec

    assert compute.pod_spec == pod_spec
    assert compute.node_selector == {"disk": "ssd"}
    assert compute.kind == kind
    assert compute.for_service("mine").name == "mine"


@pytest.mark.parametrize("scaled", [False, True])
def test_a_spec_of_pods_keeps_how_its_service_scales(scaled: bool) -> None:
    compute = kt.Compute(cpus=1)
    compute = compute.autoscale(min_scale=2) if scaled else compute.distribute("ray", workers=3)
    pod_spec = copy.deepcopy(compute.pod_spec)
    pod_spec["nodeSelector"] = {"disk": "ssd"}
    before = (
        compute.kind,
        compute.replicas,
        compute.autoscaling_config,
        compute.distributed_config,
    )
    compute.pod_spec = pod_spec

    assert compute.pod_spec == pod_spec
    after = (compute.kind, compute.replicas, compute.autoscaling_config, compute.distributed_config)
    assert after == before


@pytest.mark.parametrize("value", [None, [], "pods", {}, {"containers": []}, {"containers": "a"}])
def test_what_is_no_spec_of_pods_is_refused(value: Any) -> None:
    compute = kt.Compute(cpus=1)
    before = compute.manifest
    with pytest.raises(kt.SpecError, match=r"pod_spec|containers"):
        compute.pod_spec = value
    assert compute.manifest == before
    with pytest.raises(kt.SpecError, match="names pods that are there"):
        kt.Compute(selector={"app": "a"}).pod_spec = {"containers": [{"name": "a"}]}
