"""The safetensors format: a JSON header with dtype, shape and place of each tensor, then the bytes.

    0          8                8 + n
    +----------+----------------+---------------------------------+
    | n (u64)  | JSON, n bytes  | tensors, one behind the other   |
    +----------+----------------+---------------------------------+

As https://huggingface.co/docs/safetensors has it. The store cuts such a file at the borders of
tensors, so that two versions differ in the chunks of the tensors that differ, and a reader of some
tensors gets their chunks alone. Large tensors are cut into pieces that are counted from the begin
of the tensor; small neighbours share a chunk; the header is a chunk of its own.

A header is data from outside. `parse` takes only what the format allows: known dtypes, sizes that
fit the shapes, and tensors that fill the file without gaps and overlaps.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError

#: Bits of an element, by dtype.
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_LENGTH_BYTES = 8
#: With the length in front.
LONGEST_HEADER_BYTES = _LENGTH_BYTES + LIMITS.tensor_header_bytes
_METADATA = "__metadata__"
_DIMENSIONS = 64


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `begin` and `end` count from the first byte after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Cut:
    """A chunk of tensors: its bytes, and the tensor and the byte of this tensor where it begins."""

    begin: int
    end: int
    name: str
    offset: int


class Header:
    """The header of a file: its tensors in the order of their bytes, and its texts."""

    def __init__(self, tensors: list[Tensor], metadata: Mapping[str, str]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.metadata = metadata
        #: Bytes of all tensors.
        self.size = tensors[-1].end if tensors else 0

    @functools.cached_property
    def cuts(self) -> list[Cut]:
        """The chunks behind the header.

        Raises:
            DataStoreError: The tensors are too large for a manifest.
        """
        if self.size > LIMITS.tensors_bytes:
            raise DataStoreError(
                f"these tensors have {self.size:,} bytes; {LIMITS.tensors_bytes:,} are allowed",
                hint="put them as several keys",
            )
        return list(_cuts(list(self.tensors.values())))

    def encode(self) -> bytes:
        """The header as the file has it, with the length in front."""
        described: dict[str, Any] = {_METADATA: dict(self.metadata)} if self.metadata else {}
        for tensor in self.tensors.values():
            described[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (tensor.begin, tensor.end),
            }
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # so that the bytes of tensors are aligned
        _check_length(len(text))
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _cuts(tensors: list[Tensor]) -> Iterator[Cut]:
    first: Tensor | None = None  # of the small neighbours that will share a chunk
    end = 0
    for tensor in tensors:
        size = tensor.end - tensor.begin
        if first is not None and tensor.end - first.begin > LIMITS.tensor_chunk_bytes:
            yield Cut(first.begin, end, first.name, 0)
            first = None
        if size >= LIMITS.tensor_chunk_bytes:
            for begin in range(0, size, LIMITS.tensor_chunk_bytes):
                piece_end = min(tensor.begin + begin + LIMITS.tensor_chunk_bytes, tensor.end)
                yield Cut(tensor.begin + begin, piece_end, tensor.name, begin)
        elif size and first is None:
            first = tensor
        end = tensor.end
    if first is not None:
        yield Cut(first.begin, end, first.name, 0)


def bits(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPE_BITS[dtype] * math.prod(shape)


def header_length(start: bytes | bytearray, file_bytes: int) -> int:
    """The bytes of the header with the length in front, which the first 8 bytes of a file tell."""
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) < _LENGTH_BYTES or length > file_bytes - _LENGTH_BYTES:
        raise _malformed(f"its header has {length} bytes, the file {file_bytes}")
    _check_length(length)
    return _LENGTH_BYTES + length


def parse(encoded: bytes, file_bytes: int) -> Header:
    """The header of a file of so many bytes, checked.

    Raises:
        DataStoreError: It is no header of safetensors, or does not fit the file.
    """
    length = header_length(encoded, file_bytes)
    try:
        described = json.loads(encoded[_LENGTH_BYTES:length], object_pairs_hook=_without_duplicates)
        if not isinstance(described, dict):
            raise ValueError("it is no object")
        metadata = described.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            raise ValueError(f"its {_METADATA} are no texts")
        tensors = [_parse_tensor(name, fields) for name, fields in described.items()]
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
        _check_places(tensors, file_bytes - length)
    except (ValueError, RecursionError) as error:  # also not UTF-8, or no JSON
        raise _malformed(str(error)) from error
    return Header(tensors, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} comes twice")
    return fields


def _parse_tensor(name: str, fields: object) -> Tensor:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.80} has not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"{name!r:.80} has the dtype {dtype!r:.80}, which is unknown")
    for numbers, longest in ((shape, _DIMENSIONS), (offsets, 2)):
        if not isinstance(numbers, list) or len(numbers) > longest:
            raise ValueError(f"{name!r:.80} has a shape or offsets that are no lists of numbers")
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"{name!r:.80} has a size or an offset that is none")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r:.80} has the offsets {offsets}")
    if math.prod(filter(None, shape)) >= 2**63:
        raise ValueError(f"{name!r:.80} has the shape {shape}, which no array can have")
    if bits(dtype, tuple(shape)) != 8 * (offsets[1] - offsets[0]):
        raise ValueError(f"{name!r:.80} is {dtype} of {shape} in {offsets[1] - offsets[0]} bytes")
    return Tensor(name, dtype, tuple(shape), *offsets)


def _check_places(tensors: list[Tensor], data_bytes: int) -> None:
    end = 0
    for tensor in tensors:
        if tensor.begin != end:
            fault = "overlaps another" if tensor.begin < end else "leaves a gap before it"
            raise ValueError(f"{tensor.name!r:.80} begins at {tensor.begin}: it {fault}")
        end = tensor.end
    if end != data_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file has {data_bytes} for them")


def _check_length(length: int) -> None:
    if length > LIMITS.tensor_header_bytes:
        raise _malformed(
            f"its header has {length:,} bytes; {LIMITS.tensor_header_bytes:,} are allowed"
        )


def _malformed(fault: str) -> DataStoreError:
    return DataStoreError(f"this is no file of safetensors: {fault}")


def chunk_sizes(read: Callable[[int, int], bytes | memoryview], file_bytes: int) -> list[int]:
    """The sizes of the chunks of a file; none if it is no file of safetensors.

    `read` gives the bytes of the file from an offset up to another.
    """
    start = bytes(read(0, min(file_bytes, _LENGTH_BYTES + 1)))
    if start[_LENGTH_BYTES:] != b"{":
        return []
    try:
        header = parse(bytes(read(0, header_length(start, file_bytes))), file_bytes)
        return [file_bytes - header.size, *(cut.end - cut.begin for cut in header.cuts)]
    except DataStoreError:
        return []
