"""What a user wrote into a manifest stays, whatever is set besides."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.manifests import parameters, rendering
from kubetorch.manifests.kinds import named
from kubetorch.specs.compute import ComputeSpec
from unit.manifests.users import Manifest, manifests
from unit.specs.strategies import JSON, LABEL_NAMES, WORDS

KINDS = sorted(manifests())
#: What the agent needs for itself: it runs instead of what the container ran.
TAKEN = ("command", "args")


def render(compute: ComputeSpec) -> Manifest:
    return rendering.render(compute, namespace="ns", name="service", username="me")


def lost(user: Any, rendered_value: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields that the user has set and the rendered manifest lacks."""
    if isinstance(user, dict):
        for key, value in user.items():
            if key in TAKEN and isinstance(value, list):
                continue
            if not isinstance(rendered_value, dict) or key not in rendered_value:
                yield f"{path}.{key}"
            else:
                yield from lost(value, rendered_value[key], f"{path}.{key}")
    elif isinstance(user, list):
        for number, value in enumerate(user):
            rendered_child = rendered_value[number] if len(rendered_value) > number else None
            yield from lost(value, rendered_child, f"{path}.{number}")
    elif user != rendered_value:
        yield f"{path}: {user!r} became {rendered_value!r}"


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_manifest_has_is_there_afterwards(kind: str) -> None:
    manifest = manifests()[kind]
    missing = list(lost(manifest, render(parameters.read_manifest(manifest))))
    renamed = [
        field_path
        for field_path in missing
        if field_path.endswith("containers.0.name: 'app' became 'kubetorch'")
    ]
    # A Knative Service may have one port.
    port = ".spec.template.spec.containers.0.ports.0"
    knative = [f"{port}.name: 'web' became 'http1'", f"{port}.containerPort: 80 became 32300"]
    assert missing == [*renamed, *(knative if kind == "Service" else [])]


@given(
    st.sampled_from(KINDS),
    st.dictionaries(WORDS.map("x{}".format), JSON, max_size=3),
    st.dictionaries(WORDS.map("x{}".format), JSON, max_size=3),
    st.dictionaries(LABEL_NAMES, WORDS, max_size=3),
)
def test_fields_that_nobody_knows_stay(
    kind: str, top: Manifest, spec: Manifest, labels: dict[str, str]
) -> None:
    manifest = manifests()[kind]
    manifest |= top
    manifest["spec"] |= spec
    manifest["metadata"]["labels"] |= labels
    before = copy.deepcopy(manifest)
    rendered = render(parameters.read_manifest(manifest))
    assert manifest == before
    assert {key: rendered[key] for key in top} == top
    assert {key: rendered["spec"][key] for key in spec} == spec
    assert rendered["metadata"]["labels"].items() >= labels.items()


@given(
    labels=st.dictionaries(
        st.sampled_from(
            ["app", "kubetorch.com/service", "kubetorch.com/version", "kubetorch.com/username"]
        ),
        WORDS,
        min_size=1,
    )
)
def test_labels_by_which_an_object_finds_its_pods_are_never_touched(labels: dict[str, str]) -> None:
    manifest = manifests()["Deployment"]
    manifest["spec"]["selector"] = {"matchLabels": labels}
    manifest["spec"]["template"]["metadata"]["labels"] = dict(labels)
    rendered = render(parameters.read_manifest(manifest))
    assert rendered["spec"]["selector"] == {"matchLabels": labels}
    assert rendered["spec"]["template"]["metadata"]["labels"].items() >= labels.items()


def test_labels_of_match_expressions_are_never_touched() -> None:
    manifest = manifests()["Deployment"]
    expression = {"key": "kubetorch.com/version", "operator": "In", "values": ["1"]}
    manifest["spec"]["selector"] = {"matchExpressions": [expression]}
    manifest["spec"]["template"]["metadata"]["labels"] = {"kubetorch.com/version": "1"}
    template = render(parameters.read_manifest(manifest))["spec"]["template"]
    assert template["metadata"]["labels"]["kubetorch.com/version"] == "1"


