"""`kt install`, `kt upgrade`, `kt check` and `kt uninstall` against a real cluster."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import remains
from cluster.conftest import Kubectl
from cluster.images import has_image

#: They take the installation of all other tests for themselves.
pytestmark = pytest.mark.alone

#: Namespaces of this run alone: those of an earlier one may still be going.
SPACE = f"kt-install-{secrets.token_hex(3)}"
TEAM = f"{SPACE}-team"
IMAGE = os.environ.get("KT_TEST_IMAGE", "localhost/kubetorch:dev")
POD_IMAGE = os.environ.get("KT_TEST_POD_IMAGE", "localhost/kubetorch-pod:dev")
#: Values of an installation beside the one of the other tests.
BESIDE = f"crd.create=false,rbac.userRoles=false,watchNamespaces={{{TEAM}}}"
INSTALL = ("install", "--image", IMAGE, "--pod-image", POD_IMAGE, "--set", BESIDE)
PROGRAM = f"""
import kubetorch as kt

def double(number):
    return 2 * number

volume = kt.Volume(name="data", size="1Gi", mount_path="/data", namespace="{TEAM}",
                   storage_class="shared")
secret = kt.secret(name="key", values={{"KEY": "value"}}, namespace="{TEAM}")
compute = kt.Compute(cpus="10m", namespace="{TEAM}", volumes=[volume], secrets=[secret])
print(kt.fn(double, name="double").to(compute)(21))
"""


class Kt:
    """Runs `kt` for the installation of these tests."""

    def __init__(self, kubeconfig: Path | str) -> None:
        self.environ = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "KT_BACKEND": "kubernetes",
            "KT_INSTALL_NAMESPACE": SPACE,
        }

    def __call__(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "kt"), *arguments]
        completed = self.run(*command)
        assert completed.returncode == status, completed.stdout + completed.stderr
        return completed

    def json(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", status=status).stdout)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=180
        )


@pytest.fixture(scope="module")
def namespaces(kubectl: Kubectl, apart: str) -> Iterator[None]:
    """The namespace of the installation, which it makes, and one for its services."""
    if not has_image(IMAGE):
        pytest.skip(f"no node has {IMAGE}")
    kubectl("create", "namespace", TEAM)
    yield
    kubectl("delete", "namespace", TEAM, SPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture
def kt(namespaces: None) -> Iterator[Kt]:
    kt_command = Kt(os.environ["KUBECONFIG"])
    yield kt_command
    kt_command("uninstall", "-y", "--volumes", "--secrets", "--timeout", "120")


def account(kubectl: Kubectl, folder: Path, *roles: str) -> Path:
    """A kubeconfig of a service account that has these ClusterRoles in the team's namespace."""
    name = f"someone-{secrets.token_hex(3)}"
    kubectl("create", "serviceaccount", name, "-n", TEAM)
    for role in roles:
        binding = ("create", "rolebinding", f"{name}-{role}", "-n", TEAM, "--clusterrole", role)
        kubectl(*binding, "--serviceaccount", f"{TEAM}:{name}")
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    token = kubectl("create", "token", name, "-n", TEAM).strip()
    config["users"] = [{"name": "someone", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "someone"
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


#: A kind that Kubetorch does not know.
FLEETS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "fleets.kubetorch-tests.example"},
    "spec": {
        "group": "kubetorch-tests.example",
        "scope": "Namespaced",
        "names": {"kind": "Fleet", "plural": "fleets"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object"}},
            }
        ],
    },
}


def changes(report: Any) -> set[str]:
    return {change["change"] for change in report["objects"]}


