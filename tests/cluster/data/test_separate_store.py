"""A data store of its own: a Deployment to which pods send blobs and from which they fetch them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from cluster import faults
from cluster.conftest import Installed, Kubectl
from cluster.controller.test_faults_storage import install

#: Each installs the controller anew.
pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(300)]

STORES = ("-n", "kubetorch", "-l", "app.kubernetes.io/component=store")
#: Larger than a chunk of a file: its content says where it is cut.
SIZE = 5_000_000
SERVICE = f"""
import os
import kubetorch as kt

class Pod:
    def put(self, key):
        with open("/tmp/put", "wb") as file:
            file.write(os.urandom({SIZE}))
        kt.put(key, "/tmp/put")
        return os.environ["POD_IP"]

    def get(self, key):
        kt.get(key, "/tmp/got/")
        return sum(entry.stat().st_size for entry in os.scandir("/tmp/got"))
"""
BEGINNING = """
from pathlib import Path
import kubetorch as kt
from service import Pod
pod = kt.cls(Pod, name="pod").to(kt.Compute(cpus="10m"), stream_logs=False)
"""


@pytest.fixture(scope="module")
def run(
    installed: Installed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[str]]]:
    """Runs programs of a user of an installation with such a store; the lines that they print."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "pyproject.toml").touch()
    (folder / "service.py").write_text(SERVICE)
    install("store.separate.enabled=true", "store.separate.persistence.enabled=true")
    try:
        yield lambda program: installed.python(BEGINNING + program, folder).splitlines()
    finally:
        install("store.separate.enabled=false", "store.separate.persistence.enabled=false")


def test_pods_send_to_the_store_what_laptops_get(
    run: Callable[[str], list[str]], kubectl: Kubectl
) -> None:
    ip, size, got_size = run("""
print(pod.put("of/pod"))
print(pod.get("of/pod"))
kt.get("of/pod", "back/")
print(sum(path.stat().st_size for path in Path("back").iterdir()))
""")[-3:]
    assert (size, got_size) == (str(SIZE), str(SIZE))
    assert ip in {line["source"] for line in _audit(kubectl) if line["path"].endswith("/blobs")}


def test_keys_outlive_the_pods_of_store_and_controller(
    run: Callable[[str], list[str]], kubectl: Kubectl, kill_controllers: Callable[[], None]
) -> None:
    run('Path("note").write_text("kept"); kt.put("note", "note")')
    kubectl("delete", "pods", *STORES, "--grace-period=0", "--force")
    kill_controllers()
    faults.until(lambda: _is_ready(kubectl))
    printed = run('kt.get("note", "again/"); print(Path("again/note").read_text())')
    assert printed[-1] == "kept"


def test_keys_of_a_service_end_with_it_also_when_the_store_was_away(
    run: Callable[[str], list[str]], kubectl: Kubectl, installed: Installed
) -> None:
    run('Path("state").write_text("1"); kt.put("pod/state", "state"); kt.put("other", "state")')
    kubectl("scale", "deployment/kubetorch-store", "-n", "kubetorch", "--replicas=0")
    faults.until(lambda: not _pods(kubectl))
    run("pod.teardown()")
    kubectl("scale", "deployment/kubetorch-store", "-n", "kubetorch", "--replicas=1")
    faults.until(lambda: _is_ready(kubectl))
    # By the command: `run` would deploy the service again.
    faults.until(lambda: "pod/" not in installed.run("kt", "ls"))
    assert "other" in installed.run("kt", "ls")


def _pods(kubectl: Kubectl) -> list[dict]:
    return json.loads(kubectl("get", "pods", *STORES, "-o", "json"))["items"]


def _is_ready(kubectl: Kubectl) -> bool:
    """Whether a store leads and serves."""
    return any(
        status["ready"] and pod["metadata"]["labels"].get("kubetorch.com/leads") == "true"
        for pod in _pods(kubectl)
        for status in pod["status"].get("containerStatuses", ())
    )


def _audit(kubectl: Kubectl) -> list[dict]:
    """The audit lines of the store."""
    lines = kubectl("logs", "deployment/kubetorch-store", "-n", "kubetorch").splitlines()
    audit_lines = [line.partition("kubetorch.audit ")[2] for line in lines]
    return [json.loads(line) for line in audit_lines if line]
