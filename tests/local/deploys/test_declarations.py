"""What the documents say of a declaration is true of the pods that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

import kubetorch as kt
from tests.local.user_project import UserProject

SOURCE = """
import os

def variables(*names):
    return [os.environ.get(name) for name in names]

def stop():
    breakpoint()
    return "went on"

def stop_in_a_process():
    import subprocess
    import sys

    code = "breakpoint()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(service, tmp_path_factory):
    project = UserProject(tmp_path_factory.mktemp("declarations") / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def deploy(jobs):
    handles = []

    def deploy(compute, name="declared", function="variables"):
        handles.append(kt.fn(getattr(jobs, function), name=name))
        return handles[-1].to(compute)

    yield deploy
    for handle in handles:
        handle.teardown()


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has GPUs")
def test_gpus_that_are_not_there_can_be_pretended(deploy, monkeypatch):
    with pytest.raises(kt.ResourceNotAvailableError, match="KT_LOCAL_GPUS=pretend"):
        deploy(kt.Compute(gpus=8))

    # The service runs already, without the variable.
    monkeypatch.setenv("KT_LOCAL_GPUS", "pretend")
    remote = deploy(kt.Compute(gpus=8))
    assert remote("CUDA_VISIBLE_DEVICES") == ["0,1,2,3,4,5,6,7"]
    two_gpus = deploy(kt.Compute(gpus=2), name="other")
    assert two_gpus("CUDA_VISIBLE_DEVICES") == ["0,1"]

    monkeypatch.delenv("KT_LOCAL_GPUS")
    with pytest.raises(kt.ResourceNotAvailableError, match="asks for 8 GPUs"):
        deploy(kt.Compute(gpus=8))


def test_a_misspelled_way_to_pretend_gpus_is_an_error(deploy, monkeypatch):
    monkeypatch.setenv("KT_LOCAL_GPUS", "8")
    with pytest.raises(kt.ConfigError, match="KT_LOCAL_GPUS is '8'"):
        deploy(kt.Compute(gpus=8))


def test_memory_of_a_gpu_without_a_queue_warns_that_nothing_is_limited(deploy, monkeypatch):
    monkeypatch.setenv("KT_LOCAL_GPUS", "pretend")
    with pytest.warns(UserWarning, match="gpu_memory='4Gi' limits nothing"):
        remote = deploy(kt.Compute(gpu_memory="4Gi"))
    assert remote("CUDA_VISIBLE_DEVICES") == ["0"]
    assert remote.compute.gpu_memory == "4Gi"


def test_memory_of_a_gpu_with_a_queue_is_what_was_written(deploy, monkeypatch, recwarn):
    monkeypatch.setenv("KT_LOCAL_GPUS", "pretend")
    remote = deploy(kt.Compute(gpu_memory="4Gi", queue="batch"))

    assert remote.compute.gpu_memory == "4Gi"
    assert not [warning for warning in recwarn if "limits nothing" in str(warning.message)]


def test_an_autoscaled_service_runs_where_nothing_scales_it(deploy, capsys):
    remote = deploy(kt.Compute(cpus="0.1").autoscale(progress_deadline="5m", min_scale=2))

    assert "WARNING" not in capsys.readouterr().err
    assert remote("KT_SERVICE_NAME") == ["declared"]  # of one pod, and no list of two
    assert len(remote.compute.pod_names()) == 2
    assert remote.compute.autoscaling_config


def test_a_breakpoint_that_no_debugger_comes_to_goes_on(deploy):
    for environ in ({"PYTHONBREAKPOINT": "0"}, {"KT_DEBUG_WAIT": "0.1"}):
        assert deploy(kt.Compute(cpus="0.1", env_vars=environ), function="stop")() == "went on"
    compute = kt.Compute(cpus="0.1", env_vars={"KT_DEBUG_WAIT": "0.1"})
    assert deploy(compute, function="stop_in_a_process", name="process")() == ""


def test_metrics_of_a_call_are_a_line(deploy):
    remote = deploy(kt.Compute(cpus="0.1"))
    with pytest.warns(UserWarning, match="streams no metrics"):
        assert remote("KT_SERVICE_NAME", stream_metrics=True) == ["declared"]


def test_programs_read_the_objects_of_this_machine_as_of_a_cluster(deploy):
    volume = kt.Volume("objects", size="1Mi", mount_path="/objects")
    secret = kt.Secret(name="objects", values={"KEY": "value"})
    compute = kt.Compute(cpus="0.1", volumes=[volume], secrets=[secret], labels={"team": "ml"})
    remote = deploy(compute)
    client = kt.globals.controller_client()

    (pod,) = client.list_pods("default", label_selector="team=ml")["items"]
    assert client.list_pods("default", label_selector="team=web")["items"] == []
    assert pod["metadata"]["name"] == remote.compute.pod_names()[0]
    assert client.get_pod("default", pod["metadata"]["name"])["status"]["phase"] == "Running"
    assert isinstance(client.get_pod_logs("default", pod["metadata"]["name"]), str)
    deployment = client.get_deployment("default", "declared")
    assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "ml"
    assert client.get_service("default", "declared")["spec"]["selector"]
    claim = client.get_pvc("default", "objects")
    assert claim in client.list_pvcs("default")["items"]
    (name,) = [
        secret_object["metadata"]["name"]
        for secret_object in client.list_secrets("default")["items"]
        if secret_object["metadata"]["labels"]["kubetorch.com/secret-name"] == "objects"
    ]
    assert client.get_secret("default", name)["data"] == {"KEY": "dmFsdWU="}
    resources = client.discover_resources("default", name_filter="clared", include_pods=True)
    (workload,) = resources["workloads"]
    assert (workload["name"], workload["kind"], len(workload["pods"])) == (
        "declared",
        "Deployment",
        1,
    )
    going = client.fetch_services_for_teardown("default", services="declared")["resources"]
    assert {(resource["kind"], resource["name"]) for resource in going} == {
        ("Deployment", "declared"),
        ("Service", "declared"),
    }
    assert client.get_connections()["workloads"]["default/declared"]
    for empty in (client.list_nodes(), client.list_storage_classes()):
        assert empty == {"items": []}
    assert client.list_config_maps("default") == client.list_ingresses("default") == empty

    assert client.get_pod("default", "nobody", ignore_not_found=True) is None
    with pytest.raises(kt.ControllerRequestError, match="there is no Pod 'nobody'") as caught:
        client.get_pod("default", "nobody")
    assert caught.value.status == 404
    remote.teardown()
    volume.delete()


@pytest.mark.parametrize("name", ["deploy", "apply", "create_secret", "delete_services", "post"])
def test_what_changed_a_cluster_names_what_replaces_it(name):
    with pytest.raises(kt.SpecError, match=rf"controller_client\(\)\.{name}\(\)") as caught:
        getattr(kt.globals.controller_client(), name)(service_name="x", namespace="default")
    assert caught.value.hint.startswith("instead: ")


def test_a_method_that_never_was_is_no_method():
    with pytest.raises(AttributeError, match="list_podz"):
        _ = kt.globals.controller_client().list_podz
