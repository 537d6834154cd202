"""Fields of kinds, as an API server describes them."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes import malformed


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


SCHEMAS: dict[str, Any] = {
    "Deployment": {
        "x-kubernetes-group-version-kind": [
            {"group": "apps", "version": "v1", "kind": "Deployment"}
        ],
        "properties": {"spec": {"allOf": [ref("Spec")], "description": "what is wanted"}},
    },
    "Spec": {
        "properties": {
            "replicas": {"type": "integer"},
            "containers": {"type": "array", "items": {"allOf": [ref("Container")]}},
            "labels": {"additionalProperties": {"type": "string"}},
        }
    },
    "Container": {"properties": {"image": {}, "name": {}}},
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("specs", ["spec"]),
        ("spec.replica", ["containers", "labels", "replicas"]),
        ('spec.containers[name="a.b"].imag', ["image", "name"]),
        ("spec.containers[0].imag", ["image", "name"]),
        ("spec.labels.a.b", []),
        ("spec.nothing.below", []),
    ],
)
def test_the_fields_beside_a_path(path: str, fields: list[str]) -> None:
    assert malformed.fields(SCHEMAS, "apps/v1", "Deployment", path) == fields


def test_of_a_kind_that_is_not_described_none_are_known() -> None:
    assert malformed.fields(SCHEMAS, "apps/v1", "Other", "spec.x") == []
