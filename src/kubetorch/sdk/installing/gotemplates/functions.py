"""The functions of templates: Go's own, and those of sprig and helm that the chart uses.

A number from the values is a `Figure`: helm keeps it as the text that it was written as, or as a
number, depending on where it was set, so that its truth and its comparisons differ. Such a number
can be written and given to `int`; whatever else is done with it is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

#: What pipelines have: text, whole numbers, truth, nothing, lists, mappings, figures.
Value = Any

_VERB = re.compile(r"%(.)")


class Unfit(Exception):  # becomes an InstallError that says where
    """A function cannot do with its arguments."""


class Refused(Exception):  # becomes a ConfigError
    """The template says that a value will not do."""


@dataclass(frozen=True)
class Figure:
    """A number from the values."""

    number: int | float


def figure(value: Value) -> Value:
    """A value of the data as the template gets it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Figure(value) if is_number else value


def described(value: Value) -> str:
    """What a value is called in errors."""
    if value is None:
        return "nothing (a value that is not set)"
    return f"the {type(value).__name__} {value!r}"


def truth(value: Value) -> bool:
    """Whether a value counts as true."""
    if isinstance(value, Figure):
        raise Unfit(f"the number {value.number} is neither true nor false: compare it, with int")
    return bool(value)


def written(value: Value) -> str:
    """How a value is written."""
    if value is None:
        return ""
    if isinstance(value, Figure):
        value = value.number
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, float) and re.fullmatch(r"-?\d+\.\d+", repr(value)):
        return repr(value)
    raise Unfit(f"{described(value)} cannot be written as it is: use toYaml or quote")


def call(name: str, arguments: list[Value]) -> Value:
    """The value of a function.

    Raises:
        Unfit: There is none of that name, or the arguments are not for it.
        Refused: It is `fail` or `required`, and says no.
    """
    function = _FUNCTIONS.get(name)
    if function is None:
        raise Unfit(f"the function {name} is not known; there are {', '.join(sorted(_FUNCTIONS))}")
    try:
        return function(*arguments)
    except (TypeError, AttributeError, IndexError) as error:
        shown = ", ".join(described(one) for one in arguments)
        raise Unfit(f"{name} cannot do with {shown}") from error


# ------------------------------------------------------------------------------------ comparing


def _comparable(value: Value) -> Value:
    if isinstance(value, Figure):
        raise Unfit(f"the number {value.number} from the values is compared with int only")
    return value


def _equal(first: Value, *others: Value) -> bool:
    if not others:
        raise Unfit("eq needs two values")
    _comparable(first)
    for other in others:
        if type(_comparable(other)) is not type(first) and None not in (first, other):
            raise Unfit(f"eq compares {described(first)} with {described(other)}")
    return first in others


def _order(holds: Callable[[int, int], bool]) -> Callable[[Value, Value], bool]:
    def compare(first: Value, second: Value) -> bool:
        if type(first) is not int or type(second) is not int:
            raise Unfit(f"{described(first)} and {described(second)} are no two whole numbers")
        return holds(first, second)

    return compare


# --------------------------------------------------------------------------------------- texts


def _text(value: Value) -> str:
    if not isinstance(value, str):
        raise Unfit(f"{described(value)} is no text")
    return value


def _quote(*values: Value) -> str:
    shown = (json.dumps(written(one), ensure_ascii=False) for one in values if one is not None)
    return " ".join(shown)


def _squote(*values: Value) -> str:
    return " ".join(f"'{written(one)}'" for one in values if one is not None)


def _printf(pattern: str, *values: Value) -> str:
    remaining = list(values)

    def shown(match: re.Match[str]) -> str:
        verb = match[1]
        if verb == "%":
            return "%"
        value = remaining.pop(0)
        if verb == "d" and type(value) is int:
            return str(value)
        if verb == "q" and isinstance(value, str):
            return _quote(value)
        if verb == "v" or (verb == "s" and isinstance(value, str)):
            return written(value)
        raise Unfit(f"printf cannot write {described(value)} as %{verb}")

    text = _VERB.sub(shown, _text(pattern))
    if remaining:
        raise Unfit(f"printf has {len(remaining)} values too many")
    return text


def _indent(spaces: int, text: str) -> str:
    margin = " " * spaces
    return margin + _text(text).replace("\n", f"\n{margin}")


def _truncate(length: int, text: str) -> str:
    return _text(text)[:length] if length >= 0 else _text(text)[length:]


def _trim_suffix(suffix: str, text: str) -> str:
    return _text(text).removesuffix(suffix)


def _trim_prefix(prefix: str, text: str) -> str:
    return _text(text).removeprefix(prefix)


def _join(separator: str, values: list[Value]) -> str:
    return _text(separator).join(written(one) for one in values)


# ---------------------------------------------------------------------------- data and decisions


def _plain(value: Value) -> Value:
    """A value without figures."""
    if isinstance(value, Figure):
        return value.number
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _to_yaml(value: Value) -> str:
    text = yaml.safe_dump(_plain(value), default_flow_style=False, allow_unicode=True, width=2**30)
    # A document of one scalar has an end of its own.
    return text.removesuffix("\n...\n").removesuffix("\n")


def _default(replacement: Value, value: Value = None) -> Value:
    return value if truth(value) else replacement


def _required(message: str, value: Value) -> Value:
    if value is None or value == "":
        raise Refused(_text(message))
    return value


def _fail(message: str) -> Value:
    raise Refused(_text(message))


def _index(value: Value, *keys: Value) -> Value:
    for key in keys:
        if isinstance(value, Mapping):
            value = figure(value.get(_text(key)))
        elif isinstance(value, list) and type(key) is int:
            value = figure(value[key])
        else:
            raise Unfit(f"{described(value)} has no index {key!r}")
    return value


def _dict(*pairs: Value) -> dict[str, Value]:
    if len(pairs) % 2:
        raise Unfit("dict needs a value for each key")
    return {_text(key): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)}


def _int(value: Value) -> int:
    if isinstance(value, Figure):
        return int(value.number)
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    if isinstance(value, int):
        return int(value)
    raise Unfit(f"{described(value)} is no whole number")


def _length(value: Value) -> int:
    if not isinstance(value, (str, list, Mapping)):
        raise Unfit(f"{described(value)} has no length")
    return len(value.encode()) if isinstance(value, str) else len(value)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "not": lambda value: not truth(value),
    "eq": _equal,
    "ne": lambda first, second: not _equal(first, second),
    "gt": _order(lambda first, second: first > second),
    "ge": _order(lambda first, second: first >= second),
    "lt": _order(lambda first, second: first < second),
    "le": _order(lambda first, second: first <= second),
    "len": _length,
    "index": _index,
    "printf": _printf,
    "quote": _quote,
    "squote": _squote,
    "indent": _indent,
    "nindent": lambda spaces, text: "\n" + _indent(spaces, text),
    "trunc": _truncate,
    "trim": lambda text: _text(text).strip(),
    "trimSuffix": _trim_suffix,
    "trimPrefix": _trim_prefix,
    "lower": lambda text: _text(text).lower(),
    "join": _join,
    "toYaml": _to_yaml,
    "default": _default,
    "empty": lambda value: not truth(value),
    "required": _required,
    "fail": _fail,
    "list": lambda *values: list(values),
    "dict": _dict,
    "hasKey": lambda mapping, key: key in mapping,
    "int": _int,
    "toString": written,
    "ternary": lambda yes, no, holds: yes if truth(holds) else no,
}
