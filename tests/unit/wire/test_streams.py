"""Streams of Arrow, tables and frames are as large as they look, at both ends."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pandas
import polars
import pyarrow
import pytest

from kubetorch.errors import SerializationError
from kubetorch.wire import codecs
from tests.unit.wire.test_arrays import sent

#: More rows than there may be without bytes.
ROWS = 2**24


TWO = pyarrow.array([1, 2])


def _stream(batch: Any, times: int = 1) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(times):
            writer.write(batch)
    return bytes(sink.getvalue())


def _decode(value: object, area: bytes = b"") -> Any:
    return codecs.decode("values", [b"$" + json.dumps(value).encode(), bytearray(area)])


def _runs(count: int, values: Any) -> Any:
    return pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([count], "i4"), values)


def _codes(values: Any, *codes: int) -> Any:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(codes, "i1"), values)


def _views(*sizes: int) -> Any:
    offsets = pyarrow.array([0] * len(sizes), "i4")
    return pyarrow.ListViewArray.from_arrays(
        offsets, pyarrow.array(sizes, "i4"), pyarrow.array([1, 2])
    )


def _union(*offsets: int) -> Any:
    codes = pyarrow.array([0] * len(offsets), "i1")
    return pyarrow.UnionArray.from_dense(
        codes, pyarrow.array(offsets, "i4"), [pyarrow.array([1, 2])]
    )


EMPTY = pyarrow.py_buffer(b"")
LARGE = {
    "nulls": pyarrow.nulls(ROWS),
    "a run": _runs(ROWS, pyarrow.array(["a"])),
    "structs of no fields": pyarrow.StructArray.from_buffers(pyarrow.struct([]), ROWS, [None]),
    "texts of no bytes": pyarrow.Array.from_buffers(pyarrow.binary(0), ROWS, [None, EMPTY]),
    "a dictionary of nulls": _codes(pyarrow.nulls(ROWS), 0),
    "a list of nulls": pyarrow.ListArray.from_arrays([0, ROWS], pyarrow.nulls(ROWS)),
    "a run of lists": _runs(5, pyarrow.array([[1, 2]])),
    "a dictionary of lists": _codes(pyarrow.array([[1, 2]]), 0, 0),
    "runs in a struct": pyarrow.StructArray.from_arrays([_runs(ROWS, pyarrow.array([1]))], ["a"]),
    "views of one list": _views(2, 2, 2),
    "views in a list": pyarrow.ListArray.from_arrays([0, 3], _views(2, 2, 2)),
    "a union of one value": _union(1, 1, 1),
}


@pytest.mark.security
@pytest.mark.parametrize("name", LARGE)
def test_rows_that_no_byte_accounts_for_are_refused_at_both_ends(name: str) -> None:
    table = pyarrow.table({"a": LARGE[name]})
    with pytest.raises(SerializationError, match=r'^result\[1\]\["x"\] is a pyarrow\.lib\.Table, '):
        codecs.encode("values", [0, {"x": table}])
    data = _stream(table)
    for kind in ("pa.Table", "pa.Array", "pl.DataFrame"):
        with pytest.raises(SerializationError):
            _decode({"$": [kind, [0, len(data)]]}, data)


@pytest.mark.security
def test_rows_without_bytes_of_many_batches_and_values_are_counted_together() -> None:
    data = _stream(pyarrow.record_batch({"a": pyarrow.nulls(2**17)}), 64)
    for kind in ("pa.Table", "pl.DataFrame"):
        with pytest.raises(SerializationError, match=r"more than \d+ rows"):
            _decode({"$": [kind, [0, len(data)]]}, data)
    stream = _stream(pyarrow.table({"a": pyarrow.nulls(2**19)}))
    tags = [{"$": ["pa.Table", [index * len(stream), len(stream)]]} for index in range(3)]
    with pytest.raises(SerializationError, match=r"more than \d+ rows"):
        _decode(tags, stream * 3)
    table = pyarrow.table({"a": pyarrow.nulls(2**19)})
    with pytest.raises(SerializationError, match=r"^result\[2\] is .* more than \d+ rows"):
        codecs.encode("values", [table] * 3)


NONE = {"$": ["np.array", "<i1", [0], "C", [0, 0]]}


@pytest.mark.security
@pytest.mark.parametrize("rows", [2**22, 2**31 - 1])
def test_nulls_are_no_labels_of_an_index_or_a_category(rows: int) -> None:
    data = _stream(pyarrow.table({"": pyarrow.nulls(rows)}))
    labels = ["values", ["arrow", [0, len(data)]], None, None]
    for index in (
        ["multi", [labels], [NONE], [None]],
        ["values", ["category", NONE, labels, True], None, None],
    ):
        with pytest.raises(SerializationError, match=r"more than \d+ rows"):
            _decode({"$": ["pd.index", index]}, data)


@pytest.mark.security
def test_a_range_has_no_more_labels_than_are_cheap() -> None:
    for stop in (2**26 + 1, 2**63 - 1, 2**80):
        labels = ["range", 0, stop, 1, None]
        for tag in (["pd.index", labels], ["pd.frame", [], ["range", 0, 0, 1, None], labels, None]):
            with pytest.raises(SerializationError, match=r"67108864 labels|OverflowError"):
                _decode({"$": tag})
    for value in (pandas.RangeIndex(2**26 + 1), pandas.DataFrame(index=pandas.RangeIndex(2**40))):
        with pytest.raises(SerializationError, match=r"pandas\.RangeIndex of more than 67108864"):
            codecs.encode("values", value)
    index = pandas.RangeIndex(2**26)
    assert sent(index).equals(index)


def test_labels_may_be_as_many_as_the_values_beside_them() -> None:
    series = pandas.Series(numpy.zeros(2**26 + 1, "i1"))
    assert len(sent(series)) == len(sent(pandas.DataFrame({"a": series}))) == 2**26 + 1


SMALL = {
    "nulls": pyarrow.nulls(1000),
    "runs": pyarrow.RunEndEncodedArray.from_arrays([2, 5], ["a", "b"]),
    "views": pyarrow.array([[1, 2], None, [3]], pyarrow.list_view(pyarrow.int8())),
    "large views": pyarrow.array([[1, 2], None, [3]], pyarrow.large_list_view(pyarrow.int8())),
    "union": _union(0, 1),
    "dictionary": _codes(pyarrow.array([1.5, 2.5]), 0, 1, 0, 0),
    "dictionaries in a struct": pyarrow.StructArray.from_arrays(
        [_codes(pyarrow.array(["u"]), 0, 0)], ["a"]
    ),
    "nulls beside numbers": pyarrow.StructArray.from_arrays(
        [pyarrow.nulls(2**21), pyarrow.array(numpy.zeros(2**21))], ["a", "b"]
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_what_has_its_bytes_arrives_as_it_was(name: str) -> None:
    arrived_array = sent(SMALL[name])
    assert (arrived_array.type, arrived_array) == (SMALL[name].type, SMALL[name])


@pytest.mark.security
def test_an_empty_table_ends_no_process_that_looks_at_it() -> None:
    views = pyarrow.list_view(pyarrow.int8())
    table = sent(pyarrow.table({"a": pyarrow.chunked_array([], views)}))
    assert table["a"].num_chunks == 1
    assert list(table.to_pandas().columns) == ["a"]


def test_nulls_of_many_columns_beside_numbers_arrive() -> None:
    frame = polars.DataFrame({"a": numpy.zeros(2**19)}).with_columns(
        polars.lit(None).alias(f"n{number}") for number in range(20)
    )
    assert sent(frame).equals(frame)


def _array(dtype: str, *numbers: object) -> tuple[dict[str, Any], bytes]:
    array = numpy.array(numbers, dtype)
    return {
        "$": ["np.array", array.dtype.str, [len(array)], "C", [0, array.nbytes]]
    }, array.tobytes()


LABELS = ["values", ["array", {"$": ["np.objects", [2], ["u", "v"]]}], None, None]
SAME_VALUE = {"$": ["again", 0]}
NUMBERS: dict[str, tuple[Any, Any]] = {
    "a code of no category": (lambda numbers: ["category", numbers, LABELS, False], ("i1", 2)),
    "a code that is cut off": (lambda numbers: ["category", numbers, LABELS, False], ("i8", 2**32)),
    "a code below -1": (lambda numbers: ["category", numbers, LABELS, False], ("i1", -2)),
    "codes that are fractions": (lambda numbers: ["category", numbers, LABELS, False], ("f8", 0.5)),
    "codes in another order": (lambda numbers: ["category", numbers, LABELS, False], (">i4", 1)),
    "periods of fewer bytes": (lambda numbers: ["period", numbers, "period[D]"], ("i4", 1)),
    "moments of fewer bytes": (lambda numbers: ["zoned", numbers, "ns", "UTC"], ("V16", b"1")),
    "a mask of numbers": (lambda numbers: ["masked", numbers, SAME_VALUE, "Int64"], ("i8", 1)),
    "masked numbers that are none": (
        lambda numbers: ["masked", numbers, SAME_VALUE, "Int64"],
        ("S8", b"1"),
    ),
}


@pytest.mark.security
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_looked_at_before_pandas_sees_them(name: str) -> None:
    column, (dtype, number) = NUMBERS[name]
    array, data = _array(dtype, number)
    with pytest.raises(SerializationError, match=r"codes that are none|an array of"):
        _decode({"$": ["pd.series", column(array), ["range", 0, 1, 1, None], None]}, data)


@pytest.mark.security
@pytest.mark.parametrize(("dtype", "code"), [("i1", 1), ("i1", -2), ("i8", 256), ("i8", 2**32)])
def test_codes_of_an_index_are_looked_at_before_pandas_cuts_them(dtype: str, code: int) -> None:
    array, data = _array(dtype, code)
    index = ["multi", [["range", 0, 1, 1, None]], [array], [None]]
    with pytest.raises(SerializationError, match="codes that are none of 1 labels"):
        _decode({"$": ["pd.index", index]}, data)


# ----------------------------------------------------------------------- what cannot be rebuilt

_DAYS = pandas.bdate_range("2020-01-01", periods=2, freq="C", holidays=["2020-01-02"])
_OFFSET = pandas.date_range("2020", periods=2, freq=pandas.DateOffset(months=1, days=2))
_HOURS = pandas.offsets.BusinessHour(start="10:00", end="12:00")
LOST: dict[str, tuple[Any, str]] = {
    "holidays": (pandas.Series([1, 2], index=_DAYS), r"\.index"),
    "an offset of their own": (pandas.DataFrame({"a": [1, 2]}, index=_OFFSET), r"\.index"),
    "columns": (pandas.DataFrame([[1, 2]], columns=_OFFSET), r"\.columns"),
    "hours": (pandas.date_range("2020", periods=3, freq=_HOURS), ""),
    "arrays of width 0": (polars.Series([[], []], dtype=polars.Array(polars.Int8, 0)), ""),
    "a dictionary in a struct that lacks all": (
        pyarrow.array(
            [None, {"a": None}, None],
            pyarrow.struct([("a", pyarrow.dictionary(pyarrow.int8(), pyarrow.int64()))]),
        ),
        "",
    ),
    "text that is none": (
        pyarrow.array([b"\xff"]).view(pyarrow.string()),
        "",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_could_not_be_rebuilt_is_refused_by_its_path(name: str) -> None:
    value, path = LOST[name]
    with pytest.raises(
        SerializationError, match=rf'^result\[1\]\["x"\]{path} is a .* cannot travel'
    ):
        codecs.encode("values", [0, {"x": value}])


def test_frequencies_that_have_a_name_arrive() -> None:
    for name in ("D", "2h", "ME", "QS-FEB", "B", "W-WED", "C", "bh", "3MS"):
        index = pandas.date_range("2020-01-01", periods=4, freq=name)
        assert sent(pandas.Series(range(4), index=index)).index.freq == index.freq
        if name in ("D", "2h", "ME", "W-WED"):
            periods = index.to_period()
            assert sent(pandas.Series(range(4), index=periods)).index.equals(periods)
