"""Arrays, tensors and frames in the codec `values` arrive as they were, without a copy too many."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import io
import sys
from typing import Any

import numpy
import pandas
import polars
import polars.testing
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy
from hypothesis.extra import pandas as of_pandas

from kubetorch.errors import SerializationError
from kubetorch.wire import codecs, values


def sent(value: Any, *, is_writable: bool = True) -> Any:
    """A value as it arrives."""
    segments = codecs.encode("values", value)
    sizes = [len(segment) for segment in segments]
    payload = b"".join(codecs.join(segments))
    memory = memoryview(bytearray(payload) if is_writable else payload)
    return codecs.decode("values", codecs.split(memory, sizes))


def is_copied(value: Any, memory: Any) -> bool:
    """Whether none of the buffers of an encoded value is a piece of an array's memory."""
    _, area = codecs.encode("values", value)
    assert isinstance(area, values.GatheredSegment)
    return not any(
        numpy.shares_memory(numpy.frombuffer(part, "u1"), memory)
        for part in area.parts
        if isinstance(part, memoryview)
    )


# ---------------------------------------------------------------------------------------- NumPy

dtypes = (
    of_numpy.scalar_dtypes()
    | of_numpy.unicode_string_dtypes(min_len=1)
    | of_numpy.byte_string_dtypes(min_len=1)
    | of_numpy.array_dtypes(of_numpy.scalar_dtypes(), allow_subarrays=True)
)
shapes = of_numpy.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=5)


@settings(deadline=None)
@given(of_numpy.arrays(dtypes, shapes), st.sampled_from(["C", "F", "strided"]))
def test_an_array_arrives_as_it_was(array: Any, order: str) -> None:
    if order == "strided":
        array = array[..., ::2] if array.ndim else array
    else:
        array = numpy.asarray(array, order=order)
    arrived_array = sent(array)
    assert arrived_array.dtype == array.dtype
    assert arrived_array.shape == array.shape
    assert arrived_array.tobytes() == array.tobytes()
    assert arrived_array.flags.writeable
    if order == "F":
        assert arrived_array.flags.f_contiguous == array.flags.f_contiguous


@given(dtypes.flatmap(lambda dtype: of_numpy.arrays(dtype, ())))
def test_a_scalar_arrives_as_it_was(array: Any) -> None:
    scalar = array[()]
    arrived_values = sent([scalar, {"a": scalar}])
    for arrived_scalar in (arrived_values[0], arrived_values[1]["a"]):
        assert type(arrived_scalar) is type(scalar)
        assert numpy.array(arrived_scalar, array.dtype).tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", ["f8", "f4", "i1", "?", "c16", "u8"])
def test_a_list_of_many_numbers_of_numpy_is_one(kind: str) -> None:
    numbers = list(numpy.arange(5000).astype(kind))
    head, _ = codecs.encode("values", {"a": numbers})
    assert len(head) < 100
    for arrived_numbers in (sent({"a": numbers})["a"], sent({tuple(numbers)}).pop()):
        assert list(map(type, arrived_numbers)) == list(map(type, numbers))
        assert list(arrived_numbers) == numbers
    mixed = [*numbers, 1]
    assert list(map(type, sent(mixed))) == list(map(type, mixed))


def test_an_array_of_objects_is_a_list_of_values() -> None:
    array = numpy.array([[1, "x"], [None, (1, {2: 3})]], dtype=object)
    arrived_array = sent(array)
    assert arrived_array.dtype == object
    assert arrived_array.tolist() == array.tolist()
    with pytest.raises(SerializationError, match=r'result\["a"\]\[1\] is an object'):
        codecs.encode("values", {"a": numpy.array([1, object()], dtype=object)})


