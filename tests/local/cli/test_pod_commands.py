"""Commands in pods that serve: `Compute.run_bash`, `pip_install`, `sync_package`."""

from __future__ import annotations

import http.client
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import kubetorch as kt
from benchmarks import wheels
from tests.local import commands
from tests.local.service_harness import in_background
from tests.local.user_project import UserProject

SOURCE = """
import os

def value(name):
    return __import__(name).VALUE

def read(path):
    with open(path) as file:
        return file.read()
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    wheels.build(folder, "delta", "1.0", "VALUE = 'delta 1.0'\n")
    return folder


@pytest.fixture
def value(tmp_path):
    project = UserProject(tmp_path / "shop")
    handle = kt.fn(project.module(SOURCE).value).to(kt.Compute(cpus="0.1"))
    yield handle
    handle.teardown()
    project.forget()


@pytest.fixture(scope="module")
def shared_value(tmp_path_factory, service):
    """A function for all tests that install nothing in its pod."""
    project = UserProject(tmp_path_factory.mktemp("shared") / "shop")
    handle = kt.fn(project.module(SOURCE).value, name="shared").to(kt.Compute(cpus="0.1"))
    yield handle
    handle.teardown()
    project.forget()


def test_commands_tell_exit_code_output_and_errors_one_after_the_other(shared_value):
    outputs = shared_value.compute.run_bash(["echo out; echo err >&2", "echo why; exit 3"])
    assert outputs == [[0, "out\n", "err\n"], [3, "", "why\n"]]


def test_commands_run_where_the_workers_run(shared_value):
    pod = shared_value.service_config["pods"][0]["name"]
    (output_of_pod,) = shared_value.compute.run_bash("pwd; echo $POD_NAME; ls", node=pod)
    folder, name, *entries = output_of_pod[1].split()
    assert (Path(folder).name, name) == ("work", pod)
    assert "shop" in entries


def test_kt_exec_runs_a_command_in_a_pod(shared_value):
    words = ("--", "sh", "-c", "echo $POD_NAME; exit 3")
    completed = commands.kt("exec", shared_value.service_name, *words)
    (pod,) = shared_value.service_config["pods"]
    assert (completed.returncode, completed.stdout) == (3, f"{pod['name']}\n")


def test_a_pod_that_is_not_there_is_named(shared_value):
    with pytest.raises(kt.SpecError, match="'other'"):
        shared_value.compute.run_bash("true", node="other")
    with pytest.raises(kt.SpecError, match="sidecar"):
        shared_value.compute.run_bash("true", container="sidecar")


def test_pods_are_chosen_by_their_index_too(tmp_path):
    project = UserProject(tmp_path / "shop")
    handle = kt.fn(project.module(SOURCE).value, name="several").to(kt.Compute(replicas=2))
    try:
        names = handle.compute.pod_names()
        for node, expected_names in (
            (0, names[:1]),
            (1, names[1:]),
            ("1", names[1:]),
            ([1, 0], names[::-1]),
        ):
            outputs = handle.compute.run_bash("echo -n $POD_NAME", node=node)
            assert [output.strip() for _, output, _ in outputs] == expected_names
        for node in (2, -1, True, [0, 2]):
            with pytest.raises(kt.SpecError, match=r"node is .*has no such pod"):
                handle.compute.run_bash("true", node=node)
    finally:
        handle.teardown()
        project.forget()


def test_the_container_has_its_own_name(tmp_path):
    project = UserProject(tmp_path / "shop")
    template = {"spec": {"containers": [{"name": "pytorch", "image": "x"}, {"name": "side"}]}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job"},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": template}}},
    }
    handle = kt.fn(project.module(SOURCE).value).to(kt.Compute.from_manifest(job))
    try:
        assert handle.compute.run_bash("echo hi", container="pytorch") == [[0, "hi\n", ""]]
        with pytest.raises(kt.SpecError, match=r"container is .side.; .* of the agent, .pytorch."):
            handle.compute.run_bash("true", container="side")
    finally:
        handle.teardown()
        project.forget()


def test_a_compute_without_a_service_has_nowhere_to_run_commands():
    with pytest.raises(kt.SpecError, match="nothing was deployed"):
        kt.Compute(cpus="1").run_bash("true")


@pytest.mark.parametrize("installer", ["pip_install", "pip", "uv pip", "python -m pip"])
def test_what_is_installed_is_there_at_once_and_in_this_pod_alone(value, index, installer):
    with pytest.raises(ModuleNotFoundError):
        value("delta")
    options = f"--no-index --find-links {index} delta"
    if installer == "pip_install":
        value.compute.pip_install(options)
    else:
        ((status, output, error),) = value.compute.run_bash(f"{installer} install {options}")
        assert status == 0, output + error
    assert value("delta") == "delta 1.0"
    assert not list(Path(sys.prefix).glob("lib/python*/site-packages/delta.py"))


def test_what_is_installed_in_both_places_is_left_as_it_is(value):
    value.compute.pip_install("numpy")
    assert value.compute.run_bash("ls ../packages")[0][1] == ""


def test_a_requirement_that_cannot_be_installed_is_an_error_with_its_output(shared_value, index):
    with pytest.raises(kt.ImageStepError, match="nothing-like-this") as failed:
        shared_value.compute.pip_install(f"--no-index --find-links {index} nothing-like-this")
    assert failed.value.exit_code == 1


def test_a_comparison_beside_flags_is_no_redirection(shared_value, index):
    with pytest.raises(kt.ImageStepError, match="delta>=2"):
        shared_value.compute.pip_install(f"--no-index --find-links {index} delta>=2")


def test_a_package_that_is_synced_is_importable_at_once(value, tmp_path):
    package = tmp_path / "synced_later"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 'synced'\n")
    value.compute.sync_package(str(package))
    assert value("synced_later") == "synced"
    assert value.compute.run_bash("cat synced_later/*.py")[0][1] == "VALUE = 'synced'\n"


def test_two_copies_at_once_do_not_disturb_each_other(value, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "model").write_bytes(b"m" * 1024**2)
    (tmp_path / "small.txt").write_text("small")
    ((_, work, _),) = value.compute.run_bash("mkdir large; mkfifo large/model; pwd")
    with (
        in_background(lambda: value.compute.rsync(str(tmp_path / "large"))) as copied,
        # A copy into a pipe goes on only as it is read.
        Path(work.strip(), "large", "model").open("rb") as pipe,
    ):
        value.compute.rsync(str(tmp_path / "small.txt"))
        assert pipe.read() == b"m" * 1024**2
    assert copied == [None]
    assert value.compute.run_bash("cat small.txt")[0][1] == "small\n"


def test_sources_outside_the_project_are_seen_as_they_are_after_a_command(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    source = elsewhere / "source.py"
    source.write_text("VALUE = 1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    project = UserProject(tmp_path / "shop")
    handle = kt.fn(project.module(SOURCE).value).to(kt.Compute(cpus="0.1"))
    try:
        assert handle.compute.run_bash(f"cat {source}") == [[0, "VALUE = 1\n", ""]]
        newer = elsewhere / "newer"
        newer.write_text("VALUE = 2")
        newer.replace(source)
        assert handle.compute.run_bash(f"cat {source}") == [[0, "VALUE = 2\n", ""]]
    finally:
        handle.teardown()
        project.forget()


def test_a_token_for_calls_is_not_enough(shared_value, service):
    (pod,) = shared_value.service_config["pods"]
    view = kt.globals.session().get_workload("default", shared_value.service_name)
    address = urlsplit(pod["url"])
    for token, status in ((view.token, 401), ((service / "token").read_text(), 200)):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
        body = '{"step": {"command": "true"}}'
        connection.request("POST", "/v1/run", body, {"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == status
        connection.close()


def test_a_command_ends_with_the_client_that_wanted_it(shared_value, service):
    (pod,) = shared_value.service_config["pods"]
    address = urlsplit(pod["url"])
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    body = '{"step": {"command": "echo $$; trap \\"\\" PIPE; sleep 50"}}'
    token = (service / "token").read_text()
    connection.request("POST", "/v1/run", body, {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    pid = int(eval(answer.readline())["text"])
    answer.close()
    connection.close()
    wait = f"while kill -0 {pid} 2>/dev/null; do sleep 0.05; done; echo gone"
    assert shared_value.compute.run_bash(wait)[0][1] == "gone\n"
