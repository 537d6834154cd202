"""Variables of a manifest, with the values that pods of this machine get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubetorch.controller.backends.process import backend
from kubetorch.controller.backends.process.stores import PodAttachments, SecretFiles, VolumeFolders
from kubetorch.errors import ResourceNotAvailableError, SpecError
from kubetorch.manifests import desired_pods


def manifest(*env: dict[str, Any], kind: str = "Deployment", **container: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "python", "env": list(env), **container}
    helper = {"name": "helper", "resources": {"limits": {"memory": "64Mi"}}}
    pod = {"containers": [main, helper], "serviceAccountName": "trainer"}
    metadata = {"labels": {"team": "a"}, "annotations": {"example.com/note": "b"}}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "web", "namespace": "ns"},
        "spec": {"template": {"metadata": metadata, "spec": pod}},
    }


@pytest.fixture
def attachments(tmp_path: Path) -> PodAttachments:
    secrets = SecretFiles(tmp_path / "secrets", lambda: 0.0)
    return PodAttachments(secrets, VolumeFolders(tmp_path / "volumes", lambda: 0.0))


@pytest.fixture
def variables(attachments: PodAttachments) -> Any:
    def variables(workload_manifest: dict[str, Any]) -> dict[str, str]:
        pods = desired_pods.read(workload_manifest)
        return attachments.resolve(pods, backend.pod_facts(pods, "web-1", 1, "127.0.2.1"))

    return variables


def text(name: str, value: str | None) -> dict[str, Any]:
    return {"name": name, "value": value}


def field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def resource(name: str, amount: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"resourceFieldRef": {"resource": amount, **more}}}


def test_references_are_replaced_backwards_only(variables: Any) -> None:
    resolved_values = variables(
        manifest(
            {"name": "BLANK"},
            text("NULL", None),
            text("A", "one"),
            field("POD", "metadata.name"),
            text("B", "$(A)-$(POD)-$(BLANK)x"),
            text("C", "$$(A) $(NOPE) $A ${A} 5$ a$$b $(A"),
            text("D", "$(E)"),
            text("E", "late"),
            text("A", "two"),
        )
    )
    assert resolved_values == {
        "BLANK": "",
        "NULL": "",
        "A": "two",
        "POD": "web-1",
        "B": "one-web-1-x",
        "C": "$(A) $(NOPE) $A ${A} 5$ a$b $(A",
        "D": "$(E)",
        "E": "late",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "web-1"),
        ("metadata.namespace", "ns"),
        ("metadata.labels['team']", "a"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['example.com/note']", "b"),
        ("spec.serviceAccountName", "trainer"),
        ("status.podIP", "127.0.2.1"),
        ("status.hostIP", "127.0.0.1"),
        ("status.podIPs", "127.0.2.1"),
    ],
)
def test_fields_of_the_pod_have_values(variables: Any, path: str, value: str) -> None:
    assert variables(manifest(field("X", path))) == {"X": value}


@pytest.mark.parametrize("path", ["spec.nodeName", "metadata.uid"])
def test_what_only_a_cluster_has_gets_a_stand_in(variables: Any, path: str) -> None:
    assert variables(manifest(field("X", path)))["X"]


def test_pods_of_a_stateful_set_have_its_labels(variables: Any) -> None:
    path = "metadata.labels['apps.kubernetes.io/pod-index']"
    assert variables(manifest(field("X", path), kind="StatefulSet")) == {"X": "1"}


def test_amounts_of_resources_are_counted_in_their_divisor(variables: Any) -> None:
    resolved_values = variables(
        manifest(
            resource("MEMORY", "limits.memory"),
            resource("MEBIBYTES", "limits.memory", divisor="1Mi"),
            resource("CORES", "limits.cpu"),
            resource("MILLIS", "limits.cpu", divisor="1m"),
            resource("ASKED", "requests.cpu", divisor="1m"),
            resource("REQUESTED", "requests.memory", divisor="1Mi"),
            resource("HELPER", "limits.memory", containerName="helper", divisor="1Mi"),
            resources={"limits": {"memory": "1Gi", "cpu": "1500m"}, "requests": {"cpu": "0.5"}},
        )
    )
    assert resolved_values == {
        "MEMORY": str(2**30),
        "MEBIBYTES": "1024",
        "CORES": "2",
        "MILLIS": "1500",
        "ASKED": "500",
        "REQUESTED": "1024",
        "HELPER": "64",
    }


def test_without_a_limit_it_is_what_the_machine_has(variables: Any) -> None:
    resolved_values = variables(
        manifest(resource("CPU", "limits.cpu"), resource("M", "limits.memory"))
    )
    assert int(resolved_values["CPU"]) >= 1
    assert int(resolved_values["M"]) > 2**20


CONFIG = {"configMapKeyRef": {"name": "settings", "key": "k"}}
OPTIONAL = {"configMapKeyRef": {"name": "settings", "key": "k", "optional": True}}


def test_a_config_map_is_refused_by_name_unless_it_may_be_missing(
    variables: Any, attachments: PodAttachments
) -> None:
    with pytest.raises(ResourceNotAvailableError, match=r"the variable X .* 'settings'"):
        variables(manifest({"name": "X", "valueFrom": CONFIG}))
    source = {"configMapRef": {"name": "others"}}
    with pytest.raises(ResourceNotAvailableError, match=r"envFrom .* 'others'"):
        variables(manifest(envFrom=[source]))
    workload_manifest = manifest({"name": "X", "valueFrom": OPTIONAL})
    assert variables(workload_manifest) == {}
    notes = attachments.notes(desired_pods.read(workload_manifest))
    assert notes == ("there is no config map settings, which may be missing",)


@pytest.mark.parametrize(
    "variable",
    [
        field("X", "spec.unknown"),
        resource("X", "limits.unknown"),
        resource("X", "limits.cpu", divisor="none"),
        resource("X", "limits.cpu", containerName="none"),
        {"name": "X", "valueFrom": {"fileKeyRef": {"key": "k"}}},
    ],
)
def test_what_a_cluster_would_refuse_is_refused(variables: Any, variable: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="X"):
        variables(manifest(variable))
