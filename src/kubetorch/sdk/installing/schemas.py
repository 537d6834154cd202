"""JSON Schema as far as `values.schema.json` needs it. Pure.

helm checks values by the same file. A word of JSON Schema that is not known here is an error rather
than a check that is left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kubetorch.errors import InstallError

Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_KNOWN = {
    "$schema",
    "$ref",
    "definitions",
    "type",
    "enum",
    "required",
    "properties",
    "additionalProperties",
    "items",
    "pattern",
    "minLength",
    "minimum",
    "maximum",
}


def faults(schema: Schema, value: object) -> list[str]:
    """What is wrong with a value, each with where it stands; empty when it will do.

    Raises:
        InstallError: The schema has a word that is not known here.
    """
    return list(_Check(schema).of(schema, value, ""))


class _Check:
    """Holds a value against a schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def of(self, schema: Schema, value: object, path: str) -> Iterator[str]:
        if unknown := set(schema) - _KNOWN:
            raise InstallError(f"values.schema.json has {unknown}, which is not known here")
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            yield from self.of(self._root["definitions"][name], value, path)
            return
        wanted = schema.get("type")
        if wanted is not None and not _is_a(value, wanted):
            yield f"{path or 'values'} is {value!r}; it must be of type {wanted}"
            return
        if "enum" in schema and value not in schema["enum"]:
            yield f"{path} is {value!r}; it must be one of {', '.join(map(str, schema['enum']))}"
        if isinstance(value, dict):
            yield from self._mapping(schema, value, path)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from self.of(schema.get("items", {}), item, f"{path}[{index}]")
        elif isinstance(value, str):
            yield from _text(schema, value, path)
        elif isinstance(value, (int, float)):
            yield from _number(schema, value, path)

    def _mapping(self, schema: Schema, value: dict[str, Any], path: str) -> Iterator[str]:
        properties: Schema = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{_join(path, name)} is missing"
        for name, item in value.items():
            if name in properties:
                yield from self.of(properties[name], item, _join(path, name))
            elif others is False:
                near = difflib.get_close_matches(str(name), properties, n=1)
                meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(properties)}"
                yield f"{_join(path, name)} is no value of the chart; {meant}"
            elif isinstance(others, Mapping):
                yield from self.of(others, item, _join(path, name))


def _is_a(value: object, wanted: str) -> bool:
    if isinstance(value, bool):
        return wanted == "boolean"
    return isinstance(value, _TYPES[wanted])


def _text(schema: Schema, value: str, path: str) -> Iterator[str]:
    if len(value) < schema.get("minLength", 0):
        yield f"{path} is {value!r}; it must be longer"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path} is {value!r}; it must match {schema['pattern']}"


def _number(schema: Schema, value: float, path: str) -> Iterator[str]:
    if value < schema.get("minimum", value):
        yield f"{path} is {value}; it must be at least {schema['minimum']}"
    if value > schema.get("maximum", value):
        yield f"{path} is {value}; it must be at most {schema['maximum']}"


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
