"""Secrets and volumes of services on the local backend."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.lib import mounts as mounts_module
from kubetorch.sdk import backend
from kubetorch.sdk.deploys.attachments import upload_secret
from tests.local.user_project import UserProject

SOURCE = """
import os
from pathlib import Path

def variable(name):
    return os.environ.get(name)

def listing(path):
    place = Path(os.path.expanduser(path))
    found = (p for p in place.rglob("*") if ".." not in str(p))  # where a kubelet keeps them
    return {str(p.relative_to(place)): oct(p.stat().st_mode & 0o777) for p in found}

def content(path):
    return Path(os.path.expanduser(path)).read_text()

def write(path, text):
    Path(os.path.expanduser(path)).write_text(text)

def shout(name):
    print("the value is", "set" if os.environ[name] else "empty")
"""
#: So that no file has it by accident, nor the compiled source of this test.
MARK = "-".join(["quince", "marmalade", str(os.getpid())])


@pytest.fixture
def home(emptied_home: Path) -> Path:
    return emptied_home


@pytest.fixture
def jobs(home: Path, tmp_path: Path) -> Any:
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def _mounts(tmp_path: Path) -> None:
    """Skips where pods can have no paths of their own."""
    probe = [sys.executable, "-m", mounts_module.__name__, str(tmp_path)]
    if subprocess.run(probe, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("this machine allows no mount namespaces")


def _on(**parameters: Any) -> kt.Compute:
    return kt.Compute(cpus="0.1", **parameters)


def _files_with(folder: Path, value: str) -> list[Path]:
    """Files in which a value can be found, plain or encoded."""
    encoded = base64.b64encode(value.encode()).rstrip(b"=")
    files = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it was there for a moment
            data = path.read_bytes() if path.is_file() else b""
            files += [path] if value.encode() in data or encoded in data else []
    return files


# ------------------------------------------------------------------------------------- secrets


def test_a_secret_of_variables_is_in_the_environment_and_nowhere_else(
    service_home: Path,
    jobs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUINCE", MARK)
    compute = _on(secrets=[kt.secret("quince", env_vars=["QUINCE"])])
    reader = kt.fn(jobs.variable).to(compute)
    loud = kt.fn(jobs.shout).to(_on(secrets=["quince"]))
    assert reader("QUINCE") == MARK
    loud("QUINCE")
    out, err = capfd.readouterr()
    assert "the value is set" in out + err
    assert MARK not in out + err
    assert MARK not in repr(compute) + repr(compute.manifest) + repr(compute.secrets)
    (secret_file,) = _files_with(service_home, MARK)
    assert secret_file.is_relative_to(service_home / "secrets")
    assert secret_file.stat().st_mode & 0o777 == 0o600
    assert secret_file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("_mounts")
def test_files_of_a_secret_are_at_their_path_in_pods_and_not_on_the_machine(
    service_home: Path, jobs: ModuleType
) -> None:
    secret = kt.Secret("files", values={"credentials": MARK, "config": "x"}, path="~/.tool")
    on = _on(secrets=[secret])
    assert kt.fn(jobs.listing).to(on)("~/.tool") == {"credentials": "0o600", "config": "0o600"}
    assert kt.fn(jobs.content).to(on)("~/.tool/credentials") == MARK
    with pytest.raises(OSError, match="Read-only"):
        kt.fn(jobs.write).to(on)("~/.tool/credentials", "other")
    assert not (Path.home() / ".tool").exists()
    (secret_file,) = _files_with(service_home, MARK)
    assert secret_file.is_relative_to(service_home / "secrets")


@pytest.mark.usefixtures("service_home", "_mounts")
def test_files_of_a_provider_are_where_they_were(jobs: ModuleType) -> None:
    aws = Path.home() / ".aws"
    aws.mkdir()
    (aws / "credentials").write_text("[default]")
    on = _on(secrets=["aws"])
    assert kt.fn(jobs.content).to(on)("~/.aws/credentials") == "[default]"
    (aws / "credentials").write_text("changed here")
    (aws / "new").write_text("")
    assert kt.fn(jobs.content).to(on)("~/.aws/credentials") == "[default]"
    assert list(kt.fn(jobs.listing).to(on)("~/.aws")) == ["credentials"]


def test_variables_of_a_provider_have_the_names_that_its_programs_look_for(
    jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    on = _on(secrets=["openai"])
    assert kt.fn(jobs.variable).to(on)("OPENAI_API_KEY") == "key"


def test_a_secret_with_other_values_needs_to_be_overridden(
    jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = kt.fn(jobs.variable)
    monkeypatch.setenv("QUINCE", "one")
    reader.to(_on(secrets=[kt.secret("quince", env_vars=["QUINCE"])]))
    monkeypatch.setenv("QUINCE", "two")
    with pytest.raises(kt.SecretConflictError, match="override"):
        reader.to(_on(secrets=[kt.secret("quince", env_vars=["QUINCE"])]))
    assert reader("QUINCE") == "one", "the pods that were there went away"
    reader.to(_on(secrets=[kt.secret("quince", env_vars=["QUINCE"], override=True)]))
    assert reader("QUINCE") == "two", "pods keep values that were replaced"


def test_a_secret_that_exists_is_used_by_its_name(
    jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "token")
    kt.fn(jobs.variable).to(_on(secrets=[kt.Secret("hf-token", env_var="HF_TOKEN")]))
    monkeypatch.delenv("HF_TOKEN")
    reader = kt.fn(jobs.variable, name="other")
    assert (
        reader.to(_on(secrets=[kt.Secret("hf-token", env_var="HF_TOKEN")]))("HF_TOKEN") == "token"
    )
    assert reader.to(_on(secrets=["hf-token"]))("HF_TOKEN") == "token"
    secret = kt.secret("hf-token")
    assert secret is not None
    assert secret.values == {"HF_TOKEN": "token"}
    assert kt.secret("no-such-secret") is None


def test_a_secret_that_does_not_exist_is_said_before_anything_runs(jobs: ModuleType) -> None:
    with pytest.raises(kt.SecretNotFound) as raised:
        kt.fn(jobs.variable).to(_on(secrets=["no-such-secret"]))
    assert (raised.value.secret_name, raised.value.namespace) == ("no-such-secret", "default")


def test_a_secret_is_one_of_its_namespace(jobs: ModuleType) -> None:
    secret = kt.Secret("quince", values={"Q": "1"}, namespace="other")
    with pytest.raises(kt.SpecError, match="namespace 'other'"):
        kt.fn(jobs.variable).to(_on(secrets=[secret]))


def test_a_secret_by_its_name_is_the_one_where_the_service_is(jobs: ModuleType) -> None:
    def store(namespace: str, **values: str) -> None:
        secret = kt.Secret("tokens" if "T" in values else "there", values=values)
        upload = partial(upload_secret, secret=secret, collision="same")
        backend.session().ask(lambda session: upload(session, namespace))

    store("default", T="of default", D="default alone")
    store("team", T="of team")
    store("team", THERE="1")
    secret = kt.secret("tokens")
    assert secret.namespace is None
    assert secret.values == {"T": "of default", "D": "default alone"}
    team_secret = kt.Secret.from_name("there")
    assert (team_secret.name, team_secret.values) == ("there", {})
    for namespace, secrets in (("team", [secret, team_secret]), ("default", [secret])):
        read = kt.fn(jobs.variable).to(_on(namespace=namespace, secrets=secrets))
        assert read("T") == f"of {namespace}"
        assert read("THERE") == ("1" if team_secret in secrets else None)
        read.teardown()

    with pytest.raises(kt.SecretNotFound):
        kt.fn(jobs.variable).to(_on(namespace="other", secrets=[secret]))
    with pytest.raises(kt.SpecError, match="namespace 'default'"):
        kt.fn(jobs.variable).to(
            _on(namespace="team", secrets=[kt.Secret.from_name("tokens", "default")])
        )
    assert kt.Secret.from_name("there", "other") is None
    assert kt.Secret.from_name("nowhere") is None


# ------------------------------------------------------------------------------------- volumes


@pytest.mark.usefixtures("_mounts")
def test_a_volume_is_shared_by_services_and_outlives_them(home: Path, jobs: ModuleType) -> None:
    volume = kt.Volume("data", size="1Gi", mount_path="/kubetorch-data")
    on = _on(volumes=[volume])
    writer, reader = kt.fn(jobs.write).to(on), kt.fn(jobs.content).to(_on(volumes=[volume]))
    writer("/kubetorch-data/x", "one")
    assert reader("/kubetorch-data/x") == "one"
    assert not Path("/kubetorch-data").exists(), "the machine has the path of a pod"
    with pytest.raises(kt.VolumeInUseError) as raised:
        volume.delete()
    assert set(raised.value.services) == {writer.service_name, reader.service_name}
    writer.teardown()
    reader.teardown()
    second_reader = kt.fn(jobs.content).to(_on(volumes=[kt.Volume.from_name("data")]))
    assert second_reader("/kubetorch-data/x") == "one"
    second_reader.teardown()
    volume.delete()
    assert not volume.exists()
    assert not _files_with(home / "volumes", "one")


@pytest.mark.usefixtures("_mounts")
def test_a_volume_by_its_name_is_where_it_was_declared(jobs: ModuleType) -> None:
    kt.Volume("data", size="1Gi", mount_path="/kubetorch-data").create()
    kt.fn(jobs.write).to(_on(volumes=["data"]))("/kubetorch-data/x", "one")
    elsewhere = kt.Volume.from_name("data", mount_path="/kubetorch-other")
    assert kt.fn(jobs.content).to(_on(volumes=[elsewhere]))("/kubetorch-other/x") == "one"
    claimed = kt.Volume("mine", pvc="data", mount_path="/kubetorch-mine")
    assert kt.fn(jobs.content).to(_on(volumes=[claimed]))("/kubetorch-mine/x") == "one"


@pytest.mark.usefixtures("service_home", "_mounts")
def test_an_agent_that_is_started_again_sees_what_it_saw(jobs: ModuleType) -> None:
    volume = kt.Volume("data", size="1Gi", mount_path="/kubetorch-data")
    secret = kt.Secret("files", values={"key": "value"}, path="~/.tool")
    on = _on(volumes=[volume], secrets=[secret])
    writer = kt.fn(jobs.write).to(on)
    reader = kt.fn(jobs.content).to(_on(volumes=[volume], secrets=[secret]))
    writer("/kubetorch-data/x", "one")
    view = kt.globals.controller_client().get_workload("default", reader.service_name)
    assert view.pods[0].pid is not None
    os.kill(view.pods[0].pid, signal.SIGKILL)
    assert reader.options(retries=3)("/kubetorch-data/x") == "one"
    assert reader("~/.tool/key") == "value"


@pytest.mark.usefixtures("_mounts")
def test_a_volume_for_readers_cannot_be_written(jobs: ModuleType) -> None:
    volume = kt.Volume("data", size="1Gi", mount_path="/kubetorch-data", access_mode="ROX")
    with pytest.raises(OSError, match="Read-only"):
        kt.fn(jobs.write).to(_on(volumes=[volume]))("/kubetorch-data/x", "one")


def test_a_volume_that_does_not_exist_is_said_before_anything_runs(jobs: ModuleType) -> None:
    with pytest.raises(kt.VolumeNotFoundError, match="'nowhere'"):
        kt.fn(jobs.content).to(_on(volumes=["nowhere"]))
    with pytest.raises(ValueError, match="'nowhere'"):
        kt.Volume.from_name("nowhere")
    with pytest.warns(UserWarning, match="'nowhere'"):
        kt.Volume("nowhere", size="1Gi", mount_path="/data").delete()


@pytest.mark.usefixtures("home")
def test_a_volume_tells_about_itself() -> None:
    volume = kt.Volume("data", "10Gi", "/data")
    assert not volume.exists()
    assert volume.access_mode == "ReadWriteMany", "what it would have"
    claim = volume.create()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    once = kt.Volume("once", "1Gi", access_mode="RWO")
    once.create()
    assert kt.Volume("once", "1Gi").access_mode == "ReadWriteOnce", "that of the one that exists"
    assert volume.create() == claim
    assert volume.exists()
    assert claim["metadata"]["annotations"] == {"kubetorch.com/mount-path": "/data"}
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
    assert volume.config() == {
        "name": "data",
        "size": "10Gi",
        "access_mode": "ReadWriteMany",
        "mount_path": "/data",
        "namespace": "default",
        "storage_class": "local",
    }


@pytest.mark.usefixtures("_mounts")
def test_volumes_of_the_settings_are_those_of_every_compute(
    jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kt.Volume("data", size="1Gi", mount_path="/kubetorch-data").create()
    monkeypatch.setenv("KT_VOLUMES", "data")
    kt.fn(jobs.write).to(_on())("/kubetorch-data/x", "one")


def test_a_handle_keeps_its_secrets_when_it_is_deployed_again(
    jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUINCE", "one")
    reader = kt.fn(jobs.variable).to(_on(secrets=[kt.secret("quince", env_vars=["QUINCE"])]))
    assert [getattr(secret, "name", secret) for secret in reader.compute.secrets] == ["quince"]
    reader.deploy()
    assert reader("QUINCE") == "one"


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is one of Linux")
@pytest.mark.usefixtures("service_home")
def test_a_machine_without_namespaces_says_so_and_runs_the_rest(tmp_path: Path) -> None:
    project = UserProject(tmp_path / "shop")
    program = project.write(
        "program.py",
        """
        import kubetorch as kt

        def hello():
            return "hello"

        if __name__ == "__main__":
            variables = kt.Secret("quince", values={"QUINCE": "1"})
            print(kt.fn(hello).to(kt.Compute(cpus="0.1", secrets=[variables]))())
            volume = kt.Volume("data", size="1Gi", mount_path="/kubetorch-data")
            try:
                kt.fn(hello, name="second").to(kt.Compute(cpus="0.1", volumes=[volume]))
            except kt.ResourceNotAvailableError as error:
                print(error)
        """,
    )
    wrapper = Path(__file__).parents[1] / "without_namespaces.py"
    completed = project.run(wrapper, sys.executable, str(program))
    assert completed.returncode == 0, completed.stderr
    first, *error = completed.stdout.splitlines()
    assert first == "hello"
    assert "mount namespace, which this machine does not allow" in error[0]
    assert "hint:" in error[-1]
    assert not Path("/kubetorch-data").exists()


def test_pods_that_saw_a_secret_outlive_it_and_the_service(
    service_home: Path, jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubetorch.local import lifetime

    monkeypatch.setenv("QUINCE", "one")
    reader = kt.fn(jobs.variable).to(_on(secrets=[kt.secret("quince", env_vars=["QUINCE"])]))
    before = reader.compute.pod_names()
    (service_home / "secrets/default/kt.secret.global.quince.json").unlink()
    running = lifetime.status().running
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    assert reader("QUINCE") == "one"
    attached_reader = kt.fn(name=reader.service_name)
    assert attached_reader("QUINCE") == "one"
    assert attached_reader.compute.pod_names() == before


@pytest.mark.usefixtures("home")
def test_a_declaration_at_the_top_of_a_deployed_file_does_no_harm_in_pods(tmp_path: Path) -> None:
    project = UserProject(tmp_path / "shop")
    program = project.write(
        "program.py",
        """
        import os
        import kubetorch as kt

        # Neither is in the environment of pods that do not ask for them.
        unused = kt.secret("unused", env_vars=["QUINCE"])
        maybe = kt.secret("no-such-secret")
        data = kt.Volume("data", size="1Gi", mount_path="/kubetorch-data")
        compute = kt.Compute(cpus="0.1", secrets=[kt.secret("tokens", env_vars=["APPLE"])])

        def hello():
            return os.environ["APPLE"], os.environ.get("QUINCE"), repr(unused)

        if __name__ == "__main__":
            assert maybe is None
            print(kt.fn(hello).to(compute)())
        """,
    )
    completed = project.run(program, APPLE="red", QUINCE="yellow")
    assert completed.returncode == 0, completed.stderr
    expected = ["red", None, "Secret(name='unused', env_vars=['QUINCE'])"]
    assert completed.stdout.strip() == str(expected)
