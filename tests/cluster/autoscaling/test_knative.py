"""Autoscaled services on Knative: the object, calls that make pods, zero pods, new code."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cluster import faults
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
    annotations = {key.removeprefix(prefix): value for key, value in noted.items() if prefix in key}
    assert annotations == ANNOTATIONS
    assert noted["serving.knative.dev/progress-deadline"] == "3m"
    assert template["spec"]["containerConcurrency"] == 20

    # A busy cluster may have added pods meanwhile.
    pods_before = faults.pods(kubectl, installed.namespace, "scaled")
    assert pod in pods_before
    edited = PROGRAM.replace('word + "!"', 'word + "?"')
    word, pod = _result(installed.python(edited, tmp_path))
    assert (word, pod in pods_before) == ("hello?", True)
    revisions = kubectl("get", "revisions", "-n", installed.namespace, "-o", "name")
    assert len([revision for revision in revisions.split() if "scaled" in revision]) == 1


#: One call at a time in each pod, and none is kept for long.
BUSY = """
import os, sys, time
import kubetorch as kt

def work(seconds=0.0):
    time.sleep(seconds)
    print("worked", flush=True)
    return f"WORD {os.environ['POD_NAME']}"

def numbers(count):
    yield from range(count)

compute = kt.Compute(cpus="0.01", launch_timeout=150).autoscale(
    concurrency=1,
    min_scale=0,
    max_scale=4,
    window="10s",
    scale_down_delay="0s",
    scale_to_zero_pod_retention_period="0s",
)
"""
DEPLOY = BUSY + 'print("result", kt.fn(work, name="busy").to(compute)())\n'
#: Five callers at one time.
LOAD = """
import kubetorch as kt

busy = kt.Fn.from_name("busy")
pods = {word.split()[1] for word in busy.map([8.0] * 5, window=5)}
print("result", len(pods))
"""


def _pods(kubectl: Kubectl, namespace: str) -> list[str]:
    chosen = ("-l", "serving.knative.dev/service=busy", "-o", "name")
    return kubectl("get", "pods", "-n", namespace, *chosen).split()


def _zero(kubectl: Kubectl, namespace: str) -> None:
    deadline = time.monotonic() + 180
    while _pods(kubectl, namespace):
        assert time.monotonic() < deadline, "it was not scaled to zero"
        time.sleep(1)


@pytest.mark.usefixtures("_knative")
def test_calls_make_pods_none_is_kept_for_nothing_and_new_code_needs_none(
    tmp_path: Path, installed: Installed, kubectl: Kubectl
) -> None:
    namespace = installed.namespace
    first = _result(installed.python(DEPLOY.replace("WORD", "one"), tmp_path, timeout=200))
    assert first[0] == "one"
    (pods,) = _result(installed.python(LOAD, tmp_path, timeout=150))
    assert 1 < int(pods) <= 4

    _zero(kubectl, namespace)
    row = installed.run("kt", "list", "-n", namespace)
    assert "Ready" in next(line for line in row.splitlines() if line.startswith("busy"))
    assert "scaled to zero" in installed.run("kt", "describe", "busy", "-n", namespace)

    printed_again = installed.python(DEPLOY.replace("WORD", "two"), tmp_path, timeout=150)
    assert _result(printed_again)[0] == "two"
    revisions = kubectl("get", "revisions", "-n", namespace, "-o", "name").split()
    assert len([revision for revision in revisions if "busy" in revision]) == 1


@pytest.mark.usefixtures("_knative")
def test_what_the_pod_that_a_call_makes_cannot_load_fails_the_call(
    tmp_path: Path, installed: Installed, kubectl: Kubectl
) -> None:
    installed.python(DEPLOY, tmp_path, timeout=200)
    _zero(kubectl, installed.namespace)
    broken = BUSY + (
        'if "POD_NAME" in os.environ:\n    raise RuntimeError("no such thing")\n'
        'busy = kt.fn(work, name="busy").to(compute)\n'
        "try:\n    busy()\nexcept kt.CallRefusedError as error:\n"
        '    print("result", "no such thing" in str(error))\n'
    )
    assert _result(installed.python(broken, tmp_path, timeout=150)) == ["True"]
    assert "two" in installed.python(DEPLOY.replace("WORD", "two"), tmp_path, timeout=150)


@pytest.mark.usefixtures("_knative")
def test_curl_wakes_a_service_with_a_token(
    tmp_path: Path, installed: Installed, kubectl: Kubectl
) -> None:
    namespace = installed.namespace
    installed.python(DEPLOY.replace("WORD", "three"), tmp_path, timeout=200)
    _zero(kubectl, namespace)
    service = json.loads(kubectl("get", "ksvc", "busy", "-n", namespace, "-o", "json"))
    host = urlsplit(service["status"]["url"]).netloc
    ingress = json.loads(
        kubectl("get", "service", "kit-ingress-public", "-n", "knative-serving", "-o", "json")
    )
    url = f"http://{ingress['spec']['externalIPs'][0]}/work"
    token = installed.run("kt", "token", "busy", "-n", namespace).strip()
    body = json.dumps({"args": [0.0], "kwargs": {}})
    head = ("-sS", "-m", "90", "-X", "POST", "-H", f"Host: {host}")
    assert "three" in installed.run(
        "curl", *head, "-H", f"Authorization: Bearer {token}", "-d", body, url
    )
    refused = installed.run("curl", *head, "-d", body, url)
    assert "three" not in refused
    assert "unauthorized" in refused.lower()


#: Knative cuts its connection long before it ends, and then sees no load.
LONG = """
import os, time
import kubetorch as kt

