"""On a real cluster: where programs say they run, what scripts of apps do, what pods are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks import wheels
from cluster.conftest import Installed, Kubectl

pytestmark = pytest.mark.cluster

KT = str(Path(sys.executable).parent / "kt")
PROGRAM = """
import kubetorch as kt

def double(x):
    return 2 * x

if __name__ == "__main__":
    print(kt.fn(double).to(kt.Compute(cpus="10m"))(2))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "home" / ".kube").mkdir(parents=True)
    (tmp_path / ".ktignore").write_text("home\n")
    return tmp_path


def test_a_context_that_was_deployed_to_is_never_replaced_by_this_machine(
    installed: Installed, folder: Path
) -> None:
    (folder / "program.py").write_text(PROGRAM)
    file = folder / "home" / ".kube" / "config"
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    file.write_text(yaml.safe_dump(config))
    environ = {
        **{key: value for key, value in os.environ.items() if key != "KUBECONFIG"},
        **installed.environ,
        "KUBECONFIG": "",
        "KT_BACKEND": "auto",
        "HOME": str(folder / "home"),
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100
        )

    completed = run(sys.executable, "program.py")
    assert completed.stdout.endswith("4\n"), completed.stderr
    where = f"context {config['current-context']!r} of {file}"
    line = f"kubetorch: pods run in Kubernetes: {where} (Kubetorch is installed there)\n"
    assert completed.stderr.startswith(line)
    torn = run(KT, "teardown", "double", "-y")
    assert torn.returncode == 0, torn.stderr
    expected_line = f"backend kubernetes: {where}, namespace {installed.namespace}"
    assert torn.stderr.splitlines()[0] == expected_line

    for cluster in config["clusters"]:
        cluster["cluster"]["server"] = "https://127.0.0.1:1"
    file.write_text(yaml.safe_dump(config))
    completed = run(sys.executable, "program.py")
    assert (completed.returncode, completed.stdout) == (1, "")
    assert "deployed to before" in completed.stderr
    assert "KT_BACKEND=local" in completed.stderr.splitlines()[-1]


def test_the_script_of_an_app_deploys_and_calls(installed: Installed, folder: Path) -> None:
    (folder / "job.py").write_text(
        """
import kubetorch as kt

kt.app(cpus="10m")

@kt.compute(cpus="10m")
class Embedder:
    def embed(self, text):
        return len(text)

def triple(x):
    return 3 * x

if __name__ == "__main__":
    Embedder.deploy()
    remote = kt.fn(triple).to(kt.Compute(cpus="10m"))
    print("called", remote(4), Embedder.embed("abc", stream_logs=False))
    remote.teardown()
    Embedder.teardown()
"""
    )
    shown = installed.run(KT, "run", "python", "job.py", cwd=folder, timeout=150)
    assert "called 12 3" in shown


@pytest.fixture
def index(folder: Path) -> Path:
    index = folder / "wheels"
    index.mkdir()
    for name in ("alpha", "beta"):
        wheels.build(index, name, "1.0", f"VALUE = '{name} 1.0'\n")
    return index


@pytest.mark.usefixtures("index")
def test_and_14_the_compute_wins_over_the_image_and_steps_install_for_the_pod(
    installed: Installed, folder: Path
) -> None:
    program = """
    import json, os
    import kubetorch as kt

    def look():
        import alpha, beta
        names = "WHO", "CHAIN", "UNDER", "LEFT", "PATH"
        return [alpha.VALUE, beta.VALUE, *(os.environ[name] for name in names)]

    if __name__ == "__main__":
        image = kt.Image().copy("wheels", "/wheels", contents=True).set_env_vars({
            "WHO": "image", "BASE": "/image", "CHAIN": "$WHO-chain", "LEFT": "image",
            "PATH": "/image/bin:$PATH",
        })
        image.run_bash("uv pip install --system --no-index --find-links /wheels alpha")
        image.run_bash("pip install --no-index --find-links /wheels beta")
        given = {
            "WHO": "compute", "UNDER": "$BASE/x", "PATH": "/compute/bin:$PATH",
            "UV_SYSTEM_PYTHON": "1", "PIP_TARGET": "/nowhere", "PIP_USER": "1",
        }
        remote = kt.fn(look).to(kt.Compute(cpus="10m", image=image, env_vars=given))
        ((status, said, error),) = remote.compute.run_bash("ls /nowhere")
        print(json.dumps([*remote(), status]))
        remote.teardown()
    """
    *values, path, status = json.loads(installed.python(program, folder).splitlines()[-1])
    assert values == ["alpha 1.0", "beta 1.0", "compute", "image-chain", "/image/x", "image"]
    entries = path.split(":")
    assert entries.index("/compute/bin") < entries.index("/image/bin")
    assert status != 0


@pytest.fixture
def team(kubectl: Kubectl, installed: Installed) -> Iterator[str]:
    namespace = f"{installed.namespace}-team"
    kubectl("create", "namespace", namespace)
    yield namespace
    kubectl("delete", "kubetorchworkloads", "--all", "-n", namespace, "--wait=true")
    kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_volume_by_its_name_is_the_one_where_the_service_is(
    installed: Installed, folder: Path, team: str
) -> None:
    program = """
    import pathlib, sys
    import kubetorch as kt

    def note(text=None):
        path = pathlib.Path("/here/note")
        if text:
            path.write_text(text)
        return path.read_text()

    if __name__ == "__main__":
        team = sys.argv[1]
        made = kt.Volume("shared", "1Mi", "/before", namespace=team, access_mode="RWO")
        made.create()
        volume = kt.Volume.from_name("shared", mount_path="/here")
        remote = kt.fn(note).to(kt.Compute(cpus="10m", namespace=team, volumes=[volume]))
        print(remote("kept"), remote())
        remote.teardown()
        try:
            kt.fn(note).to(kt.Compute(cpus="10m", volumes=[volume]))
        except kt.VolumeNotFoundError as error:
            print("missing", error.message)
        made.delete()
    """
    shown = installed.python(program, folder, team, timeout=200).splitlines()
    assert shown[-2] == "kept kept"
    assert shown[-1] == (
        f"missing Volume 'shared' does not exist in namespace {installed.namespace!r}"
    )
