"""The chart under the real helm: installed, used, upgraded, and gone without a trace."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import remains
from cluster.conftest import Kubectl
from cluster.faults import until
from cluster.images import has_image
from contract.chart import goldens
from kubetorch.install.chart import FOLDER, Chart
from kubetorch.install.releases import DEFINITION
from unit.install.test_templates import CASES, VALUES

RELEASE = "kt-release"
#: Namespaces of this run alone: those of an earlier one may still be going.
SPACE = f"kt-helm-{secrets.token_hex(3)}"
TEAM = f"{SPACE}-team"
IMAGE = os.environ.get("KT_TEST_IMAGE", "localhost/kubetorch:dev")
POD_IMAGE = os.environ.get("KT_TEST_POD_IMAGE", "localhost/kubetorch-pod:dev")
#: Values of an installation beside the one of the other tests.
BESIDE = f"crd.create=false,rbac.userRoles=false,watchNamespaces={{{TEAM}}}"
PROGRAM = f"""
import kubetorch as kt

def double(number):
    return 2 * number

compute = kt.Compute(cpus="10m", namespace="{TEAM}")
print(kt.fn(double, name="double").to(compute)(21))
"""


def helm(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    if shutil.which("helm") is None:
        pytest.skip("no helm on the PATH")
    completed = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=180)
    assert completed.returncode == 0 or not check, completed.stderr
    return completed


def kt(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "kt"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def images() -> tuple[str, str]:
    """Options for the images that were built."""
    repository, _, tag = IMAGE.rpartition(":")
    pods, _, pod_tag = POD_IMAGE.rpartition(":")
    settings = f"image.repository={repository},image.tag={tag}"
    return "--set", f"{settings},podImage.repository={pods},podImage.tag={pod_tag}"


def of_helm(file: Path) -> list[dict[str, Any]]:
    """What helm renders the chart to, without its hooks."""
    options = ("--namespace", goldens.NAMESPACE, "--kube-version", "1.34.0")
    text = helm(
        "template", "kubetorch", str(FOLDER), *options, "-f", str(file), "--no-hooks"
    ).stdout
    text = text.replace("managed-by: Helm", "managed-by: kubetorch")
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def sorted_by_name(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def key(manifest: dict[str, Any]) -> tuple[str, ...]:
        metadata = manifest["metadata"]
        return manifest["kind"], metadata.get("namespace") or "", metadata["name"]

    return sorted(objects, key=key)


@pytest.mark.parametrize("file", goldens.VALUES, ids=lambda path: path.stem)
def test_kt_renders_what_helm_renders(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    ours = Chart().render(values, namespace=goldens.NAMESPACE)
    assert sorted_by_name(ours) == sorted_by_name(of_helm(file))


def test_helm_writes_what_the_cases_of_our_templates_say(tmp_path: Path) -> None:
    defined = "".join(
        f'{{{{ define "case{number}" }}}}{source}{{{{ end }}}}'
        for number, (source, _) in enumerate(CASES)
    )
    lines = "".join(
        f'c{number}: {{{{ include "case{number}" . | quote }}}}\n' for number in range(len(CASES))
    )
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: cases, version: 1.0.0}")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(VALUES))
    (tmp_path / "templates" / "cases.yaml").write_text(defined + lines)
    written = yaml.safe_load(helm("template", "r", str(tmp_path)).stdout)
    assert [written[f"c{number}"] for number in range(len(CASES))] == [text for _, text in CASES]


def test_helm_finds_nothing_to_complain_of() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(FOLDER)).stdout


@pytest.fixture(scope="module")
def namespaces(kubectl: Kubectl, apart: str) -> Iterator[None]:
    """The namespace of a release, which it makes, and one for its services."""
    if not has_image(IMAGE):
        pytest.skip(f"no node has {IMAGE}")
    kubectl("create", "namespace", TEAM)
    yield
    kubectl("delete", "namespace", TEAM, SPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture
def spaces(namespaces: None) -> Iterator[None]:
    """Room for a release beside the installation whose resource definition it shares."""
    yield
    helm("uninstall", RELEASE, "-n", SPACE, "--no-hooks", check=False)
    kt("uninstall", "-y", "-n", SPACE, "--timeout", "60")


@pytest.mark.alone
def test_a_release_works_is_upgraded_and_leaves_nothing(
    spaces: None, kubectl: Kubectl, tmp_path: Path
) -> None:
    options = ("--set", BESIDE, *images(), "--wait", "--timeout", "120s")
    installed = helm("install", RELEASE, str(FOLDER), "-n", SPACE, "--create-namespace", *options)
    assert f"kt config set install_namespace {SPACE}" in installed.stdout

    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environ = {**os.environ, "KT_BACKEND": "kubernetes", "KT_INSTALL_NAMESPACE": SPACE}
    completed = subprocess.run(
        [sys.executable, str(file)], env=environ, capture_output=True, text=True, timeout=110
    )
    assert completed.stdout.strip().endswith("42"), completed.stdout + completed.stderr

    for command in (("upgrade",), ("uninstall", "-y"), ("install",)):
        refused = kt(*command, "-n", SPACE)
        assert refused.returncode == 1
        assert f"belongs to the helm release {RELEASE}" in refused.stderr or (
            "a helm release is changed with helm upgrade" in refused.stderr
        )

    helm("upgrade", RELEASE, str(FOLDER), "-n", SPACE, *options, "--set", "logLevel=debug")
    container = "{.spec.template.spec.containers[0].env[?(@.name=='KT_LOG_LEVEL')].value}"
    level = kubectl(
        "get", "deploy", "kubetorch-controller", "-n", SPACE, "-o", f"jsonpath={container}"
    )
    assert level == "debug"

    helm("uninstall", RELEASE, "-n", SPACE, "--wait", "--timeout", "150s")
    # Of what was deleted Kubernetes deletes the rest in the background.
    until(lambda: not remains.of_installation(kubectl, SPACE, TEAM))


@pytest.mark.alone
def test_a_release_whose_image_cannot_be_pulled_goes_without_its_hooks(
    spaces: None, kubectl: Kubectl
) -> None:
    image = "image.repository=198.18.0.1:5000/nothing,image.tag=none"
    options = ("--create-namespace", "--set", BESIDE, "--set", image)
    helm("install", RELEASE, str(FOLDER), "-n", SPACE, *options)
    hung = helm("uninstall", RELEASE, "-n", SPACE, "--timeout", "5s", check=False)
    assert "timed out" in hung.stderr, "its Job runs the same image"
    helm("uninstall", RELEASE, "-n", SPACE, "--no-hooks", "--wait")
    kubectl("delete", "job", "kubetorch-uninstall", "-n", SPACE, "--cascade=foreground")
    # Of what was deleted Kubernetes deletes the rest in the background.
    until(lambda: not remains.of_installation(kubectl, SPACE, TEAM))


@pytest.mark.alone
def test_helm_does_not_take_over_what_kt_installed(spaces: None, kubectl: Kubectl) -> None:
    completed = kt("install", "-n", SPACE, "--image", IMAGE, "--set", BESIDE, "--no-wait")
    assert completed.returncode == 0, completed.stderr
    refused = helm("install", RELEASE, str(FOLDER), "-n", SPACE, "--set", BESIDE, check=False)
    assert refused.returncode != 0
    assert "cannot be imported into the current release" in refused.stderr


@pytest.mark.alone
def test_helm_leaves_the_kind_to_services_of_others(
    spaces: None, kubectl: Kubectl, apart: str
) -> None:
    uninstalled = kt("uninstall", "-y", "-n", apart)
    assert uninstalled.returncode == 0, uninstalled.stderr
    watched = ("--set", f"watchNamespaces={{{TEAM}}}", *images(), "--wait", "--timeout", "120s")
    install = ("install", RELEASE, str(FOLDER), "-n", SPACE, "--create-namespace", *watched)
    helm(*install)
    callable = {"kind": "function", "name": "f", "module": "m", "qualname": "f"}
    workload = {
        "apiVersion": "kubetorch.com/v1alpha1",
        "kind": "KubetorchWorkload",
        "metadata": {"name": "f", "namespace": "default"},
        "spec": {"generation": 1, "callable": callable},
    }
    kubectl("apply", "-f", "-", manifests=[workload])
    # Neither an upgrade without it nor an uninstall takes the kind from a service of others.
    values_without_definition = (*watched, "--set", "crd.create=false")
    helm("upgrade", RELEASE, str(FOLDER), "-n", SPACE, *values_without_definition)
    helm("uninstall", RELEASE, "-n", SPACE, "--wait", "--timeout", "150s")
    assert kubectl("get", "kubetorchworkloads", "-n", "default", "-o", "name").strip()
    labels = kubectl("get", "crd", DEFINITION.name, "-o", "jsonpath={.metadata.labels}")
    assert "managed-by" not in labels
    kubectl("delete", "kubetorchworkloads", "f", "-n", "default")
    # It is nobody's; where nobody needs it, an uninstall deletes it.
    helm(*install, "--take-ownership")
    helm("uninstall", RELEASE, "-n", SPACE, "--wait", "--timeout", "150s")
    assert DEFINITION.name not in kubectl("get", "crd", "-o", "name")
