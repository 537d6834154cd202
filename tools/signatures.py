"""Every public name of `kubetorch`, with its signature, its methods and its properties.

python tools/signatures.py > before.txt    # in one checkout, and in another; then diff the two
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, ModuleType

import kubetorch


def public_names() -> Iterator[str]:
    """One line for each public name and for each public member of a class or module."""
    for name in sorted([*kubetorch.__all__, "errors"]):
        yield from _described(name, getattr(kubetorch, name))


def _described(name: str, value: object) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield f"{name}: module"
        for member in _public(vars(value)):
            attribute = getattr(value, member)
            is_own = getattr(attribute, "__module__", None) == value.__name__
            if is_own and not (name == "errors" and member in kubetorch.__all__):
                yield from _described(f"{name}.{member}", attribute)
    elif isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__mro__[1:-1] if _is_public(base))
        yield f"{name}: class({bases}) {_signature(value)}"
        if not issubclass(value, Enum):
            for member in _public(dict.fromkeys(dir(value))):
                yield from _member(f"{name}.{member}", inspect.getattr_static(value, member))
    elif isinstance(value, FunctionType):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _member(name: str, member: object) -> Iterator[str]:
    if isinstance(member, (staticmethod, classmethod)):
        yield f"{name}: {type(member).__name__} {_signature(member.__func__)}"
    elif isinstance(member, FunctionType):
        yield f"{name}{_signature(member)}"
    elif hasattr(type(member), "__get__"):
        can_be_set = member.fset is not None if isinstance(member, property) else True
        yield f"{name}: property{', can be set' * can_be_set}"
    else:
        yield f"{name}: {type(member).__name__}"


def _public(names: dict[str, object]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def _is_public(base: type) -> bool:
    return base.__module__ == "builtins" or base.__name__ in kubetorch.__all__


def _signature(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]  # any callable
    except (TypeError, ValueError):
        return "(?)"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in public_names())
