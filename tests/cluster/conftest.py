"""The cluster that `KUBECONFIG` names; without one, or without kubectl, these tests are skipped."""

from __future__ import annotations

import copy
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import example_programs
import shared
from cluster import byo, definitions, faults

#: What is installed; read now, since tests see no variables of ours.
IMAGE = os.environ.get("KT_TEST_IMAGE", "localhost/kubetorch:dev")
POD_IMAGE = os.environ.get("KT_TEST_POD_IMAGE", "localhost/kubetorch-pod:dev")
#: Whether parts of the cluster may be stopped.
MAY_BREAK = os.environ.get("KT_TEST_BREAK_CLUSTER") == "1"
#: What namespaces of tests begin with.
TEST_NAMESPACES = "kt-tests-"
Objects = list[dict[str, Any]]
Kubectl = Callable[..., str]

#: What a cluster has before anybody deploys: names that the manifests refer to.
REQUIRED: Objects = [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "research"}},
    {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "trainer", "namespace": "research"},
    },
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "high"},
        "value": 1000,
    },
]
#: What Knative refuses in a pod template unless its configuration allows it.
KNATIVE_FEATURES = (
    "kubernetes.podspec-affinity",
    "kubernetes.podspec-nodeselector",
    "kubernetes.podspec-tolerations",
    "kubernetes.podspec-priorityclassname",
    "kubernetes.podspec-schedulername",
    "kubernetes.podspec-persistent-volume-claim",
    "kubernetes.podspec-persistent-volume-write",
    "kubernetes.podspec-init-containers",
    "kubernetes.containerspec-addcapabilities",
)
_FEATURES = ("configmap/config-features", "--namespace", "knative-serving")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the tests that are `alone` run last, and those that take minutes first.

    Where the longest came last, it would run when the other workers have nothing to do.
    """
    cluster_tests = {item for item in items if Path(__file__).parent in item.path.parents}
    last = {item for item in cluster_tests if item.get_closest_marker("alone") is not None}
    first = {item for item in cluster_tests - last if item.path.name == "test_ranks_frameworks.py"}
    items.sort(key=lambda item: (item in last, item not in first))


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    """Run kubectl against the cluster, and return what it prints."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no KUBECONFIG: these tests need a real Kubernetes")
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on the PATH")

    def run(*arguments: str, manifests: Objects | None = None) -> str:
        text = None if manifests is None else yaml.safe_dump_all(manifests)
        completed = subprocess.run(
            ["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=90
        )
        assert completed.returncode == 0, (
            f"kubectl {' '.join(arguments)}\n{completed.stdout}{completed.stderr}"
        )
        return completed.stdout

    return run


class Installed:
    """Kubetorch in the cluster, and a namespace of the tests' own.

    Attributes:
        namespace: The namespace.
        environ: Environment of programs that use both.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.environ = {
            "KUBECONFIG": os.environ["KUBECONFIG"],
            "KT_BACKEND": "kubernetes",
            "KT_NAMESPACE": namespace,
            "KT_USERNAME": "",
            # Tests have folders of their own, each a project, and some more than one user.
            "KT_REPLACE": "1",
        }

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 100.0) -> str:
        """What a command prints; it has to succeed."""
        return example_programs.run(
            *command, cwd=cwd or Path.cwd(), timeout=timeout, **self.environ
        )

    def python(self, program: str, folder: Path, *arguments: str, timeout: float = 100.0) -> str:
        """What a program prints, given as text; it is `program.py` in `folder`."""
        file = folder / "program.py"
        file.write_text(textwrap.dedent(program))
        return self.run(sys.executable, str(file), *arguments, cwd=folder, timeout=timeout)


@pytest.fixture(scope="module")
def controller(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    """Kubetorch, installed from the images that were built; the namespace it is in.

    Tests that are `alone` may uninstall it: where a run has some, each module looks anew.
    """
    if any(item.get_closest_marker("alone") for item in request.session.items):
        _install()
        yield "kubetorch"
    else:
        with shared.made_once("controller", _install, lambda _: None):
            yield "kubetorch"


@pytest.fixture(scope="module")
def apart(controller: str) -> Iterator[str]:
    """That installation, kept to its own namespace: no two of a cluster may share one."""
    _install("--set", f"watchNamespaces={{{controller}}}")
    yield controller
    _install("--set", "watchNamespaces={}")


def _install(*options: str) -> None:
    kt = str(Path(sys.executable).parent / "kt")
    images = ("--image", IMAGE, "--pod-image", POD_IMAGE)
    command = [kt, "install", *images, "--timeout", "120s", *options]
    with shared.turn("install"):
        completed = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert completed.returncode == 0, f"{shlex.join(command)}\n{completed.stdout}{completed.stderr}"


@pytest.fixture(scope="module")
def installed(kubectl: Kubectl, controller: str) -> Iterator[Installed]:
    """Kubetorch, and a namespace for services, which goes with all that is in it."""
    namespace = f"{TEST_NAMESPACES}{secrets.token_hex(3)}"
    kubectl("create", "namespace", namespace)
    yield Installed(namespace)
    kubectl("delete", "kubetorchworkloads", "--all", "-n", namespace, "--wait=true")
    kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def bringing(
    installed: Installed, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """The installation, as somebody uses it who may make objects of all kinds themselves.

    The account that a client certificate is exchanged for may not, and Kubetorch makes for nobody
    what they may not make.
    """
    namespace = installed.namespace
    account = f"{namespace}:bringer"
    kubectl("create", "serviceaccount", "bringer", "-n", namespace)
    binding = ("clusterrolebinding", f"{namespace}-bringer")
    kubectl("create", *binding, "--clusterrole=cluster-admin", f"--serviceaccount={account}")
    config = yaml.safe_load(Path(installed.environ["KUBECONFIG"]).read_text())
    token = kubectl("create", "token", "bringer", "-n", namespace, "--duration=2h")
    config["users"][0]["user"] = {"token": token.strip()}
    file = tmp_path_factory.mktemp("bringer") / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    installed_for_user = copy.copy(installed)
    installed_for_user.environ = {**installed.environ, "KUBECONFIG": str(file)}
    yield installed_for_user
    kubectl("delete", *binding)


@pytest.fixture
def client(tmp_path: Path, installed: Installed) -> Iterator[Callable[[str], faults.Client]]:
    """Starts programs of a user, each of them in a folder of its own."""
    with faults.clients(tmp_path, installed.environ) as start:
        yield start


@pytest.fixture
def kill_controllers(controller: str, kubectl: Kubectl) -> Iterator[Callable[[], None]]:
    """Kills the controllers, which Kubernetes starts again; the next test finds new pods of them.

    Before each further start of one container Kubernetes waits longer, up to five minutes.
    """

    def kill() -> None:
        faults.kill(faults.controllers())

    yield kill
    faults.replace_controllers(kubectl, controller)


@pytest.fixture
def kit() -> Path:
    """The folder of the kit's own scripts; only who started the cluster may stop parts of it."""
    folder = Path(__file__).parents[3] / "shared" / "cluster"
    if not (folder / "node").exists() or not MAY_BREAK:
        pytest.skip("KT_TEST_BREAK_CLUSTER=1 allows to stop parts of a cluster of the kit")
    return folder


def leave(kubectl: Kubectl, node: str) -> None:
    """Have what tests need somewhere else: operators, and the controller.

    The controller is what knows that a node is not heard of. Deployments in namespaces of tests,
    of this module or of earlier ones, are left as they are.
    """

    def are_available() -> bool:
        deployments = json.loads(kubectl("get", "deployments", "-A", "-o", "json"))["items"]
        return all(
            any(
                condition["type"] == "Available" and condition["status"] == "True"
                for condition in deployment["status"].get("conditions", ())
            )
            for deployment in deployments
            if not deployment["metadata"]["namespace"].startswith(TEST_NAMESPACES)
        )

    drain = ("drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data")
    try:
        kubectl(*drain, "--timeout=80s")
        faults.until(are_available, seconds=180)
    finally:
        kubectl("uncordon", node)


@pytest.fixture
def second(kubectl: Kubectl, installed: Installed) -> str:
    """The name of the second node, on which nothing runs that is needed."""
    name = "node2"
    if f"node/{name}" not in kubectl("get", "nodes", "-o", "name").split():
        pytest.skip("the first node is the machine that the cluster runs on")
    leave(kubectl, name)
    return name


@pytest.fixture(scope="module")
def kinds(kubectl: Kubectl) -> Iterator[set[str]]:
    """The kinds that the API server has, `Kind.group`, the test definitions among them."""
    with shared.made_once("kinds", lambda: _make_kinds(kubectl), _remove_kinds(kubectl)):
        yield _kinds(kubectl)


def _make_kinds(kubectl: Kubectl) -> dict[str, Any]:
    served_kinds = _kinds(kubectl)
    before: dict[str, str | None] = {}
    missing_definitions = [
        definition
        for definition in definitions.of(lambda name: json.loads(_definition(kubectl, name)))
        if f"{definition['spec']['names']['kind']}.{definition['spec']['group']}"
        not in served_kinds
    ]
    required = [*missing_definitions, *REQUIRED]
    kubectl("apply", "--server-side", "-f", "-", manifests=required)
    for definition in missing_definitions:
        name = definition["metadata"]["name"]
        kubectl("wait", "--for=condition=Established", "--timeout=80s", f"crd/{name}")
    if "TrainJob.trainer.kubeflow.org" in served_kinds:
        kubectl("apply", "--server-side", "-f", "-", manifests=[byo.TRAIN_RUNTIME])
        required.append(byo.TRAIN_RUNTIME)
    if "Service.serving.knative.dev" in served_kinds:
        features = json.loads(kubectl("get", *_FEATURES, "-o", "json")).get("data") or {}
        before = {name: features.get(name) for name in KNATIVE_FEATURES}
        _allow(kubectl, dict.fromkeys(KNATIVE_FEATURES, "enabled"))
    return {"required": required, "features": before}


def _remove_kinds(kubectl: Kubectl) -> Callable[[dict[str, Any]], None]:
    def remove(cluster_objects: dict[str, Any]) -> None:
        required_manifests = cluster_objects["required"]
        kubectl(
            "delete", "--ignore-not-found", "--wait=false", "-f", "-", manifests=required_manifests
        )
        if cluster_objects["features"]:
            _allow(kubectl, cluster_objects["features"])

    return remove


def _allow(kubectl: Kubectl, features: dict[str, str | None]) -> None:
    """Change what Knative allows; `None` is its default."""
    patch = json.dumps({"data": features})
    kubectl("patch", *_FEATURES, "-p", patch)


def _kinds(kubectl: Kubectl) -> set[str]:
    lines = kubectl("api-resources", "--no-headers").splitlines()
    rows = [line.split() for line in lines]
    return {f"{row[-1]}.{row[-3].rpartition('/')[0]}" for row in rows}


def _definition(kubectl: Kubectl, name: str) -> str:
    return kubectl("get", "crd", name, "-o", "json")
