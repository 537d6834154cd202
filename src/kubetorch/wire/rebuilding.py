"""Exceptions made anew: what JSON cannot tell of one, and an instance without its constructor.

Standard library only, and nothing that has to be imported when an exception is described: there
may be no file descriptor left for that.

Attributes of an exception may live in C (`OSError.filename`) or be tuples, bytes and paths. Such a
value is an object of one key, which says what it is. What cannot travel at all stands in the `args`
as text, so that whatever formats them makes the same text here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

#: Characters of JSON that the members of one exception may have together.
LIMIT = 256 * 1024
_DEPTH, _LENGTH = 8, 1000
#: Attributes of built-in classes that repeat others, or hold the user's objects themselves.
_LEFT_OUT = frozenset({"obj", "exceptions", "message"})
_SCALARS = (type(None), bool, int)

Describe = Callable[[BaseException], dict[str, Any] | None]
Rebuild = Callable[[dict[str, Any]], Exception]


class StandIn(str):
    """An argument that could not travel: its text, and what `repr` shows of it."""

    shown = ""

    def __repr__(self) -> str:
        return self.shown


# ------------------------------------------------------------------------- exception → members


def members_of(error: BaseException, describe: Describe) -> dict[str, Any]:
    """What of an exception its plain `args` and `state` do not tell, by attribute.

    Args:
        error: The exception.
        describe: Gives what stands for an exception among the arguments, if anything does.
    """
    found: dict[str, Any] = {}
    room = LIMIT
    for name, value in _candidates(error):
        try:
            packed = _Packing(describe, stands_in=name == "args").pack(value)
            room -= (size := len(json.dumps(packed)))
        except Exception:  # noqa: BLE001  # the user's __repr__; what does not fit
            continue
        if room < 0:
            room += size
        else:
            found[name] = packed
    return found


def _candidates(error: BaseException) -> Iterator[tuple[str, Any]]:
    if not all(_is_json(one) for one in error.args):
        yield "args", error.args
    for name in _names_in_c(error):
        try:
            value = getattr(error, name)
        except Exception:  # noqa: BLE001  # it was never set
            continue
        if value is not None:
            yield name, value
    for name, value in getattr(error, "__dict__", {}).items():
        if name != "__notes__" and not _is_json(value):
            yield name, value


def _names_in_c(error: BaseException) -> Iterator[str]:
    """Attributes that are not in its `__dict__`: those of built-in classes, and of `__slots__`."""
    for cls in type(error).__mro__:
        if cls is BaseException:
            return
        for name, kind in vars(cls).items():
            is_member = isinstance(kind, (MemberDescriptorType, GetSetDescriptorType))
            if is_member and not name.startswith("__") and name not in _LEFT_OUT:
                yield name


def _is_json(value: object) -> bool:
    """Whether it comes out of JSON as it went in."""
    if type(value) is str:
        return is_text(value)
    if type(value) is float:
        return value - value == 0
    if type(value) is list:
        return all(_is_json(one) for one in value)
    if type(value) is dict:
        return all(type(key) is str and _is_json([key, one]) for key, one in value.items())
    return type(value) in _SCALARS


def is_text(value: str) -> bool:
    """Whether it can be encoded: lone surrogates cannot, as those of undecodable file names."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Packing:
    """Values on their way into JSON.

    Args:
        describe: See `members_of`.
        stands_in: Whether text stands in for what cannot travel; else `pack` raises.
    """

    def __init__(self, describe: Describe, *, stands_in: bool) -> None:
        self._describe = describe
        self._stands_in = stands_in

    def pack(self, value: object, depth: int = 0) -> Any:  # noqa: ANN401  # of JSON
        """The value, with a tag wherever JSON would change it.

        Raises:
            ValueError: It cannot travel.
        """
        if depth > _DEPTH or (hasattr(value, "__len__") and len(value) > LIMIT):
            raise ValueError("too deep or too long")
        kind, deeper = type(value), depth + 1
        if kind in _SCALARS:
            return value
        if isinstance(value, (list, tuple, dict)) and len(value) > _LENGTH:
            raise ValueError("too long")
        if kind is list:
            return [self.pack(one, deeper) for one in value]  # type: ignore[attr-defined]  # it is
        return self._tagged(value, deeper)

    def _tagged(self, value: Any, deeper: int) -> Any:  # noqa: ANN401  # any value, and of JSON
        kind = type(value)
        if kind is str:
            return value if is_text(value) else {"text": value.encode(errors="surrogatepass").hex()}
        if kind is float:
            return value if value - value == 0 else {"float": repr(value)}
        if kind is tuple:
            return {"tuple": [self.pack(one, deeper) for one in value]}
        if kind is dict:
            return {"dict": [[self.pack(one, deeper) for one in item] for item in value.items()]}
        if kind is bytes:
            return {"bytes": value.hex()}
        if hasattr(kind, "__fspath__") and kind.__module__.partition(".")[0] == "pathlib":
            return {"path": self.pack(os.fspath(value), deeper)}
        if isinstance(value, BaseException):
            described = self._describe(value)
            if described is not None:
                return {"error": described}
        if not self._stands_in:
            raise ValueError(f"a value of type {kind.__qualname__}")
        return {"shown": [self.pack(str(value)), self.pack(repr(value))]}


