"""What the container of a manifest, or of an image, would run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kubetorch.errors import SpecError
from kubetorch.manifests import agent_container, parameters, rendering


def pod(**container: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [{"name": "main", "image": "a", **container}]},
    }


@pytest.mark.parametrize(
    ("container", "command"),
    [
        ({}, None),
        ({"command": ["python", "-m", "http.server"]}, "python -m http.server"),
        ({"command": ["echo"], "args": ["a b", "$HOME"]}, "echo 'a b' '$HOME'"),
        ({"args": ["serve", 8000]}, "serve 8000"),
        (
            {
                "command": ["echo", "$(A)", "$(B)", "$$(A)", "$(NONE)"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2"}],
            },
            "echo 1 12 '$(A)' '$(NONE)'",
        ),
        (
            {
                "command": ["echo", "$(S)"],
                "env": [{"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            },
            "echo '$(S)'",
        ),
    ],
)
def test_the_command_of_a_manifest(container: dict[str, Any], command: str | None) -> None:
    assert agent_container.command_of(pod(**container)) == command


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (None, None),
        (("python", "m.py", "a b"), "python m.py 'a b'"),
        ("python m.py && echo done", "python m.py && echo done"),
    ],
)
def test_the_command_of_an_image(command: Any, line: str | None) -> None:
    assert agent_container.command_line(command) == line


def rendered(manifest: dict[str, Any]) -> dict[str, Any]:
    compute = parameters.read_manifest(manifest)
    return rendering.render(compute, namespace="team", name="f")


def test_what_names_the_container_names_the_agent_s() -> None:
    field = {"resourceFieldRef": {"containerName": "main", "resource": "requests.cpu"}}
    manifest = pod(env=[{"name": "CPU", "valueFrom": field}])
    manifest |= {"apiVersion": "batch/v1", "kind": "Job"}
    failing = {"onExitCodes": {"containerName": "main", "operator": "In", "values": [1]}}
    item = {"path": "cpu", **field}
    spec = manifest.pop("spec")
    spec["volumes"] = [
        {"name": "a", "downwardAPI": {"items": [item]}},
        {"name": "b", "projected": {"sources": [{"downwardAPI": {"items": [item]}}]}},
    ]
    side_field = {"resourceFieldRef": {"containerName": "side", "resource": "requests.cpu"}}
    spec["containers"].append({"name": "side", "env": [{"name": "A", "valueFrom": side_field}]})
    annotations = {
        "kubectl.kubernetes.io/default-container": "main",
        "container.apparmor.security.beta.kubernetes.io/main": "runtime/default",
        "container.apparmor.security.beta.kubernetes.io/side": "unconfined",
        "said": "main",
    }
    manifest["spec"] = {
        "podFailurePolicy": {"rules": [{"action": "FailJob", **failing}]},
        "template": {"metadata": {"annotations": annotations}, "spec": spec},
    }
    rendered_manifest = rendered(manifest)
    assert '"containerName": "main"' not in json.dumps(rendered_manifest)
    assert json.dumps(rendered_manifest).count('"containerName": "kubetorch"') == 4
    assert '"containerName": "side"' in json.dumps(rendered_manifest)
    of_pods = rendered_manifest["spec"]["template"]["metadata"]["annotations"]
    assert {key: of_pods[key] for key in of_pods if "kubetorch.com" not in key} == {
        "kubectl.kubernetes.io/default-container": "kubetorch",
        "container.apparmor.security.beta.kubernetes.io/kubetorch": "runtime/default",
        "container.apparmor.security.beta.kubernetes.io/side": "unconfined",
        "said": "main",
    }


def test_pods_of_another_template_keep_what_names_their_own_container() -> None:
    def group(container: str) -> dict[str, Any]:
        field = {"resourceFieldRef": {"containerName": container, "resource": "limits.cpu"}}
        variable = {"name": "CPU", "valueFrom": field}
        main = {"name": container, "image": "a", "env": [variable]}
        return {"replicas": 1, "template": {"spec": {"containers": [main, {"name": "both"}]}}}

    groups = {"Master": group("main"), "Worker": group("both")}
    rendered_job = rendered(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "spec": {"pytorchReplicaSpecs": groups},
        }
    )
    names = re.findall(r'"containerName": "(\w+)"', json.dumps(rendered_job))
    assert names == ["pytorch", "pytorch"]


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_port_of_the_pods_that_is_the_agent_s_is_refused(is_beside: bool) -> None:
    ports = [{"name": "web", "containerPort": 32300}]
    manifest = pod(**({} if is_beside else {"ports": ports}))
    if is_beside:
        manifest["spec"]["containers"].append({"name": "proxy", "ports": ports})
    with pytest.raises(SpecError, match=r"ports\[0\] of the pods is 32300, .* the agent listens"):
        rendered(manifest)
    agents = {"name": "http1", "containerPort": 32301}
    manifest["spec"]["containers"][0].setdefault("ports", []).append(agents)
    rendered(manifest)


def test_a_port_of_another_protocol_is_another_port() -> None:
    rendered(pod(ports=[{"name": "dns", "containerPort": 32300, "protocol": "UDP"}]))
