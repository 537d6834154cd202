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

from kubetorch.wire import guarding

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
        except BaseException:  # noqa: BLE001  # the user's __repr__; what does not fit
            continue
        if room < 0:
            room += size
        else:
            found[name] = packed
    return found


def _candidates(error: BaseException) -> Iterator[tuple[str, Any]]:
    args = guarding.args_of(error)
    if not _is_json(list(args)):
        yield "args", args
    for name, kind in _names_in_c(error):
        value = guarding.tell(kind.__get__, None, error)  # else it was never set
        if value is not None:
            yield name, value
    for name, value in guarding.attributes_of(error).items():
        if not _is_json(value):
            yield name, value


def _names_in_c(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Attributes that are not in its `__dict__`: those of built-in classes, and of `__slots__`."""
    for cls in guarding.bases_of(type(error)):
        if cls is BaseException:
            return
        for name, kind in guarding.namespace_of(cls).items():
            is_member = guarding.is_a(kind, (MemberDescriptorType, GetSetDescriptorType))
            if is_member and not name.startswith("__") and name not in _LEFT_OUT:
                yield name, kind


def _is_json(value: object) -> bool:
    """Whether it comes out of JSON as it went in."""
    waiting, room = [value], guarding.MOST_VALUES
    while waiting:
        one: Any = waiting.pop()
        kind = type(one)
        if kind is list or kind is dict:
            room -= len(one) + 1
            if room < 0:
                return False
            waiting.extend(one)
            if kind is dict:
                if not all(type(key) is str for key in one):
                    return False
                waiting.extend(one.values())
        elif not _is_json_alone(one):
            return False
    return True


def _is_json_alone(value: Any) -> bool:  # noqa: ANN401  # any value
    kind = type(value)
    if kind is str:
        return is_text(value)
    if kind is float:
        return bool(value - value == 0)
    return any(kind is one for one in _SCALARS)


def is_text(value: str) -> bool:
    """Whether it can be encoded: lone surrogates cannot, as those of undecodable file names."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def clean(text: str) -> str:
    """Text that can be encoded: lone surrogates are shown as Python writes them."""
    if is_text(text):
        return text
    return text.encode(errors="backslashreplace").decode()


class _Packing:
    """Values on their way into JSON.

    Args:
        describe: See `members_of`.
        stands_in: Whether text stands in for what cannot travel; else `pack` raises.
    """

    def __init__(self, describe: Describe, *, stands_in: bool) -> None:
        self._describe = describe
        self._stands_in = stands_in
        self._room = guarding.MOST_VALUES

    def pack(self, value: object, depth: int = 0) -> Any:  # noqa: ANN401  # of JSON
        """The value, with a tag wherever JSON would change it.

        Raises:
            ValueError: It cannot travel.
        """
        self._room -= 1
        if depth > _DEPTH or self._room < 0 or guarding.tell(len, 0, value) > LIMIT:
            raise ValueError("too deep or too long")
        kind, deeper = type(value), depth + 1
        if any(kind is one for one in _SCALARS):
            return value
        if guarding.is_a(value, (list, tuple, dict)) and len(value) > _LENGTH:
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
        if guarding.is_a(value, BaseException):
            described = self._describe(value)
            if described is not None:
                return {"error": described}
        if not self._stands_in:
            raise ValueError(f"a value of type {kind.__qualname__}")
        # A text may be of a subclass, whose text is of it again.
        text = guarding.tell(lambda: str.__str__(str(value)), "")
        return {"shown": [self.pack(text), self.pack(guarding.shown(value))]}


# ------------------------------------------------------------------------- members → exception


def unpack_members(members: Mapping[str, Any], rebuild: Rebuild) -> dict[str, Any]:
    """The attributes that `members_of` told; those that make no sense are left out."""
    nothing = object()
    found = {
        name: guarding.take(_unpack, nothing, packed, rebuild) for name, packed in members.items()
    }
    return {name: value for name, value in found.items() if value is not nothing}


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
        guarding.put_args(error, tuple(args))
        for name, value in attributes.items():
            guarding.put(error, name, value)
    return error


def _instance(cls: type[Exception], args: Sequence[object]) -> Exception | None:
    makers: list[Callable[[], Any]] = []
    if guarding.module_of(cls) == "builtins":
        # Fails if it lacks an argument that could not travel.
        makers.append(lambda: cls(*args))
    bases = guarding.bases_of(cls)
    builtin: Any = next(base for base in bases if guarding.module_of(base) == "builtins")
    # The first fails if it has a signature of its own.
    makers += [lambda: cls.__new__(cls, *args), lambda: builtin.__new__(cls, *args)]
    made = (guarding.take(maker, None) for maker in makers)
    return next((error for error in made if issubclass(type(error), cls)), None)


def make_telling(
    cls: type[Exception], text: str, args: Sequence[object], attributes: Mapping[str, Any]
) -> Exception | None:
    """As `make`, of a subclass whose text is `text`: the class itself makes another one here."""

    def again(self: Exception) -> tuple[Any, ...]:
        return make_telling, (cls, text, guarding.args_of(self), guarding.attributes_of(self))

    members = {
        "__module__": guarding.module_of(cls),
        "__qualname__": guarding.qualname_of(cls),
        "__doc__": guarding.namespace_of(cls).get("__doc__"),
        "__str__": lambda _: text,
        "__reduce__": again,
    }
    metaclass: Any = type(cls)
    # A class may refuse to have subclasses.
    telling = guarding.take(lambda: metaclass(guarding.name_of(cls), (cls,), members), None)
    return None if telling is None else make(telling, args, attributes)