@pytest.mark.skipif(numpy.__version__ < "2", reason="they came with NumPy 2")
def test_an_array_of_strings_without_a_length_arrives() -> None:
    array = numpy.array([["a", "bcd"]], numpy.dtypes.StringDType())
    arrived_array = sent(array)
    assert arrived_array.dtype == array.dtype
    assert arrived_array.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("array", "hint"),
    [
        (numpy.ma.array([1], mask=[True]), "it.data and it.mask"),
        (numpy.rec.array([(1, 2.0)], names="a,b"), "numpy.asarray(it), which has the same fields"),
    ],
)
def test_an_array_that_is_more_than_one_is_refused_with_what_travels(array: Any, hint: str) -> None:
    with pytest.raises(SerializationError, match="result is a numpy") as caught:
        codecs.encode("values", array)
    assert hint in str(caught.value.hint)


def test_a_record_array_travels_as_its_hint_says() -> None:
    records = numpy.rec.array([(1, 2.0)], names="a,b")

    arrived_records = sent(numpy.asarray(records)).view(numpy.recarray)

    assert arrived_records.a.tolist() == [1] and arrived_records[0].b == 2.0
    assert type(arrived_records[0]) is numpy.record


def test_arrays_are_not_copied() -> None:
    array = numpy.ones((1000, 100))
    for layout in (array, numpy.asfortranarray(array), array.astype("M8[s]")):
        assert not is_copied({"a": [layout]}, layout)
    payload = bytearray(b"".join(codecs.join(codecs.encode("values", array))))
    head = payload.index(b"}") + 1
    start = -(-head // codecs.ALIGNMENT) * codecs.ALIGNMENT
    area = memoryview(payload)[start:]
    decoded_array = codecs.decode("values", [bytes(payload[:head]), area])
    assert numpy.shares_memory(decoded_array, numpy.frombuffer(payload, "u1"))


def test_what_lies_in_memory_that_cannot_be_written_can_be_changed_where_it_arrives() -> None:
    arrived_array = sent(numpy.ones(5000), is_writable=False)
    arrived_array[0] = 2
    assert arrived_array[0] == 2


def test_an_array_that_is_there_twice_travels_once_and_is_one_array() -> None:
    array = numpy.ones(10_000)
    segments = codecs.encode("values", [array, {"again": array}])
    assert sum(map(len, segments)) < 90_000
    first, second = sent([array, {"again": array}])
    assert second["again"] is first


def _sent_to_one_without(library: str, value: Any) -> Any:
    segments = [b"".join(codecs.join([segment])) for segment in codecs.encode("values", value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        return codecs.decode("values", segments)


def test_a_number_of_numpy_is_a_plain_one_where_there_is_no_numpy() -> None:
    arrived_numbers = _sent_to_one_without("numpy", [numpy.float64(1.5), numpy.str_("x")])
    assert [type(number) for number in arrived_numbers] == [float, str]
    assert arrived_numbers == [1.5, "x"]
    arrived_numbers = _sent_to_one_without("numpy", list(numpy.arange(50.0)))
    assert {type(number) for number in arrived_numbers} == {float}
    assert arrived_numbers == list(range(50))


@pytest.mark.parametrize(
    ("library", "value"),
    [
        ("numpy", numpy.ones(2)),
        ("numpy", numpy.int64(2)),
        ("pandas", pandas.DataFrame({"a": [1]})),
        ("polars", polars.DataFrame({"a": [1]})),
        ("pyarrow", pyarrow.table({"a": [1]})),
    ],
)
def test_a_library_that_is_missing_where_a_value_arrives_is_named(library: str, value: Any) -> None:
    with pytest.raises(SerializationError, match=f"{library} cannot be imported here") as caught:
        _sent_to_one_without(library, value)
    assert f'kt.Image().pip_install(["{library}"])' in str(caught.value)


# ---------------------------------------------------------------------------------------- torch


def _torch() -> Any:
    return pytest.importorskip("torch")


def _tensors() -> dict[str, Any]:
    torch = _torch()
    return {
        "float": torch.randn(3, 4),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "conjugate": torch.complex(torch.ones(2), torch.ones(2)).conj(),
        "negative": torch.complex(torch.ones(2), torch.ones(2)).conj().imag,
        "transposed": torch.randn(3, 4).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": torch.arange(10)[::2],
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "gradient": torch.ones(3, requires_grad=True),
        "computed": torch.ones(3, requires_grad=True) * 2,
    }


def test_a_torch_tensor_arrives_as_it_was() -> None:
    torch = _torch()
    for name, tensor in _tensors().items():
        arrived_tensor = sent([tensor])[0]
        assert type(arrived_tensor) is type(tensor), name
        assert (arrived_tensor.dtype, arrived_tensor.shape) == (tensor.dtype, tensor.shape), name
        assert arrived_tensor.requires_grad == tensor.requires_grad, name
        assert torch.equal(arrived_tensor, tensor), name
        if name in ("transposed", "channels last"):
            assert arrived_tensor.stride() == tensor.stride(), name


def test_a_torch_tensor_is_not_copied_and_can_be_changed() -> None:
    torch = _torch()
    tensor = torch.ones(10_000)
    assert not is_copied(tensor, tensor.numpy())
    arrived_tensor = sent(tensor, is_writable=False)
    arrived_tensor[0] = 2
    assert arrived_tensor[0] == 2


def test_a_torch_tensor_that_lies_elsewhere_is_refused_with_the_way_out() -> None:
    torch = _torch()
    with pytest.raises(SerializationError, match=r'\["a"\] is a torch.Tensor on meta') as caught:
        codecs.encode("values", {"a": torch.ones(2, device="meta")})
    assert "tensor.cpu()" in str(caught.value)
    with pytest.raises(SerializationError, match="sparse or quantized"):
        codecs.encode("values", torch.ones(2).to_sparse())


def test_a_torch_model_that_was_changed_on_its_way_is_refused_or_another_one() -> None:
    torch = _torch()
    good = ["float32", [2], [0], False, False, [0, 8]]
    for position, strange in [
        (0, "qint8"),
        (0, "nn"),
        (1, [3]),
        (1, [-2]),
        (2, [1]),
        (2, []),
        (5, [0, 9]),
    ]:
        parts = [*good]
        parts[position] = strange
        with pytest.raises(SerializationError):
            _decode("torch.tensor", parts, bytes(8))
    assert torch.equal(_decode("torch.tensor", good, bytes(8)), torch.zeros(2))


def _decode(kind: str, parts: list[Any], area: bytes) -> Any:
    import json

    return codecs.decode("values", [b"$" + json.dumps({"$": [kind, *parts]}).encode(), area])


# --------------------------------------------------------------------------------------- pandas

COLUMNS: dict[str, Any] = {
    "integers": [1, 2, 3],
    "floats": [1.5, None, 3.0],
    "flags": [True, False, True],
    "texts": ["a", None, "c"],
    "objects": pandas.Series([1, None, (1, {"a": {2: 3}})], dtype=object),
    "mixed": pandas.Series([1, "a", datetime.date(2020, 1, 1)], dtype=object),
    "texts as objects": pandas.Series(["a", None, float("nan")], dtype=object),
    "categories": pandas.Categorical(["x", "y", None], categories=["y", "x"], ordered=True),
    "intervals as categories": pandas.cut([1, 2, 3], 2),
    "moments": pandas.date_range("2020", periods=3),
    "zoned": pandas.date_range("2020-03-29", periods=3, freq="h", tz="Europe/Berlin"),
    "in utc": pandas.date_range("2020", periods=3, tz="UTC"),
    "with an offset": pandas.date_range("2020", periods=3, tz="+05:30"),
    "spans": pandas.to_timedelta([1, 2, 3], unit="s"),
    "months": pandas.period_range("2020", periods=3, freq="M"),
    "intervals": pandas.interval_range(0, 3),
    "nullable integers": pandas.array([1, None, 3], dtype="Int64"),
    "nullable floats": pandas.array([1.5, None, 3], dtype="Float32"),
    "nullable flags": pandas.array([True, None, False], dtype="boolean"),
    "python texts": pandas.array(["a", None, "c"], dtype=pandas.StringDtype("python")),
    "arrow texts": pandas.array(["a", None, "c"], dtype=pandas.StringDtype("pyarrow")),
    "arrow integers": pandas.array([1, None, 3], dtype=pandas.ArrowDtype(pyarrow.int32())),
    "arrow lists": pandas.array(
        [[1], None, [2, 3]], dtype=pandas.ArrowDtype(pyarrow.list_(pyarrow.int64()))
    ),
    "complex": [1 + 2j, 0j, 3j],
}

INDEXES: dict[str, Any] = {
    "range": pandas.RangeIndex(5, 11, 2, name="i"),
    "integers": pandas.Index([3, 1, 2]),
    "texts": pandas.Index(["a", "b", "c"], name=("x", 1)),
    "mixed": pandas.Index(["a", 1, (1, 2)]),
    "moments": pandas.date_range("2020", periods=3, freq="2h", tz="UTC", name="when"),
    "without a frequency": pandas.DatetimeIndex(["2020", "2022", "2023"]),
    "spans": pandas.timedelta_range("1s", periods=3),
    "months": pandas.period_range("2020", periods=3, freq="Q"),
    "categories": pandas.CategoricalIndex(["a", "b", "a"]),
    "intervals": pandas.interval_range(0, 3),
    "levels": pandas.MultiIndex.from_tuples([("a", 1), ("b", 2), ("a", 3)], names=["k", None]),
    "nullable": pandas.Index(pandas.array([1, None, 3], dtype="Int64")),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_pandas_arrives_as_it_was(name: str) -> None:
    series = pandas.Series(COLUMNS[name], name=name)
    pandas.testing.assert_series_equal(sent(series), series)
    frame = series.to_frame()
    pandas.testing.assert_frame_equal(sent({"a": [frame]})["a"][0], frame)


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_of_pandas_arrives_as_it_was(name: str) -> None:
    index = INDEXES[name]
    arrived_index = sent(index)
    pandas.testing.assert_index_equal(arrived_index, index, exact=True)
    assert type(arrived_index) is type(index)
    assert getattr(arrived_index, "freq", None) == getattr(index, "freq", None)
    frame = pandas.DataFrame({"a": [1, 2, 3]}, index=index)
    pandas.testing.assert_frame_equal(sent(frame), frame)
    pandas.testing.assert_frame_equal(sent(frame.T), frame.T)


@pytest.mark.parametrize("labels", [["a"], ["a", 1.5], [None], [-1, -2, "x"]], ids=str)
def test_labels_may_come_again_many_times(labels: list[Any]) -> None:
    index = pandas.Index(labels * 2000, dtype=object)
    pandas.testing.assert_index_equal(sent(index), index, exact=True)


def test_a_frame_of_all_columns_arrives_with_its_attributes() -> None:
    frame = pandas.DataFrame(COLUMNS, index=INDEXES["levels"])
    frame.attrs["source"] = {1: (2,)}
    arrived_frame = sent(frame)
    pandas.testing.assert_frame_equal(arrived_frame, frame)
    assert arrived_frame.attrs == {"source": {1: [2]}}
    pandas.testing.assert_frame_equal(sent(frame.iloc[::2]), frame.iloc[::2])


@pytest.mark.parametrize(
    "frame",
    [
        pandas.DataFrame(),
        pandas.DataFrame(index=[1, 2]),
        pandas.DataFrame(columns=["a", "b"]),
        pandas.DataFrame({"a": []}, dtype="f4"),
        pandas.DataFrame(numpy.ones((3, 2)), columns=["a", "a"]),
        pandas.DataFrame(numpy.ones((3, 2), order="F")),
        pandas.DataFrame({3: [1], "b": [2.0], ("c", 1): ["x"]}),
        pandas.DataFrame({("a", 1): [1], ("b", 2): [2]}),
        pandas.DataFrame(numpy.ones((3, 9))).assign(s="a"),
        pandas.DataFrame({"a": [1, 2], "b": [3, 4], "c": [1.0, 2.0]})[["c", "a"]],
        pandas.DataFrame(numpy.array([["a", 1], ["b", 2]], dtype=object)),
    ],
)  # fmt: skip
def test_a_frame_of_any_shape_arrives(frame: Any) -> None:
    arrived_frame = sent(frame)
    pandas.testing.assert_frame_equal(arrived_frame, frame)
    assert type(arrived_frame.columns) is type(frame.columns)
    assert type(arrived_frame.index) is type(frame.index)


@settings(max_examples=50, deadline=None)
@given(
    of_pandas.data_frames(
        [
            of_pandas.column("a", dtype=float),
            of_pandas.column("b", elements=st.text(max_size=3), dtype=object),
            of_pandas.column("c", dtype=int),
            of_pandas.column("d", dtype="datetime64[ns]"),
        ]
    )
)
def test_a_frame_of_any_content_arrives(frame: Any) -> None:
    pandas.testing.assert_frame_equal(sent(frame), frame)


@pytest.mark.parametrize("array", [numpy.ones((1000, 20)), numpy.ones((1000, 20), order="F")])
def test_a_frame_of_one_dtype_is_not_copied(array: Any) -> None:
    frame = pandas.DataFrame(array, copy=False)
    assert not is_copied(frame, array)
    frame["name"] = "x"
    if pandas.__version__ >= "3":  # before, pandas itself copies where it takes some columns
        assert not is_copied(frame, array)


@pytest.mark.parametrize(
    "value",
    [
        pandas.Timestamp("2020-03-29 02:30", tz="UTC"),
        pandas.Timestamp("2020-10-25 01:30", tz="UTC").tz_convert("Europe/Berlin"),
        pandas.Timestamp(1),
        pandas.Timedelta(5),
        pandas.NaT,
        pandas.NA,
    ],
)
def test_a_scalar_of_pandas_arrives_as_it_was(value: Any) -> None:
    arrived_scalar = sent([value])[0]
    assert type(arrived_scalar) is type(value)
    assert repr(arrived_scalar) == repr(value)


def test_what_of_a_frame_cannot_travel_is_named_with_its_column() -> None:
    frame = pandas.DataFrame({"a": [1, 2]})
    frame["s"] = pandas.arrays.SparseArray([0, 1])
    with pytest.raises(SerializationError, match=r'result\["s"\] is .* of dtype Sparse'):
        codecs.encode("values", frame)
    objects = pandas.DataFrame({"o": pandas.Series([1, object()], dtype=object)})
    with pytest.raises(SerializationError, match=r'result\["f"\]\["o"\]\[1\] is an object'):
        codecs.encode("values", {"f": objects})


# --------------------------------------------------------------------------------- Arrow, polars

TABLE = pyarrow.table(
    {
        "a": [1, None, 3],
        "s": ["x", None, "z"],
        "d": pyarrow.array(["u", "v", "u"]).dictionary_encode(),
        "l": [[1, 2], None, []],
        "r": [{"a": 1, "b": "q"}, None, {"a": 2, "b": None}],
        "n": pyarrow.nulls(3),
        "m": pyarrow.array([decimal.Decimal("1.10"), None, None]),
    },
    metadata={"key": "value"},
)
OF_ARROW = {
    "table": TABLE,
    "slice": TABLE.slice(1, 1),
    "chunks": pyarrow.concat_tables([TABLE, TABLE]),
    "empty": TABLE.schema.empty_table(),
    "batch": TABLE.to_batches()[0],
    "empty batch": TABLE.slice(0, 0).to_batches()[0] if TABLE.slice(0, 0).to_batches() else TABLE,
    "array": pyarrow.array([1, None]),
    "dictionary": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
    "empty array": pyarrow.array([], pyarrow.string()),
    "chunked": pyarrow.chunked_array([[1], [2, 3]]),
    "nulls": pyarrow.nulls(5),
}


@pytest.mark.parametrize("name", OF_ARROW)
def test_what_arrow_has_arrives_as_it_was(name: str) -> None:
    value = OF_ARROW[name]
    arrived_value = sent({"a": value})["a"]
    assert type(arrived_value) is type(value)
    assert arrived_value.equals(value)
    if hasattr(value, "schema"):
        assert arrived_value.schema.equals(value.schema, check_metadata=True)


def test_a_table_is_not_copied() -> None:
    array = numpy.arange(100_000)
    assert not is_copied(pyarrow.table({"a": array}), array)


FRAME = polars.DataFrame(
    {
        "a": [1, None],
        "s": ["x", None],
        "l": [[1], [2, 3]],
        "r": [{"a": 1}, None],
        "c": polars.Series(["x", "y"], dtype=polars.Categorical),
        "e": polars.Series(["x", "y"], dtype=polars.Enum(["x", "y"])),
        "d": [decimal.Decimal("1.20"), None],
        "t": [datetime.datetime(2020, 1, 1), None],
        "z": polars.Series([datetime.datetime(2020, 1, 1), None]).dt.replace_time_zone(
            "Europe/Berlin"
        ),
        "b": [b"x", None],
        "f": [True, None],
        "n": [None, None],
        "v": polars.Series([[1, 2], [3, 4]], dtype=polars.Array(polars.Int8, 2)),
    }
)


def test_a_frame_of_polars_arrives_as_it_was() -> None:
    arrived_frame = sent({"a": FRAME})["a"]
    polars.testing.assert_frame_equal(arrived_frame, FRAME)
    assert arrived_frame.schema == FRAME.schema
    for column in FRAME.columns:
        polars.testing.assert_series_equal(sent(FRAME[column]), FRAME[column])
    polars.testing.assert_frame_equal(sent(polars.DataFrame()), polars.DataFrame())


def test_columns_of_polars_are_not_copied_after_polars_wrote_them() -> None:
    frame = polars.DataFrame({"a": range(100_000), "b": [str(i) for i in range(100_000)]})
    _, area = codecs.encode("values", frame)
    assert isinstance(area, values.GatheredSegment)
    assert max(map(len, area.parts)) > 0.99 * len(area)
    # What lies before them moves them by no multiple of their alignment.
    arrived_values = sent({"before": b"x" * 5001, "frame": frame, "after": frame["b"]})
    polars.testing.assert_frame_equal(arrived_values["frame"], frame)
    polars.testing.assert_series_equal(arrived_values["after"], frame["b"])


def test_what_of_polars_cannot_travel_says_so() -> None:
    many = polars.select(n=polars.repeat(None, 2_000_000, dtype=polars.Null))
    with pytest.raises(SerializationError, match=r"more than \d+ rows"):
        codecs.encode("values", many)
    with pytest.raises(SerializationError, match="whose column 'o' has objects"):
        codecs.encode("values", polars.DataFrame({"o": [object()]}))
    with pytest.raises(SerializationError, match=r"frame\.collect\(\)"):
        codecs.encode("values", FRAME.lazy())


def test_a_stream_of_polars_that_says_it_is_larger_is_refused() -> None:
    stream = io.BytesIO()
    polars.DataFrame({"n": [None] * 3}).write_ipc_stream(stream, compression="uncompressed")
    data = stream.getvalue()
    length = (3).to_bytes(8, "little")
    for position in range(len(data) - 8):
        if data[position : position + 8] == length:
            huge = data[:position] + (2**40).to_bytes(8, "little") + data[position + 8 :]
            with contextlib.suppress(SerializationError):
                assert _decode("pl.DataFrame", [[0, len(huge)]], huge).height == 3
