"""Access to the user's exceptions, whose own code may do anything when it is looked at.

A property may raise `KeyError` or `SystemExit`, a `__getattr__` may fail for every name, a class
may have a metaclass with views of its own. What Python itself keeps of an exception is read past
all of that; what only the user's code can tell is attempted, and done without if it raises.

Standard library only: the worker uses this module too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeGuard, TypeVar

from kubetorch.errors import CallCancelledError, CallTimeoutError

Found = TypeVar("Found")

#: What is not the doing of the code that runs: Ctrl-C, and the end of a call that is itself about
#: to raise what another call ended with.
INTERRUPTS = (KeyboardInterrupt, CallCancelledError, CallTimeoutError)
#: Values that are looked at in one: lists that share their parts may have more than can be counted.
MOST_VALUES = 100_000
#: Bits of an integer that JSON carries: Python reads no more than 4300 digits.
_MOST_BITS = 10_000
_DEPTH, _LENGTH = 8, 1000

_of_type, _of_error = vars(type), vars(BaseException)


def tell(look: Callable[..., Found], otherwise: Found, *args: object) -> Found:
    """What `look` finds in an exception that is described; `otherwise` if it raises anything.

    Also `SystemExit` and `KeyboardInterrupt` are the user's here: a call that is described has left
    the code that can be interrupted.
    """
    try:
        return look(*args)
    except BaseException:  # noqa: BLE001  # the user's
        return otherwise


def take(make: Callable[..., Found], otherwise: Found, *args: object) -> Found:
    """What `make` gives where an exception is made anew, in the middle of a program.

    Raises:
        KeyboardInterrupt, CallCancelledError, CallTimeoutError: They end that program's call.
    """
    try:
        return make(*args)
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001  # a SystemExit of the user's class must not end it
        return otherwise


def shown(value: object) -> str:
    """What `repr` shows of a value, or else the name of its class."""
    return tell(lambda: str.__str__(repr(value)), name_of(type(value)))


def said(error: BaseException) -> str:
    """The name of its class and its text, as far as it has one to show."""
    text, name = take(lambda: str.__str__(str(error)), ""), name_of(type(error))
    return f"{name}: {text}" if text else name


# -------------------------------------------------------------------------- what Python keeps


def is_a(value: object, classes: type[Found] | tuple[type[Found], ...]) -> TypeGuard[Found]:
    """As `isinstance`, which would ask the value itself for its `__class__`."""
    return issubclass(type(value), classes)


def name_of(cls: type) -> str:
    """Its `__name__`."""
    return str.__str__(_of_type["__name__"].__get__(cls))


def qualname_of(cls: type) -> str:
    """Its `__qualname__`."""
    return str.__str__(_of_type["__qualname__"].__get__(cls))


def module_of(cls: type) -> str:
    """Its `__module__`, empty if that is no text."""
    module = tell(lambda: _of_type["__module__"].__get__(cls), "")
    return str.__str__(module) if is_a(module, str) else ""


def bases_of(cls: type) -> tuple[type, ...]:
    """Its `__mro__`."""
    return _of_type["__mro__"].__get__(cls)  # type: ignore[no-any-return]


def namespace_of(cls: type) -> Mapping[str, Any]:
    """Its `__dict__`."""
    return _of_type["__dict__"].__get__(cls)  # type: ignore[no-any-return]


def args_of(error: BaseException) -> tuple[Any, ...]:
    """Its `args`."""
    return _of_error["args"].__get__(error)  # type: ignore[no-any-return]


def attributes_of(error: BaseException) -> dict[str, Any]:
    """A copy of its `__dict__`, but for keys that are no names, and its notes."""
    found = dict(_of_error["__dict__"].__get__(error))
    return {key: one for key, one in found.items() if type(key) is str and key != "__notes__"}


def cause_of(error: BaseException) -> BaseException | None:
    """Its `__cause__`."""
    return _of_error["__cause__"].__get__(error)  # type: ignore[no-any-return]


def trace_of(error: BaseException) -> TracebackType | None:
    """Its `__traceback__`."""
    return _of_error["__traceback__"].__get__(error)  # type: ignore[no-any-return]


def put(error: BaseException, name: str, value: object) -> None:
    """Set an attribute, if it can be set: also of a frozen dataclass."""
    for setter in (BaseException.__setattr__, setattr):
        try:
            setter(error, name, value)
        except INTERRUPTS:
            raise
        except BaseException:  # noqa: BLE001  # a property, or a class in C with a way of its own
            continue
        return


def put_args(error: BaseException, args: tuple[Any, ...]) -> None:
    """Set its `args`."""
    _of_error["args"].__set__(error, args)


def put_cause(error: BaseException, cause: BaseException) -> None:
    """Set its `__cause__`."""
    _of_error["__cause__"].__set__(error, cause)


# ------------------------------------------------------------------------------- plain values


def plain(value: object, most: int) -> Any:  # noqa: ANN401  # of JSON
    """A copy of a value in the types of JSON alone, made without a method of the value's own.

    Args:
        value: Anything.
        most: Characters that a text may have.

    Raises:
        ValueError: JSON cannot carry it, or it is too much.
    """
    return _Plain(most).copy(value, 0)


class _Plain:
    def __init__(self, most: int) -> None:
        self._most = most
        self._room = MOST_VALUES

    def copy(self, value: Any, depth: int) -> Any:  # noqa: ANN401  # any value, and of JSON
        self._room -= 1
        if value is None or value is True or value is False:
            return value
        if is_a(value, str):
            text = str.__str__(value)
            if len(text) <= self._most:
                text.encode()  # raises a ValueError for lone surrogates
                return text
        elif is_a(value, int):
            if int.bit_length(value) <= _MOST_BITS:
                return int.__pos__(value)
        elif is_a(value, float):
            number = float.__pos__(value)
            if number - number == 0:  # JSON has no other numbers
                return number
        elif depth <= _DEPTH and self._room >= 0 and is_a(value, (list, tuple, dict)):
            return self._copy_all(value, depth + 1)
        raise ValueError("no plain value")

    def _copy_all(self, value: Any, deeper: int) -> Any:  # noqa: ANN401  # as above
        kind = next(one for one in (list, tuple, dict) if is_a(value, one))
        if kind.__len__(value) > _LENGTH:
            raise ValueError("too long")
        if kind is not dict:
            return [self.copy(one, deeper) for one in kind.__iter__(value)]
        items = list(dict.items(value))
        if not all(is_a(key, str) for key, _ in items):
            raise ValueError("a key that is no text")
        return {self.copy(key, 0): self.copy(one, deeper) for key, one in items}
