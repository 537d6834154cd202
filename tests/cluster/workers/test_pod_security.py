"""Pods comply with the Pod Security level of their namespace; the same program runs at each."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.conftest import Installed, Kubectl
from cluster.images import BASE, KIT, build
from example_programs import EXAMPLES, EXPECTED

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

LEVELS = ("privileged", "baseline", "restricted")


@contextlib.contextmanager
def level(name: str, kubectl: Kubectl) -> Iterator[Installed]:
    """A namespace of a level."""
    namespace = f"kt-{name}-{secrets.token_hex(3)}"
    kubectl("create", "namespace", namespace)
    kubectl("label", "namespace", namespace, f"pod-security.kubernetes.io/enforce={name}")
    try:
        yield Installed(namespace)
    finally:
        kubectl("delete", "kubetorchworkloads", "--all", "-n", namespace, "--wait=true")
        kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.mark.parametrize("name", LEVELS)
def test_hello_world_runs_unchanged(
    name: str, kubectl: Kubectl, controller: str, tmp_path: Path
) -> None:
    program = shutil.copy(EXAMPLES / "hello_world.py", tmp_path)
    with level(name, kubectl) as space:
        began = time.monotonic()
        printed = space.run(sys.executable, program, cwd=tmp_path, timeout=150)
        print(f"{time.monotonic() - began:.1f} s\n{printed}")
        listing = json.loads(kubectl("get", "pods", "-n", space.namespace, "-o", "json"))
    for pod in listing["items"]:
        spec = pod["spec"]
        shown = {
            "pod": pod["metadata"]["name"],
            "securityContext": spec["securityContext"],
            **{
                container["name"]: container.get("securityContext")
                for container in spec.get("initContainers", [])
            },
            **{
                container["name"]: container.get("securityContext")
                for container in spec["containers"]
            },
        }
        print(f"--- {name}\n{yaml.safe_dump(shown, sort_keys=False)}")
    assert printed == EXPECTED["hello_world.py"]
    assert "SYS_PTRACE" not in json.dumps(listing)


PROGRAM = """
import getpass, os, sys
from pathlib import Path
import kubetorch as kt

def look():
    import mine
    home = Path.home()
    (home / "x").write_text("")
    Path("own.txt").write_text("")
    Path("/data/kept.txt").write_text("5")
    token = Path("/root/.tool/token").read_text()
    return os.getuid(), str(home), getpass.getuser(), token, mine.X

def main(image_id):
    sys.stderr = sys.stdout  # where Kubetorch's own lines go
    image = kt.Image(image_id=image_id or None).sync_package("package")
    secret = kt.Secret("tool", values={"token": "t"}, path="~/.tool", override=True)
    volume = kt.Volume("kept", size="16Mi", mount_path="/data")
    compute = kt.Compute(cpus="0.1", image=image, volumes=[volume], secrets=[secret])
    print("found", *kt.fn(look).to(compute)())
    for command in ("touch /etc/mine", "apt-get install -y tree"):
        wrong = kt.Image(image_id=image_id or None).run_bash(command)
        try:
            kt.fn(look, name="bad").to(kt.Compute(cpus="0.1", image=wrong))
        except kt.StartupError as error:
            print("refused", error)
    image = kt.Image(image_id=image_id or None)
    kt.fn(look, name="app").to(kt.Compute(cpus="0.1", image=image, working_dir="/app"))

if __name__ == "__main__":
    main(sys.argv[1])
"""
#: Who images say that they run as, and who their pods are then.
USERS = {
    "": "65532 /root kubetorch",
    "1234": "1234 /root kubetorch",
    "daemon": "65532 /root kubetorch",
}


@pytest.mark.parametrize("user", USERS)
def test_restricted_pods_have_home_packages_secrets_and_volumes(
    user: str, kubectl: Kubectl, controller: str, tmp_path: Path
) -> None:
    image = ""
    if user:
        if not (KIT / "image").exists():
            pytest.skip(f"there is no cluster kit in {KIT}: KT_CLUSTER_KIT names its folder")
        (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nUSER {user}\n")
        image = f"localhost/kt-user-{user}:1"
        build(image, tmp_path)
    (tmp_path / "package" / "mine").mkdir(parents=True)
    (tmp_path / "package" / "mine" / "__init__.py").write_text("X = 7")
    with level("restricted", kubectl) as space:
        printed = space.python(PROGRAM, tmp_path, image, timeout=200)
    print(printed)
    assert f"found {USERS[user]} t 7" in printed
    number = USERS[user].partition(" ")[0]
    assert f"the pod runs as user {number}, not as root" in printed
    assert f"apt-get needs root, and the container runs as user {number}" in printed
    assert f"user {number}, as whom the pod runs, cannot write to /app" in printed


STAGED = """
import os, sys
import kubetorch as kt

def who():
    return os.getuid(), os.environ["STAGE"], os.environ["POD_NAME"]

if __name__ == "__main__":
    stage, deploys = sys.argv[1], sys.argv[2] != "call"
    compute = kt.Compute(cpus="0.1", env_vars={"STAGE": stage})
    remote = kt.fn(who).to(compute) if deploys else kt.fn(name="who")
    print("found", *remote())
"""


def printed_words(printed: str) -> list[str]:
    (line,) = (
        printed_line for printed_line in printed.splitlines() if printed_line.startswith("found ")
    )
    return line.split()[1:]


def test_running_pods_stay_when_a_namespace_becomes_restricted_until_the_next_deploy(
    kubectl: Kubectl, controller: str, tmp_path: Path
) -> None:
    """What the controller knew of the namespace is old then: it asks again when it is refused."""
    with level("privileged", kubectl) as space:
        user, stage, pod = printed_words(space.python(STAGED, tmp_path, "one", "deploy"))
        assert (user, stage) == ("0", "one")
        enforce = "pod-security.kubernetes.io/enforce=restricted"
        kubectl("label", "namespace", space.namespace, enforce, "--overwrite")
        assert printed_words(space.python(STAGED, tmp_path, "one", "call")) == ["0", "one", pod]
        printed = space.python(STAGED, tmp_path, "two", "deploy")
        print(printed)
        assert printed_words(printed)[:2] == ["65532", "two"]


SCALED = """
import os, sys
import kubetorch as kt

def who():
    return os.getuid()

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1").autoscale(min_scale=1, max_scale=1)
    print("found", kt.fn(who).to(compute)())
    volume = kt.Volume("kept", size="16Mi", mount_path="/data")
    volume.create()
    volume.ssh(image="localhost/python:3.11")
"""


def test_an_autoscaled_service_and_a_shell_in_a_volume_comply_too(
    kubectl: Kubectl, controller: str, tmp_path: Path
) -> None:
    if "services" not in kubectl("api-resources", "--api-group", "serving.knative.dev"):
        pytest.skip("the cluster has no Knative")
    (tmp_path / "program.py").write_text(SCALED)
    with level("restricted", kubectl) as space:
        completed = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env={**os.environ, **space.environ},
            input="id -u; touch /data/x && echo written\n",
            capture_output=True,
            text=True,
            timeout=200,
        )
    print(completed.stdout, completed.stderr)
    assert completed.returncode == 0
    assert "found 65532\n" in completed.stdout
    assert "65532\nwritten\n" in completed.stdout.partition("found")[2]
