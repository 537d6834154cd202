"""The fields of an object that each manager owns, as server-side apply notes them. Pure.

A set of fields (`fieldsV1`) is a dictionary. Its keys are steps: `f:NAME` leads to a field,
`k:{...}` to the list entry with these keys, `v:VALUE` to the list entry with this value, `i:INDEX`
to the list entry at an index; `.` is the node itself. A step with an empty dictionary is owned as a
whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Fields = dict[str, Any]
Entry = dict[str, Any]
#: Keys of an entry that say whose fields it lists.
_IDENTITY = ("manager", "operation", "apiVersion", "subresource")
_ITSELF = "."


def entries_of(manifest: Mapping[str, Any]) -> list[Entry]:
    """The entries of an object's managers, without those for its status."""
    entries = manifest["metadata"].get("managedFields") or ()
    return [entry for entry in entries if not entry.get("subresource")]


def owned(entries: Iterable[Entry], is_meant: Callable[[Entry], bool]) -> Fields:
    fields: Fields = {}
    for entry in entries:
        if is_meant(entry):
            fields = union(fields, entry.get("fieldsV1") or {})
    return fields


def union(first: Fields, second: Fields) -> Fields:
    united = dict(first)
    for key, below in second.items():
        united[key] = union(united[key], below) if key in united else below
    return united


def intersection(first: Fields, second: Fields) -> Fields:
    """The fields in both; where one set has a node as a whole, the other's fields below it."""
    if not first or not second:
        return first or second
    both = (key for key in first if key in second)
    return {key: intersection(first[key], second[key]) for key in both}


def cut(fields: Fields, path: Sequence[str]) -> tuple[Fields, Fields | None]:
    """The fields without those at a path, and the fields at that path; `None` without any."""
    step, *rest = path
    if step not in fields:
        return fields, None
    remaining = {key: below for key, below in fields.items() if key != step}
    if not rest:
        return remaining, fields[step]
    below, taken = cut(fields[step], rest)
    if below or taken is None:
        remaining[step] = below
    return remaining, taken


def nested(path: Sequence[str], fields: Fields) -> Fields:
    for step in reversed(path):
        fields = {step: fields}
    return fields


def names(path: Iterable[str]) -> list[str]:
    return [f"f:{step}" for step in path]


def key_of(**keys: str) -> str:
    """The step to the list entry that has these keys."""
    return f"k:{json.dumps(keys, separators=(',', ':'), sort_keys=True)}"


def values(node: Any, fields: Fields) -> Any:  # noqa: ANN401  # any node of an object
    """A node of an object, cut down to these fields, as it would be applied."""
    steps = [step for step in fields if step != _ITSELF]
    if not steps:
        return node
    if isinstance(node, Mapping):
        chosen = ((step.partition(":")[2], fields[step]) for step in steps)
        return {name: values(node[name], below) for name, below in chosen if name in node}
    if isinstance(node, list):
        positioned_entries = [_entry_at(node, step, fields[step]) for step in steps]
        # In the order of the object: that of containers has a meaning.
        ordered_entries = sorted(filter(None, positioned_entries), key=lambda entry: entry[0])
        return [entry_values for _, entry_values in ordered_entries]
    return node


def _entry_at(node: list[Any], step: str, fields: Fields) -> tuple[int, Any] | None:
    """The index of the list entry that a step leads to, and the entry cut down to these fields."""
    kind, _, text = step.partition(":")
    identity = json.loads(text)
    for index, entry in enumerate(node):
        if (kind == "v" and entry == identity) or (kind == "i" and index == identity):
            return index, entry
        if kind == "k" and all(entry.get(key) == value for key, value in identity.items()):
            return index, {**identity, **values(entry, fields)}
    return None


def with_fields(
    entries: Iterable[Entry], fields: Fields, identity: Mapping[str, Any]
) -> list[Entry]:
    """The entries, with these fields added to the entry of an identity, which is made if absent."""
    new_entries, is_there = [], False
    for entry in entries:
        if all(entry.get(key) == identity.get(key) for key in _IDENTITY):
            entry, is_there = {**entry, "fieldsV1": union(entry["fieldsV1"], fields)}, True
        new_entries.append(entry)
    if not is_there:
        new_entries.append({**identity, "fieldsType": "FieldsV1", "fieldsV1": fields})
    return new_entries
