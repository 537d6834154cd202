"""How programs and people reach services of a real cluster: from outside, from pods, with less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.conftest import Installed, Kubectl
from cluster.faults import until

SERVICE = """
import os

def double(x):
    return 2 * x

def through(name, x):
    import kubetorch as kt
    return kt.fn(name=name)(x), os.environ["POD_NAME"]

def nested(x):
    import kubetorch as kt
    inner = kt.fn(double, name="inner").to(kt.Compute(cpus="10m"))
    try:
        return inner(x), inner.endpoint()
    finally:
        inner.teardown()
"""
CALL = """
import kubetorch as kt
print(kt.fn(name="double")(21))
"""
KT = str(Path(sys.executable).parent / "kt")


@pytest.fixture(scope="module")
def service(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The service `double`; the folder that it was deployed from."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "pyproject.toml").touch()
    (folder / "service.py").write_text(SERVICE)
    program = """
    import kubetorch as kt, service
    print(kt.fn(service.double).to(kt.Compute(cpus="10m"))(2))
    """
    assert installed.python(program, folder).splitlines()[-1] == "4"
    yield folder


@pytest.fixture(scope="module")
def user(
    kubectl: Kubectl, installed: Installed, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Somebody who may call services, and not forward ports of their pods."""
    namespace = installed.namespace
    kubectl("create", "serviceaccount", "caller", "-n", namespace)
    rules: list[dict[str, Any]] = [
        {
            "apiGroups": ["kubetorch.com"],
            "resources": ["kubetorchworkloads"],
            "verbs": ["get", "list"],
        },
        {
            "apiGroups": ["kubetorch.com"],
            "resources": ["kubetorchworkloads/call"],
            "verbs": ["create"],
        },
    ]
    meta = {"name": "caller", "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rules}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "caller"},
        "subjects": [{"kind": "ServiceAccount", **meta}],
    }
    kubectl("apply", "-f", "-", manifests=[role, binding])
    token = kubectl("create", "token", "caller", "-n", namespace).strip()
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    for account_user in config["users"]:
        account_user["user"] = {"token": token}
    file = tmp_path_factory.mktemp("caller") / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return {**os.environ, **installed.environ, "KUBECONFIG": str(file)}


def run(*command: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=100)


def test_auto_finds_the_cluster(installed: Installed, service: Path) -> None:
    (service / "auto.py").write_text(CALL)
    env = {**os.environ, **installed.environ, "KT_BACKEND": "auto"}
    completed = run(sys.executable, "auto.py", env=env, cwd=service)
    assert completed.stdout == "42\n", completed.stderr


def test_the_curl_lines_of_describe_work(installed: Installed, service: Path) -> None:
    shown = json.loads(installed.run(KT, "describe", "double", "--json", cwd=service))
    lines = shown["curl"].replace(" 8080 ", " 18080 ").replace(":8080/", ":18080/")
    script = f"{lines}\nstatus=$?\nkill %1\nexit $status"
    env = {**os.environ, **installed.environ, "PATH": f"{Path(KT).parent}:{os.environ['PATH']}"}
    completed = run("bash", "-c", script, env=env, cwd=service)
    assert completed.stdout.strip().splitlines()[-1] == "2", completed.stderr


def test_shells_and_commands_reach_the_pod(installed: Installed, service: Path) -> None:
    pod = installed.run(KT, "ssh", "double", "--", "hostname", cwd=service).split()[-1]
    program = """
    import kubetorch as kt
    compute = kt.fn(name="double").compute
    print(compute.pod_names(), compute.run_bash("hostname")[0][1].strip())
    """
    assert installed.python(program, service).splitlines()[-1] == f"['{pod}'] {pod}"


def test_services_call_and_deploy_services(installed: Installed, service: Path) -> None:
    program = """
    import kubetorch as kt, service
    through = kt.fn(service.through).to(kt.Compute(cpus="10m"))
    value, pod = through("double", 5)
    print(value, pod.startswith("through-"))
    nested = kt.fn(service.nested).to(kt.Compute(cpus="10m"))
    print(*nested(3))
    for one in (through, nested):
        one.teardown()
    """
    lines = installed.python(program, service).splitlines()
    assert "10 True" in lines
    assert lines[-1] == f"6 http://inner.{installed.namespace}.svc.cluster.local/double"


def test_who_may_not_forward_ports_of_pods_calls_through_the_controller(
    service: Path, user: dict[str, str]
) -> None:
    (service / "caller.py").write_text(CALL)
    completed = run(sys.executable, "caller.py", env=user, cwd=service)
    assert completed.stdout == "42\n", completed.stderr


def test_who_may_only_call_can_do_nothing_else(service: Path, user: dict[str, str]) -> None:
    for command, words in (
        (("ssh", "double", "--", "id"), "is not yours"),
        (("ssh", "double", "--exact-match", "--", "id"), "kubetorchworkloads/exec"),
        (("teardown", "double", "-y"), "is not yours"),
        (("teardown", "double", "--exact-match", "-y"), "delete"),
    ):
        refused = run(KT, *command, env=user, cwd=service)
        assert refused.returncode == 1
        assert words in refused.stderr
        assert "uid=" not in refused.stdout


def test_a_user_of_another_namespace_is_refused(
    kubectl: Kubectl, service: Path, user: dict[str, str]
) -> None:
    completed = run(KT, "list", "-n", "kube-system", env=user, cwd=service)
    assert completed.returncode == 1
    assert "kube-system" in completed.stderr


def test_a_shell_in_a_volume_is_a_pod_that_goes_with_it(
    kubectl: Kubectl, installed: Installed, service: Path
) -> None:
    program = """
    import kubetorch as kt
    volume = kt.Volume("shelf", "100Mi", "/shelf", access_mode="ReadWriteOnce")
    volume.create()
    volume.ssh(image="localhost/python:3.11")
    """
    (service / "shell.py").write_text(textwrap.dedent(program))
    env = {**os.environ, **installed.environ}
    for command, expected_output in (("echo kept > it; pwd", "/shelf"), ("cat it", "kept")):
        shell = subprocess.run(
            [sys.executable, "shell.py"],
            env=env,
            cwd=service,
            input=command,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert shell.stdout.strip() == expected_output, shell.stderr
    until(lambda: "shelf-shell" not in kubectl("get", "pods", "-n", installed.namespace))


def test_a_service_has_all_its_replicas_when_it_is_deployed_and_goes_back_to_one(
    installed: Installed, tmp_path: Path
) -> None:
    printed = installed.python(
        """
        import os, subprocess
        import kubetorch as kt

        def echo(value):
            return value

        PODS = "kubectl get pods -l kubetorch.com/service=grown -o name -n "
        PODS += os.environ["KT_NAMESPACE"]
        for count in (1, 2, 4, 1):
            f = kt.fn(echo, name="grown").to(kt.Compute(cpus="0.01", replicas=count))
            there = len(subprocess.check_output(PODS.split(), text=True).splitlines())
            assert there >= count, f"deployed with {there} of {count} pods"
            print("of", count, f(5))
        """,
        tmp_path,
    )
    assert [line for line in printed.splitlines() if line.startswith("of")] == [
        "of 1 5",
        "of 2 [5, 5]",
        "of 4 [5, 5, 5, 5]",
        "of 1 5",
    ]