def count(seconds):
    for second in range(seconds):
        time.sleep(1)
        print("second", second, flush=True)
    return os.environ["POD_NAME"]

annotations = {
    "autoscaling.knative.dev/min-scale": "0",
    "autoscaling.knative.dev/window": "6s",
    "autoscaling.knative.dev/scale-to-zero-pod-retention-period": "0s",
}
container = {"name": "kubetorch", "resources": {"requests": {"cpu": "10m"}}}
compute = kt.Compute.from_manifest({
    "apiVersion": "serving.knative.dev/v1",
    "kind": "Service",
    "metadata": {"name": "long"},
    "spec": {
        "template": {
            "metadata": {"annotations": annotations},
            "spec": {"timeoutSeconds": 10, "containers": [container]},
        }
    },
})
counter = kt.fn(count, name="long").to(compute)
spawned = counter.spawn(50)
print("result", counter(50) and spawned.result() and "done")
"""


@pytest.mark.usefixtures("_knative")
def test_calls_go_on_when_knative_has_cut_their_connections(
    tmp_path: Path, installed: Installed
) -> None:
    printed = installed.python(LONG, tmp_path, timeout=200)
    assert _result(printed) == ["done"]
    assert "second 49" in printed


#: An image of a registry that has no address: Knative looks it up before there is a pod.
NOWHERE = """
import kubetorch as kt

def work():
    return 1

image = kt.Image(image_id="registry.kubetorch-tests.invalid/team/app:1")
compute = kt.Compute(cpus="0.01", image=image, launch_timeout=60).autoscale(min_scale=1)
said = []
for _ in range(2):
    try:
        kt.fn(work, name="nowhere").to(compute)
    except kt.ImagePullError as error:
        words = ("failed to resolve image to digest", "no such host")
        said.append(all(one in str(error) for one in words))
print("result", *said)
"""


@pytest.mark.usefixtures("_knative", "kinds")
def test_a_revision_that_failed_has_knatives_reason_and_the_next_deploy_makes_another(
    tmp_path: Path, installed: Installed, kubectl: Kubectl
) -> None:
    assert _result(installed.python(NOWHERE, tmp_path, timeout=150)) == ["True", "True"]
    revisions = kubectl("get", "revisions", "-n", installed.namespace, "-o", "name").split()
    assert len([revision for revision in revisions if "nowhere" in revision]) == 2
