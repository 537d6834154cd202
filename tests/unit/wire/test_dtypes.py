"""Dtypes that arrive are looked at before NumPy sees them: none reaches beyond its array."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from kubetorch.errors import SerializationError
from kubetorch.wire import codecs
from tests.unit.wire.test_arrays import sent

#: The largest number of C's `int`.
INT = 2**31 - 1


def _decode(value: object, area: bytes = b"") -> Any:
    return codecs.decode("values", [b"$" + json.dumps(value).encode(), bytearray(area)])


def _fields(formats: list[Any], offsets: list[Any], itemsize: object, **extra_parts: Any) -> Any:
    names = [f"f{number}" for number in range(len(formats))]
    parts = {"names": names, "titles": [None] * len(formats), "formats": formats}
    return {**parts, "offsets": offsets, "itemsize": itemsize, **extra_parts}


INNER = _fields(["<i4"], [INT - 2], 16)
LYING = {
    "a field that begins after its element": _fields(["<i4"], [INT], 16),
    "a field that ends after its element": _fields(["<i4"], [13], 16),
    "an end that no int holds": _fields([["|u1", [INT]]], [1], 16),
    "an offset that no int holds": _fields(["<i4"], [2**32], 16),
    "an offset that no long holds": _fields(["<i4"], [2**64], 16),
    "a negative offset": _fields(["<i4"], [-1], 16),
    "an offset that is no number": _fields(["<i4"], [True], 16),
    "a field in a field": _fields([INNER], [0], 16),
    "an array of such fields": _fields([[INNER, [1]]], [0], 16),
    "an array in an array": _fields([[["<i4", [2**16]], [2**16]]], [0], 16),
    "dimensions whose product wraps": _fields([["<i4", [2**32, 2**32]]], [0], 16),
    "a negative dimension": _fields([["<i4", [-1, -1]]], [0], 16),
    "a dimension of none": _fields([["<i4", [0, INT]]], [0], 16),
    "an element of no bytes": _fields([], [], 0),
    "an element of negative size": _fields(["<i4"], [0], -16),
    "an element that no int holds": _fields(["<i4"], [0], 2**31 + 16),
    "too few offsets": _fields(["<i4", "<i4"], [0], 16),
    "too few titles": _fields(["<i4"], [0], 16, titles=[]),
    "too few names": _fields(["<i4", "<i4"], [0, 4], 16, names=["a"]),
    "a name twice": _fields(["<i4", "<i4"], [0, 4], 16, names=["a", "a"]),
    "a title that is a name": _fields(["<i4", "<i4"], [0, 4], 16, titles=["f1", None]),
    "a title twice": _fields(["<i4", "<i4"], [0, 4], 16, titles=["t", "t"]),
    "a title that is no text": _fields(["<i4"], [0], 16, titles=[1]),
    "fields that are many times their element": _fields([["|u1", [16]]] * 17, [0] * 17, 16),
    "a text of no characters": _fields(["<U0"], [0], 16),
    "a text that no int holds": _fields([f"<U{2**30 - 1}"], [0], 16),
    "dimensions of the array itself": ["<i4", [4]],
    "a unit of zero": "<M8[0s]",
    "a unit of zero in a field": _fields(["<m8[0ns]"], [0], 16),
    "a unit that no int holds": f"<M8[{2**31}s]",
}


@pytest.mark.security
@pytest.mark.parametrize("name", LYING)
def test_a_dtype_that_reaches_beyond_its_element_is_refused(name: str) -> None:
    for tag in (
        ["np.array", LYING[name], [1], "C", [0, 16]],
        ["np.scalar", LYING[name], "00" * 16],
    ):
        with pytest.raises(SerializationError, match="cannot be rebuilt"):
            _decode({"$": tag}, bytes(16))


NUMBERS = st.sampled_from(
    [0, 1, 2, 4, 8, 15, 16, INT - 1, INT, INT + 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -1, -(2**31)]
)
FORMATS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["|u1", "<i4", ">f8", "<U4", "|S3", "|V7", "<c16", "<M8[ns]"]),
    lambda inner: (
        st.tuples(inner, st.lists(NUMBERS, max_size=3)).map(list)
        | st.lists(st.tuples(inner, NUMBERS), max_size=3).flatmap(
            lambda fields: NUMBERS.map(
                lambda size: _fields(
                    [dtype for dtype, _ in fields], [offset for _, offset in fields], size
                )
            )
        )
    ),
    max_leaves=4,
)


def _lies_within(dtype: Any, size: int) -> bool:
    """Whether all bytes of an element are within so many, by numbers that do not overflow."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        count = 1
        for length in shape:
            count *= length
        return count * base.itemsize <= size and _lies_within(base, base.itemsize)
    fields = [] if dtype.names is None else [dtype.fields[name] for name in dtype.names]
    return dtype.itemsize <= size and all(
        offset >= 0
        and offset + kind.itemsize <= dtype.itemsize
        and _lies_within(kind, kind.itemsize)
        for kind, offset, *_ in fields
    )


