"""Arrays, tensors and frames in `kubetorch.wire.values`: NumPy, torch, pandas, polars and Arrow.

The module imports only the standard library: a process that encodes a value of a library has loaded
the library already, and a process that receives such a value imports it. Encoding copies no buffer
that lies in one piece; decoding copies no buffer.

- Arrays of NumPy are dtype, shape, order and bytes. Arrays of objects are lists of values, each of
  which must be able to travel by itself.
- Tensors are the same, on the CPU, dense; as in a pickle, the graph of their gradients stays.
- Frames of pandas are their columns: arrays, and the additions that make other columns of arrays
  (categories, masks, time zones). Columns that Arrow keeps are streams of Arrow.
- Tables of Arrow and frames of polars are streams of Arrow's IPC format, not compressed.
  `kubetorch.wire.arrow_streams` checks a stream before a library reads it: it may have no extension
  types, whose registered code would run, and must not decode into more than its bytes.
"""

from __future__ import annotations

import bisect
import functools
import io
import itertools
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from kubetorch.errors import SerializationError
from kubetorch.wire import arrow_streams, dtypes, introspection
from kubetorch.wire.tuning import LIMITS
from kubetorch.wire.values import Packer, Tag, Unpacker, checked_zone, expect, is_zone

_DENSE = "send tensor.to_dense(), or its parts; pickle carries others where it is allowed"


def _check_shape(packer: Packer, value: Any) -> list[int]:  # noqa: ANN401  # an array or a tensor
    """The shape of a value, unless the other end refuses it."""
    sizes = list(value.shape)
    try:
        dtypes.shape(sizes)
    except ValueError as error:
        packer.refuse(value, f", which cannot travel: {error}", "send its shape")
    return sizes


# ---------------------------------------------------------------------------------------- NumPy


def _pack_numpy(packer: Packer, value: Any, mode: int) -> Tag | None:  # noqa: ANN401  # of NumPy
    numpy = sys.modules["numpy"]
    if type(value) in (numpy.ndarray, numpy.memmap):
        if value.dtype.kind == "O":
            return _pack_objects(packer, value, mode)
        return packer.once(value, lambda: _pack_array(packer, value))
    if isinstance(value, numpy.str_):
        return packer.tag("np.str", packer.pack(str.__str__(value)))
    if isinstance(value, numpy.bytes_):
        return packer.tag("np.bytes", packer.add(bytes(value), 1))
    if isinstance(value, numpy.generic):
        dtype = _describe_dtype(packer, value, value.dtype)
        # The value for a receiver without NumPy.
        plain = [float(value)] if isinstance(value, float) else []
        return packer.tag("np.scalar", dtype, value.tobytes().hex(), *plain)
    if isinstance(value, numpy.ndarray):
        packer.refuse(value, hint=_array_hint(value))
    return None


def _array_hint(value: Any) -> str:  # noqa: ANN401  # an array that is more than one
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.recarray):
        return (
            "send numpy.asarray(it), which has the same fields; .view(numpy.recarray) makes it a "
            "record array again"
        )
    if isinstance(value, numpy.ma.MaskedArray):
        return "send it.data and it.mask, or it.filled(0)"
    return "send numpy.asarray(it), the array itself"


def _pack_objects(packer: Packer, value: Any, mode: int) -> Tag:  # noqa: ANN401  # an array
    items = packer.items(value.reshape(-1).tolist(), max(mode, packer.EXACT))
    return packer.tag("np.objects", _check_shape(packer, value), items)


def _pack_array(packer: Packer, value: Any) -> Tag:  # noqa: ANN401  # an array
    if value.dtype.kind == "T":
        if hasattr(value.dtype, "na_object"):
            packer.refuse(value, " of strings that may be missing, which cannot travel")
        texts = packer.items(value.reshape(-1).tolist())
        return packer.tag("np.strings", _check_shape(packer, value), texts, [0, 0])
    dtype, flags = _describe_dtype(packer, value, value.dtype), value.flags
    order, rows = "C", value
    if not flags.c_contiguous:
        order = "F" if flags.f_contiguous else "C"
        rows = value.T if order == "F" else value.copy(order="C")
    position = packer.add(rows.reshape(-1).view("u1")) if value.size else [0, 0]
    return packer.tag("np.array", dtype, _check_shape(packer, value), order, position)


def _describe_dtype(packer: Packer, value: object, dtype: Any) -> Any:  # noqa: ANN401  # of JSON
    """A dtype as JSON: its name, or its parts."""
    if dtype.isbuiltin == 1:
        return dtype.str
    try:
        return dtypes.describe(dtype)
    except (ValueError, TypeError):  # NumPy's own, for a dtype of another library
        packer.refuse(
            value,
            f" of dtype {dtype}, which cannot travel",
            "convert it first: array.astype(numpy.float32), for example",
        )


_SCALARS = frozenset({str, int, float, bool, type(None)})


