"""A parameter of `kt.Compute` as an attribute of it: checked when it is set, kept in the spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, Protocol, TypeVar, overload

from kubetorch.errors import SpecError
from kubetorch.specs.compute import ComputeSpec

GivenT = TypeVar("GivenT", contravariant=True)
ShownT = TypeVar("ShownT", covariant=True)

#: What the spec's fields are when nobody says anything.
ABSENT = {item.name: item.default for item in fields(ComputeSpec)}


class Declared(Protocol):
    """What has fields."""

    _spec: ComputeSpec

    def _set(self, **changes: Any) -> None:  # noqa: ANN401  # fields of the spec
        """Change the spec, if it is then one that is possible."""


class Field(Generic[GivenT, ShownT]):
    """One field of the spec.

    Args:
        parse: What a value becomes in the spec; raises `SpecError`.
        doc: What it means.
        show: What a value of the spec is to the user, if not itself.
        default: What `None` stands for, if not for the spec's own default.
        variable: Variable of the environment that the default may come from.
        field: Name of the spec's field, if it is not that of the parameter.
    """

    def __init__(
        self,
        parse: Callable[[object], object],
        doc: str,
        *,
        show: Callable[[Any], ShownT] | None = None,
        default: Callable[[], object] | None = None,
        variable: str | None = None,
        field: str | None = None,
    ) -> None:
        self._parse = parse
        self._field = field
        self._show = show
        self._default = default
        self._variable = variable
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = self._field or name

    @overload
    def __get__(self, declared: None, owner: type) -> Field[GivenT, ShownT]: ...
    @overload
    def __get__(self, declared: Declared, owner: type) -> ShownT: ...
    def __get__(self, declared: Declared | None, owner: type) -> Field[GivenT, ShownT] | ShownT:
        if declared is None:
            return self
        value = getattr(declared._spec, str(self._field))
        return value if self._show is None else self._show(value)

    def __set__(self, declared: Declared, value: GivenT) -> None:
        given: object = value
        if given is None and self._default is not None:
            given = self._default()
        name = str(self._field)
        try:
            parsed = ABSENT[name] if given is None else self._parse(given)
        except SpecError as error:
            if value is None and self._variable is not None:
                raise SpecError(f"{self._variable}: {error.message}", hint=error.hint) from error
            raise
        declared._set(**{name: parsed})
