"""Values of the chart: merged as helm merges them, and read from `--set`. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from kubetorch.errors import ConfigError

Values = dict[str, Any]

_NUMBER = re.compile(r"0|-?[1-9]\d*")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
#: A comma, dot, brace or equals sign that is not escaped.
_SPLIT = {mark: re.compile(rf"(?<!\\){re.escape(mark)}") for mark in ",.="}


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Values:
    """Values over values: mappings are merged, `None` removes, all else replaces."""
    found = {key: copy.deepcopy(value) for key, value in lower.items()}
    for key, value in upper.items():
        below = found.get(key)
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping):
            # What is null in a mapping of its own removes nothing and is left out too.
            found[key] = merged(below if isinstance(below, Mapping) else {}, value)
        else:
            found[key] = copy.deepcopy(value)
    return found


def layered(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Values:
    """Given values over given values: as `merged`, but a `None` stays, for the chart's own."""
    found = {key: copy.deepcopy(value) for key, value in lower.items()}
    for key, value in upper.items():
        below = found.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = layered(below or {}, value) if both else copy.deepcopy(value)
    return found


def parse_set(text: str) -> Values:
    r"""What `--set` says: `a.b=1,c={x,y}`; `\` escapes a mark.

    Raises:
        ConfigError: It cannot be read.
    """
    found: Values = {}
    for part in _parts(text):
        path, equals, value = _cut(part)
        if not equals or not path:
            raise ConfigError(
                f"--set {text!r} cannot be read: {part!r} is no key=value",
                hint="for example --set replicas=2,image.pullPolicy=Always",
            )
        keys = [_unescaped(key) for key in _SPLIT["."].split(path)]
        if any("[" in key or not key for key in keys):
            raise ConfigError(
                f"--set {text!r} cannot be read: {path!r} is no path of keys",
                hint="lists are given whole, as key={a,b}, or in a file with -f",
            )
        nested: Values = {keys[-1]: _value(value)}
        for key in reversed(keys[:-1]):
            nested = {key: nested}
        found = layered(found, nested)
    return found


def _cut(part: str) -> tuple[str, str, str]:
    match = _SPLIT["="].search(part)
    return (part, "", "") if match is None else (part[: match.start()], "=", part[match.end() :])


def _parts(text: str) -> list[str]:
    """The assignments, which commas part, but for those in braces."""
    parts: list[str] = []
    for piece in _SPLIT[","].split(text):
        if parts and "={" in parts[-1] and not parts[-1].endswith("}"):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def _value(text: str) -> object:
    if text.startswith("{") and text.endswith("}"):
        inside = text[1:-1]
        return [_value(item) for item in _SPLIT[","].split(inside)] if inside else []
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _NUMBER.fullmatch(text) else _unescaped(text)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