def _numpy(unpacker: Unpacker) -> Any:  # noqa: ANN401  # a module
    return unpacker.library("numpy", "a NumPy array")


def _unpack_array(
    unpacker: Unpacker, described: object, shape: object, order: object, position: object
) -> Any:  # noqa: ANN401  # an array
    numpy = _numpy(unpacker)
    dtype, sizes = dtypes.parse(described), dtypes.shape(shape)
    buffer = unpacker.buffer(position, is_writable=True)
    if dtype.hasobject or not dtype.itemsize or math.prod(sizes) * dtype.itemsize != len(buffer):
        raise ValueError(f"an array of {sizes} {dtype} in {len(buffer)} bytes")
    if not len(buffer):
        return numpy.empty(sizes, dtype)
    array = numpy.ndarray(sizes, dtype, buffer, order=expect(order, str))
    return unpacker.keep(position, array)  # type: ignore[arg-type]  # it is a list


def _unpack_scalar(unpacker: Unpacker, described: object, data: object, *plain: object) -> Any:  # noqa: ANN401
    try:
        numpy = unpacker.library("numpy", "a scalar of NumPy")
    except SerializationError:
        if plain:
            return plain[0]
        raise
    content = bytearray.fromhex(expect(data, str))
    dtype = dtypes.parse(described)
    if dtype.hasobject or dtype.itemsize != len(content):
        raise ValueError(f"a {dtype} of {len(content)} bytes")
    return numpy.ndarray((), dtype, content)[()]


def _unpack_numbers(unpacker: Unpacker, dtype: object, position: object) -> list[Any]:
    buffer = unpacker.buffer(position)
    try:
        numpy = unpacker.library("numpy", "a list of numbers of NumPy")
    except SerializationError:
        if expect(dtype, str) != ("<f8" if sys.byteorder == "little" else ">f8"):
            raise
        return buffer.cast("d").tolist()
    return list(numpy.frombuffer(buffer, dtypes.plain_dtype(expect(dtype, str))))


def _unpack_text(unpacker: Unpacker, text: object) -> Any:  # noqa: ANN401  # a scalar
    try:
        return unpacker.library("numpy", "a scalar of NumPy").str_(expect(text, str))
    except SerializationError:
        return expect(text, str)


def _unpack_objects(unpacker: Unpacker, shape: object, items: object) -> Any:  # noqa: ANN401
    numpy = _numpy(unpacker)
    sizes, values = dtypes.shape(shape), expect(items, list)
    if math.prod(sizes) != len(values):
        raise ValueError(f"an array of {sizes} with {len(values)} objects")
    objects = numpy.empty(len(values), object)
    if _SCALARS.issuperset(map(type, values)):
        objects[:] = values
    else:
        for index, value in enumerate(values):  # NumPy would look into lists
            objects[index] = value
    return objects.reshape(sizes)


def _unpack_strings(unpacker: Unpacker, shape: object, items: object, _: object) -> Any:  # noqa: ANN401
    numpy = _numpy(unpacker)
    values = [expect(item, str) for item in expect(items, list)]
    return numpy.array(values, numpy.dtypes.StringDType()).reshape(dtypes.shape(shape))


# ---------------------------------------------------------------------------------------- torch


def _pack_torch(packer: Packer, value: Any, mode: int) -> Tag | None:  # noqa: ANN401  # of torch
    del mode
    torch = sys.modules["torch"]
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.device.type != "cpu":
        packer.refuse(value, f" on {value.device}, which cannot travel", "send tensor.cpu()")
    if value.layout is not torch.strided or value.is_quantized:
        packer.refuse(value, " that is sparse or quantized, which cannot travel", _DENSE)
    return packer.once(value, lambda: _pack_tensor(packer, value))


def _pack_tensor(packer: Packer, value: Any) -> Tag:  # noqa: ANN401  # a tensor
    tensor = value.detach().resolve_conj().resolve_neg()
    # The axes from the longest stride to the shortest: so they lie in memory.
    axes = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    rows = tensor.permute(axes)
    if not rows.is_contiguous():
        axes = list(range(tensor.dim()))
        rows = tensor.contiguous()
    size = rows.numel() * rows.element_size()
    # By `ctypes`, which torch imports itself: torch may run without NumPy.
    import ctypes  # noqa: PLC0415

    memory = (ctypes.c_char * size).from_address(rows.data_ptr()) if size else b""
    if size:
        memory.tensor = rows  # type: ignore[union-attr]  # the tensor lives as long as the memory
    return packer.tag(
        "torch.tensor",
        str(tensor.dtype).removeprefix("torch."),
        _check_shape(packer, rows),
        axes,
        value.requires_grad,
        type(value).__name__ == "Parameter",
        packer.add(memory),
    )


