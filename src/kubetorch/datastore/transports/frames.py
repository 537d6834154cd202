"""Tensors as frames, and frames as verified tensors.

The frames are pieces of what a file of these tensors has behind its header, so that the digests of
the version's chunks are those of the frames' bytes, and no frame needs a dtype.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from kubetorch.datastore import weights
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.safetensors import Header
from kubetorch.datastore.tensors import Array, Contents, Destination, TensorFile, host_bytes
from kubetorch.datastore.transports.transport import Device, Frame
from kubetorch.datastore.tuning import LIMITS
from kubetorch.datastore.weights import StoredTensors
from kubetorch.errors import DataStoreError

#: Begin and end of a frame behind the header.
Span = tuple[int, int]


def spans(header: Header, *, is_packed: bool) -> list[Span]:
    """The frames of tensors: large tensors alone, small neighbours together; or all as one buffer.

    A frame has `frame_bytes` at most.
    """
    borders = [0, header.size]
    if not is_packed:
        for tensor in header.tensors.values():
            if tensor.end - tensor.begin >= LIMITS.tensor_chunk_bytes:
                borders += (tensor.begin, tensor.end)
    borders.sort()
    return [
        (begin, min(begin + LIMITS.frame_bytes, last))
        for first, last in itertools.pairwise(borders)
        for begin in range(first, last, LIMITS.frame_bytes)
    ]


def outgoing(file: TensorFile, frame_spans: Sequence[Span]) -> Iterator[Frame]:
    """The frames of a putter; what lies in one tensor is a view of it where it can be."""
    torch = sys.modules["torch"]
    tensors = [tensor for tensor in file.header.tensors.values() if tensor.begin < tensor.end]
    begins = [tensor.begin for tensor in tensors]
    last_name, last_bytes = "", torch.empty(0)
    for begin, end in frame_spans:
        pieces = []
        for tensor in tensors[bisect_right(begins, begin) - 1 :]:
            if tensor.begin >= end:
                break
            if tensor.name != last_name:
                last_name, last_bytes = tensor.name, _bytes(file.arrays[tensor.name])
            pieces.append(last_bytes[max(begin - tensor.begin, 0) : end - tensor.begin])
        yield pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _bytes(tensor: Array) -> Frame:
    torch = sys.modules["torch"]
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `contiguous` and `reshape` keep any stride where a size is 1, and `view` refuses it.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


class Staging:
    """Memory of a getter for all bytes of a version, until they are known to be right."""

    def __init__(self, stored: StoredTensors, device: Device) -> None:
        torch = sys.modules["torch"]
        self._stored = stored
        self._data = torch.empty(stored.header.size, dtype=torch.uint8, device=device)

    def frames(self, *, is_packed: bool) -> list[Frame]:
        header = self._stored.header
        return [self._data[begin:end] for begin, end in spans(header, is_packed=is_packed)]

    def check(self) -> None:
        """Compare all bytes with the digests of the version.

        Raises:
            DataStoreError: They differ.
        """

        def is_right(chunk: tuple[str, int, int]) -> bool:
            digest, begin, end = chunk
            return digest_of(host_bytes(self._data[begin:end])) == digest

        if not all(weights.in_threads(is_right, self._stored.data_chunks())):
            raise DataStoreError("the bytes that came are not those of the version")

    def fill(self, destination: Destination, contents: Contents) -> None:
        """Copy the tensors to where they belong."""
        for tensor in (tensor for tensor in contents.tensors if tensor.begin < tensor.end):
            source = self._data[tensor.begin : tensor.end]
            target = destination.arrays[tensor.name]
            if source.device.type == "cpu":
                buffer, array = destination.buffer(tensor.name)
                buffer[:] = host_bytes(source)
                if not destination.is_direct(tensor.name):
                    destination.finish(tensor.name, array)
            else:
                if source.storage_offset() % target.element_size():  # of dtypes that files lack
                    source = source.clone()
                destination.finish(tensor.name, source.view(target.dtype).view(target.shape))
        destination.set_values()
        if self._data.device.type == "cuda":
            sys.modules["torch"].cuda.synchronize(self._data.device)