def test_it_is_installed_used_changed_and_gone(kt: Kt, kubectl: Kubectl, tmp_path: Path) -> None:
    first = kt.json(*INSTALL)
    assert first["ready"]
    assert first["image"] == IMAGE
    assert changes(first) == {"created"}
    assert changes(kt.json("install")) == {"unchanged"}, "values that were given are kept"

    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    completed = kt.run(sys.executable, str(file))
    assert completed.stdout.strip().endswith("42"), completed.stdout + completed.stderr
    assert kt.json("check", "-n", TEAM)["ok"]

    upgraded = kt.json("upgrade", "--set", "networkPolicy.enabled=false,logLevel=debug")
    became = {
        upgrade_change["kind"]: upgrade_change["change"] for upgrade_change in upgraded["objects"]
    }
    assert (became["NetworkPolicy"], became["Deployment"]) == ("deleted", "changed")
    assert upgraded["values"]["image"]["tag"] == IMAGE.rpartition(":")[2]
    assert kt.run(sys.executable, str(file)).stdout.strip().endswith("42")

    uninstalled = kt.json("uninstall", "-y")
    assert [kept_object["name"] for kept_object in uninstalled["kept"]["volumes"]] == ["data"]
    assert [kept_object["namespace"] for kept_object in uninstalled["kept"]["secrets"]] == [TEAM]
    remaining_objects = remains.of_installation(kubectl, SPACE, TEAM)
    volume = json.loads(kubectl("get", "pvc", "data", "-n", TEAM, "-o", "json"))
    assert not volume["metadata"].get("deletionTimestamp")
    assert {name.split("/")[0] for name in remaining_objects} == {
        "PersistentVolumeClaim",
        "Secret",
    }, remaining_objects

    # Where nothing is installed, nothing is looked for, let alone deleted.
    second_uninstall = kt("uninstall", "-y", "--volumes", "--secrets")
    assert f"Kubetorch is not installed in namespace {SPACE}" in second_uninstall.stdout
    assert remains.of_installation(kubectl, SPACE, TEAM) == remaining_objects


def test_an_image_that_cannot_be_pulled_fails_with_the_reason(kt: Kt) -> None:
    begun = time.monotonic()
    completed = kt("install", "--image", "198.18.0.1:5000/nothing:1", "--set", BESIDE, status=1)
    assert "the image 198.18.0.1:5000/nothing:1 cannot be pulled" in completed.stderr
    assert "not found" in completed.stderr
    assert time.monotonic() - begun < 60


