"""Every kind that a user may bring: deployed, called, torn down, with its own operator."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from cluster import byo
from cluster.conftest import Installed, Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

#: Deploys, calls, and says who answered; the second time with another value of a variable.
PROGRAM = """
import json, os, sys
import kubetorch as kt

def where(word):
    return [word, os.environ["POD_NAME"], os.environ.get("STAGE")]

compute = kt.Compute.from_manifest("manifest.yaml")
compute.launch_timeout = 150
if len(sys.argv) > 1:
    compute.add_env_vars({"STAGE": sys.argv[1]})
remote = kt.fn(where, name=compute.manifest["metadata"]["name"]).to(compute)
print("\\nresult", json.dumps(remote("hello")))
if "stay" not in sys.argv:
    remote.teardown()
"""


def called(printed: str) -> list[list[str]]:
    """What each pod that was called returned."""
    (line,) = (
        printed_line for printed_line in printed.splitlines() if printed_line.startswith("result ")
    )
    answers = json.loads(line.partition(" ")[2])
    return answers if isinstance(answers[0], list) else [answers]


@pytest.fixture
def _served(request: pytest.FixtureRequest, kubectl: Kubectl) -> None:
    """Skips a kind that the cluster does not have, and has what it refers to."""
    manifest, _ = byo.KINDS[request.getfixturevalue("kind")]
    group = manifest["apiVersion"].rpartition("/")[0]
    served = kubectl("api-resources", "--api-group", group, "--no-headers")
    if manifest["kind"] not in [line.split()[-1] for line in served.splitlines() if line]:
        pytest.skip(f"the cluster has no {manifest['kind']} of {group or 'v1'}")
    if manifest["kind"] == "TrainJob":
        # It is of the whole cluster, and tests beside this one use it: nobody deletes it.
        kubectl("apply", "--server-side", "-f", "-", manifests=[byo.TRAIN_RUNTIME])


def bring(kind: str, folder: Path) -> int:
    """Write the manifest of a kind; the pods that a call goes to, 0 for one on each node."""
    manifest, pods = byo.KINDS[kind]
    (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    return pods


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize("kind", [kind for kind in byo.KINDS if kind != "Service"])
def test_it_is_deployed_called_and_torn_down(
    kind: str, tmp_path: Path, bringing: Installed, kubectl: Kubectl
) -> None:
    pods = bring(kind, tmp_path)
    answers = called(bringing.python(PROGRAM, tmp_path, timeout=200))
    assert {word for word, _, _ in answers} == {"hello"}
    names = [pod for _, pod, _ in answers]
    assert len(set(names)) == len(names)
    if pods:
        assert len(names) == pods
    reasons = ("--field-selector", "reason=Unhealthy", "-o", "jsonpath={.items[*].message}")
    event_lines = kubectl("get", "events", "-n", bringing.namespace, *reasons)
    assert "Readiness probe failed: HTTP probe failed" not in event_lines, event_lines
    name = byo.KINDS[kind][0]["metadata"]["name"]
    remaining_objects = ""
    for _ in range(120):  # what the kind's controller deletes goes in the background
        of_service = f"kubetorch.com/service={name}"
        remaining_objects = kubectl(
            "get", "pods,services", "-n", bringing.namespace, "-l", of_service, "-o", "name"
        )
        if not remaining_objects:
            break
        time.sleep(0.5)
    assert not remaining_objects


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize("kind", ["StatefulSet", "Job", "PyTorchJob", "JobSet", "TrainJob"])
def test_another_template_replaces_all_pods(kind: str, tmp_path: Path, bringing: Installed) -> None:
    bring(kind, tmp_path)
    before = called(bringing.python(PROGRAM, tmp_path, "one", "stay", timeout=200))
    after = called(bringing.python(PROGRAM, tmp_path, "two", timeout=200))
    assert {stage for *_, stage in before} == {"one"}
    assert {stage for *_, stage in after} == {"two"}
    assert len(before) == len(after)
