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
    made = []

    def deploy(compute, name="declared"):
        made.append(kt.fn(jobs.variables, name=name))
        return made[-1].to(compute)

    yield deploy
    for handle in made:
        handle.teardown()


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has GPUs")
def test_trust_gpus_that_are_not_there_can_be_pretended(deploy, monkeypatch):
    with pytest.raises(kt.ResourceNotAvailableError, match="KT_LOCAL_GPUS=pretend"):
        deploy(kt.Compute(gpus=8))

    # The service runs already, without the variable.
    monkeypatch.setenv("KT_LOCAL_GPUS", "pretend")
    remote = deploy(kt.Compute(gpus=8))
    assert remote("CUDA_VISIBLE_DEVICES") == ["0,1,2,3,4,5,6,7"]
    other = deploy(kt.Compute(gpus=2), name="other")
    assert other("CUDA_VISIBLE_DEVICES") == ["0,1"]

    monkeypatch.delenv("KT_LOCAL_GPUS")
    with pytest.raises(kt.ResourceNotAvailableError, match="asks for 8 GPUs"):
        deploy(kt.Compute(gpus=8))


def test_trust_a_misspelled_way_to_pretend_gpus_is_an_error(deploy, monkeypatch):
    monkeypatch.setenv("KT_LOCAL_GPUS", "8")
    with pytest.raises(kt.ConfigError, match="KT_LOCAL_GPUS is '8'"):
        deploy(kt.Compute(gpus=8))


def test_trust_memory_of_a_gpu_without_a_queue_warns_that_nothing_is_limited(deploy, monkeypatch):
    monkeypatch.setenv("KT_LOCAL_GPUS", "pretend")
    with pytest.warns(UserWarning, match="gpu_memory='4Gi' limits nothing"):
        remote = deploy(kt.Compute(gpu_memory="4Gi"))
    assert remote("CUDA_VISIBLE_DEVICES") == ["0"]
    assert remote.compute.gpu_memory == "4Gi"


def test_trust_memory_of_a_gpu_with_a_queue_is_what_was_written(deploy, monkeypatch, recwarn):
    monkeypatch.setenv("KT_LOCAL_GPUS", "pretend")
    remote = deploy(kt.Compute(gpu_memory="4Gi", queue="batch"))

    assert remote.compute.gpu_memory == "4Gi"
    assert not [one for one in recwarn if "limits nothing" in str(one.message)]


def test_trust_an_autoscaled_service_runs_with_one_warning_where_nothing_scales_it(deploy, capsys):
    remote = deploy(kt.Compute(cpus="0.1").autoscale(progress_deadline="5m", min_scale=2))

    assert capsys.readouterr().out.count("there is no Knative here, so it does not scale") == 1
    assert remote("KT_SERVICE_NAME") == ["declared"]  # of one pod, and no list of two
    assert len(remote.compute.pod_names()) == 2
    assert remote.compute.autoscaling_config
