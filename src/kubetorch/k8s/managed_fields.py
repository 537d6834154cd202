"""Which fields of an object each manager owns, as server-side apply keeps it. Pure.

A set of fields (`fieldsV1`) is a dictionary: `f:NAME` is a field, `k:{...}` an entry of a list by
its keys, `v:VALUE` one by its value, `.` the thing itself; what has nothing below it is owned as a
whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Fields = dict[str, Any]
Entry = dict[str, Any]
#: Whose fields an entry lists: its manager, what that did, and the subresource.
_IDENTITY = ("manager", "operation", "apiVersion", "subresource")
_ITSELF = "."


def entries_of(one: Mapping[str, Any]) -> list[Entry]:
    """Who owns what of an object, but for its status."""
    found = one["metadata"].get("managedFields") or ()
    return [entry for entry in found if not entry.get("subresource")]


def owned(entries: Iterable[Entry], is_meant: Callable[[Entry], bool]) -> Fields:
    """The fields of all managers that are meant."""
    found: Fields = {}
    for entry in entries:
        if is_meant(entry):
            found = union(found, entry.get("fieldsV1") or {})
    return found


def union(first: Fields, second: Fields) -> Fields:
    found = dict(first)
    for key, below in second.items():
        found[key] = union(found[key], below) if key in found else below
    return found


def intersection(first: Fields, second: Fields) -> Fields:
    """What both have; where one has a whole, what the other has of it."""
    if not first or not second:
        return first or second
    both = (key for key in first if key in second)
    return {key: intersection(first[key], second[key]) for key in both}


def cut(fields: Fields, path: Sequence[str]) -> tuple[Fields, Fields | None]:
    """The fields without those at a path, and what those are; `None` if there are none."""
    step, *rest = path
    if step not in fields:
        return fields, None
    left = {key: below for key, below in fields.items() if key != step}
    if not rest:
        return left, fields[step]
    below, taken = cut(fields[step], rest)
    if below or taken is None:
        left[step] = below
    return left, taken


def at(path: Sequence[str], fields: Fields) -> Fields:
    """The fields, below a path."""
    for step in reversed(path):
        fields = {step: fields}
    return fields


def names(path: Iterable[str]) -> list[str]:
    return [f"f:{step}" for step in path]


def key_of(**keys: str) -> str:
    """The step to the entry of a list that has these keys."""
    return f"k:{json.dumps(keys, separators=(',', ':'), sort_keys=True)}"


def values(node: Any, fields: Fields) -> Any:  # noqa: ANN401  # any node of an object
    """What an object has at these fields, as it would be applied."""
    steps = [step for step in fields if step != _ITSELF]
    if not steps:
        return node
    if isinstance(node, Mapping):
        chosen = ((step.partition(":")[2], fields[step]) for step in steps)
        return {name: values(node[name], below) for name, below in chosen if name in node}
    if isinstance(node, list):
        found = [_entry(node, step, fields[step]) for step in steps]
        # In their own order: that of containers has a meaning.
        return [one for _, one in sorted(filter(None, found), key=lambda entry: entry[0])]
    return node


def _entry(node: list[Any], step: str, fields: Fields) -> tuple[int, Any] | None:
    """The place of a list's entry, and what it has at these fields."""
    kind, _, text = step.partition(":")
    wanted = json.loads(text)
    for place, one in enumerate(node):
        if (kind == "v" and one == wanted) or (kind == "i" and place == wanted):
            return place, one
        if kind == "k" and all(one.get(key) == value for key, value in wanted.items()):
            return place, {**wanted, **values(one, fields)}
    return None


def given_to(entries: Iterable[Entry], fields: Fields, identity: Mapping[str, Any]) -> list[Entry]:
    """The entries, with these fields for the one of this identity, which is made if need be."""
    found, is_there = [], False
    for entry in entries:
        if all(entry.get(key) == identity.get(key) for key in _IDENTITY):
            entry, is_there = {**entry, "fieldsV1": union(entry["fieldsV1"], fields)}, True
        found.append(entry)
    if not is_there:
        found.append({**identity, "fieldsType": "FieldsV1", "fieldsV1": fields})
    return found
