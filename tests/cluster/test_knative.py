"""Autoscaled services on Knative: the object that is made, calls, new code without a new pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.conftest import Installed, Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROGRAM = """
import os
import kubetorch as kt

def where(word):
    return [word + "!", os.environ["POD_NAME"]]

compute = kt.Compute(cpus="0.01", launch_timeout=150).autoscale(
    target=10,
    window="60s",
    metric="concurrency",
    target_utilization=70,
    min_scale=1,
    max_scale=3,
    initial_scale=1,
    concurrency=20,
    scale_to_zero_pod_retention_period="10m",
    scale_down_delay="2m",
    progress_deadline="3m",
    activation_scale=2,
)
print("result", *kt.fn(where, name="scaled").to(compute)("hello"))
"""
#: What the compute above says in Knative's words.
ANNOTATIONS = {
    "class": "kpa.autoscaling.knative.dev",
    "target": "10",
    "window": "60s",
    "metric": "concurrency",
    "target-utilization-percentage": "70",
    "min-scale": "1",
    "max-scale": "3",
    "initial-scale": "1",
    "scale-to-zero-pod-retention-period": "10m",
    "scale-down-delay": "2m",
    "activation-scale": "2",
}


@pytest.fixture
def _knative(kubectl: Kubectl) -> None:
    if "services" not in kubectl("api-resources", "--api-group", "serving.knative.dev"):
        pytest.skip("the cluster has no Knative")


def _result(printed: str) -> list[str]:
    return next(line for line in printed.splitlines() if line.startswith("result ")).split()[1:]


@pytest.mark.usefixtures("_knative")
def test_a_scaled_service_is_made_called_and_takes_new_code_without_a_new_pod(
    tmp_path: Path, installed: Installed, kubectl: Kubectl
) -> None:
    word, pod = _result(installed.python(PROGRAM, tmp_path, timeout=200))
    assert word == "hello!"
    service = json.loads(kubectl("get", "ksvc", "scaled", "-n", installed.namespace, "-o", "json"))
    template = service["spec"]["template"]
    noted = template["metadata"]["annotations"]
    prefix = "autoscaling.knative.dev/"
    said = {key.removeprefix(prefix): value for key, value in noted.items() if prefix in key}
    assert said == ANNOTATIONS
    assert noted["serving.knative.dev/progress-deadline"] == "3m"
    assert template["spec"]["containerConcurrency"] == 20

    edited = PROGRAM.replace('word + "!"', 'word + "?"')
    assert _result(installed.python(edited, tmp_path)) == ["hello?", pod]
    revisions = kubectl("get", "revisions", "-n", installed.namespace, "-o", "name")
    assert len(revisions.split()) == 1