def _unpack_tensor(  # the parts of a tensor
    unpacker: Unpacker,
    name: object,
    shape: object,
    axes: object,
    requires_grad: object,
    is_parameter: object,
    position: object,
) -> Any:  # noqa: ANN401  # a tensor
    torch = unpacker.library("torch", "a tensor")
    dtype = vars(torch).get(expect(name, str))
    sizes, order = dtypes.shape(shape), dtypes.sizes(axes)
    # torch crashes for quantized numbers that lack their scale.
    is_known = isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    if not is_known or sorted(order) != list(range(len(sizes))):
        raise ValueError(f"a tensor of dtype {name!r:.80} with the axes {order}")
    buffer = unpacker.buffer(position, is_writable=True)
    if math.prod(sizes) * dtype.itemsize != len(buffer):
        raise ValueError(f"a tensor of {sizes} {dtype} in {len(buffer)} bytes")
    flat = torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)
    tensor = flat.view(sizes).permute(sorted(range(len(order)), key=order.__getitem__))
    if is_parameter is True:
        tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad is True)
    elif requires_grad is True:
        tensor.requires_grad_()
    return unpacker.keep(position, tensor)  # type: ignore[arg-type]  # it is a list


# --------------------------------------------------------------------------------------- pandas


def _pack_pandas(packer: Packer, value: Any, mode: int) -> Tag | None:  # noqa: ANN401  # of pandas
    pandas = sys.modules["pandas"]
    kind = type(value)
    if kind is pandas.DataFrame:
        return _pack_frame(packer, value)
    if kind is pandas.Series:
        column = _pack_column(packer, value)
        return packer.tag("pd.series", column, *_pack_labels(packer, value, value.name))
    if isinstance(value, pandas.Index):
        return packer.tag("pd.index", _pack_index(packer, value, LIMITS.bare_range_labels))
    if value is pandas.NaT or value is pandas.NA:
        return packer.tag("pd.missing", "NaT" if value is pandas.NaT else "NA")
    if kind in (pandas.Timestamp, pandas.Timedelta):
        zone = [_pack_zone(packer, value.tzinfo)] if kind is pandas.Timestamp else []
        return packer.tag(f"pd.{kind.__name__}", packer.pack(value.asm8), *zone)
    del mode
    return None


def _pack_labels(packer: Packer, value: Any, name: object) -> list[object]:  # noqa: ANN401
    """The index of a frame or of a series, its name, and its `attrs`."""
    most_labels = LIMITS.range_labels if value.size else LIMITS.bare_range_labels
    pack = functools.partial(_pack_index, packer, value.index, most_labels)
    index = packer.pack_part("index", pack, is_attribute=True)
    labels = [index, packer.pack(name, packer.KEY)]
    return [*labels, packer.pack(dict(value.attrs))] if value.attrs else labels


def _pack_frame(packer: Packer, frame: Any) -> Tag:  # noqa: ANN401  # a frame
    blocks: list[object] = []
    column_number, dtypes = 0, list(frame.dtypes)
    has_rows = len(frame) > 0
    while column_number < len(dtypes):
        column = frame.iloc[:, column_number]
        count = 1
        if has_rows and _is_plain(dtypes[column_number]):
            count = next(
                len(list(same_dtypes))
                for _, same_dtypes in itertools.groupby(dtypes[column_number:])
            )
            if count > 1 and not _are_neighbours(column, frame.iloc[:, column_number + 1]):
                count = 1
        if count > 1:
            blocks.append(
                packer.pack(frame.iloc[:, column_number : column_number + count].to_numpy())
            )
        else:
            pack = functools.partial(_pack_column, packer, column)
            blocks.append(packer.pack_part(frame.columns[column_number], pack))
        column_number += count
    pack = functools.partial(_pack_index, packer, frame.columns)
    columns = packer.pack_part("columns", pack, is_attribute=True)
    return packer.tag("pd.frame", blocks, columns, *_pack_labels(packer, frame, None))


def _are_neighbours(first: Any, second: Any) -> bool:  # noqa: ANN401  # columns
    """True if two columns are neighbours in one array, as pandas keeps most columns."""
    first_memory, second_memory = (
        column.to_numpy().__array_interface__ for column in (first, second)
    )
    distance = second_memory["data"][0] - first_memory["data"][0]
    return distance in (first.dtype.itemsize, first.dtype.itemsize * len(first))


def _is_plain(dtype: Any) -> bool:  # noqa: ANN401  # a dtype
    return _package(dtype) == "numpy" and dtype.kind != "O"


def _pack_column(packer: Packer, column: Any, mode: int = 0) -> list[object]:  # noqa: ANN401
    """The values of a series or of an index: the kind of column, and its arrays."""
    dtype = column.dtype
    if _package(dtype) == "numpy":
        return ["array", packer.pack(column.to_numpy(), mode)]
    array = column.array
    pack = _PACKED_COLUMNS.get(type(dtype).__name__) if _package(dtype) == "pandas" else None
    if pack is not None:
        return pack(packer, array, dtype)
    if not (hasattr(array, "_data") and hasattr(array, "_mask")):
        why = f" of dtype {dtype}, which cannot travel"
        packer.refuse(array, why, "convert it: .astype(object)")
    return ["masked", packer.pack(array._data), packer.pack(array._mask), str(dtype)]


