"""Reads attributes of the user's values and classes without running the user's code.

The user's code may do anything when an attribute is read: a property may raise `SystemExit`, a
`__getattr__` may fail for every name, a metaclass may lie. So this module reads the attributes that
Python itself keeps past the user's code, and calls the user's code by `safely` and `attempt` only.
It imports no module when it is used: the process may have no free file descriptor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from kubetorch import errors

Value = TypeVar("Value")

#: Ctrl-C, and errors that interrupt the running call.
INTERRUPTS = (KeyboardInterrupt, errors.CallCancelledError, errors.CallTimeoutError)
#: The most decorators of one function: an object may answer to every name with itself.
_DECORATORS = 100
_NOTHING = object()


def safely(look: Callable[..., Value], otherwise: Value, *args: object) -> Value:
    """The result of `look`, which describes an exception, or `otherwise` if `look` raises.

    `SystemExit` and `KeyboardInterrupt` count as errors of the user's code, too: an interrupt of a
    call cannot arrive any more when its exception is described.
    """
    try:
        return look(*args)
    except BaseException:  # noqa: BLE001  # the user's
        return otherwise


def attempt(make: Callable[..., Value], otherwise: Value, *args: object) -> Value:
    """As `safely`, in the middle of a program: `INTERRUPTS` pass through."""
    try:
        return make(*args)
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001  # SystemExit of the user's class must not end it
        return otherwise


def attribute(value: object, name: str, otherwise: Any = None) -> Any:  # noqa: ANN401  # the user's
    """As `getattr`, of a value whose class may raise any exception: the result is `otherwise`."""
    return attempt(getattr, otherwise, value, name, otherwise)


def unwrapped(function: object) -> Any:  # noqa: ANN401  # the user's
    """The function below the decorators that have a `__wrapped__`."""
    for _ in range(_DECORATORS):
        inner = attribute(function, "__wrapped__", _NOTHING)
        if inner is _NOTHING:
            break
        function = inner
    return function


def is_a(value: object, classes: type[Value] | tuple[type[Value], ...]) -> TypeGuard[Value]:
    """As `isinstance`, but without a look at the value's own `__class__`."""
    return issubclass(type(value), classes)


def class_attribute(cls: type, name: str) -> Any:  # noqa: ANN401  # by name
    return vars(type)[name].__get__(cls)


def error_attribute(error: BaseException, name: str) -> Any:  # noqa: ANN401  # by name
    """An attribute of `BaseException`, such as `args`, `__traceback__` or `__cause__`."""
    return vars(BaseException)[name].__get__(error)


def set_error_attribute(error: BaseException, name: str, value: object) -> None:
    """Set such an attribute, also if the class refuses, as a frozen dataclass does."""
    vars(BaseException)[name].__set__(error, value)


def name_of(cls: type) -> str:
    """The `__name__` of a class."""
    return str.__str__(class_attribute(cls, "__name__"))


def qualname_of(cls: type) -> str:
    """The `__qualname__` of a class."""
    return str.__str__(class_attribute(cls, "__qualname__"))


def owner_of(cls: type, name: str) -> type | None:
    """The class among the bases of a class, itself included, that has an attribute."""
    mro: tuple[type, ...] = class_attribute(cls, "__mro__")
    return next((base for base in mro if name in class_attribute(base, "__dict__")), None)


def module_of(cls: type) -> str:
    """The `__module__` of a class, empty if that is no text."""
    module = safely(class_attribute, "", cls, "__module__")
    return str.__str__(module) if is_a(module, str) else ""


def is_ours(value: object) -> bool:
    """True for an instance of a class of Kubetorch."""
    return module_of(type(value)).partition(".")[0] == "kubetorch"


def shown(value: object) -> str:
    """The `repr` of a value, or the name of its class if `repr` fails."""
    return safely(lambda: str.__str__(repr(value)), name_of(type(value)))


def summary(error: BaseException) -> str:
    """The name of the class of an exception, and its text unless that is empty."""
    text, name = attempt(lambda: str.__str__(str(error)), ""), name_of(type(error))
    return f"{name}: {text}" if text else name
