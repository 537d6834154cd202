"""Dataclasses that are dictionaries or lists, too, and values that are nested deep."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from kubetorch.errors import SerializationError
from kubetorch.wire import codecs
from tests.unit.wire.test_arrays import sent

MODULE = __name__


@dataclasses.dataclass
class Settings(dict):  # type: ignore[type-arg]
    """A dictionary with fields of its own."""

    name: str = "x"
    sizes: Any = ()

    def items(self) -> Any:
        raise AssertionError("code of the class runs")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("code of the class runs")


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As a library of models has them: each field is a key, too."""

    loss: Any = None

    def __post_init__(self) -> None:
        self["loss"] = self.loss


@dataclasses.dataclass
class Rows(list):  # type: ignore[type-arg]
    source: str = ""


@dataclasses.dataclass
class Holder:
    settings: Any
    plain: Any = dataclasses.field(default_factory=dict)


def test_the_fields_of_a_dataclass_that_is_a_dictionary_arrive_with_what_is_in_it() -> None:
    settings = Settings("y", (1, [2]))
    dict.__setitem__(settings, (1, 2), {"a": (3,)})
    arrived_settings = sent([settings, settings])[1]
    assert type(arrived_settings) is Settings
    assert (arrived_settings.name, arrived_settings.sizes) == ("y", (1, [2]))
    assert dict(dict.items(arrived_settings)) == {(1, 2): {"a": (3,)}}


def test_the_output_of_a_model_arrives_as_it_was() -> None:
    arrived_output = sent({"a": Output(numpy.arange(3))})["a"]
    assert type(arrived_output) is Output
    assert list(arrived_output) == ["loss"]
    assert arrived_output["loss"] is arrived_output.loss
    arrived_output["more"] = 1
    assert list(arrived_output) == ["loss", "more"]


def test_the_fields_of_a_dataclass_that_is_a_list_arrive_with_what_is_in_it() -> None:
    rows = Rows("here")
    rows += [1, (2,)]
    arrived_rows = sent(Holder(rows)).settings
    assert (type(arrived_rows), arrived_rows.source, list(arrived_rows)) == (
        Rows,
        "here",
        [1, (2,)],
    )


def test_fields_that_are_dictionaries_and_lists_are_values_of_their_own() -> None:
    plain: dict[Any, Any] = {(1, 2): [3, (4,)], "b": {"c": [Holder({})]}}
    arrived_holder = sent(Holder([(1,)], plain))
    assert (arrived_holder.settings, arrived_holder.plain) == ([(1,)], plain)


def test_such_a_dataclass_is_a_plain_one_where_its_class_is_missing() -> None:
    head, *area = (
        bytes(b"".join(codecs.join([segment]))) for segment in codecs.encode("values", Output(5))
    )
    assert codecs.decode("values", [head.replace(b"Output", b"Absent"), *area]) == {"loss": 5}


def test_what_such_a_dataclass_holds_and_cannot_travel_is_refused_by_its_path() -> None:
    for value, path in [
        (Output(object()), r"\.loss"),
        (Settings("x", [object()]), r"\.sizes\[0\]"),
        (Rows(object()), r"\.source"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(SerializationError, match=rf"^result\[0\]{path} is an object"):
            codecs.encode("values", [value])


def test_a_container_is_made_of_what_it_is_and_of_nothing_else() -> None:
    for text in (
        f'["container","{MODULE}","Settings",{{}},[1]]',
        f'["container","{MODULE}","Rows",{{}},{{"a":1}}]',
        f'["object","{MODULE}","Rows",{{}}]',
    ):
        with pytest.raises(SerializationError):
            codecs.decode("values", [b'${"$":' + text.encode() + b"}"])


# ------------------------------------------------------------------------------------------ depth

#: What docs/limitations.md says.
LEVELS = 200
#: Calls that a program may be in itself.
CALLS = 50
WRAPS: dict[str, Any] = {
    "lists": lambda value: [value],
    "tuples": lambda value: (value,),
    "dictionaries": lambda value: {"a": value},
    "dictionaries with other keys": lambda value: {1: value},
    "dataclasses": Holder,
    "frozen sets": lambda value: frozenset([value]),
    "both": lambda value: [{"a": value}],
}


def _call(depth: int, function: Any, *args: Any) -> Any:
    return function(*args) if depth == 0 else _call(depth - 1, function, *args)


@pytest.mark.parametrize("name", WRAPS)
def test_a_value_may_be_nested_as_deep_as_the_documents_say(name: str) -> None:
    value: Any = 1
    for _ in range(LEVELS // 2 if name == "both" else LEVELS):
        value = WRAPS[name](value)
    with ThreadPoolExecutor(1) as pool:  # whose calls are none of pytest's
        arrived_value = pool.submit(_call, CALLS, sent, value).result()
    for _ in range(LEVELS):
        arrived_value = (
            arrived_value.settings if name == "dataclasses" else next(iter(_parts(arrived_value)))
        )
    assert arrived_value == 1


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def test_a_value_that_is_nested_too_deep_is_refused() -> None:
    for wrap in WRAPS.values():
        value: Any = 1
        for _ in range(1100):
            value = wrap(value)
        with pytest.raises(SerializationError, match="nested too deep"):
            codecs.encode("values", value)
