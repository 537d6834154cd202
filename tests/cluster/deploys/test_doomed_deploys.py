"""Deploys that cannot succeed, through the SDK and the controller of a cluster.

`test_dooms.py` has every case and measures the judges; this is what a user sees of them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.conftest import Installed, Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

#: Seconds from the fact to the error in the user's program, where the machine has other work, too:
#: long before its launch timeout.
BUDGET = 20.0
PROGRAM = """
    import concurrent.futures, json, sys, time
    import kubetorch as kt

    def hello():
        return 1

    def manifest(name, **more):
        container = {"name": "kubetorch", "image": "localhost/python:3.11", **more}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "doom-" + name},
                "spec": {"selector": {"matchLabels": {"app": name}}, "template": {
                    "metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}}}}

    def image(name):
        return kt.Compute(cpus="10m", image=kt.Image(image_id=name), launch_timeout=60)

    cases = {
        "image-not-found": lambda: image("198.18.0.1:5000/nope:1"),
        "too-large": lambda: kt.Compute(cpus=1000, launch_timeout=60),
        "no-such-label": lambda: kt.Compute(node_selector={"disk": "ssd"}, launch_timeout=60),
        "no-priority-class": lambda: kt.Compute(
            cpus="10m", priority_class_name="nope", launch_timeout=60),
        "no-kai": lambda: kt.Compute(cpus="10m", queue="nope", launch_timeout=60),
        "no-queue": lambda: kt.Compute(cpus="10m", queue_name="nope", launch_timeout=60),
        "out-of-memory": lambda: kt.Compute.from_manifest(manifest("out-of-memory",
            resources={"requests": {"cpu": "10m"}, "limits": {"memory": "12Mi"}})),
        "no-operator": lambda: kt.Compute.from_manifest(
            manifest("no-operator") | {"apiVersion": "nope.example.com/v1", "kind": "Nope"},
            pod_template_path="spec.template"),
        "registry-is-away": lambda: kt.Compute(
            cpus="10m", launch_timeout=40, image=kt.Image(image_id="198.18.0.1:5999/nope:1")),
    }

    def deploy(name):
        begun = time.time()
        try:
            kt.fn(hello, name="doom-" + name).to(cases[name]())
        except kt.KubetorchError as error:
            at = time.time()
            return {"error": type(error).__name__, "message": error.message, "hint": error.hint,
                    "pod": error.pod_name, "seconds": at - (error.since or begun),
                    "all": at - begun}
        return {"error": None}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = dict(zip(cases, pool.map(deploy, cases)))
    print("FOUND" + json.dumps(found))
"""
DOOMED = {
    "image-not-found": ("ImagePullError", "there is no image 198.18.0.1:5000/nope:1"),
    "too-large": ("UnschedulableError", "cpus, 1000 are asked"),
    "no-such-label": ("UnschedulableError", "has no label disk, ssd is asked"),
    "no-priority-class": ("MissingObjectError", "there is no PriorityClass 'nope'"),
    "no-kai": ("OperatorMissingError", "the cluster has n"),
    "no-queue": (("OperatorMissingError", "MissingObjectError"), "nope"),
    "out-of-memory": ("OutOfMemoryError", "killed for its memory"),
    "no-operator": ("OperatorMissingError", "does not serve the kind Nope"),
}


def _allow_manifests(kubectl: Kubectl, namespace: str) -> None:
    """Let the account that deploys here bring objects of its own, of any kind."""
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    account = {"kind": "ServiceAccount", "name": "kubetorch-admin", "namespace": "kubetorch"}
    group = "rbac.authorization.k8s.io"
    metadata = {"name": "anything", "namespace": namespace}
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "anything"},
        "subjects": [account],
    }
    kubectl("apply", "-f", "-", manifests=[role, binding])


@pytest.fixture(scope="module")
def outcomes(
    kubectl: Kubectl, installed: Installed, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What each deploy ended with."""
    _allow_manifests(kubectl, installed.namespace)
    printed = installed.python(PROGRAM, tmp_path_factory.mktemp("doomed"), timeout=240)
    results = json.loads(printed.rpartition("FOUND")[2])
    lines = [
        f"{name:20} {row['seconds']:6.1f} s  {row['error']}: {row['message'].splitlines()[0]:.120}"
        for name, row in results.items()
    ]
    table = "\n".join(lines)
    print(f"\n{table}")
    if os.environ.get("DOOMED_DEPLOYS_TABLE"):
        Path(os.environ["DOOMED_DEPLOYS_TABLE"]).write_text(f"{table}\n", encoding="utf-8")
    return results


@pytest.mark.parametrize("case", DOOMED)
def test_the_error_of_a_doomed_deploy_comes_in_time(outcomes: Any, case: str) -> None:
    kinds, words = DOOMED[case]
    outcome = outcomes[case]
    assert outcome["error"] in kinds if isinstance(kinds, tuple) else outcome["error"] == kinds, (
        outcome
    )
    assert words in outcome["message"]
    assert outcome["hint"]
    assert outcome["seconds"] <= BUDGET, outcome


def test_a_deploy_that_may_still_come_right_lasts_until_its_time_is_over(outcomes: Any) -> None:
    outcome = outcomes["registry-is-away"]
    assert outcome["error"] == "ServiceTimeoutError", outcome
    assert "connection refused" in outcome["message"]
    assert outcome["all"] >= 40


def test_the_next_deploy_of_a_doomed_service_succeeds(
    installed: Installed, tmp_path: Path, kubectl: Kubectl
) -> None:
    printed = installed.python(
        """
        import kubetorch as kt

        def hello():
            return "hello"

        try:
            kt.fn(hello, name="second").to(kt.Compute(cpus="10m", node_selector={"disk": "ssd"}))
        except kt.UnschedulableError:
            remote = kt.fn(hello, name="second").to(kt.Compute(cpus="10m"))
            print(remote())
        """,
        tmp_path,
    )
    assert printed.splitlines()[-1] == "hello"


def test_the_same_deploy_succeeds_once_what_refused_its_pods_is_put_right(
    installed: Installed, tmp_path: Path, kubectl: Kubectl
) -> None:
    namespace = installed.namespace
    kubectl("create", "quota", "none", "--hard=count/services=100,cpu=1m", "-n", namespace)
    program = """
        import kubetorch as kt

        def hello():
            return "hello"

        try:
            print(kt.fn(hello, name="third").to(kt.Compute(cpus="10m"))())
        except kt.QuotaExceededError as error:
            print("quota")
    """
    try:
        first = installed.python(program, tmp_path)
        second = installed.python(program, tmp_path)
    finally:
        kubectl("delete", "quota", "none", "-n", namespace)
    assert [output.splitlines()[-1] for output in (first, second)] == ["quota", "quota"]
    assert installed.python(program, tmp_path).splitlines()[-1] == "hello"


def described_events(kubectl: Kubectl, *where: str) -> str:
    return kubectl("describe", "kubetorchworkload", *where).split("Events:")[1]


@pytest.mark.usefixtures("outcomes")
def test_kubectl_shows_what_became_of_a_doomed_deploy(
    installed: Installed, kubectl: Kubectl
) -> None:
    where = ("doom-image-not-found", "-n", installed.namespace)
    # The status and its event follow the answer to the deploy, and nothing waits for them.
    deadline = time.monotonic() + 60.0
    while not {"Failed", "ImagePullError"} <= {
        *(row := kubectl("get", "ktw", *where, "--no-headers")).split()
    }:
        assert time.monotonic() < deadline, row
        time.sleep(0.5)
    while "there is no image" not in (events := described_events(kubectl, *where)):
        assert time.monotonic() < deadline, events
        time.sleep(0.5)
    assert "doom-image-not-found" in kubectl("get", "all", "-n", installed.namespace)