@pytest.mark.security
@settings(max_examples=300, deadline=None)
@given(FORMATS)
def test_whatever_dtype_is_accepted_lies_within_its_array(described: Any) -> None:
    try:
        array = _decode({"$": ["np.array", described, [1], "C", [0, 16]]}, bytes(16))
    except SerializationError:
        return
    assert _lies_within(array.dtype, 16)
    assert len(array.tobytes()) == 16


NESTED: Any = "<i4"
for _ in range(40):
    NESTED = [("a", NESTED)]
NEVER = {
    "a dimension of none": numpy.zeros(2, [("a", "<i4"), ("b", "<i4", (0,))]),
    "an element of no bytes": numpy.zeros(2, []),
    "fields that are many times their element": numpy.zeros(
        1, {"names": [f"f{n}" for n in range(17)], "formats": ["V9"] * 17, "offsets": [0] * 17}
    ),
    "levels without end": numpy.zeros(1, NESTED),
    "a title that is no text": numpy.zeros(1, [((("t", 1), "a"), "<i4")]),
    "rows without bytes": numpy.empty((2**21, 0)),
    "columns without bytes": numpy.empty((0, 2**29), "i1"),
    "objects that are none": numpy.empty((2**21, 0), object),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_would_be_refused_where_it_arrives_is_refused_where_it_is_sent(name: str) -> None:
    with pytest.raises(SerializationError, match=r'^result\["a"\]\[1\] is a numpy\.ndarray'):
        codecs.encode("values", {"a": [1, NEVER[name]]})


@pytest.mark.parametrize(
    "array",
    [
        numpy.zeros(2, {"names": ["rgb", "r"], "formats": ["<u4", "u1"], "offsets": [0, 2]}),
        numpy.zeros(2, [(("a title", "a"), "<i4"), ("b", "<f8", (2, 3))]),
        numpy.zeros(2, numpy.dtype([("a", "i1"), ("b", "f8")], align=True)),
        numpy.zeros(2, [("a", [("b", [("c", "<U3")])])]),
        numpy.zeros((0, 1, 800, 800)),
        numpy.zeros((1000, 0, 3)),
        numpy.zeros(3, "M8[25us]"),
    ],
    ids=["shared bytes", "title", "aligned", "nested", "no image", "no columns", "unit of 25"],
)
def test_a_dtype_or_shape_that_is_seldom_arrives_as_it_was(array: Any) -> None:
    arrived_array = sent(array)
    assert (arrived_array.dtype, arrived_array.shape) == (array.dtype, array.shape)
    assert arrived_array.dtype.fields == array.dtype.fields
    assert arrived_array.tobytes() == array.tobytes()


# ------------------------------------------------------------------------------- lists of scalars

SCALARS = of_numpy.scalar_dtypes() | of_numpy.array_dtypes(of_numpy.scalar_dtypes())


def _bits(value: Any) -> tuple[object, ...]:
    """All of a scalar; what is in the bytes of a long double that are none of the number is not."""
    is_padded = isinstance(value, (numpy.longdouble, numpy.clongdouble))
    bits = repr(value) if is_padded else getattr(value, "tobytes", lambda: value)()
    return type(value), getattr(value, "dtype", None), bits


_MIXED = st.lists(
    SCALARS.flatmap(lambda dtype: of_numpy.arrays(dtype, ())).map(lambda array: array[()]),
    max_size=40,
)
_ALIKE = SCALARS.flatmap(
    lambda dtype: st.lists(
        of_numpy.arrays(dtype, ()).map(lambda array: array[()]), min_size=14, max_size=40
    )
)
_TIMES = st.lists(
    st.sampled_from(["m8", "M8"]).flatmap(
        lambda kind: st.builds(
            lambda number, unit: numpy.array(number, "i8").view(f"{kind}{unit}")[()],
            st.integers(-(2**63), 2**63 - 1),
            st.sampled_from(["", "[Y]", "[M]", "[D]", "[s]", "[25s]", "[ns]", "[as]"]),
        )
    ),
    min_size=14,
    max_size=40,
)
_T = numpy.timedelta64


@settings(max_examples=80, deadline=None)
@given(_MIXED | _ALIKE | _TIMES)
@example([_T(5)] * 8 + [_T(1, "s")] * 8)
@example([_T(2**40, "D")] * 8 + [_T(1, "ns")] * 8)
@example([_T(300_000, "Y")] * 8 + [_T(1, "M")] * 8)
@example([_T(5, "Y")] * 8 + [_T(1, "s")] * 8)
@example([_T(1, "D"), _T("NaT")] * 20)
@example([numpy.longdouble("1e4000")] * 20)
def test_a_list_of_scalars_arrives_as_it_was(scalars: list[Any]) -> None:
    arrived_scalars = sent(scalars)
    assert [_bits(scalar) for scalar in arrived_scalars] == [_bits(scalar) for scalar in scalars]
