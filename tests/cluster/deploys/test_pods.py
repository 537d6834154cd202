"""`pods()` and `pod_names()` on a cluster: right after a deploy, and as the cluster has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.conftest import Installed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

PROGRAM = """
import json, sys
import kubetorch as kt

def f():
    return 1

if __name__ == "__main__":
    for number in range(5):
        compute = kt.Compute(cpus="0.1", env_vars={"HUSH": "quince"}, annotations={"owner": "ann"})
        remote = kt.fn(f, name=f"listed-{number}").to(compute)
        names, (pod,) = compute.pod_names(), compute.pods()
        assert names == [pod.metadata.name], (names, pod)
        assert pod.status.phase == "Running"
        (container,) = pod.spec.containers
        values = {one.name: one.get("value") for one in container.env}
        owner = pod.metadata.annotations.owner
        shown = [pod.spec.node_name, pod.metadata.uid, owner, values["HUSH"]]
        remote.teardown()
    print("found", json.dumps(shown))
"""


def printed_answer(printed: str) -> list[str | None]:
    (line,) = (
        printed_line for printed_line in printed.splitlines() if printed_line.startswith("found ")
    )
    answer: list[str | None] = json.loads(line.removeprefix("found "))
    return answer


def test_what_has_answered_is_listed_as_the_cluster_describes_it(
    installed: Installed, tmp_path: Path
) -> None:
    node, uid, owner, hush = printed_answer(installed.python(PROGRAM, tmp_path))
    assert node
    assert uid
    assert (owner, hush) == ("ann", "quince")
