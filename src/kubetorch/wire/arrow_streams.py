"""Checks of streams of Arrow's IPC format in `kubetorch.wire.arrays`, before a library reads them.

A compressed buffer may claim any length; a registered class may run any code for an extension type;
columns of nulls, runs, and structs without fields may claim any number of rows without bytes for
them. No library has an option to refuse these. And polars allocates memory for the rows and bytes
that a stream claims. So this module checks the claims of a stream.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from kubetorch.wire.tuning import LIMITS

#: Rows that a byte accounts for: it has eight flags.
_ROWS_PER_BYTE = 8
#: The key in the metadata of an extension type.
EXTENSION = b"ARROW:extension:name"
#: The key in the metadata of a compressed stream of early versions of the format.
_COMPRESSION = b"ARROW:experimental_compression"
#: Kinds of messages in a stream, and of fields that are text.
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_TEXT_KINDS = (5, 20, 24)
#: The kind of a field of runs; its second inner field has the repeated values.
_RUNS = 22
#: Numbers of 4 bytes in a view: its size, its begin, its piece and offset; and the size up to which
#: the view itself has its bytes.
_VIEW_WORDS, _INLINE_BYTES = 4, 12
#: Levels of fields in fields, and bytes that a field has in a schema at least.
_LEVELS, _FIELD_BYTES = 100, 16


def reader(stream: memoryview) -> Callable[[int, int], memoryview]:
    return lambda offset, size: stream[offset : offset + size]


def check(read: Callable[[int, int], memoryview], end: int, *, is_polars: bool = False) -> int:
    """Refuse a stream of Arrow that would decode into more than its bytes, or has extension types.

    Returns the number of rows without bytes, of all columns and batches together.
    """
    offset = dictionary_bytes = checked_bytes = empty_rows = 0
    while offset < end:
        marker, length = struct.unpack("<II", read(offset, 8))
        if marker != 0xFFFFFFFF:
            raise ValueError("a stream of Arrow in an old format")
        if not length:
            break
        message = read(offset + 8, length)
        kind, header, body = _parse_message(message)
        text = bytes(message)
        if EXTENSION in text:
            raise ValueError("a stream of Arrow with an extension type")
        if kind == _SCHEMA:
            _check_fields(message, header, is_polars=is_polars)
        if kind == _DICTIONARY:
            header = _FlatTable(message, header.offset(1))
            dictionary_bytes += body
        if kind in (_DICTIONARY, _BATCH):
            checked_bytes += dictionary_bytes
            if header.field(3) or _COMPRESSION in text:
                raise ValueError("a stream of Arrow that is compressed")
            empty_rows += _check_batch(message, header, body)
        offset += 8 + length + body
        if body < 0 or offset > end:
            raise ValueError("a stream of Arrow that ends too early")
        if checked_bytes > LIMITS.checked_dictionary_bytes:
            raise ValueError("a stream of Arrow with too many batches for its dictionaries")
    return empty_rows


def _check_batch(message: memoryview, batch: _FlatTable, body: int) -> int:
    """Refuse a batch whose buffers overlap, or do not lie in its body of this many bytes.

    Returns the number of rows for which the body is too small.
    """
    sizes = 0
    for offset, size in batch.pairs(2):
        sizes += size
        # Overlapping buffers would take more memory when they are copied.
        if not (0 <= offset <= offset + size <= body and sizes <= body):
            raise ValueError("a stream of Arrow with a buffer that is not there")
    # A batch without columns has rows, too.
    lengths = [length for length, _ in batch.pairs(1)]
    lengths.append(_number("<q", message, batch.field(0)) if batch.field(0) else 0)
    if min(lengths) < 0:
        raise ValueError("a stream of Arrow with fewer rows than none")
    return max(sum(lengths[:-1]) - body * _ROWS_PER_BYTE, lengths[-1] - body * _ROWS_PER_BYTE, 0)


def _check_fields(message: memoryview, schema: _FlatTable, *, is_polars: bool) -> None:
    """Refuse a schema that would exhaust a library.

    Libraries do not bound the nesting of fields. A value of a dictionary or of a run is copied once
    for each row that refers to it; if such a value refers to further values, the copies multiply
    without bound. And polars copies the values of a dictionary, unless they are text.
    """
    fields_and_levels = [(field, 1) for field in schema.tables(1)]
    for field, level in fields_and_levels:
        kind, inner = message[field.field(2)] if field.field(2) else 0, [*field.tables(5)]
        if field.field(4) and is_polars and kind not in _TEXT_KINDS:
            raise ValueError("a stream of Arrow with a dictionary of other values than texts")
        repeated = [field] if field.field(4) else inner[1:] if kind == _RUNS else []
        for value_field in repeated:
            has_inner_fields = any(True for _ in value_field.tables(5))
            if has_inner_fields or (value_field.field(4) and value_field is not field):
                raise ValueError("a stream of Arrow that repeats values which have values in them")
        fields_and_levels += [(inner_field, level + 1) for inner_field in inner]
        if inner and (level == _LEVELS or len(fields_and_levels) > len(message) // _FIELD_BYTES):
            raise ValueError("a stream of Arrow with fields in fields without end")


def check_references(pyarrow: Any, array: Any) -> None:  # noqa: ANN401  # of Arrow
    """Refuse an array whose rows refer to more values than it has.

    Several rows of a list view or of a dense union may refer to one value, also when nested.
    """
    kind, types = array.type, pyarrow.types
    inner: list[Any] = [array.values] if hasattr(array, "values") else []
    if types.is_struct(kind) or types.is_union(kind):
        inner = [array.field(number) for number in range(kind.num_fields)]
    counts: list[tuple[int, int]] = []
    if hasattr(array, "sizes"):  # a list view
        counts = [(array.sizes.sum().as_py() or 0, 0)]
    elif types.is_union(kind) and kind.mode == "dense":
        numbers = {code: number for number, code in enumerate(kind.type_codes)}
        counts = [
            (count["counts"].as_py(), numbers[count["values"].as_py()])
            for count in array.type_codes.value_counts()
        ]
    if any(count > len(inner[number]) for count, number in counts):
        raise ValueError(f"an array of {kind!s:.80} whose rows refer to the same values")
    for inner_array in inner:
        if inner_array.type.num_fields:
            check_references(pyarrow, inner_array)


def check_views(pyarrow: Any, array: Any) -> None:  # noqa: ANN401  # of Arrow
    """Refuse an array of views of which one lies outside of its data, also where the row is null.

    Arrow validates the views of other rows alone, but its casts read all of them.
    """
    kind, types = array.type, pyarrow.types
    if types.is_dictionary(kind):
        check_views(pyarrow, array.dictionary)
    elif hasattr(array, "values"):
        check_views(pyarrow, array.values)
    elif types.is_struct(kind) or types.is_union(kind):
        for number in range(kind.num_fields):
            check_views(pyarrow, array.field(number))
    elif (types.is_string_view(kind) or types.is_binary_view(kind)) and array.null_count:
        _check_null_views(pyarrow, array)


def _check_null_views(pyarrow: Any, array: Any) -> None:  # noqa: ANN401  # of Arrow
    _, views, *pieces = array.buffers()
    end = array.offset + len(array)
    words = memoryview(views)[: _VIEW_WORDS * 4 * end].cast("i")
    rows = pyarrow.array(range(array.offset, end), pyarrow.int64()).filter(array.is_null())
    for row in rows.to_pylist():
        size, _, piece, offset = words[_VIEW_WORDS * row : _VIEW_WORDS * (row + 1)]
        is_inside = 0 <= size <= _INLINE_BYTES or (
            0 <= piece < len(pieces) and offset >= 0 and 0 < size <= pieces[piece].size - offset
        )
        if not is_inside:
            raise ValueError(f"an array of {array.type!s:.80} with a view outside of its data")


def _parse_message(message: memoryview) -> tuple[int, _FlatTable, int]:
    """Kind, header and length of the body of a message of Arrow."""
    table = _FlatTable(message, _number("<I", message, 0))
    kind, body = table.field(1), table.field(3)
    if not kind:
        raise ValueError("a message of Arrow of no kind")
    size = _number("<q", message, body) if body else 0
    return message[kind], _FlatTable(message, table.offset(2)), size


def _number(form: str, data: memoryview, position: int) -> int:
    if position < 0:
        raise ValueError("a message of Arrow that refers to what is before it")
    return int(struct.unpack_from(form, data, position)[0])


class _FlatTable:
    """A table of a FlatBuffer."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - _number("<i", data, position)
        self._size = _number("<H", data, self._fields)

    def field(self, number: int) -> int:
        """The position of a field; 0 if the field is absent."""
        entry = 4 + 2 * number
        if entry >= self._size:
            return 0
        offset = _number("<H", self._data, self._fields + entry)
        return self._position + offset if offset else 0

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """The pairs of numbers in a list that a field refers to."""
        if self.field(number):
            position = self.offset(number)
            for item in range(
                position + 4, position + 4 + 16 * _number("<I", self._data, position), 16
            ):
                yield _number("<q", self._data, item), _number("<q", self._data, item + 8)

    def tables(self, number: int) -> Iterator[_FlatTable]:
        """The tables in a list that a field refers to."""
        if self.field(number):
            position = self.offset(number)
            for item in range(
                position + 4, position + 4 + 4 * _number("<I", self._data, position), 4
            ):
                yield _FlatTable(self._data, item + _number("<I", self._data, item))

    def offset(self, number: int) -> int:
        """The position of the table or list that a field refers to."""
        position = self.field(number)
        if not position:
            raise ValueError("a message of Arrow that lacks a part")
        return position + _number("<I", self._data, position)
