"""The deployed callable, and what of it a call may reach."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from kubetorch.errors import CallableNotFoundError

_NOTHING = object()


class Target:
    """A function, or the one instance of a class.

    Args:
        name: What users call it.
        value: The function or the instance.
        is_instance: Whether `value` is the instance of a class.
    """

    def __init__(self, name: str, value: object, *, is_instance: bool) -> None:
        self._name = name
        self._value = value
        self._is_instance = is_instance
        self._async: dict[str | None, bool] = {}

    def runs_on_loop(self, method: str | None) -> bool:
        """Whether the event loop runs it: `async def`, with or without `yield`.

        A method that does not exist, or raises when it is looked up, is a matter of `find`.
        """
        known = self._async.get(method)
        if known is not None:
            return known
        try:
            is_async = _is_async(self.find(method))
        except BaseException:  # noqa: BLE001  # the user's __getattr__; the thread that reads asks
            return False
        self._async[method] = is_async
        return is_async

    def find(self, method: str | None) -> Callable[..., Any]:
        """What a call of `method`, or of the callable itself, is to run.

        Raises:
            CallableNotFoundError: There is no such method, or it is private.
        """
        if not self._is_instance:
            if method is not None:
                raise CallableNotFoundError(
                    f"{self._name!r} is a function; it has no method {method!r}"
                )
            return self._value  # type: ignore[return-value]  # a callable, or calling it says so
        if method is None:
            if not callable(self._value):
                raise CallableNotFoundError(
                    f"{self._name!r} is a class without __call__; call one of its methods",
                    hint=self._methods_hint(),
                )
            return self._value
        if method.startswith("_") and method != "__call__":
            raise CallableNotFoundError(f"{self._name}.{method} is private and cannot be called")
        if isinstance(inspect.getattr_static(type(self._value), method, None), property):
            raise self._no_method(method, "is a property")
        # Not getattr's default: an AttributeError may come from the user's own __getattr__.
        found = getattr(self._value, method, _NOTHING)
        if found is _NOTHING:
            raise CallableNotFoundError(
                f"{self._name!r} has no method {method!r}", hint=self._methods_hint(method)
            )
        if not callable(found):
            raise self._no_method(method, f"is a value of type {type(found).__name__}")
        return found

    def _no_method(self, method: str, what: str) -> CallableNotFoundError:
        return CallableNotFoundError(
            f"{self._name}.{method} {what}, not a method",
            hint=f"give {self._name} a method that returns it",
        )

    def _methods_hint(self, wanted: str = "") -> str:
        names = [
            name
            for name in dir(type(self._value))
            if not name.startswith("_") and callable(getattr(type(self._value), name, None))
        ]
        close = difflib.get_close_matches(wanted, names, n=1)
        if close:
            return f"did you mean {close[0]!r}?"
        return f"it has {', '.join(names[:20])}" if names else "it has no public methods"


def _is_async(found: Callable[..., Any]) -> bool:
    functions = [found]
    if not inspect.isroutine(found):
        functions.append(getattr(type(found), "__call__", found))  # noqa: B004  # the method itself
    return any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in functions)
