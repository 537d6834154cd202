"""Frames by CUDA IPC: a getter maps the memory of the putter's device, and copies from it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kubetorch.datastore.transports.rendezvous import Link
from kubetorch.datastore.transports.transport import Frame
from kubetorch.datastore.tuning import TIMING
from kubetorch.errors import DataStoreError
from kubetorch.wire.transports import SharedFrame, Taken


class CudaIpc:
    """The transport between a putter and getters that can read its device.

    Args:
        links: To the getters, or to the putter alone.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links

    def send(self, frames: Iterable[Frame]) -> Iterator[None]:
        torch = sys.modules["torch"]
        for frame in frames:
            torch.cuda.current_stream(frame.device).synchronize()
            for link in self._links:
                link.send(shared(frame))  # each getter has a count of its own
            for link in self._links:
                link.receive(Taken, TIMING.transport_silence_seconds)
            yield

    def receive(self, frames: Iterable[Frame]) -> Iterator[None]:
        torch = sys.modules["torch"]
        (link,) = self._links
        for frame in frames:
            message = link.receive(SharedFrame, TIMING.transport_silence_seconds)
            if message.length != frame.numel():
                raise DataStoreError("the putter's frames are others")
            frame.copy_(mapped(message))
            torch.cuda.synchronize(frame.device)
            link.send(Taken())
            yield


def host() -> str:
    """A name that processes have in common which can share the memory of devices."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/ipc').readlink()}"


def device_id(index: int) -> str:
    return str(sys.modules["torch"].cuda.get_device_properties(index).uuid)


def readable_ids(index: int) -> tuple[str, ...]:
    """The devices whose memory a device of this process can read, itself included."""
    cuda = sys.modules["torch"].cuda
    return tuple(
        device_id(peer_index)
        for peer_index in range(cuda.device_count())
        if peer_index == index or cuda.can_device_access_peer(index, peer_index)
    )


def shared(frame: Frame) -> SharedFrame:
    """The description by which another process maps a frame."""
    reductions = importlib.import_module("torch.multiprocessing.reductions")
    _, arguments = reductions.reduce_tensor(frame)
    (_, _, _, offset, _, _, device, handle, size, begin, _, *rest) = arguments
    counter_handle, counter_offset, event_handle, is_event_needed = rest
    return SharedFrame(
        length=frame.numel(),
        offset=offset,
        device_id=device_id(device),
        handle=handle,
        storage_size=size,
        storage_offset=begin,
        counter_handle=counter_handle,
        counter_offset=counter_offset,
        event_handle=event_handle,
        is_event_needed=is_event_needed,
    )


def mapped(message: SharedFrame) -> Frame:
    """The frame of another process."""
    torch = sys.modules["torch"]
    reductions = importlib.import_module("torch.multiprocessing.reductions")
    indices = range(torch.cuda.device_count())
    device = next((index for index in indices if device_id(index) == message.device_id), None)
    if device is None:
        raise DataStoreError("this process does not see the putter's device")
    return reductions.rebuild_cuda_tensor(
        torch.Tensor,
        (message.length,),
        (1,),
        message.offset,
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        message.handle,
        message.storage_size,
        message.storage_offset,
        False,  # it needs no gradient
        message.counter_handle,
        message.counter_offset,
        message.event_handle,
        message.is_event_needed,
    )