def _package(value: object) -> str:
    return introspection.module_of(type(value)).partition(".")[0]


def _pack_category(packer: Packer, array: Any, dtype: Any) -> list[object]:  # noqa: ANN401
    labels = _pack_inner(packer, dtype.categories)
    return ["category", packer.pack(array.codes), labels, dtype.ordered]


def _pack_moments(packer: Packer, array: Any, dtype: Any) -> list[object]:  # noqa: ANN401
    return ["zoned", packer.pack(array.asi8), dtype.unit, _pack_zone(packer, dtype.tz)]


def _pack_texts(packer: Packer, array: Any, dtype: Any) -> list[object]:  # noqa: ANN401
    missing = "NA" if dtype.na_value is sys.modules["pandas"].NA else "nan"
    if dtype.storage != "python":
        return ["string", _pack_arrow_column(packer, array), missing]
    texts = (None if text is dtype.na_value else text for text in array)
    return ["text", packer.items(list(texts)), missing]


def _pack_intervals(packer: Packer, array: Any, dtype: Any) -> list[object]:  # noqa: ANN401
    sides = (_pack_inner(packer, array.left), _pack_inner(packer, array.right))
    return ["interval", *sides, dtype.closed]


def _pack_periods(packer: Packer, array: Any, dtype: Any) -> list[object]:  # noqa: ANN401
    if _period_dtype(sys.modules["pandas"], str(dtype)) != dtype:
        packer.refuse(array, f" of dtype {dtype}, which cannot travel", "convert it: .astype(str)")
    return ["period", packer.pack(array.asi8), str(dtype)]


_PACKED_COLUMNS: dict[str, Callable[[Packer, Any, Any], list[object]]] = {
    "CategoricalDtype": _pack_category,
    "DatetimeTZDtype": _pack_moments,
    "StringDtype": _pack_texts,
    "ArrowDtype": lambda packer, array, _: ["arrow", _pack_arrow_column(packer, array)],
    "PeriodDtype": _pack_periods,
    "IntervalDtype": _pack_intervals,
}


#: Characters of the name of a frequency.
_FREQUENCY_LENGTH = 100
#: Names of time zones for which pandas reads no file that the name chooses.
_ZONE_NAME = re.compile(r"(?!dateutil|tzlocal)[A-Za-z0-9_+:/-]{1,64}")


def _pack_zone(packer: Packer, zone: Any) -> object:  # noqa: ANN401  # any time zone
    """A time zone of pandas, which may be one of `pytz`: then by its name."""
    if zone is None or is_zone(zone):
        return packer.pack(zone)
    if not _ZONE_NAME.fullmatch(str(zone)):
        packer.refuse(zone, hint="use zoneinfo.ZoneInfo")
    return str(zone)


def _named_zone(zone: Any) -> Any:  # noqa: ANN401  # a part of a tag
    return zone if type(zone) is str and _ZONE_NAME.fullmatch(zone) else checked_zone(zone)


def _pack_arrow_column(packer: Packer, array: Any) -> list[int]:  # noqa: ANN401  # of pandas
    pyarrow = sys.modules["pyarrow"]
    return _pack_table(packer, array, pyarrow.table({"": array.__arrow_array__()}))


def _pack_index(
    packer: Packer,
    index: Any,  # noqa: ANN401  # an index
    most_labels: int = LIMITS.range_labels,
) -> list[object]:
    pandas = sys.modules["pandas"]
    names = [packer.pack(name, packer.KEY) for name in index.names]
    if type(index) is pandas.RangeIndex:
        if len(index) > most_labels:
            packer.refuse(
                index, f" of more than {most_labels} labels", "send its start, stop and step"
            )
        return ["range", index.start, index.stop, index.step, *names]
    if type(index) is pandas.MultiIndex:
        levels = [_pack_inner(packer, level) for level in index.levels]
        return ["multi", levels, [packer.pack(codes.copy()) for codes in index.codes], names]
    # An index of periods has its frequency in its dtype.
    has_frequency = hasattr(index, "freq") and type(index) is not pandas.PeriodIndex
    frequency = getattr(index, "freqstr", None) if has_frequency else None
    if frequency is not None and _known_frequency(pandas, frequency) != index.freq:
        why = f" of the frequency {index.freq!s:.80}, which cannot travel"
        packer.refuse(index, why, "set its freq to None, or send index._with_freq(None)")
    return ["values", _pack_column(packer, index, packer.KEY), *names, frequency]


def _known_frequency(pandas: Any, name: str) -> object:  # noqa: ANN401  # a module
    """The frequency of this name; `None` if the name does not describe it, as with holidays."""
    try:
        return pandas.tseries.frequencies.to_offset(_frequency(name))
    except ValueError:
        return None


