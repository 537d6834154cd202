"""Bytes of calls on their way through an agent: arguments, results, values of references."""

from __future__ import annotations

from typing import Protocol

from kubetorch.lib.memory import Memory
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.pod.user_process.protocol import Buffer

_NOTHING = memoryview(b"")


class Payload(Protocol):
    """Bytes on their way. The last owner releases them."""

    @property
    def view(self) -> memoryview:
        """The bytes."""

    def release(self) -> None:
        """Release the bytes. May be called twice."""


class OwnedPayload:
    """A payload whose memory lives as long as objects that were made from its view."""

    __slots__ = ("view",)

    def __init__(self, data: Buffer) -> None:
        self.view = memoryview(data)

    def release(self) -> None:
        self.view = _NOTHING


def shared(payload: Payload) -> Payload:
    """The same bytes for a worker, which releases them, while the payload itself stays."""
    if isinstance(payload, (Memory, MemoryFile)):
        return payload.share()
    return OwnedPayload(payload.view)
