"""Pods of one node that declare the same data have one tree of it, where the chart allows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import conftest
from cluster.conftest import Installed, Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(300)]

PROGRAM = """
import json
import os
import kubetorch as kt


def look():
    root = os.path.realpath("/kt-data")
    return [os.environ["POD_NAME"], root, os.stat(os.path.join(root, "a.txt")).st_ino]


if __name__ == "__main__":
    os.makedirs("model", exist_ok=True)
    with open("model/a.txt", "w") as file:
        file.write("1")
    kt.put("models/base", "model", contents=True)
    compute = kt.Compute(cpus="10m", replicas=3, data={"/kt-data": "models/base"})
    print("result", json.dumps(kt.fn(look, name="sharing").to(compute)()))
"""


@pytest.fixture
def node_data(controller: str) -> Iterator[None]:
    conftest._install("--set", "nodeData.enabled=true")
    yield
    conftest._install("--set", "nodeData.enabled=false")


def look(installed: Installed, folder: Path) -> list[tuple[str, str, int]]:
    printed = installed.python(PROGRAM, folder, timeout=200)
    line = next(line for line in printed.splitlines() if line.startswith("result"))
    return [tuple(answer) for answer in json.loads(line.removeprefix("result"))]


@pytest.mark.usefixtures("node_data")
def test_pods_of_a_node_have_one_tree_in_a_folder_of_their_namespace(
    installed: Installed, kubectl: Kubectl, tmp_path: Path
) -> None:
    trees: dict[str, set[int]] = {}
    for pod, root, inode in look(installed, tmp_path):
        described = json.loads(kubectl("get", "pod", pod, "-n", installed.namespace, "-o", "json"))
        (volume,) = (v for v in described["spec"]["volumes"] if "hostPath" in v)
        assert volume["hostPath"]["path"].endswith(f"/{installed.namespace}")
        assert "kubetorch-node" in root
        trees.setdefault(described["spec"]["nodeName"], set()).add(inode)
    assert [len(inodes) for inodes in trees.values()] == [1] * len(trees)


@pytest.mark.usefixtures("node_data")
def test_where_hostpaths_are_forbidden_each_pod_has_the_data_for_itself(
    installed: Installed, kubectl: Kubectl, tmp_path: Path
) -> None:
    level = "pod-security.kubernetes.io/enforce"
    kubectl("label", "namespace", installed.namespace, f"{level}=baseline", "--overwrite")
    try:
        assert all("kubetorch-node" not in root for _, root, _ in look(installed, tmp_path))
    finally:
        kubectl("label", "namespace", installed.namespace, f"{level}-")
