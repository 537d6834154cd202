"""Specs as fields of a Kubernetes object, and back. Pure.

The words of a spec become those of Kubernetes (`inactivity_ttl` is `inactivityTtl`), pairs become
entries with `name` and `value`, and what has its default is left out, so that people can read it.
Nothing is lost: `load` gives back what `dump` was given, also when the API server has sorted the
keys and forgotten which numbers had a fraction.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kubetorch.specs.image import Step
from kubetorch.wire import messages

_T = TypeVar("_T")
#: Names and values, in the order given.
PAIRS = tuple[tuple[str, str], ...]


def dump(value: Any) -> Any:  # noqa: ANN401  # whatever a spec consists of
    """A spec, or a part of one, as JSON values."""
    if dataclasses.is_dataclass(value):
        found = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if part is not None and part != default_of(field):
                found[key(field.name)] = dump(part)
        return found
    if isinstance(value, tuple):
        return [
            {"name": part[0], "value": part[1]} if isinstance(part, tuple) else dump(part)
            for part in value
        ]
    return value


def load(kind: type[_T], value: object) -> _T:
    """A spec of what `dump` made of it.

    Raises:
        ProtocolError: It is something else.
    """
    return messages.decode(kind, messages.encode(_words(kind, value)))


def key(field: str) -> str:
    """What a field is called in Kubernetes."""
    return re.sub("_([a-z0-9])", lambda found: found[1].upper(), field.lstrip("_"))


def default_of(field: dataclasses.Field[Any]) -> object:
    """The value of a field where nothing else is said; `MISSING` when something has to be."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def arms(kind: Any) -> list[Any]:  # noqa: ANN401  # a type, which may be a union
    """What a type may be, `None` left out."""
    is_union = get_origin(kind) is not None and type(None) in get_args(kind)
    found = get_args(kind) if is_union else (kind,)
    return [arm for arm in found if arm is not type(None)]


def _words(kind: Any, value: object) -> object:  # noqa: ANN401  # a type, which may be a union
    """What `dump` made, in the words that messages have."""
    arm = arms(kind)[0]
    if isinstance(value, list):
        if arm == PAIRS:
            return [[one.get("name"), one.get("value")] for one in map(_mapping, value)]
        return [_words(get_args(arm)[0] if get_args(arm) else Any, one) for one in value]
    if not isinstance(value, dict):
        return value
    if arm is Step:
        return {_field(name): part for name, part in value.items()}
    if not dataclasses.is_dataclass(arm):
        return value
    hints = get_type_hints(arm)
    found: dict[str, object] = {}
    for field in dataclasses.fields(arm):
        if key(field.name) in value:
            found[field.name] = _words(hints[field.name], value[key(field.name)])
        elif default_of(field) is dataclasses.MISSING and type(None) in get_args(hints[field.name]):
            found[field.name] = None
    return found


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _field(name: str) -> str:
    return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)
