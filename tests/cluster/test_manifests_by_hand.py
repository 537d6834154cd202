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
AGAIN = "import kubetorch as kt; print(kt.Fn.from_name('good')(1))"
OWN = {
    "apiVersion": "kubetorch.com/v1alpha1",
    "kind": "KubetorchWorkload",
    "metadata": {"name": "inner"},
    "spec": {"generation": 1, "template": {"spec": {"containers": [{"name": "kubetorch"}]}}},
}
CHANGED = {"apiVersion": "kubetorch.com/v2", "kind": "Other"}
#: What the declarations of workloads have that nobody could deploy like this, by their names.
REFUSED: dict[str, dict[str, Any]] = {
    "of-ours": {"manifest": json.dumps(OWN), "podTemplatePath": ["spec", "template"]},
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
    place = ("-n", installed.namespace)
    good = json.loads(kubectl("get", "ktworkload", "good", *place, "-o", "json"))

    def written(name: str, compute: dict[str, Any]) -> dict[str, Any]:
        made = copy.deepcopy(good)
        made["metadata"] = {"name": name, "namespace": installed.namespace}
        made.pop("status", None)
        made["spec"]["compute"] = {**made["spec"].get("compute", {}), **compute}
        return made

    def made() -> set[str]:
        found = kubectl("get", "deployments,pods", *place, "-o", "name").split()
        return {one for one in found if "good" not in one}

    wrong = [written(name, compute) for name, compute in REFUSED.items()]
    taken = []
    for one in wrong:  # some the definition itself refuses
        try:
            kubectl("create", "-f", "-", given=[one])
            taken.append(one["metadata"]["name"])
        except AssertionError as refused:
            assert "invalid" in str(refused).lower() or "unknown field" in str(refused)
    assert "of-ours" in taken
    kubectl("create", "-f", "-", given=[written("plain", {})])
    time.sleep(2.0)
    assert made() == set()

    kill_controllers()
    assert installed.python(AGAIN, tmp_path).splitlines()[-1] == "2"
    listed = [one["name"] for one in json.loads(installed.run("kt", "list", "--json"))]
    assert sorted(listed) == ["good", "plain"]
    assert made() == set()
    said = kubectl("logs", "-n", "kubetorch", "deployment/kubetorch-controller", "--tail=-1")
    for name in taken:
        assert f"workload={installed.namespace}/{name}" in said
    kubectl("delete", "ktworkload", "plain", *taken, *place)


def test_a_tree_over_the_limits_slows_no_controller(installed: Installed, kubectl: Kubectl) -> None:
    where = ("svc", "kubetorch-controller", "-n", "kubetorch")
    address = kubectl("get", *where, "-o", "jsonpath={.spec.clusterIP}")
    token = kubectl("create", "token", "default", "-n", installed.namespace, "--duration=10m")
    kubectl(
        *("create", "rolebinding", "uploads", "-n", installed.namespace),
        *("--clusterrole=edit", f"--serviceaccount={installed.namespace}:default"),
    )
    tree, packed = bomb(1_500_000_000)
    wanted = replace(spec("f", tree=tree), namespace=installed.namespace)
    body = messages.encode(deploy(wanted)) + b"\n" + packed
    path = routes.workload(installed.namespace, "f", "deploy")
    slowest = 0.0
    # The address refuses connections until the nodes know the pods that the controller has now.
    until(lambda: _is_healthy(address))
    with (
        HttpClient(f"http://{address}:8080", token.strip(), timeout=90.0) as client,
        client.request("POST", path, body=body) as response,
    ):
        status, said = response.status, json.loads(response.read())
    with HttpClient(f"http://{address}:8080", "", timeout=30.0) as client:
        for _ in range(20):
            begun = time.monotonic()
            with client.request("GET", "/health") as response:
                response.read()
            slowest = max(slowest, time.monotonic() - begun)
    print(f"{len(packed):,} bytes sent, worst /health afterwards {slowest:.3f} s")
    assert (status, said["error_type"]) == (400, "ProjectTooLargeError"), said
    before = kubectl("get", "pods", "-n", "kubetorch", "-o", "json")
    restarts = [
        one["restartCount"]
        for pod in json.loads(before)["items"]
        for one in pod["status"].get("containerStatuses", ())
    ]
    assert sum(restarts) == 0, "the controller was killed for its memory"


def _is_healthy(address: str) -> bool:
    with HttpClient(f"http://{address}:8080", "", timeout=5.0) as client:
        try:
            with client.request("GET", "/health") as response:
                return response.status == 200
        except ControllerUnavailableError:
            return False
