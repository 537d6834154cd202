"""Messages about tensors that go from process to process, past the store.

The offers of a window's participants go to the controller; the other ones are lines of JSON on the
connection between a putter and each of its getters:

    getter ── Greeting ──► putter      as soon as the window is closed
           ── Ready ─────►             its memory is there
           ◄───── Start ──             which transport, with whom
           ◄─ SharedFrame ─ Taken ─►   of CUDA IPC alone: one pair for each frame
           ── Taken ─────►             all bytes are in its memory

Who closes the connection before that gets, or sends, nothing.
"""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a participant of a window can pass tensors from process to process.

    Attributes:
        manifest: The version that a putter has; empty for a getter.
        device: The kind of the device that has all its tensors: `cuda` or `cpu`.
        device_id: The UUID of this device.
        readable_ids: The UUIDs of the devices that this one can read.
        host: Processes of the same host can share the memory of devices.
        address: Where a putter waits for its getters, as `host:port`.
        token: What they show there.
    """

    key: str
    manifest: str = ""
    device: str = "cpu"
    device_id: str = ""
    readable_ids: tuple[str, ...] = ()
    host: str = ""
    address: str = ""
    token: str = ""


class Greeting(msgspec.Struct, frozen=True, omit_defaults=True):
    """A getter has come.

    Attributes:
        groups: The names of the communicators that its process still has.
    """

    token: str
    participant: str
    groups: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """The getter has memory for all tensors."""


class Start(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What comes now.

    Attributes:
        transport: `gloo`, `nccl` or `cuda_ipc`.
        is_packed: Whether all tensors are one buffer.
        group: The name of the communicator, which the getter has if there is no `store`.
        store: Where the members of a new communicator meet, as `host:port`.
        rank, size: The getter's in a new communicator, of which the putter has rank 0.
    """

    transport: str
    is_packed: bool = False
    group: str = ""
    store: str = ""
    rank: int = 0
    size: int = 0


class SharedFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A frame in the memory of a putter's device, as `torch.multiprocessing` describes it.

    Attributes:
        length: Bytes of the frame, from `offset` of the storage on.
        device_id: The UUID of the device.
    """

    length: int
    offset: int
    device_id: str
    handle: bytes
    storage_size: int
    storage_offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    is_event_needed: bool


class Taken(msgspec.Struct, frozen=True):
    """What was sent is in the memory of the getter."""