def _pack_inner(packer: Packer, index: Any) -> list[object]:  # noqa: ANN401  # an index
    """An index that is part of a column or of another index."""
    if type(index) is sys.modules["pandas"].RangeIndex and len(index) > LIMITS.inner_range_labels:
        names = [packer.pack(name, packer.KEY) for name in index.names]
        return ["values", _pack_column(packer, index), *names, None]
    return _pack_index(packer, index)


def _unpack_frame(
    unpacker: Unpacker,
    blocks: object,
    columns: object,
    index: object,
    _name: object,
    attributes: object = None,
) -> Any:  # noqa: ANN401  # a frame
    pandas = unpacker.library("pandas", "a frame of pandas")
    packed_blocks = expect(blocks, list)
    most_labels = LIMITS.range_labels if packed_blocks else LIMITS.bare_range_labels
    labels = _unpack_labels(unpacker, index, most_labels)
    series: list[Any] = []
    if len(packed_blocks) == 1 and type(packed_blocks[0]) is not list:
        frame = pandas.DataFrame(_array(packed_blocks[0], 2), labels, copy=False)
    else:
        for block in packed_blocks:
            if type(block) is list:
                series.append(_make_series(pandas, _unpack_column(unpacker, block), labels))
            else:
                series += [_make_series(pandas, row, labels) for row in _array(block, 2).T]
        frame = pandas.DataFrame(dict(enumerate(series)), labels, copy=False)
    frame.columns = _unpack_labels(unpacker, columns)
    frame.attrs.update({} if attributes is None else expect(attributes, dict))
    return frame


def _make_series(pandas: Any, values: Any, labels: Any) -> Any:  # noqa: ANN401  # of pandas
    # With its dtype: pandas would else infer another one.
    return pandas.Series(values, labels, dtype=values.dtype, copy=False)


def _unpack_series(
    unpacker: Unpacker, column: object, index: object, name: object, attributes: object = None
) -> Any:  # noqa: ANN401  # a series
    pandas = unpacker.library("pandas", "a series of pandas")
    values = _unpack_column(unpacker, column)
    series = _make_series(pandas, values, _unpack_labels(unpacker, index))
    series.name = unpacker.key(name)
    series.attrs.update({} if attributes is None else expect(attributes, dict))
    return series


def _unpack_index(unpacker: Unpacker, packed: object) -> Any:  # noqa: ANN401  # an index
    return _unpack_labels(unpacker, packed, LIMITS.bare_range_labels)


def _unpack_labels(
    unpacker: Unpacker, packed: object, most_labels: int = LIMITS.range_labels
) -> Any:  # noqa: ANN401  # an index
    pandas = unpacker.library("pandas", "an index of pandas")
    kind, *parts = expect(packed, list)
    if expect(kind, str) == "range":
        start, stop, step, name = parts
        labels = range(*(expect(bound, int) for bound in (start, stop, step)))
        if len(labels) > most_labels:
            raise ValueError(f"a range of more than {most_labels} labels")
        return pandas.RangeIndex(labels, name=unpacker.key(name))
    if kind == "multi":
        levels, codes, names = parts
        inner_levels = [_unpack_inner(unpacker, level) for level in expect(levels, list)]
        return pandas.MultiIndex(
            inner_levels,
            [
                _codes(level_codes, level)
                for level_codes, level in zip(expect(codes, list), inner_levels, strict=True)
            ],
            names=[unpacker.key(name) for name in expect(names, list)],
        )
    column, name, frequency = parts
    values = _unpack_column(unpacker, column)
    if type(values) is sys.modules["numpy"].ndarray and values.dtype.kind == "O":
        unpacker.keys(values)
    index = pandas.Index(values, dtype=values.dtype, name=unpacker.key(name), copy=False)
    if frequency is not None:
        index = type(index)(index, freq=_frequency(frequency), name=index.name)
    return index


def _frequency(name: object) -> str:
    """The name of a frequency; pandas takes long to parse a long name."""
    text = expect(name, str)
    if len(text) > _FREQUENCY_LENGTH:
        raise ValueError(f"a frequency whose name has {len(text)} characters")
    return text  # type: ignore[no-any-return]  # it is a `str`


def _unpack_inner(unpacker: Unpacker, packed: object) -> Any:  # noqa: ANN401  # an index
    labels = _unpack_labels(unpacker, packed)
    if (
        isinstance(labels, sys.modules["pandas"].RangeIndex)
        and len(labels) > LIMITS.inner_range_labels
    ):
        raise ValueError(f"a range of {len(labels)} labels where an array should be")
    return labels


def _unpack_column(unpacker: Unpacker, packed: object) -> Any:  # noqa: ANN401  # an array
    pandas = unpacker.library("pandas", "a frame of pandas")
    kind, *parts = expect(packed, list)
    return _COLUMNS[expect(kind, str)](unpacker, pandas, *parts)


