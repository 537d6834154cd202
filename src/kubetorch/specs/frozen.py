"""Objects of JSON as text that compares, hashes and travels: what a spec keeps of a dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kubetorch.errors import SpecError


def freeze(value: object, *, parameter: str) -> str:
    """The text of a dictionary; equal dictionaries have the same.

    Dates, which YAML makes of what looks like one, become text again.

    Args:
        value: The dictionary.
        parameter: Name for messages.

    Raises:
        SpecError: It is no dictionary, or JSON cannot carry what is in it.
    """
    if not isinstance(value, Mapping):
        raise SpecError(f"{parameter} is {value!r}; it must be a dictionary")
    plain = _plain(value, parameter, depth=0)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def thaw(text: str) -> dict[str, Any]:
    """The dictionary that `freeze` had; a new one each time."""
    found: dict[str, Any] = json.loads(text)
    return found


#: Nobody nests deeper; what does has a cycle.
_DEEPEST = 100


def _plain(value: object, where: str, *, depth: int) -> object:
    if depth > _DEEPEST:
        raise SpecError(f"{where}: it is nested too deeply")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(f"{where} has the key {key!r}; keys must be text")
        return {key: _plain(item, f"{where}.{key}", depth=depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}.{i}", depth=depth + 1) for i, item in enumerate(value)]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise SpecError(f"{where} is {value!r}; a manifest has no such number")
    if value is None or isinstance(value, (str, int, float)):
        return value
    from datetime import date, datetime, timezone  # noqa: PLC0415  # costs 1 ms, for YAML alone

    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return moment.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    raise SpecError(f"{where} is {value!r}; it must be text, a number, a list or a dictionary")