# ------------------------------------------------------------------------- members → exception


def unpack_members(members: Mapping[str, Any], rebuild: Rebuild) -> dict[str, Any]:
    """The attributes that `members_of` told; those that make no sense are left out."""
    found = {}
    for name, packed in members.items():
        try:
            found[name] = _unpack(packed, rebuild)
        except (ValueError, TypeError, RecursionError):
            continue
    return found


def _unpack(packed: Any, rebuild: Rebuild) -> Any:  # noqa: ANN401  # of JSON, and any value
    if isinstance(packed, list):
        return [_unpack(one, rebuild) for one in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, content),) = packed.items()
    if tag == "tuple":
        return tuple(_unpack(one, rebuild) for one in content)
    if tag == "dict":
        return {_unpack(key, rebuild): _unpack(one, rebuild) for key, one in content}
    if tag == "text":
        return bytes.fromhex(content).decode(errors="surrogatepass")
    if tag == "bytes":
        return bytes.fromhex(content)
    if tag == "float":
        return float(content)
    if tag == "error":
        return rebuild(content)
    if tag == "path":
        from pathlib import Path  # noqa: PLC0415  # few failures have one

        return Path(_unpack(content, rebuild))
    if tag != "shown":
        raise ValueError(f"a value of unknown kind {tag!r}")
    text, shown = (_unpack(one, rebuild) for one in content)
    value = StandIn(text)
    value.shown = str(shown)
    return value


def make(
    cls: type[Exception], args: Sequence[object], attributes: Mapping[str, Any]
) -> Exception | None:
    """An exception of a class with these `args` and attributes; `None` if it cannot be made.

    The constructor runs for built-in classes only, whose state lives in C.
    """
    error = _instance(cls, args)
    if error is not None:
        if error.args != tuple(args):
            error.args = tuple(args)
        for name, value in attributes.items():
            put(error, name, value)
    return error


def _instance(cls: type[Exception], args: Sequence[object]) -> Exception | None:
    if cls.__module__ == "builtins":
        try:
            return cls(*args)
        except Exception:  # noqa: BLE001, S110  # it lacks an argument that could not travel
            pass
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    for maker in (cls, builtin):
        try:
            error = maker.__new__(cls, *args)
        except Exception:  # noqa: BLE001  # a `__new__` with a signature of its own
            continue
        if isinstance(error, cls):
            return error
    return None


def put(error: Exception, name: str, value: object) -> None:
    """Set an attribute, if it can be set."""
    try:
        setattr(error, name, value)
    except Exception:  # noqa: BLE001  # no room in `__slots__`, or a property of the user's
        return


def make_telling(
    cls: type[Exception], text: str, args: Sequence[object], attributes: Mapping[str, Any]
) -> Exception | None:
    """As `make`, of a subclass whose text is `text`: the class itself makes another one here."""

    def again(self: Exception) -> tuple[Any, ...]:
        return make_telling, (cls, text, self.args, dict(self.__dict__))

    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__str__": lambda _: text,
        "__reduce__": again,
    }
    metaclass: Any = type(cls)
    try:
        telling = metaclass(cls.__name__, (cls,), members)
    except Exception:  # noqa: BLE001  # a class that refuses to have subclasses
        return None
    return make(telling, args, attributes)