def _array(value: Any, dimensions: int = 1) -> Any:  # noqa: ANN401  # an array
    """An array that arrived; pandas would call methods of any other object."""
    array = expect(value, sys.modules["numpy"].ndarray)
    if array.ndim != dimensions or (dimensions > 1 and not array.size):
        raise ValueError(f"an array of the shape {array.shape}")
    return array


def _numbers(value: Any, kinds: str) -> Any:  # noqa: ANN401  # an array
    """An array of numbers of these kinds, in the order of bytes of this machine."""
    array = _array(value)
    if array.dtype.kind not in kinds or not array.dtype.isnative:
        raise ValueError(f"an array of {array.dtype} where numbers should be")
    return array


def _integers(value: Any) -> Any:  # noqa: ANN401  # an array
    """An array of integers of 64 bits, such as moments."""
    array = _numbers(value, "i")
    if array.dtype.itemsize != 8:
        raise ValueError(f"an array of {array.dtype} where int64 should be")
    return array


def _codes(value: Any, labels: Any) -> Any:  # noqa: ANN401  # arrays
    """The positions of labels, -1 for a missing label; pandas would truncate larger numbers."""
    codes = _numbers(value, "i")
    if codes.size and not -1 <= codes.min() <= codes.max() < len(labels):
        raise ValueError(f"codes that are none of {len(labels)} labels")
    return codes


def _category(unpacker: Unpacker, pandas: Any, codes: Any, categories: Any, ordered: object) -> Any:  # noqa: ANN401
    labels = _unpack_inner(unpacker, categories)
    return pandas.Categorical.from_codes(
        _codes(codes, labels), dtype=pandas.CategoricalDtype(labels, ordered is True)
    )


def _zoned(_: Unpacker, pandas: Any, moments: Any, unit: object, zone: object) -> Any:  # noqa: ANN401
    dtype = pandas.DatetimeTZDtype(expect(unit, str), _named_zone(zone))
    index = pandas.DatetimeIndex(_integers(moments).view(f"M8[{unit}]"), copy=False)
    return index.tz_localize("UTC").tz_convert(dtype.tz).array


def _text(_: Unpacker, pandas: Any, items: object, missing: object) -> Any:  # noqa: ANN401
    texts = [item if item is None else expect(item, str) for item in expect(items, list)]
    dtype = _string_dtype(pandas, "python", missing)
    return _objects(texts) if dtype is None else pandas.array(texts, dtype=dtype)


def _string(unpacker: Unpacker, pandas: Any, position: object, missing: object) -> Any:  # noqa: ANN401
    texts = _unpack_table(unpacker, position)[0]
    # A cast to text may grow the values, such as those of a dictionary.
    if str(texts.type) not in ("string", "large_string"):
        raise ValueError(f"texts that are {texts.type!s:.80}")
    dtype = _string_dtype(pandas, "pyarrow", missing)
    return _objects(texts.to_pylist()) if dtype is None else dtype.__from_arrow__(texts)


def _string_dtype(pandas: Any, storage: str, missing: object) -> Any:  # noqa: ANN401  # of pandas
    """The dtype of texts; `None` if this pandas is too old for it and has objects instead."""
    if expect(missing, str) == "NA":
        return pandas.StringDtype(storage)
    try:
        return pandas.StringDtype(storage, na_value=math.nan)
    except TypeError:
        return None


def _objects(texts: list[str | None]) -> Any:  # noqa: ANN401  # an array
    objects = sys.modules["numpy"].empty(len(texts), object)
    objects[:] = [math.nan if text is None else text for text in texts]
    return objects


def _arrow(unpacker: Unpacker, pandas: Any, position: object) -> Any:  # noqa: ANN401  # of pandas
    return pandas.arrays.ArrowExtensionArray(_unpack_table(unpacker, position)[0])


def _masked(_: Unpacker, pandas: Any, data: Any, mask: Any, name: object) -> Any:  # noqa: ANN401
    kind = {"b": "Boolean", "f": "Floating"}.get(_numbers(data, "biuf").dtype.kind, "Integer")
    array = getattr(pandas.arrays, f"{kind}Array")(data, _numbers(mask, "b"))
    if str(array.dtype) != expect(name, str):
        raise ValueError(f"a {array.dtype} that is {name!r:.80}")
    return array


def _period(_: Unpacker, pandas: Any, ordinals: Any, name: object) -> Any:  # noqa: ANN401
    dtype = _period_dtype(pandas, name)
    return pandas.arrays.PeriodArray(_integers(ordinals), dtype=dtype)


def _period_dtype(pandas: Any, name: object) -> Any:  # noqa: ANN401  # of pandas
    return pandas.PeriodDtype.construct_from_string(_frequency(name))


