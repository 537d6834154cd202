"""The fields of the kinds of an API server, by its OpenAPI document. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_REFERENCE = "#/components/schemas/"
_KINDS = "x-kubernetes-group-version-kind"
# A step of a path: `.containers`, or the entry of a list, `[name="main"]`.
_STEP = re.compile(r"\[[^]]*]|[^.[]+")


def fields(schemas: Mapping[str, Any], api_version: str, kind: str, path: str) -> list[str]:
    """The fields beside the last one of a path, such as `spec.containers[name="main"].imag`."""
    group, _, version = api_version.rpartition("/")
    meant = {"group": group, "version": version, "kind": kind}
    matching = (schema for schema in schemas.values() if meant in (schema.get(_KINDS) or ()))
    node: Mapping[str, Any] = next(matching, {})
    for step in _steps(path)[:-1]:
        node = _schema_below(schemas, _resolve(schemas, node), step)
    return sorted(_resolve(schemas, node).get("properties") or ())


def _steps(path: str) -> list[str]:
    return _STEP.findall(path)


def _schema_below(
    schemas: Mapping[str, Any], node: Mapping[str, Any], step: str
) -> Mapping[str, Any]:
    if step.startswith("["):
        return node.get("items") or {}
    schema = (node.get("properties") or {}).get(step) or node.get("additionalProperties")
    return schema if isinstance(schema, Mapping) else {}


def _resolve(schemas: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a node refers to: by `$ref`, or by `allOf` where it has a description."""
    parts: Iterable[Mapping[str, Any]] = (node, *(node.get("allOf") or ()))
    for part in parts:
        if reference := part.get("$ref"):
            schema: Mapping[str, Any] = schemas.get(str(reference).removeprefix(_REFERENCE)) or {}
            return schema
    return node
