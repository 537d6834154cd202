"""The error for a manifest with unknown fields, or with values of the wrong type."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kubetorch.errors import KubetorchError, SpecError, did_you_mean
from kubetorch.k8s import failures
from kubetorch.k8s.client import Client
from kubetorch.k8s.failures import FieldFault
from kubetorch.manifests.kinds import Manifest

_QUANTITY = re.compile(r"[+-]?[0-9.]+([eEinumkKMGTP]*[-+]?[0-9]*)")
#: Fields with amounts; the API server does not say which amount it cannot read.
_AMOUNTS = ("limits", "requests")
_REFERENCE = "#/components/schemas/"
_KINDS = "x-kubernetes-group-version-kind"
# A step of a path: `.containers`, or the entry of a list, `[name="main"]`.
_STEP = re.compile(r"\[[^]]*]|[^.[]+")

_log = logging.getLogger(__name__)


async def refusal(client: Client, manifest: Manifest, message: str) -> SpecError:
    """The error for an API server's message about the form of a manifest."""
    faults = failures.field_faults(message)
    texts = [_text(fault, manifest) for fault in faults]
    hints = [await _hint(client, fault, manifest) for fault in faults]
    name = manifest["metadata"]["name"]
    return SpecError(
        f"the {manifest['kind']} {name} is not as its kind has to be: {'; '.join(texts)}",
        hint="; ".join(filter(None, hints)) or "correct the manifest there",
    )


def _text(fault: FieldFault, manifest: Manifest) -> str:
    if fault.is_unknown:
        return f"there is no field {fault.path}"
    paths = [fault.path] if fault.path else []
    if not paths and "quantities must match" in fault.problem:
        paths = list(_unreadable_amounts(manifest))
    return ": ".join([", ".join(paths), fault.problem] if paths else [fault.problem])


def _unreadable_amounts(node: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401  # a node
    if isinstance(node, list):
        for number, child in enumerate(node):
            yield from _unreadable_amounts(child, f"{path}[{number}]")
    elif isinstance(node, dict):
        for key, value in node.items():
            child_path = f"{path}.{key}".lstrip(".")
            if key in _AMOUNTS and isinstance(value, dict):
                for name, amount in value.items():
                    if not _QUANTITY.fullmatch(str(amount)):
                        yield f"{child_path}.{name} ({amount!r})"
            else:
                yield from _unreadable_amounts(value, child_path)


async def _hint(client: Client, fault: FieldFault, manifest: Manifest) -> str | None:
    if not fault.is_unknown:
        return None
    version, kind = str(manifest["apiVersion"]), str(manifest["kind"])
    try:
        field_names = fields(await client.schemas(version), version, kind, fault.path)
    except KubetorchError as error:  # the hint is optional
        _log.info("fields not known kind=%s error=%s", kind, error)
        return None
    return did_you_mean(fault.path.rpartition(".")[2], field_names, likeness=0.6)


def fields(schemas: Mapping[str, Any], api_version: str, kind: str, path: str) -> list[str]:
    """The fields beside the last one of a path, such as `spec.containers[name="main"].imag`.

    `schemas` are those of an API server's OpenAPI document.
    """
    group, _, version = api_version.rpartition("/")
    meant = {"group": group, "version": version, "kind": kind}
    matching = (schema for schema in schemas.values() if meant in (schema.get(_KINDS) or ()))
    node: Mapping[str, Any] = next(matching, {})
    for step in _STEP.findall(path)[:-1]:
        node = _schema_below(schemas, _resolve(schemas, node), step)
    return sorted(_resolve(schemas, node).get("properties") or ())


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
