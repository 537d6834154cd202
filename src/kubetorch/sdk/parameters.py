"""What each parameter of `kt.Compute` may be: the user's value in, the specs' value out.

Every function raises `SpecError` with the parameter, the value, and what would be right.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kubetorch.errors import SerializationError, SpecError
from kubetorch.specs import quantity
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.names import check_namespace
from kubetorch.wire.codecs import CODECS, encode

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")

Pairs = tuple[tuple[str, str], ...]


def count(parameter: str, value: object) -> int:
    """A whole number of at least one; text of digits counts as one."""
    number = whole(value)
    if number is None or number < 1:
        raise SpecError(
            f"{parameter} is {value!r}; it must be a whole number of at least 1",
            hint=f"for example kt.Compute({parameter}=2)",
        )
    return number


def seconds(parameter: str, value: object) -> int:
    """A whole number of seconds, of at least one."""
    number = whole(value)
    if number is None or number < 1:
        raise SpecError(
            f"{parameter} is {value!r}; it must be a whole number of seconds, 1 or more",
            hint=f"for example kt.Compute({parameter}=600)",
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
    """Environment variables, their values as text."""
    pairs = mapping("env_vars", value, 'kt.Compute(env_vars={"STAGE": "test"})')
    found = []
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
        found.append((name, str(item)))
    return tuple(found)


def labels(value: object, *, parameter: str = "labels") -> Pairs:
    """Kubernetes labels, their values as text."""
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
    """A copy of a dictionary."""
    if not isinstance(value, Mapping):
        raise SpecError(
            f"{parameter} is {value!r}; it must be a dictionary", hint=f"for example {example}"
        )
    return dict(value)


def absolute_path(parameter: str, value: object) -> str:
    """An absolute path in a container."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise SpecError(
            f"{parameter} is {value!r}; it must be an absolute path in the container",
            hint=f'for example kt.Compute({parameter}="/app")',
        )
    return posixpath.normpath(value)


def expanded(path: str) -> Path:
    """A path of this machine, with `~` replaced."""
    return Path(path).expanduser()


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
            raise SpecError(f"allowed_serialization has {name!r}; there are {', '.join(CODECS)}")
    if not names:
        raise SpecError("allowed_serialization is empty, so nothing could be called")
    return names


def ttl(value: object) -> str:
    """A time such as `30m`."""
    quantity.seconds(value, parameter="inactivity_ttl")
    return str(value)


def logging(value: object) -> LoggingConfig:
    """How a workload logs."""
    if not isinstance(value, LoggingConfig):
        raise SpecError(
            f"logging_config is {value!r}; it must be a kt.LoggingConfig",
            hint='for example kt.Compute(logging_config=kt.LoggingConfig(level="debug"))',
        )
    return value


def namespace(value: object) -> str:
    """A Kubernetes namespace."""
    return check_namespace(value)


def init_args(value: object) -> dict[str, Any]:
    """Arguments of a constructor, by name, that JSON can carry."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise SpecError(
            f"init_args is {value!r}; it must be a dictionary with names of parameters",
            hint='for example init_args={"start": 5}',
        )
    try:
        encode("json", dict(value))
    except SerializationError as error:
        raise SpecError(f"init_args: {error.message}") from error
    return dict(value)