def test_a_controller_that_ends_again_and_again_shows_its_last_lines(
    kt: Kt, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("extraEnv: [{name: KT_LISTEN_HOST, value: nowhere.invalid}]")
    completed = kt(*INSTALL, "-f", str(file), status=1)
    assert "ends again and again" in completed.stderr
    assert "the controller cannot start" in completed.stderr


def test_what_failed_before_does_not_fail_it_once_the_cause_is_put_right(
    kt: Kt, kubectl: Kubectl, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    reference = {"secretKeyRef": {"name": "late", "key": "k"}}
    file.write_text(yaml.safe_dump({"extraEnv": [{"name": "LATE", "valueFrom": reference}]}))
    assert "CreateContainerConfigError" in kt(*INSTALL, "-f", str(file), status=1).stderr
    kubectl("create", "secret", "generic", "late", "--from-literal", "k=v", "-n", SPACE)
    assert "which had failed before" in kt("install").stdout

    kubectl("create", "quota", "none", "--hard", "pods=0", "-n", SPACE)
    kubectl("delete", "pods", "--all", "-n", SPACE)
    assert "no pod is made" in kt("install", "--timeout", "60", status=1).stderr
    kubectl("delete", "quota", "none", "-n", SPACE)
    begun = time.monotonic()
    assert kt.json("install")["ready"]
    assert time.monotonic() - begun < 90


def test_who_may_not_install_is_told_what_is_missing(
    kt: Kt, kubectl: Kubectl, tmp_path: Path
) -> None:
    someone = Kt(account(kubectl, tmp_path))
    completed = someone(*INSTALL, status=1)
    assert "forbidden" in completed.stderr.lower()
    assert "hint: let an administrator grant it" in completed.stderr


def test_check_names_rights_that_a_user_lacks(kt: Kt, kubectl: Kubectl, tmp_path: Path) -> None:
    kt(*INSTALL)
    someone = Kt(account(kubectl, tmp_path, "view"))
    report = someone.json("check", "-n", TEAM, status=1)
    states = {check["check"]: check for check in report["checks"]}
    assert states["rights"]["state"] == "broken"
    assert "create kubetorchworkloads.kubetorch.com" in states["rights"]["reason"]
    assert "kubectl create rolebinding" in states["rights"]["hint"]
    assert states["way to the controller"]["state"] == "ok"
    assert states["DNS"]["state"] == "skipped"

    kubectl("apply", "--server-side", "-f", "-", manifests=[FLEETS])
    check_of_own_kinds = one_check(kt, "kinds of your own")
    assert (
        check_of_own_kinds["state"],
        "the controller lacks the rule" in check_of_own_kinds["reason"],
    ) == ("note", True)
    commands = check_of_own_kinds["hint"].splitlines()[1:]
    kinds = re.findall(r"--resource=(\S+)", "\n".join(commands))
    try:
        for command in commands:
            subprocess.run(command, shell=True, check=True, timeout=60)
        reason = one_check(kt, "kinds of your own")["reason"]
        assert kinds and not [kind for kind in kinds if kind in reason]
    finally:
        for kind in kinds:
            kubectl("delete", "clusterrole", f"kubetorch-{kind}", "--ignore-not-found")
        kubectl("delete", "crd", FLEETS["metadata"]["name"], "--ignore-not-found")


def one_check(kt: Kt, name: str) -> Any:
    checks = kt.json("check", "-n", TEAM)["checks"]
    return next(check for check in checks if check["check"] == name)


def test_check_says_what_to_do_where_nothing_is_installed(kt: Kt) -> None:
    report = kt.json("check", "-n", TEAM, status=1)
    states = {check["check"]: check for check in report["checks"]}
    assert states["API server"]["state"] == "ok"
    assert states["controller"]["state"] == "broken"
    assert "kt install" in states["controller"]["hint"]


def test_a_second_installation_does_not_take_what_belongs_to_the_first(
    kt: Kt, kubectl: Kubectl, apart: str
) -> None:
    before = remains.of_installation(kubectl, SPACE)  # the namespace, of an earlier test
    completed = kt("install", "--image", IMAGE, status=1)
    assert f"belongs to the Kubetorch in namespace {apart}" in completed.stderr
    assert "crd.create=false" in completed.stderr
    assert remains.of_installation(kubectl, SPACE) == before


def test_prometheus_may_read_figures_and_nothing_else(kt: Kt, kubectl: Kubectl) -> None:
    """The objects of the service monitor, without the operator that reads it."""
    rendered = kt("install", "--dry-run", "--set", "serviceMonitor.enabled=true").stdout
    objects = [
        manifest
        for manifest in yaml.safe_load_all(rendered)
        if "metrics" in manifest["metadata"]["name"]
    ]
    kt(*INSTALL)
    kubectl("apply", "-f", "-", manifests=objects)
    try:
        token = kubectl("create", "token", "kubetorch-metrics", "-n", SPACE).strip()
        address = kubectl(
            "get", "svc", "kubetorch-controller", "-n", SPACE, "-o", "jsonpath={.spec.clusterIP}"
        )
        # A Service leads to a new pod a moment after that is ready.
        retries = ["--retry", "5", "--retry-connrefused", "--retry-delay", "1"]
        head = ["curl", "-s", "-m", "20", *retries, "-H", f"Authorization: Bearer {token}"]
        url = f"http://{address}:8080"
        text = kt.run(*head, f"{url}/metrics").stdout
        assert 'kubetorch_controller_workloads{status="Ready"} 0' in text
        refused = kt.run(*head, "-o", "/dev/null", "-w", "%{http_code}", f"{url}/v1/workloads")
        assert refused.stdout == "403"
    finally:
        kubectl("delete", "--ignore-not-found", "-f", "-", manifests=objects)


def test_who_owns_the_kind_goes_and_leaves_it_to_others_who_have_services(
    kt: Kt, kubectl: Kubectl, apart: str, tmp_path: Path
) -> None:
    beside = kt(*INSTALL, "--set", f"watchNamespaces={{{apart}}}", status=1)
    assert f"the Kubetorch in namespace {apart} works in namespaces {apart}" in beside.stderr
    kt(*INSTALL)
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    completed = kt.run(sys.executable, str(file))
    assert completed.stdout.strip().endswith("42"), completed.stdout + completed.stderr
    narrowed = kt("upgrade", "--set", f"watchNamespaces={{{SPACE}}}", status=1)
    assert f"leaves out services, which no controller would look after: {TEAM}/" in narrowed.stderr

    uninstalled = kt.json("uninstall", "-y", "-n", apart)
    assert uninstalled["definition_needed_by"][0] == f"the Kubetorch in namespace {SPACE}"
    assert uninstalled["definition_needed_by"][1].startswith(f"{TEAM}/")
    assert kubectl("get", "kubetorchworkloads", "-n", TEAM, "-o", "name").count("\n") == 1
    taken = kt.json("upgrade", "--set", "crd.create=true,rbac.userRoles=true")
    assert "changed" in {
        change["change"]
        for change in taken["objects"]
        if change["kind"] == "CustomResourceDefinition"
    }
    assert kt.run(sys.executable, str(file)).stdout.strip().endswith("42")
    assert kt.json("uninstall", "-y", "--volumes", "--secrets")["definition_needed_by"] == []
    assert "kubetorchworkloads" not in kubectl("get", "crd", "-o", "name")