def _interval(unpacker: Unpacker, pandas: Any, lower: Any, upper: Any, closed: object) -> Any:  # noqa: ANN401
    sides = (_unpack_inner(unpacker, lower), _unpack_inner(unpacker, upper))
    return pandas.arrays.IntervalArray.from_arrays(*sides, closed=expect(closed, str))


_COLUMNS: dict[str, Callable[..., Any]] = {
    "array": lambda _, __, values: _array(values),
    "category": _category,
    "zoned": _zoned,
    "text": _text,
    "string": _string,
    "arrow": _arrow,
    "masked": _masked,
    "period": _period,
    "interval": _interval,
}


def _unpack_moment(name: str) -> Callable[..., Any]:
    def unpack(unpacker: Unpacker, value: object, zone: object = None) -> Any:  # noqa: ANN401
        cls = getattr(unpacker.library("pandas", f"a pandas.{name}"), name)
        kind = "datetime64" if name == "Timestamp" else "timedelta64"
        moment = cls(expect(value, getattr(sys.modules["numpy"], kind)))
        return moment if zone is None else moment.tz_localize("UTC").tz_convert(_named_zone(zone))

    return unpack


def _unpack_missing(unpacker: Unpacker, name: object) -> object:
    pandas = unpacker.library("pandas", "a missing value of pandas")
    return pandas.NA if expect(name, str) == "NA" else pandas.NaT


# -------------------------------------------------------------------------------- Arrow, polars


def _pack_pyarrow(packer: Packer, value: Any, mode: int) -> Tag | None:  # noqa: ANN401  # of Arrow
    del mode
    pyarrow = sys.modules["pyarrow"]
    if isinstance(value, (pyarrow.Table, pyarrow.RecordBatch)):
        return packer.tag(f"pa.{type(value).__name__}", _pack_table(packer, value, value))
    if isinstance(value, (pyarrow.Array, pyarrow.ChunkedArray)):
        table = pyarrow.table({"": value})
        kind = "ChunkedArray" if isinstance(value, pyarrow.ChunkedArray) else "Array"
        return packer.tag(f"pa.{kind}", _pack_table(packer, value, table))
    return None


class _Sink:
    """A file to which a library writes a stream of Arrow; it keeps buffers without a copy."""

    closed = False

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._pieces: list[memoryview] = []
        self._ends: list[int] = []
        self.begin: int | None = None
        self.size = 0

    def write(self, data: Any) -> int:  # noqa: ANN401  # a buffer
        # The stream is one segment, so only its first buffer is aligned.
        offset, size = self._packer.add(data, 64 if self.begin is None else 1)
        if size:
            self.begin = offset if self.begin is None else self.begin
            self.size += size
            self._pieces.append(memoryview(data).cast("B"))
            self._ends.append(self.size)
        return size

    def read(self, offset: int, size: int) -> memoryview:
        """`size` bytes of the written stream."""
        piece = bisect.bisect(self._ends, offset)
        content = memoryview(b"")
        while len(content) < size and piece < len(self._pieces):
            skipped = offset + len(content) - (self._ends[piece] - len(self._pieces[piece]))
            continuation = self._pieces[piece][skipped : skipped + size - len(content)]
            content = memoryview(bytes(content) + continuation) if content else continuation
            piece += 1
        return content

    def flush(self) -> None:
        """Do nothing: `write` keeps every buffer at once."""

    def close(self) -> None:
        """Do nothing: the buffers are still needed."""


def _pack_table(packer: Packer, value: object, table: Any) -> list[int]:  # noqa: ANN401  # of Arrow
    pyarrow = sys.modules["pyarrow"]
    if arrow_streams.EXTENSION in table.schema.serialize().to_pybytes():
        packer.refuse(value, " with extension types, which cannot travel", "cast to their storage")
    sink = _Sink(packer)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    try:
        packer.count_rows(arrow_streams.check(sink.read, sink.size))
        is_table = isinstance(table, pyarrow.Table)
        _validate(pyarrow, table if is_table else pyarrow.Table.from_batches([table]))
    except (ValueError, pyarrow.ArrowException) as error:
        packer.refuse(value, f", which cannot travel: {error}", _CAST)
    return [sink.begin or 0, sink.size]


def _unpack_table(unpacker: Unpacker, position: object) -> Any:  # noqa: ANN401  # a table
    pyarrow = unpacker.library("pyarrow", "a table of Arrow")
    stream = unpacker.buffer(position)
    unpacker.count_rows(arrow_streams.check(arrow_streams.reader(stream), len(stream)))
    table = pyarrow.ipc.open_stream(pyarrow.py_buffer(stream)).read_all()
    _validate(pyarrow, table)
    if not any(column.num_chunks for column in table.columns):
        # Columns without a chunk have `to_pandas` end the process, if their type is a list view.
        table = table.schema.empty_table()
    return table


