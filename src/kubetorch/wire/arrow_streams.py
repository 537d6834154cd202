"""Streams of Arrow's IPC format in `kubetorch.wire.arrays`, looked at before a library reads them.

A compressed buffer says how long it is without being so; a class that somebody has registered makes
what it likes of an extension type; columns of nulls, runs, and structs without fields have as many
rows as they say, in no bytes. No library can be told to refuse them. And polars makes room for as
many rows and bytes as there are said to be. So what a stream says is checked here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

#: Rows that a byte accounts for: as many flags lie in it.
_ROWS = 8
#: What the metadata of an extension type has.
EXTENSION = b"ARROW:extension:name"
#: As early versions of the format had it.
_COMPRESSION = b"ARROW:experimental_compression"
#: Kinds of messages in a stream, and of fields that are text.
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_TEXTS = (5, 20, 24)
#: The kind of a field of runs, whose second field has what is repeated.
_RUNS = 22
#: Levels of fields in fields, and bytes that a field has in a schema at least.
_LEVELS, _FIELD = 100, 16
#: Bytes of dictionaries that are looked at: with each batch, all of them.
_WORK = 1 << 36


def reader(stream: memoryview) -> Callable[[int, int], memoryview]:
    return lambda at, size: stream[at : at + size]


def check(read: Callable[[int, int], memoryview], end: int, *, is_polars: bool = False) -> int:
    """Refuse a stream of Arrow that is larger than it looks, or has extension types.

    Returns the number of rows that no byte accounts for, of all columns and batches together.
    """
    at = dictionaries = work = rows = 0
    while at < end:
        marker, length = struct.unpack("<II", read(at, 8))
        if marker != 0xFFFFFFFF:
            raise ValueError("a stream of Arrow in an old format")
        if not length:
            break
        message = read(at + 8, length)
        kind, header, body = _parse_message(message)
        text = bytes(message)
        if EXTENSION in text:
            raise ValueError("a stream of Arrow with an extension type")
        if kind == _SCHEMA:
            _check_fields(message, header, is_polars=is_polars)
        if kind == _DICTIONARY:
            header = _Flat(message, header.offset(1))
            dictionaries += body
        if kind in (_DICTIONARY, _BATCH):
            work += dictionaries
            if header.field(3) or _COMPRESSION in text:
                raise ValueError("a stream of Arrow that is compressed")
            rows += _check_batch(message, header, body)
        at += 8 + length + body
        if body < 0 or at > end:
            raise ValueError("a stream of Arrow that ends too early")
        if work > _WORK:
            raise ValueError("a stream of Arrow with too many batches for its dictionaries")
    return rows


def _check_batch(message: memoryview, batch: _Flat, body: int) -> int:
    """Refuse a batch with buffers that do not lie in its body of this many bytes, one by one.

    Returns the number of rows for which the body is too small.
    """
    sizes = 0
    for offset, size in batch.pairs(2):
        sizes += size
        # Those that lie on each other would be more once they are copied.
        if not (0 <= offset <= offset + size <= body and sizes <= body):
            raise ValueError("a stream of Arrow with a buffer that is not there")
    # The batch itself has rows, too, where it has no columns.
    lengths = [length for length, _ in batch.pairs(1)]
    lengths.append(_number("<q", message, batch.field(0)) if batch.field(0) else 0)
    if min(lengths) < 0:
        raise ValueError("a stream of Arrow with fewer rows than none")
    return max(sum(lengths[:-1]) - body * _ROWS, lengths[-1] - body * _ROWS, 0)


def _check_fields(message: memoryview, schema: _Flat, *, is_polars: bool) -> None:
    """Refuse a schema that a library does not survive.

    There are no bounds of fields in fields. What is in a dictionary or in a run is there once for
    each row that refers to it, as soon as it is copied: if it refers to others itself, there is no
    end. And polars copies it, unless it is text.
    """
    found = [(field, 1) for field in schema.tables(1)]
    for field, level in found:
        kind, inner = message[field.field(2)] if field.field(2) else 0, [*field.tables(5)]
        if field.field(4) and is_polars and kind not in _TEXTS:
            raise ValueError("a stream of Arrow with a dictionary of other values than texts")
        repeated = [field] if field.field(4) else inner[1:] if kind == _RUNS else []
        for one in repeated:
            if any(True for _ in one.tables(5)) or (one.field(4) and one is not field):
                raise ValueError("a stream of Arrow that repeats values which have values in them")
        found += [(one, level + 1) for one in inner]
        if inner and (level == _LEVELS or len(found) > len(message) // _FIELD):
            raise ValueError("a stream of Arrow with fields in fields without end")


def check_references(pyarrow: Any, array: Any) -> None:  # noqa: ANN401  # of Arrow
    """Refuse an array whose rows refer to more values than it has.

    Rows of views of lists and of dense unions may refer to the same values, and so may these.
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
            (one["counts"].as_py(), numbers[one["values"].as_py()])
            for one in array.type_codes.value_counts()
        ]
    if any(count > len(inner[number]) for count, number in counts):
        raise ValueError(f"an array of {kind!s:.80} whose rows refer to the same values")
    for one in inner:
        if one.type.num_fields:
            check_references(pyarrow, one)


def _parse_message(message: memoryview) -> tuple[int, _Flat, int]:
    """Kind, header and length of the body of a message of Arrow."""
    table = _Flat(message, _number("<I", message, 0))
    kind, body = table.field(1), table.field(3)
    if not kind:
        raise ValueError("a message of Arrow of no kind")
    size = _number("<q", message, body) if body else 0
    return message[kind], _Flat(message, table.offset(2)), size


def _number(form: str, data: memoryview, at: int) -> int:
    if at < 0:
        raise ValueError("a message of Arrow that refers to what is before it")
    return int(struct.unpack_from(form, data, at)[0])


class _Flat:
    """A table of a FlatBuffer."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - _number("<i", data, at)
        self._size = _number("<H", data, self._fields)

    def field(self, number: int) -> int:
        """The position of a field; 0 if the field is absent."""
        entry = 4 + 2 * number
        if entry >= self._size:
            return 0
        found = _number("<H", self._data, self._fields + entry)
        return self._at + found if found else 0

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """The pairs of numbers in a list that a field refers to."""
        if self.field(number):
            at = self.offset(number)
            for item in range(at + 4, at + 4 + 16 * _number("<I", self._data, at), 16):
                yield _number("<q", self._data, item), _number("<q", self._data, item + 8)

    def tables(self, number: int) -> Iterator[_Flat]:
        """The tables in a list that a field refers to."""
        if self.field(number):
            at = self.offset(number)
            for item in range(at + 4, at + 4 + 4 * _number("<I", self._data, at), 4):
                yield _Flat(self._data, item + _number("<I", self._data, item))

    def offset(self, number: int) -> int:
        """The position of the table or list that a field refers to."""
        place = self.field(number)
        if not place:
            raise ValueError("a message of Arrow that lacks a part")
        return place + _number("<I", self._data, place)
