"""Parsers of the parameters of `kt.Compute`: the user's value in, the specs' value out.

Every function raises `SpecError` with the parameter, the value, and what would be right.
"""

from __future__ import annotations

import posixpath
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

from kubetorch.errors import SerializationError, SpecError
from kubetorch.lib import terminal
from kubetorch.specs import quantity
from kubetorch.specs.callable import RecordMode
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire.codecs import CODECS, encode_arguments

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")

Pairs = tuple[tuple[str, str], ...]


def count(parameter: str, value: object) -> int:
    return _positive(parameter, value, "number of at least 1", example=2)


def seconds(parameter: str, value: object) -> int:
    return _positive(parameter, value, "number of seconds, 1 or more", example=600)


def _positive(parameter: str, value: object, description: str, *, example: int) -> int:
    number = whole(value)
    if number is None or number < 1:
        raise SpecError(
            f"{parameter} is {value!r}; it must be a whole {description}",
            hint=f"for example kt.Compute({parameter}={example})",
        )
    return number


def whole(value: object) -> int | None:
    """A whole number, also as text; `None` if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    return None


def environment(value: object) -> Pairs:
    pairs = mapping("env_vars", value, 'kt.Compute(env_vars={"STAGE": "test"})')
    variables = []
    for name, item in pairs.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise SpecError(
                f"env_vars has the name {name!r}; a name has letters, digits, '_', '-' and '.', "
                "and does not begin with a digit"
            )
        if not isinstance(item, (str, int, float)):
            raise SpecError(
                f"env_vars[{name!r}] is {item!r}; it must be text or a number",
                hint="leave a variable out rather than setting it to None",
            )
        if "\0" in str(item):
            raise SpecError(f"env_vars[{name!r}] has a NUL character")
        variables.append((name, str(item)))
    return tuple(variables)


def labels(value: object, *, parameter: str = "labels") -> Pairs:
    pairs = mapping(parameter, value, f'kt.Compute({parameter}={{"team": "ml"}})')
    for name, item in pairs.items():
        check_label_name(parameter, name)
        if item is None or (str(item) and not _LABEL_NAME.fullmatch(str(item))):
            raise SpecError(
                f"{parameter}[{name!r}] is {item!r}; a value has at most 63 letters, digits, '-', "
                "'_' and '.', and begins and ends with a letter or digit"
            )
    return tuple((str(name), str(item)) for name, item in pairs.items())


def check_label_name(parameter: str, name: object) -> None:
    """Refuse what cannot be the name of a label or an annotation."""
    prefix, slash, last = str(name).rpartition("/")
    if (slash and not _LABEL_PREFIX.fullmatch(prefix)) or not _LABEL_NAME.fullmatch(last):
        raise SpecError(
            f"{parameter} has the name {name!r}; a name has at most 63 letters, digits, '-', '_' "
            "and '.', after an optional domain and '/'"
        )


def mapping(parameter: str, value: object, example: str) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise SpecError(
            f"{parameter} is {value!r}; it must be a dictionary", hint=f"for example {example}"
        )
    return dict(value)


def absolute_path(parameter: str, value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise SpecError(
            f"{parameter} is {value!r}; it must be an absolute path in the container",
            hint=f'for example kt.Compute({parameter}="/app")',
        )
    return posixpath.normpath(value)


def texts(parameter: str, value: object) -> list[str]:
    """Texts that are not empty; one stands for itself."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Iterable) or isinstance(items, (bytes, Mapping)):
        raise SpecError(f"{parameter} is {value!r}; it must be text or a list of texts")
    listed_texts = list(items)
    for item in listed_texts:
        if not isinstance(item, str) or not item.strip() or "\0" in item:
            raise SpecError(f"{parameter} has {item!r} in it; each must be text that is not empty")
    return listed_texts


def serializations(value: object) -> tuple[str, ...]:
    """Codecs that callers may use, without repetition, in the order given."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(
            f"allowed_serialization is {value!r}; it must be a list",
            hint='for example kt.Compute(allowed_serialization=["json", "pickle"])',
        )
    names = tuple(dict.fromkeys(value))
    for name in names:
        if name not in CODECS:
            raise SpecError(
                f"allowed_serialization has {name!r}; the serializations are {', '.join(CODECS)}"
            )
    if not names:
        raise SpecError("allowed_serialization is empty, so nothing could be called")
    return names


def ttl(value: object) -> str:
    quantity.seconds(value, parameter="inactivity_ttl")
    return str(value)


def logging(value: object) -> LoggingConfig:
    if not isinstance(value, LoggingConfig):
        raise SpecError(
            f"logging_config is {value!r}; it must be a kt.LoggingConfig",
            hint='for example kt.Compute(logging_config=kt.LoggingConfig(level="debug"))',
        )
    return value


def init_args(value: object) -> dict[str, Any]:
    """Arguments of a constructor, by name, that can travel."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise SpecError(
            f"init_args is {value!r}; it must be a dictionary with names of parameters",
            hint='for example init_args={"start": 5}',
        )
    try:
        encode_arguments(value, "init_args")
    except SerializationError as error:
        is_general = error.hint is None or "pickle" in error.hint
        hint = "give plain values that the constructor makes it of, or pass it to a method"
        raise SpecError(error.message, hint=hint if is_general else error.hint) from error
    return dict(value)


def record(value: object, name: str = "record") -> RecordMode:
    """The calls that leave a record."""
    if value not in get_args(RecordMode):
        raise SpecError(f"{name} is {value!r}; it must be 'failed', 'all' or 'none'")
    return cast("RecordMode", value)


def expression(name: str, values: Mapping[str, Any], *, positional: str | None = None) -> str:
    """The call that makes an object, without the arguments that are `None`."""
    arguments = {key: value for key, value in values.items() if value is not None}
    named = [f"{key}={value!r}" for key, value in arguments.items() if key.isidentifier()]
    unpacked = {key: value for key, value in arguments.items() if not key.isidentifier()}
    parts = [
        *([positional] if positional else []),
        *named,
        *([f"**{unpacked!r}"] if unpacked else []),
    ]
    return f"{name}({', '.join(parts)})"


_PACKAGE = "kubetorch."


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about what the user's own statement says."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(terminal.shown(message, sys.stderr), category, stacklevel=level)
