"""`FrozenValue`: a frozen dataclass for whoever uses it."""

from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError, field

import msgspec
import pytest

from kubetorch.lib.frozen_values import FrozenValue


class Size(FrozenValue):
    width: int
    height: int = 1

    def __post_init__(self) -> None:
        if self.width < 0:
            raise ValueError("a size is positive")


class Box(FrozenValue):
    """A box."""

    name: str
    size: Size = Size(2)
    labels: dict[str, str] = field(default_factory=dict)
    comment: str = field(default="", compare=False)


class Crate(Box):
    lid: bool = True


def test_values_come_by_position_and_by_name_and_have_defaults() -> None:
    crate = Crate("a", Size(3, height=4), lid=False)
    assert (crate.name, crate.size.height, crate.lid, crate.labels) == ("a", 4, False, {})
    assert Box("a").labels is not Box("a").labels
    assert repr(Size(3)) == "Size(width=3, height=1)"


@pytest.mark.parametrize(
    ("values", "named_values", "message"),
    [
        ((), {}, "Size lacks width"),
        ((1, 2, 3), {}, "Size takes at most 2"),
        ((1,), {"width": 2}, "Size got width twice"),
        ((1,), {"depth": 2}, "Size has no depth"),
    ],
)
def test_other_values_are_refused(
    values: tuple[int, ...], named_values: dict[str, int], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        Size(*values, **named_values)


def test_it_is_checked_when_it_is_made_and_does_not_change() -> None:
    with pytest.raises(ValueError, match="positive"):
        Size(-1)
    size = Size(1)
    with pytest.raises(FrozenInstanceError):
        size.width = 2
    with pytest.raises(FrozenInstanceError):
        del size.width
    assert size == Size(1)


def test_equal_values_of_one_class_are_equal_and_have_one_hash() -> None:
    assert Size(1) == Size(1, 1) and hash(Size(1)) == hash(Size(1, 1))
    assert Size(1) != Size(2) and Size(1) != (1, 1)
    assert Box("a", comment="x") == Box("a", comment="y")
    assert Box("a") != Crate("a")


def test_it_is_a_dataclass_for_dataclasses_and_for_msgspec() -> None:
    crate = Crate("a", labels={"b": "c"})
    names = [item.name for item in dataclasses.fields(Crate)]
    assert names == ["name", "size", "labels", "comment", "lid"]
    assert dataclasses.replace(crate, lid=False) == Crate("a", labels={"b": "c"}, lid=False)
    assert msgspec.json.decode(msgspec.json.encode(crate), type=Crate) == crate
    match Size(3):
        case Size(width, height):
            assert (width, height) == (3, 1)
