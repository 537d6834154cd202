"""What people write into a cluster by hand, and what strangers upload to its controller."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.conftest import Installed, Kubectl
from cluster.faults import until
from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib.http_client import HttpClient
from kubetorch.wire import messages, routes
from tests.local.agent.test_trees import bomb
from tests.local.service_harness import deploy, spec

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.timeout(300),
    pytest.mark.security,
]

PROGRAM = """
    import kubetorch as kt

    def good(number):
        return number + 1

    print(kt.fn(good).to(kt.Compute(cpus="10m"))(1))
"""
CALL_GOOD = "import kubetorch as kt; print(kt.Fn.from_name('good')(1))"
OWN_WORKLOAD = {
    "apiVersion": "kubetorch.com/v1alpha1",
    "kind": "KubetorchWorkload",
    "metadata": {"name": "inner"},
    "spec": {"generation": 1, "template": {"spec": {"containers": [{"name": "kubetorch"}]}}},
}
CHANGED = {"apiVersion": "kubetorch.com/v2", "kind": "Other"}
#: What the declarations of workloads have that nobody could deploy like this, by their names.
REFUSED: dict[str, dict[str, Any]] = {
    "of-ours": {"manifest": json.dumps(OWN_WORKLOAD), "podTemplatePath": ["spec", "template"]},
    "in-its-service": {"serviceTemplate": json.dumps(CHANGED)},
    "with-an-account": {"serviceAccountName": "default"},
    "of-no-size": {"replicas": -3},
}


def test_a_workload_that_is_written_by_hand_gets_no_more_than_a_deploy(
    installed: Installed,
    kubectl: Kubectl,
    kill_controllers: Callable[[], None],
    tmp_path: Path,
) -> None:
    assert installed.python(PROGRAM, tmp_path).splitlines()[-1] == "2"
    namespace_option = ("-n", installed.namespace)
    good = json.loads(kubectl("get", "ktworkload", "good", *namespace_option, "-o", "json"))

    def written(name: str, compute: dict[str, Any]) -> dict[str, Any]:
        workload = copy.deepcopy(good)
        workload["metadata"] = {"name": name, "namespace": installed.namespace}
        workload.pop("status", None)
        workload["spec"]["compute"] = {**workload["spec"].get("compute", {}), **compute}
        return workload

    def made_objects() -> set[str]:
        names = kubectl("get", "deployments,pods", *namespace_option, "-o", "name").split()
        return {name for name in names if "good" not in name}

    wrong = [written(name, compute) for name, compute in REFUSED.items()]
    taken = []
    for workload in wrong:  # some the definition itself refuses
        try:
            kubectl("create", "-f", "-", manifests=[workload])
            taken.append(workload["metadata"]["name"])
        except AssertionError as refused:
            assert "invalid" in str(refused).lower() or "unknown field" in str(refused)
    assert "of-ours" in taken
    kubectl("create", "-f", "-", manifests=[written("plain", {})])
    time.sleep(2.0)
    assert made_objects() == set()

    kill_controllers()
    assert installed.python(CALL_GOOD, tmp_path).splitlines()[-1] == "2"
    listed = [service["name"] for service in json.loads(installed.run("kt", "list", "--json"))]
    assert sorted(listed) == ["good", "plain"]
    assert made_objects() == set()
    log_text = kubectl("logs", "-n", "kubetorch", "deployment/kubetorch-controller", "--tail=-1")
    for name in taken:
        assert f"workload={installed.namespace}/{name}" in log_text
    kubectl("delete", "ktworkload", "plain", *taken, *namespace_option)


def test_a_tree_over_the_limits_slows_no_controller(installed: Installed, kubectl: Kubectl) -> None:
    where = ("svc", "kubetorch-controller", "-n", "kubetorch")
    address = kubectl("get", *where, "-o", "jsonpath={.spec.clusterIP}")
    token = kubectl("create", "token", "default", "-n", installed.namespace, "--duration=10m")
    kubectl(
        *("create", "rolebinding", "uploads", "-n", installed.namespace),
        *("--clusterrole=edit", f"--serviceaccount={installed.namespace}:default"),
    )
    tree, packed = bomb(1_500_000_000)
    workload_spec = replace(spec("f", tree=tree), namespace=installed.namespace)
    body = messages.encode(deploy(workload_spec)) + b"\n" + packed
    path = routes.workload(installed.namespace, "f", "deploy")
    slowest = 0.0
    # The address refuses connections until the nodes know the pods that the controller has now.
    until(lambda: _is_healthy(address))
    with (
        HttpClient(f"http://{address}:8080", token.strip(), timeout=90.0) as client,
        client.request("POST", path, body=body) as response,
    ):
        status, answer = response.status, json.loads(response.read())
    with HttpClient(f"http://{address}:8080", "", timeout=30.0) as client:
        for _ in range(20):
            begun = time.monotonic()
            with client.request("GET", "/health") as response:
                response.read()
            slowest = max(slowest, time.monotonic() - begun)
    print(f"{len(packed):,} bytes sent, worst /health afterwards {slowest:.3f} s")
    assert (status, answer["error_type"]) == (400, "ProjectTooLargeError"), answer
    before = kubectl("get", "pods", "-n", "kubetorch", "-o", "json")
    restarts = [
        container_status["restartCount"]
        for pod in json.loads(before)["items"]
        for container_status in pod["status"].get("containerStatuses", ())
    ]
    assert sum(restarts) == 0, "the controller was killed for its memory"


def _is_healthy(address: str) -> bool:
    with HttpClient(f"http://{address}:8080", "", timeout=5.0) as client:
        try:
            with client.request("GET", "/health") as response:
                return response.status == 200
        except ControllerUnavailableError:
            return False
