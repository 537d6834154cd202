"""Tensors as frames of bytes, and frames as tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kubetorch.datastore import weights
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.tensors import Contents, TensorFile
from kubetorch.datastore.transports import frames
from kubetorch.datastore.tuning import LIMITS
from kubetorch.datastore.weights import StoredTensors
from kubetorch.errors import DataStoreError

torch = pytest.importorskip("torch")

LARGE = LIMITS.tensor_chunk_bytes


def stored(file: TensorFile) -> StoredTensors:
    digests = [digest_of(file.chunk(number)) for number in range(len(file.header.cuts))]
    manifest = weights.manifest_of(file, digests)
    return StoredTensors(manifest, lambda _: file.encoded_header)


def passed(
    value: object, *, is_packed: bool = False, harm: Callable[[Any], None] = lambda _: None
) -> Any:
    """A value after its way from a putter to a getter."""
    file = TensorFile(value)
    staging = frames.Staging(stored(file), torch.device("cpu"))
    incoming = staging.frames(is_packed=is_packed)
    outgoing = list(frames.outgoing(file, frames.spans(file.header, is_packed=is_packed)))
    assert [frame.numel() for frame in incoming] == [frame.numel() for frame in outgoing]
    for target, source in zip(incoming, outgoing, strict=True):
        target.copy_(source)
        harm(target)
    staging.check()
    contents = Contents(file.header)
    destination = contents.new_destination()
    staging.fill(destination, contents)
    return contents.value(destination)


def bits(tensor: Any) -> bytes:
    return bytes(TensorFile(tensor).chunk(0)) if tensor.numel() else b""


_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    },
    key=str,
)


@pytest.mark.parametrize("is_packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype_arrives(dtype: Any, is_packed: bool) -> None:
    size = 24 * dtype.itemsize
    content = torch.arange(size, dtype=torch.uint8) % 2  # valid as `bool`, too
    value = {"w": content.view(dtype).view(2, 12), "byte": torch.ones(3, dtype=torch.uint8)}
    back = passed(value, is_packed=is_packed)
    assert (back["w"].dtype, back["w"].shape) == (dtype, (2, 12))
    assert bits(back["w"]) == bits(value["w"])


def test_views_and_odd_strides_arrive_as_their_values() -> None:
    matrix = torch.randn(40, 30)
    value = {
        "transposed": matrix.t(),
        "step": matrix[::3, ::2],
        "single": matrix[:, 3][:1],
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "expanded": torch.randn(1).expand(7),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty((0, 4)),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    back = passed(value)
    assert all(torch.equal(back[name], tensor) for name, tensor in value.items())


def test_large_tensors_are_frames_of_their_own_and_views() -> None:
    large = torch.zeros(LARGE, dtype=torch.uint8)
    value = {"a": torch.ones(5), "b": torch.ones(6), "large": large, "z": large[:7]}
    file = TensorFile(value)
    frame_spans = frames.spans(file.header, is_packed=False)
    assert [end - begin for begin, end in frame_spans] == [44, LARGE, 7]
    outgoing = list(frames.outgoing(file, frame_spans))
    assert outgoing[1].data_ptr() == large.data_ptr()
    assert [end - begin for begin, end in frames.spans(file.header, is_packed=True)] == [LARGE + 51]


def test_a_frame_has_a_largest_size() -> None:
    file = TensorFile(torch.empty(2 * LIMITS.frame_bytes + 5, dtype=torch.uint8))
    sizes = [end - begin for begin, end in frames.spans(file.header, is_packed=False)]
    assert sizes == [LIMITS.frame_bytes, LIMITS.frame_bytes, 5]
    assert [
        (frame.numel(), frame.storage_offset())
        for frame in frames.outgoing(file, frames.spans(file.header, is_packed=False))
    ] == list(zip(sizes, (0, LIMITS.frame_bytes, 2 * LIMITS.frame_bytes), strict=True))


def test_a_wrong_bit_is_seen_before_anything_is_filled() -> None:
    with pytest.raises(DataStoreError, match="not those of the version"):
        passed({"w": torch.zeros(100)}, harm=lambda frame: frame[99:100].add_(1))


def test_torch_describes_shared_memory_as_it_is_sent() -> None:
    reductions = pytest.importorskip("torch.multiprocessing.reductions")
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == [
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"),
        *("storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes"),
        *("requires_grad", "ref_counter_handle", "ref_counter_offset", "event_handle"),
        "event_sync_required",
    ]
