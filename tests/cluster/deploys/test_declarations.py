"""What the documents say of a declaration is true of the pods that a cluster makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster import byo
from cluster.conftest import POD_IMAGE, Installed, Kubectl
from cluster.faults import clients, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

POOL = """
import json, urllib.request

def say(what, value):
    print("\\n" + what, json.dumps(value), flush=True)

def who():
    return kt.fn(service.slow, name="found")

compute = kt.Compute(selector={"app": "found"})
remote = who().to(compute)
say("first", remote(0))
url, body = remote.endpoint(), b'{"args": [0]}'
request = urllib.request.Request(url, body, remote.request_headers, method="POST")
with urllib.request.urlopen(request) as answer:
    say("post", json.load(answer))
service.until(lambda: __import__("os").path.exists("three"))
say("same", remote(0))
say("more", who().to(kt.Compute(selector={"app": "found"}))(0))
say("found", kt.fn(name="found")(0))
service.until(lambda: __import__("os").path.exists("one"))
say("single", who().to(compute)(0))
remote.teardown()
"""
READING = """
import json

compute = kt.Compute(cpus="0.01", labels={"team": "ml"}, selector={"team": "ml"})
remote = kt.fn(service.slow, name="labelled").to(compute)
name = remote(0)
client, here = kt.globals.controller_client(), kt.config.namespace
(pod,) = client.list_pods(here, label_selector="team=ml")["items"]
assert pod["metadata"]["name"] == name, pod["metadata"]
assert client.get_pod(here, name)["spec"]["nodeName"]
# Its kubelet may say later than its agent that it runs.
service.until(lambda: client.get_pod(here, name)["status"]["phase"] == "Running")
assert isinstance(client.get_pod_logs(here, name), str)
assert client.get_deployment(here, "labelled")["spec"]["replicas"] == 1
assert client.get_service(here, "labelled")["spec"]["selector"] == {"team": "ml"}
assert client.list_pvcs(here)["items"] == []
assert len(client.list_nodes()["items"]) > 0
assert client.list_config_maps(here)["items"]
assert isinstance(client.list_secrets(here)["items"], list)
assert client.get_pod(here, "nobody", ignore_not_found=True) is None
try:
    client.get_pod(here, "nobody")
except kt.ControllerRequestError as error:
    assert error.status == 404, error
(workload,) = client.discover_resources(here, name_filter="labelled")["workloads"]
assert workload["kind"] == "Deployment"
remote.teardown()
print("read all")
"""

APPLIED = """
import copy, json

client = kt.globals.controller_client()

def shown(name, compute):
    remote = kt.fn(service.slow, name=name).to(compute)
    there = client.get_deployment(kt.config.namespace, name)
    print("\\nshown", json.dumps([remote.compute.manifest, there]), flush=True)
    again = kt.Compute.from_template({"resource": there})
    assert again.env_vars == {}, again.env_vars
    kt.fn(service.slow, name=name).to(again)(0)
    service.until(again.is_up)  # its kubelet may say later that the pod is ready
    remote.teardown()

shown("of-own-image", kt.Compute(cpus="10m", secrets=[kt.secret(name="key", values={"A": "1"})]))
compute = kt.Compute(cpus="10m", image=kt.Image(image_id="localhost/python:3.11"))
compute.image_pull_policy = "IfNotPresent"
pods = copy.deepcopy(compute.pod_spec)
pods["hostAliases"] = [{"ip": "10.1.2.3", "hostnames": ["there"]}]
compute.pod_spec = pods
shown("of-a-spec", compute)
"""


def value_of_line(line: str) -> Any:
    return json.loads(line.partition(" ")[2])


def test_a_call_of_a_pool_goes_to_the_pods_that_its_deploy_found(
    tmp_path: Path, bringing: Installed, kubectl: Kubectl
) -> None:
    namespace_option = ("-n", bringing.namespace)

    def pods() -> set[str]:
        listing = json.loads(
            kubectl("get", "pods", *namespace_option, "-l", "app=found", "-o", "json")
        )
        return {
            pod["metadata"]["name"]
            for pod in listing["items"]
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"
        }

    def scale(count: int) -> set[str]:
        kubectl(
            "apply", *namespace_option, "-f", "-", manifests=[byo.pool("found", POD_IMAGE, count)]
        )
        until(lambda: len(pods()) == count)
        return pods()

    two = scale(2)
    with clients(tmp_path, bringing.environ) as start:
        program = start(POOL)
        first = value_of_line(program.line("first"))
        assert set(first) == two
        assert value_of_line(program.line("post")) == first
        three = scale(3)
        (program.folder / "three").touch()
        assert value_of_line(program.line("same")) == first
        more = value_of_line(program.line("more"))
        assert set(more) == three
        assert value_of_line(program.line("found")) == more
        (remaining_pod,) = scale(1)
        (program.folder / "one").touch()
        assert value_of_line(program.line("single")) == remaining_pod
        program.end()


def test_pods_carry_their_selector_and_programs_read_the_objects_of_the_cluster(
    tmp_path: Path, bringing: Installed
) -> None:
    with clients(tmp_path, bringing.environ) as start:
        assert start(READING).line("read all")


def test_the_manifest_of_a_service_is_what_the_cluster_has(
    tmp_path: Path, bringing: Installed
) -> None:
    with clients(tmp_path, bringing.environ) as start:
        program = start(APPLIED)
        for name in ("of-own-image", "of-a-spec"):
            manifest, live_manifest = value_of_line(program.line("shown"))
            assert manifest["metadata"]["name"] == name
            check_applied(manifest, live_manifest)
        assert live_manifest["spec"]["template"]["spec"]["hostAliases"][0]["hostnames"] == ["there"]
        program.end()


def check_applied(expected: Any, actual: Any) -> None:
    """The cluster has all of it, and the defaults that it fills in."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            check_applied(value, actual.get(key, None if value else value))
        return
    if isinstance(expected, list):
        assert len(actual) == len(expected), (expected, actual)
        for expected_element, actual_element in zip(expected, actual, strict=True):
            check_applied(expected_element, actual_element)
        return
    assert actual == expected, (expected, actual)
