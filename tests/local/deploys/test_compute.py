"""What a `kt.Compute` says, on running pods."""

import asyncio

import pytest

import kubetorch as kt
from kubetorch.errors import SpecError
from tests.local.user_project import UserProject

SOURCE = """
import os
from pathlib import Path

def read(path):
    return Path(path).read_text()

class Reader:
    def read(self, path):
        return Path(path).read_text()

def where():
    print("asked")
    return os.environ["KT_SERVICE_NAME"], os.environ["POD_NAME"], os.environ.get("STAGE")
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def jobs(tmp_path):
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def deployed(jobs):
    """Deploys, and tears down at the end."""
    handles = []

    def deploy(compute, **keywords):
        handles.append(kt.fn(jobs.where))
        return handles[-1].to(compute, **keywords)

    yield deploy
    for handle in handles:
        handle.teardown()


def test_an_autoscaled_service_begins_with_its_fewest_pods_without_a_word_of_knative(
    deployed, capsys
):
    remote = deployed(kt.Compute(cpus="0.1").autoscale(min_scale=2, max_scale=5))

    assert "Knative" not in capsys.readouterr().err
    assert len(remote.service_config["pods"]) == 2
    assert remote()[0] == "where"
    assert not any("scale" in note for note in remote.service_config["notes"])


def test_an_annotation_that_no_scaler_here_knows_is_said_once(deployed, capsys):
    remote = deployed(kt.Compute(cpus="0.1").autoscale(target_burst_capacity=0))

    sentence = "does not know the annotation autoscaling.knative.dev/target-burst-capacity"
    assert capsys.readouterr().err.count(sentence) == 1
    assert any(sentence in note for note in remote.service_config["notes"])


def test_a_service_that_cannot_be_launched_is_refused_before_anything_is_sent(deployed):
    with pytest.raises(kt.SpecError, match=r"where cannot be launched.*https://outside"):
        deployed(kt.Compute(cpus="0.1", endpoint=kt.Endpoint(url="https://outside")))

    assert kt.globals.controller_client().list_workloads() == []


def test_a_selector_of_pods_that_are_nowhere_starts_none(deployed):
    with pytest.raises(kt.ResourceNotAvailableError, match="no pod matches the selector app=mine"):
        deployed(kt.Compute(selector={"app": "mine"}))

    assert kt.globals.controller_client().list_workloads() == []


def test_a_dry_run_of_a_distributed_service_shows_its_manifest(deployed):
    remote = deployed(kt.Compute(cpus="0.1").distribute("ray", workers=2), dryrun=True)

    assert remote.compute.manifest["kind"] == "RayCluster"


def test_a_users_manifest_runs_under_its_own_name(deployed):
    container = {"name": "app", "image": "x", "env": [{"name": "STAGE", "value": "mine"}]}
    template = {"metadata": {"labels": {"app": "mine"}}, "spec": {"containers": [container]}}
    compute = kt.Compute.from_manifest(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "of-mine"},
            "spec": {"selector": {"matchLabels": {"app": "mine"}}, "template": template},
        }
    )

    remote = deployed(compute)

    name, pod, stage = remote()
    assert (name, stage) == ("of-mine", "mine")
    assert pod.startswith("of-mine")
    assert remote.compute.endpoint == remote.base_endpoint


def test_the_pods_of_a_compute_are_described_as_kubernetes_does(deployed):
    compute = kt.Compute(cpus="0.1", replicas=2, labels={"team": "ml"})
    assert (compute.pods(), compute.pod_names(), compute.is_up()) == ([], [], False)

    deployed(compute)

    pods = compute.pods()
    assert [pod.metadata.name for pod in pods] == compute.pod_names()
    assert len(pods) == 2
    assert compute.is_up()
    (first, _) = pods
    assert first.metadata == first["metadata"]
    assert (first.kind, first.status.phase) == ("Pod", "Running")
    assert all(pod.status.pod_ip.startswith("127.0.") for pod in pods)
    assert first.metadata.labels["team"] == "ml"
    assert first.status.containerStatuses[0].ready is True
    with pytest.raises(AttributeError, match="the keys are phase"):
        _ = first.status.fase


def test_a_compute_whose_service_is_gone_has_no_pods(deployed):
    compute = kt.Compute(cpus="0.1")
    handle = deployed(compute)

    handle.teardown()

    assert (compute.pods(), compute.is_up()) == ([], False)
    with pytest.raises(kt.ServiceNotFoundError):
        compute.logs()


def test_logs_of_a_compute_are_shown(deployed, capsys):
    compute = kt.Compute(cpus="0.1")
    remote = deployed(compute, stream_logs=False)
    remote(stream_logs=False)
    capsys.readouterr()

    compute.logs(tail=5)

    (name,) = compute.pod_names()
    assert f"({name}) asked" in capsys.readouterr().out
    with pytest.raises(kt.SpecError, match=f"'absent'.*has no such pod(?s:.*){name}"):
        compute.logs(pod="absent")
    with pytest.raises(kt.SpecError, match="nothing was deployed"):
        kt.Compute().logs()


def test_each_service_of_one_compute_has_pods_of_its_own(jobs, deployed):
    compute = kt.Compute(cpus="0.1")
    first = deployed(compute)
    second = kt.fn(jobs.where, name="second").to(compute)

    assert first.compute.pod_names() != second.compute.pod_names()
    second.teardown()


def test_a_manifest_of_a_file_is_needed_only_where_it_is_deployed(tmp_path):
    project = UserProject(tmp_path / "shop")
    container = "{name: app, image: x, env: [{name: STAGE, value: file}]}"
    project.write(
        "deployment.yaml",
        f"""
        apiVersion: apps/v1
        kind: Deployment
        metadata: {{name: of-file}}
        spec:
          template:
            spec: {{containers: [{container}]}}
        """,
    )
    project.write(
        "program.py",
        """
        import os
        import kubetorch as kt

        compute = kt.Compute.from_manifest("deployment.yaml")
        compute.replicas = 1

        def stage():
            return os.environ["STAGE"]

        remote = kt.fn(stage).to(compute)
        print(remote(), remote.service_name)
        remote.teardown()
        """,
    )

    completed = project.run("program.py")

    assert completed.stdout.splitlines()[-1:] == ["file of-file"], completed.stderr


def test_files_are_copied_into_pods_that_run(jobs, tmp_path):
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    compute = kt.Compute(cpus="0.1")
    remote = kt.fn(jobs.read).to(compute)
    try:
        compute.rsync([folder, str(tmp_path / "b.txt")])
        assert (remote("data/deep/a.txt"), remote("b.txt")) == ("one", "two")

        (folder / "deep" / "a.txt").write_text("changed")
        compute.rsync(folder, dest="there", contents=True)
        asyncio.run(compute.rsync_async(folder))
        assert remote("there/deep/a.txt") == remote("data/deep/a.txt") == "changed"
        with pytest.warns(DeprecationWarning, match="local_port"):
            compute.rsync(str(tmp_path / "b.txt"), local_port=1234)
    finally:
        remote.teardown()
    with pytest.raises(kt.SpecError, match="'absent'"):
        compute.rsync("absent")
    with pytest.raises(kt.SpecError, match="source is 5"):
        compute.rsync(5)
    with pytest.raises(kt.ServiceNotFoundError):
        compute.rsync(folder)


def test_a_class_has_the_commands_of_its_compute(jobs, tmp_path):
    (tmp_path / "c.txt").write_text("three")
    handle = kt.cls(jobs.Reader)
    reader = handle.to(kt.Compute(cpus="0.1"))
    try:
        handle.rsync(str(tmp_path / "c.txt"))
        assert reader.read("c.txt") == "three"
        assert handle.run_bash("cat c.txt")[0][:2] == [0, "three\n"]
    finally:
        handle.teardown()


def test_a_frozen_service_runs_the_code_that_its_pods_have(service, tmp_path):
    project = UserProject(tmp_path / "shop")
    jobs = project.module("def version():\n    return 'as sent'\n")
    image_folder = tmp_path / "image"
    image_folder.mkdir()
    (image_folder / "baked.py").write_text("def version():\n    return 'as in the image'\n")
    remote = kt.fn(jobs.version, remote_dir=str(image_folder), remote_import_path="baked")
    try:
        remote.to(kt.Compute(cpus="0.1", freeze=True))
        assert remote() == "as in the image"
        assert remote.service_config["spec"]["tree"] is None
    finally:
        remote.teardown()
        project.forget()


def test_a_frozen_service_runs_the_project_in_place_on_this_machine(service, tmp_path):
    project = UserProject(tmp_path / "shop")
    project.write("data/x.csv", "1,2")
    project.write("shop/inner.txt", "in a folder of the project's name")
    project.write("helper.py", "def name():\n    return __file__\n")
    jobs = project.module(
        "def where():\n"
        "    import helper\n"
        "    return [__file__, helper.name(), open('data/x.csv').read()]\n"
    )
    remote = kt.fn(jobs.where, name="frozen")
    compute = kt.Compute(cpus="0.1", freeze=True)
    try:
        with pytest.warns(UserWarning, match=f"runs the project {project.folder} in place"):
            remote.to(compute)
        module = str(project.folder / f"{jobs.__name__}.py")
        assert remote() == [module, str(project.folder / "helper.py"), "1,2"]
        assert remote.service_config["spec"]["tree"] is None
        # Python takes byte code for fresh whose file has the size and the second that it had.
        project.write("helper.py", "def name():\n    return 'edited since'\n")
        with pytest.warns(UserWarning, match="in place"):
            remote.to(compute)
        assert remote()[1] == "edited since"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["shop"], "nothing beside it"
    finally:
        remote.teardown()
        project.forget()


def test_a_frozen_service_with_a_folder_to_send_is_a_contradiction(service, jobs, tmp_path):
    remote = kt.fn(jobs.where, sync_dir=str(tmp_path / "shop"))
    with pytest.raises(SpecError, match="freeze=True exclude each other"):
        remote.to(kt.Compute(cpus="0.1", freeze=True))
