"""The `json` codec: strict, and the same text as the standard library's."""

from __future__ import annotations

import collections
import enum
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetorch.errors import SerializationError
from kubetorch.wire import codecs

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)  # fmt: skip


@given(values)
def test_it_writes_what_the_standard_library_writes_and_reads_it_again(value: Any) -> None:
    (segment,) = codecs.encode("json", value)
    expected = json.dumps(value, separators=(",", ":"))
    assert bytes(segment).decode() == expected
    assert codecs.decode("json", [segment]) == json.loads(expected)


def test_what_json_cannot_carry_is_named_with_its_place() -> None:
    with pytest.raises(SerializationError, match=r"the number nan at \$\.a\[1\]"):
        codecs.encode("json", {"a": [1, float("nan")]})
    with pytest.raises(SerializationError, match=r"type set at \$\.b"):
        codecs.encode("json", {"b": {1, 2}})
    with pytest.raises(SerializationError, match=r"a key of type tuple at \$"):
        codecs.encode("json", {(1, 2): 3})


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ({1: "a", "1": "b"}, "1 and '1'"),
        ({"args": [[{"x": ({"1": 0, Level.LOW: 1},)}]], "kwargs": {}}, "'1' and <Level.LOW: 1>"),
        (collections.OrderedDict({"null": 1, None: 2}), "'null' and None"),
        ([{True: 1, "true": 2}], "True and 'true'"),
        ({"inner": {1.0: 1, "1.0": 2}}, "1.0 and '1.0'"),
    ],
)
def test_two_keys_that_json_cannot_tell_apart_are_named(value: Any, keys: str) -> None:
    with pytest.raises(SerializationError, match=f"the keys {keys} of one dictionary"):
        codecs.encode("json", value)


def test_keys_that_are_no_texts_are_carried_as_before() -> None:
    (segment,) = codecs.encode("json", {1: {"2": 3}, "2": {1: 4}, None: [{1: 5}, {"1": 6}]})
    assert bytes(segment) == b'{"1":{"2":3},"2":{"1":4},"null":[{"1":5},{"1":6}]}'


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SerializationError, match="nested this deep"):
        codecs.encode("json", endless)


def test_text_that_is_no_json_or_no_utf_8_is_refused() -> None:
    for broken in (b"{", b"\xff\xfe1", b"NaNa"):
        with pytest.raises(SerializationError, match="is not JSON"):
            codecs.decode("json", [broken])
