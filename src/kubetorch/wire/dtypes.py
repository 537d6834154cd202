"""Dtypes and shapes of arrays in `kubetorch.wire.arrays`, as JSON and back.

NumPy computes the end of a field of a dtype in a C `int`, which may overflow, and does not check
the result. So this module checks a dtype that arrived before NumPy sees it: each field lies in its
element, and each element has bytes. A dtype that `parse` would refuse is not described either.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from typing import Any

from kubetorch.wire.tuning import LIMITS
from kubetorch.wire.values import expect

_INTEGERS = frozenset({int})
#: Dimensions of an array: the product of more dimensions would take long.
_DIMENSIONS = 64
#: Levels of a dtype that has fields.
_DEPTH = 16
_ELEMENT_BYTES = 2**31 - 1
#: The fields that may share each byte of an element, on average.
_FIELDS_PER_BYTE = 16
# NumPy divides by the multiplier of a unit of time, so it is not 0.
_DTYPE = re.compile(r"[<>|=]([biufcSUVmM])([0-9]{1,9})(\[([1-9][0-9]{0,9})?[A-Za-z]{1,9}\])?")


def sizes(value: object) -> list[int]:
    """A part of a tag that is a list of sizes."""
    numbers = expect(value, list)
    if not _INTEGERS.issuperset(map(type, numbers)) or min(numbers, default=0) < 0:
        raise ValueError("numbers that are no sizes")
    return numbers  # type: ignore[no-any-return]  # it is a list


def shape(value: object) -> tuple[int, ...]:
    """The shape of an array; an array without elements has a bounded number of rows."""
    dimensions = sizes(value)
    if len(dimensions) > _DIMENSIONS:
        raise ValueError(f"an array of {len(dimensions)} dimensions")
    if 0 in dimensions:
        rows = math.prod(itertools.takewhile(bool, dimensions))
        if (
            rows > LIMITS.empty_array_rows
            or math.prod(filter(None, dimensions)) > LIMITS.empty_array_elements
        ):
            raise ValueError("an array without elements that has too many rows")
    return tuple(dimensions)


@functools.lru_cache(64)
def describe(dtype: Any) -> Any:  # noqa: ANN401  # a dtype, and JSON
    """A dtype as JSON; a `ValueError` if it cannot travel."""
    described = _describe(dtype)
    if parse(described) != dtype:
        raise ValueError("a dtype with more than names, titles, formats and offsets")
    return described


def _describe(dtype: Any) -> Any:  # noqa: ANN401  # as `describe`
    if dtype.subdtype is not None:
        base, dimensions = dtype.subdtype
        return [_describe(base), list(dimensions)]
    if dtype.names is None:
        return dtype.str if dtype.isbuiltin != 2 else ""
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "formats": [_describe(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def parse(described: object) -> Any:  # noqa: ANN401  # a dtype
    """The dtype of an array that JSON describes."""
    # An array itself has the dimensions, not its dtype.
    if type(described) is list:
        raise ValueError("a dtype with dimensions outside of a field")
    return _parse(described, 0)


def _parse(described: object, depth: int) -> Any:  # noqa: ANN401  # a dtype
    if type(described) is str:
        return plain_dtype(described)
    if depth > _DEPTH:
        raise ValueError("a dtype nested too deep")
    numpy = sys.modules["numpy"]
    if type(described) is list:
        base, dimensions = described
        inner, counts = _parse(base, depth + 1), shape(dimensions)
        _check_size(inner.itemsize * math.prod(counts))
        return numpy.dtype((inner, counts))
    fields = expect(described, dict)
    names, titles, formats = (expect(fields[part], list) for part in ("names", "titles", "formats"))
    offsets, itemsize = sizes(fields["offsets"]), expect(fields["itemsize"], int)
    keys = [expect(key, str) for key in (*names, *(title for title in titles if title is not None))]
    is_even = len(names) == len(titles) == len(formats) == len(offsets)
    if not is_even or len(set(keys)) != len(keys):
        raise ValueError("a dtype whose fields do not fit each other")
    _check_size(itemsize)
    field_dtypes = [_parse(inner_format, depth + 1) for inner_format in formats]
    ends = [offset + dtype.itemsize for offset, dtype in zip(offsets, field_dtypes, strict=True)]
    if max(ends, default=0) > itemsize or sum(ends) - sum(offsets) > _FIELDS_PER_BYTE * itemsize:
        raise ValueError(f"a dtype of {itemsize} bytes whose fields do not lie in it")
    parts = {"names": names, "titles": titles, "formats": field_dtypes, "offsets": offsets}
    return numpy.dtype({**parts, "itemsize": itemsize})


def _check_size(size: int) -> None:
    if not 0 < size <= _ELEMENT_BYTES:
        raise ValueError(f"a dtype of {size} bytes or units")


@functools.lru_cache(64)
def plain_dtype(name: str) -> Any:  # noqa: ANN401  # a dtype
    """The dtype of this name, which has no fields."""
    match = _DTYPE.fullmatch(name)
    if match is None:
        raise ValueError(f"the dtype {name!r:.80} is not supported")
    _check_size(int(match[2]) * (4 if match[1] == "U" else 1))
    _check_size(int(match[4] or 1))
    return sys.modules["numpy"].dtype(name)
