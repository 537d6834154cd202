"""Records are frozen dataclasses in all that can be seen of them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import msgspec
import pytest

from kubetorch.lib.records import record


@record
class Point:
    """A place."""

    x: int
    y: int = 0
    tags: tuple[str, ...] = ()
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


@record
class Checked:
    """One that looks at what it is given."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(self.size)

    def __repr__(self) -> str:
        return f"<{self.size}>"


class Base:
    """What records may inherit from."""

    def double(self) -> int:
        """Twice the size."""
        return 2 * int(vars(self)["size"])


@record
class Derived(Base):
    """One with a method of its base."""

    size: int


def test_fields_are_given_by_position_or_name_or_have_a_default() -> None:
    assert Point(1, tags=("a",)) == Point(x=1, y=0, tags=("a",), notes={})
    assert Point(1).notes is not Point(1).notes
    assert Derived(4).double() == 8


@pytest.mark.parametrize(
    ("args", "named", "said"),
    [
        ((), {}, "Point needs a value for x"),
        ((1,), {"x": 2}, "Point was given two values for x"),
        ((1,), {"z": 2}, "Point has no z"),
        ((1, 2, (), {}, 5), {}, "Point takes 4 arguments, not 5"),
    ],
)
def test_wrong_arguments_are_named(args: Any, named: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Point(*args, **named)


def test_a_record_is_what_its_fields_are() -> None:
    assert Checked(1) != Derived(1)
    assert hash(Derived(1)) == hash(Derived(1))
    assert {Derived(1), Derived(1), Derived(2)} == {Derived(1), Derived(2)}
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1))
    assert repr(Point(1, 2)) == "Point(x=1, y=2, tags=(), notes={})"
    assert repr(Checked(1)) == "<1>", "its own methods stay"


def test_a_record_cannot_be_changed() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x
    assert point.x == 1


def test_a_record_checks_itself_when_it_is_made_or_changed() -> None:
    with pytest.raises(ValueError, match="-1"):
        Checked(-1)
    with pytest.raises(ValueError, match="-1"):
        dataclasses.replace(Checked(1), size=-1)


def test_others_see_a_dataclass() -> None:
    point = Point(1, 2, ("a",), {"b": "c"})
    assert dataclasses.is_dataclass(Point)
    assert [one.name for one in dataclasses.fields(Point)] == ["x", "y", "tags", "notes"]
    assert dataclasses.replace(point, y=3) == Point(1, 3, ("a",), {"b": "c"})
    assert dataclasses.asdict(point)["notes"] == {"b": "c"}
    assert pickle.loads(pickle.dumps(point)) == point
    assert copy.deepcopy(point) == point
    assert msgspec.json.decode(msgspec.json.encode(point), type=Point) == point
    match point:
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_what_a_record_would_not_keep_is_refused() -> None:
    with pytest.raises(TypeError, match="options"):

        @record
        class Secretive:
            """One field is not to be seen."""

            word: str = dataclasses.field(repr=False)

    with pytest.raises(TypeError, match="not given"):

        @record
        class Counting:
            """One field is made by itself."""

            count: int = dataclasses.field(default=0, init=False)

    with pytest.raises(TypeError, match="not given"):

        @record
        class Common:
            """One is no field."""

            limit: ClassVar[int] = 3
