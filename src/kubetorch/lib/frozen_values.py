"""The base class of frozen values where only the standard library may be imported."""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from kubetorch.lib.tuning import dataclass_transform

if TYPE_CHECKING:
    from typing import ClassVar


@dataclass_transform(frozen_default=True)
class FrozenValue:
    """A frozen dataclass but for its price: subclasses share the methods below.

    `dataclass(frozen=True)` compiles six methods for each class, which takes 0.6 ms; a start of a
    program, an agent or a worker defines dozens of classes.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
        __match_args__: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, *values: Any, **named_values: Any) -> None:  # noqa: ANN401  # of any field
        state = vars(self)
        names = self.__match_args__
        if len(values) > len(names):
            raise TypeError(f"{type(self).__name__} takes at most {len(names)} positional values")
        state.update(zip(names, values, strict=False))
        if repeated_names := state.keys() & named_values:
            raise TypeError(f"{type(self).__name__} got {min(repeated_names)} twice")
        for field in fields(self):
            name = field.name
            if name in named_values:
                state[name] = named_values.pop(name)
            elif name not in state:
                state[name] = _default(self, field)
        if named_values:
            raise TypeError(f"{type(self).__name__} has no {min(named_values)}")
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the values."""

    def __repr__(self) -> str:
        values = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__qualname__}({', '.join(values)})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _compared_values(self) == _compared_values(other)

    def __hash__(self) -> int:
        return hash(_compared_values(self))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


def _default(value: FrozenValue, field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        raise TypeError(f"{type(value).__name__} lacks {field.name}")
    return field.default


def _compared_values(value: FrozenValue) -> tuple[object, ...]:
    return tuple(getattr(value, field.name) for field in fields(value) if field.compare)
