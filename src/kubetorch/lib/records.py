"""Frozen dataclasses that take no time to define.

`dataclasses.dataclass` writes and compiles up to six methods for each class: 0.5 ms, and each of
the processes of a cold start imports some forty of them. A record inherits its methods instead.
They are slower, by 1 to 3 µs for each that is made, so what there are thousands of is better off as
a dataclass or a `msgspec.Struct`. To whoever looks (`dataclasses.fields`, `dataclasses.replace`,
`msgspec`, type checkers) it is a dataclass, but `inspect.signature` sees no fields: what users make
is better one itself. Like the specs, this needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing import Protocol

    from typing_extensions import dataclass_transform

    class _Record(Protocol):
        """What `dataclass` makes of a class."""

        __dataclass_fields__: dict[str, Field[Any]]
        __match_args__: tuple[str, ...]

else:

    def dataclass_transform(**_options: object) -> Callable[[Any], Any]:
        """As the function of that name that `typing` has from Python 3.11 on."""
        return lambda decorator: decorator


_ClassT = TypeVar("_ClassT", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: _ClassT) -> _ClassT:
    """Make a class what `dataclass(frozen=True)` makes of it.

    Raises:
        TypeError: A field is more than a type and a default: that takes a dataclass.
    """
    for name, method in _METHODS.items():
        if name not in cls.__dict__:
            setattr(cls, name, method)
    dataclass(init=False, repr=False, eq=False)(cls)
    fields: dict[str, Field[Any]] = getattr(cls, "__dataclass_fields__")  # noqa: B009
    if tuple(fields) != getattr(cls, "__match_args__"):  # noqa: B009
        raise TypeError(f"{cls.__name__} has fields that are not given, or by name alone")
    if not all(one.repr and one.compare and one.hash is None for one in fields.values()):
        raise TypeError(f"{cls.__name__} has fields with options that a record does not keep")
    return cls


def _init(self: _Record, /, *args: object, **given: object) -> None:
    fields = self.__dataclass_fields__
    name = type(self).__name__
    if len(args) > len(fields):
        raise TypeError(f"{name} takes {len(fields)} arguments, not {len(args)}")
    values: dict[str, object] = dict(zip(fields, args, strict=False))
    if not values.keys().isdisjoint(given):
        twice = ", ".join(sorted(values.keys() & given.keys()))
        raise TypeError(f"{name} was given two values for {twice}")
    for key, one in fields.items():
        if key in values:
            continue
        if key in given:
            values[key] = given.pop(key)
        elif one.default is not MISSING:
            values[key] = one.default
        elif one.default_factory is not MISSING:
            values[key] = one.default_factory()
        else:
            raise TypeError(f"{name} needs a value for {key}")
    if given:
        raise TypeError(f"{name} has no {', '.join(sorted(given))}")
    self.__dict__.update(values)
    check = getattr(self, "__post_init__", None)
    if check is not None:
        check()


def _values(self: _Record) -> tuple[object, ...]:
    return tuple(getattr(self, name) for name in self.__match_args__)


def _eq(self: _Record, other: _Record) -> object:
    if type(other) is not type(self):
        return NotImplemented
    return _values(self) == _values(other)


def _hash(self: _Record) -> int:
    return hash(_values(self))


def _repr(self: _Record) -> str:
    shown = (f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _setattr(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = {
    "__init__": _init,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
}