@pytest.mark.parametrize("kind", KINDS)
def test_the_agent_runs_instead_of_what_the_container_ran(kind: str) -> None:
    rendered = render(parameters.read_manifest(manifests()[kind]))
    if kind == "TrainJob":
        container = rendered["spec"]["trainer"]
    else:
        containers = list(_containers(rendered))
        assert {container["name"] for container in containers} >= {"sidecar"}
        container = next(container for container in containers if container["name"] != "sidecar")
    assert container["command"] == ["/bin/bash", "-c"]
    assert container["args"] == ["exec python -m kubetorch.pod"]


def _containers(node: Any) -> Iterator[Manifest]:
    if isinstance(node, dict):
        yield from node.get("containers", ())
        for value in node.values():
            yield from _containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value)


def test_the_container_of_our_name_is_the_agents() -> None:
    manifest = manifests()["Deployment"]
    containers = manifest["spec"]["template"]["spec"]["containers"]
    containers.append({"name": "kubetorch", "image": "registry.example/agent:1"})
    rendered_containers = render(parameters.read_manifest(manifest))["spec"]["template"]["spec"][
        "containers"
    ]
    assert [container["name"] for container in rendered_containers] == [
        "app",
        "sidecar",
        "kubetorch",
    ]
    assert rendered_containers[0]["command"] == ["sleep"]
    assert rendered_containers[2]["command"] == ["/bin/bash", "-c"]


def test_a_port_of_the_users_own_is_not_the_agents() -> None:
    rendered = render(parameters.read_manifest(manifests()["Deployment"]))
    container = rendered["spec"]["template"]["spec"]["containers"][0]
    assert container["ports"] == [
        {"name": "web", "containerPort": 80},
        {"name": "http1", "containerPort": 32300},
    ]


def test_the_port_named_http1_is_the_agents() -> None:
    manifest = manifests()["Deployment"]
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["ports"] = [{"name": "http1", "containerPort": 9000}]
    compute = parameters.read_manifest(manifest)
    container = render(compute)["spec"]["template"]["spec"]["containers"][0]
    assert compute.server_port == 9000
    assert container["ports"] == [{"name": "http1", "containerPort": 9000}]
    assert container["readinessProbe"]["httpGet"]["port"] == 9000


def test_memory_that_the_user_mounted_is_not_mounted_twice() -> None:
    manifest = manifests()["Deployment"]
    pod = manifest["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    pod["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    compute = parameters.read_manifest(manifest)
    assert compute.shared_memory_limit == "1Gi"
    rendered = render(compute)["spec"]["template"]["spec"]
    assert named(rendered["volumes"], "dshm") is None


def test_a_users_own_rights_are_not_widened() -> None:
    manifest = manifests()["Deployment"]
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["securityContext"] = {"capabilities": {"drop": ["ALL"]}, "runAsUser": 1000}
    rendered = render(parameters.read_manifest(manifest))
    container = rendered["spec"]["template"]["spec"]["containers"][0]
    assert container["securityContext"] == {"capabilities": {"drop": ["ALL"]}, "runAsUser": 1000}


def test_a_pod_template_that_the_user_named_gets_a_command_and_nothing_else() -> None:
    spec = {"containers": [{"name": "app", "image": "x", "command": ["sleep"]}]}
    manifest = {
        "apiVersion": "example.com/v1",
        "kind": "Gang",
        "metadata": {"name": "mine"},
        "spec": {"tasks": [{"count": 2}, {"template": {"spec": spec}}]},
    }
    compute = parameters.read_manifest(manifest, pod_template_path="spec.tasks.1.template")
    rendered = render(compute)["spec"]["tasks"][1]["template"]
    assert rendered["spec"] == {
        "containers": [
            {
                "name": "app",
                "image": "x",
                "command": ["/bin/bash", "-c"],
                "args": ["exec python -m kubetorch.pod"],
            }
        ]
    }
    assert rendered["metadata"]["labels"]["kubetorch.com/service"] == "service"
    same = parameters.read_manifest(manifest, pod_template_path=["spec", "tasks", 1, "template"])
    assert same == compute
