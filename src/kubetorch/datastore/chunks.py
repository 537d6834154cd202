"""A file as chunks whose borders its content defines.

A file of safetensors is cut at its tensors (`kubetorch.datastore.safetensors`).

After an insertion or deletion the borders behind it are where they were in the content, so most
chunks of the new version are those of the old one. A hole of a sparse file is a chunk of its own,
which has no bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kubetorch.datastore import safetensors
from kubetorch.datastore.tuning import LIMITS

if TYPE_CHECKING:
    import pyfastcdc

_BLOCK_BYTES = 512


class Cut(NamedTuple):
    """Bytes of a file; `data` is `None` for a hole.

    `is_tensor` is true in a file of safetensors, whose versions have the same borders.
    """

    offset: int
    size: int
    data: memoryview | None
    is_tensor: bool = False


def cut(descriptor: int, size: int) -> Iterator[Cut]:
    """The chunks of the first `size` bytes of a file.

    Raises:
        EOFError: The file has become shorter.
    """
    for begin, end, is_hole in _extents(descriptor, size):
        if is_hole:
            yield Cut(begin, end - begin, None)
        elif end - begin <= LIMITS.smallest_chunk_bytes:
            yield Cut(begin, end - begin, _read(descriptor, begin, end))
        elif end - begin == size and (sizes := _sizes_of_tensors(descriptor, size)):
            yield from _cut_at(descriptor, sizes)
        else:
            yield from _cut_content(descriptor, begin, end)


def _sizes_of_tensors(descriptor: int, size: int) -> list[int]:
    """The sizes of the chunks of a file of safetensors, whose borders are those of tensors."""
    return safetensors.chunk_sizes(partial(_read, descriptor), size)


def _cut_at(descriptor: int, sizes: Iterable[int]) -> Iterator[Cut]:
    begin = 0
    for size in sizes:
        yield Cut(begin, size, _read(descriptor, begin, begin + size), is_tensor=True)
        begin += size


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of each part of a file, and if it is a hole."""
    position = 0
    if os.fstat(descriptor).st_blocks * _BLOCK_BYTES < size:
        while position < size:
            try:
                data = min(os.lseek(descriptor, position, os.SEEK_DATA), size)
            except OSError as error:
                if error.errno != errno.ENXIO:  # the file system cannot tell
                    break
                data = size  # nothing but a hole follows
            if data > position:
                yield position, data, True
            position = data
            if position < size:
                hole = min(os.lseek(descriptor, position, os.SEEK_HOLE), size)
                yield position, hole, False
                position = hole
    if position < size:
        yield position, size, False


def content_cutter() -> pyfastcdc.FastCDC:
    """Cuts content where its bytes say: equal stretches of two files become equal chunks."""
    import pyfastcdc  # noqa: PLC0415  # 20 ms, for files of more than a chunk

    return pyfastcdc.FastCDC(
        LIMITS.usual_chunk_bytes,
        min_size=LIMITS.smallest_chunk_bytes,
        max_size=LIMITS.largest_chunk_bytes,
    )


def _cut_content(descriptor: int, begin: int, end: int) -> Iterator[Cut]:
    cutter = content_cutter()
    pending: memoryview | bytes = b""
    position = begin
    while position < end or pending:
        stop = min(end, position + LIMITS.cut_block_bytes - len(pending))
        block = _read(descriptor, position, stop, pending)
        offset, position = position - len(pending), stop
        cut_bytes = 0
        for chunk in cutter.cut_buf(block):
            if position < end and chunk.offset + chunk.length == len(block):
                break  # its border may lie in the next block
            cut_bytes = chunk.offset + chunk.length
            yield Cut(offset + chunk.offset, chunk.length, block[chunk.offset : cut_bytes])
        pending = block[cut_bytes:]


def _read(descriptor: int, begin: int, end: int, before: memoryview | bytes = b"") -> memoryview:
    """Bytes of a file, behind those that were read before."""
    block = memoryview(bytearray(len(before) + end - begin))
    filled = len(before)
    block[:filled] = before
    while filled < len(block):
        count = os.preadv(descriptor, [block[filled:]], begin + filled - len(before))
        if not count:
            raise EOFError
        filled += count
    return block