def _validate(pyarrow: Any, table: Any) -> None:  # noqa: ANN401  # of Arrow
    """Refuse a table for which libraries may crash."""
    table.validate()
    plain = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    for column in table.columns:
        data = plain.get(column.type)
        for chunk in column.chunks:
            # ASCII is valid text wherever it is cut; this check takes a tenth of the time.
            is_plain = data is not None and _is_ascii(chunk.buffers()[2])
            (chunk.view(data) if is_plain else chunk).validate(full=True)
            if column.type.num_fields:
                arrow_streams.check_references(pyarrow, chunk)
            arrow_streams.check_views(pyarrow, chunk)


def _is_ascii(buffer: Any) -> bool:  # noqa: ANN401  # of Arrow, or none
    view = memoryview(buffer or b"")
    return all(
        bytes(view[offset : offset + _PIECE_BYTES]).isascii()
        for offset in range(0, len(view), _PIECE_BYTES)
    )


def _unpack_batch(unpacker: Unpacker, position: object) -> Any:  # noqa: ANN401  # of Arrow
    table = _unpack_table(unpacker, position)
    batches = table.to_batches()
    if batches:
        (batch,) = batches
        return batch
    return unpacker.library("pyarrow", "").RecordBatch.from_pylist([], table.schema)


def _unpack_arrow(unpacker: Unpacker, position: object) -> Any:  # noqa: ANN401  # of Arrow
    (column,) = _unpack_table(unpacker, position).columns
    return column


#: Bytes that are checked at once.
_PIECE_BYTES = 1 << 16
_CAST = "cast its columns to other types"


def _pack_polars(packer: Packer, value: Any, mode: int) -> Tag | None:  # noqa: ANN401  # of polars
    del mode
    polars = sys.modules["polars"]
    if type(value) not in (polars.DataFrame, polars.Series):
        if type(value).__name__ == "LazyFrame":
            packer.refuse(value, hint="send frame.collect()")
        return None
    frame = value if type(value) is polars.DataFrame else value.to_frame()
    for name, dtype in frame.schema.items():
        if dtype == polars.Object:
            packer.refuse(value, f" whose column {name!r} has objects", "give it another dtype")
    sink = _Sink(packer)
    frame.write_ipc_stream(sink, compression="uncompressed")
    try:
        packer.count_rows(arrow_streams.check(sink.read, sink.size, is_polars=True))
        _check_types(polars, frame)
    except (ValueError, polars.exceptions.PolarsError) as error:
        packer.refuse(value, f", which cannot travel: {error}", _CAST)
    return packer.tag(f"pl.{type(value).__name__}", [sink.begin or 0, sink.size])


def _check_types(polars: Any, frame: Any) -> None:  # noqa: ANN401  # of polars
    """Refuse a frame with types that polars writes and cannot read."""
    if any(dtype.is_nested() for dtype in frame.dtypes):
        sink = io.BytesIO()
        frame.head(1).write_ipc_stream(sink, compression="uncompressed")
        polars.read_ipc_stream(sink.getvalue())


def _unpack_polars(unpacker: Unpacker, position: object) -> Any:  # noqa: ANN401  # a frame
    polars = unpacker.library("polars", "a frame of polars")
    stream = unpacker.buffer(position)
    rows = arrow_streams.check(arrow_streams.reader(stream), len(stream), is_polars=True)
    unpacker.count_rows(rows)
    return polars.read_ipc_stream(io.BytesIO(stream))


#: The functions that make a tag of a value, by the package of its class; they return `None` for
#: other classes of that package.
PACKERS: dict[str, Callable[[Packer, Any, int], Tag | None]] = {
    "numpy": _pack_numpy,
    "torch": _pack_torch,
    "pandas": _pack_pandas,
    "pyarrow": _pack_pyarrow,
    "polars": _pack_polars,
}

UNPACKERS: dict[str, Callable[..., Any]] = {
    "np.array": _unpack_array,
    "np.scalar": _unpack_scalar,
    "np.list": _unpack_numbers,
    "np.str": _unpack_text,
    "np.bytes": lambda unpacker, position: _numpy(unpacker).bytes_(
        bytes(unpacker.buffer(position))
    ),
    "np.objects": _unpack_objects,
    "np.strings": _unpack_strings,
    "torch.tensor": _unpack_tensor,
    "pd.frame": _unpack_frame,
    "pd.series": _unpack_series,
    "pd.index": _unpack_index,
    "pd.Timestamp": _unpack_moment("Timestamp"),
    "pd.Timedelta": _unpack_moment("Timedelta"),
    "pd.missing": _unpack_missing,
    "pa.Table": _unpack_table,
    "pa.RecordBatch": _unpack_batch,
    "pa.ChunkedArray": _unpack_arrow,
    "pa.Array": lambda unpacker, position: _unpack_arrow(unpacker, position).combine_chunks(),
    "pl.DataFrame": _unpack_polars,
    "pl.Series": lambda unpacker, position: _unpack_polars(unpacker, position).to_series(),
}
