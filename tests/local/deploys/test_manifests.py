"""Manifests of a user's own on the local backend: their kinds, replicas, variables and limits."""

from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.errors import ResourceNotAvailableError, SpecError
from tests.local.user_project import UserProject

SOURCE = """
import os

def who(name="STAGE"):
    return os.environ["POD_NAME"], os.environ.get(name)
"""
POD = {
    "spec": {
        "containers": [
            {
                "name": "main",
                "image": "mine:1",
                "command": ["sleep", "infinity"],
                "env": [{"name": "STAGE", "value": "test"}],
            }
        ]
    }
}


def manifest(api_version, kind, name, **spec):
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(service, tmp_path_factory):
    project = UserProject(tmp_path_factory.mktemp("kinds") / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def deploy(jobs):
    handles = []

    def deploy(kubernetes_object):
        handle = kt.fn(jobs.who, name=kubernetes_object["metadata"]["name"])
        handles.append(handle)
        return handle.to(kt.Compute.from_manifest(kubernetes_object))

    yield deploy
    for handle in handles:
        handle.teardown()


@pytest.mark.parametrize(
    ("api_version", "kind", "replicas"),
    [("apps/v1", "Deployment", "replicas"), ("batch/v1", "Job", "parallelism")],
)
def test_a_kind_with_replicas_runs_as_so_many_pods(deploy, api_version, kind, replicas):
    workload = manifest(api_version, kind, kind.lower(), **{replicas: 2}, template=POD)
    answers = deploy(workload)()
    assert [stage for _, stage in answers] == ["test", "test"]
    assert all(name.startswith(f"{kind.lower()}-") for name, _ in answers)


def test_pods_of_a_stateful_set_have_its_name_and_their_number(deploy):
    workload = manifest("apps/v1", "StatefulSet", "db", replicas=3, template=POD)
    remote = deploy(workload)
    assert [name for name, _ in remote()] == ["db-0", "db-1", "db-2"]
    workload["spec"]["template"] = {"spec": {"containers": [{"name": "main", "image": "mine:1"}]}}
    assert deploy(workload)() == [["db-0", None], ["db-1", None], ["db-2", None]]


def test_a_pod_has_its_own_name(deploy):
    assert deploy(manifest("v1", "Pod", "single", **POD["spec"]))() == ["single", "test"]


def test_a_training_job_becomes_plain_pods_and_says_so(deploy, capsys):
    spec = {"Master": {"template": POD}, "Worker": {"replicas": 1, "template": POD}}
    remote = deploy(manifest("kubeflow.org/v1", "PyTorchJob", "pt", pytorchReplicaSpecs=spec))
    assert "no operator of PyTorchJob here: its 2 pods are plain ones" in capsys.readouterr().err
    assert len(remote()) == 2


def test_a_kind_that_is_not_known_is_an_error_that_names_it(jobs):
    fleet = manifest("example.com/v1", "Fleet", "fleet", template=POD)
    compute = kt.Compute.from_manifest(fleet, pod_template_path="spec.template")
    handle = kt.fn(jobs.who, name="fleet")
    with pytest.raises(SpecError, match=r"'Fleet' of .* cannot be run"):
        handle.to(compute)
    handle.teardown()


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has GPUs")
def test_gpus_of_a_machine_without_them_are_a_typed_error(jobs):
    handle = kt.fn(jobs.who, name="gpu")
    with pytest.raises(ResourceNotAvailableError, match=r"asks for 2 GPUs, and .* has none"):
        handle.to(kt.Compute(gpus=2))
    handle.teardown()


@pytest.mark.skipif(not Path("/proc/driver/nvidia").exists(), reason="this machine has no GPU")
def test_a_pod_sees_the_gpus_that_it_asked_for(jobs):
    handle = kt.fn(jobs.who, name="gpu").to(kt.Compute(gpus=1))
    assert handle("CUDA_VISIBLE_DEVICES")[1] == "0"
    handle.teardown()


def test_variables_of_a_manifest_have_the_values_of_a_cluster_in_workers(deploy):
    sources = {
        "A": {"value": "one"},
        "POD": {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        "BOTH": {"value": "$(A) $(POD) $(LATER) $A $$(A)"},
        "LATER": {"value": "late"},
        "MEMORY": {
            "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}
        },
        "BLANK": {"value": None},
    }
    env = [{"name": name, **source} for name, source in sources.items()]
    container = {"name": "main", "env": env, "resources": {"limits": {"memory": "1Gi"}}}
    pod = {"spec": {"containers": [container]}}
    remote = deploy(manifest("apps/v1", "Deployment", "variables", template=pod))

    source_and_value = {name: remote(name) for name in sources}
    name = source_and_value["POD"][0]
    assert {key: value for key, (_, value) in source_and_value.items()} == {
        "A": "one",
        "POD": name,
        "BOTH": f"one {name} $(LATER) $A $(A)",
        "LATER": "late",
        "MEMORY": "1024",
        "BLANK": "",
    }


def test_a_config_map_that_is_needed_is_refused_at_the_deploy(deploy):
    ref = {"configMapKeyRef": {"name": "settings", "key": "k"}}
    pod = {"spec": {"containers": [{"name": "main", "env": [{"name": "X", "valueFrom": ref}]}]}}
    with pytest.raises(ResourceNotAvailableError, match="'settings'"):
        deploy(manifest("apps/v1", "Deployment", "configured", template=pod))
