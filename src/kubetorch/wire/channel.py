"""What makes a stream survive its connection: numbered frames, acknowledged and kept until then.

Both ends count the frames that they have sent and received, from the first connection of a client
to an incarnation of an agent. A sender keeps each counted frame until the other end has
acknowledged it; after a reconnect each end says how many it has received, and the other sends what
follows. So a frame arrives exactly once as long as both processes live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kubetorch.errors import ProtocolError

#: A receiver acknowledges at the latest after so many frames or bytes.
ACK_FRAMES = 64
ACK_BYTES = 2 * 1024 * 1024

Buffer = bytes | bytearray | memoryview
Frame = Sequence[Buffer]


class Outbox:
    """Frames that were sent and not yet acknowledged. Frames are sequences of buffers."""

    def __init__(self) -> None:
        self._kept: deque[Frame] = deque()
        self._acked = 0
        #: Bytes of the frames that are kept.
        self.kept_bytes = 0

    @property
    def sent(self) -> int:
        """Number of frames sent so far."""
        return self._acked + len(self._kept)

    @property
    def last(self) -> Frame | None:
        """The frame that was sent last, if it is still kept."""
        return self._kept[-1] if self._kept else None

    def keep(self, frame: Frame) -> int:
        """Remember a frame that is about to be sent; its number, from 1."""
        self._kept.append(frame)
        for part in frame:
            self.kept_bytes += len(part)
        return self._acked + len(self._kept)

    def ack(self, received: int) -> None:
        """Forget what the other end has."""
        if received > self.sent:
            raise ProtocolError(f"{received} frames acknowledged, only {self.sent} were sent")
        while self._acked < received:
            # First this: a signal handler that raises after a call leaves `sent` as it is.
            self._acked += 1
            for part in self._kept.popleft():
                self.kept_bytes -= len(part)

    def after(self, received: int) -> Iterator[Frame]:
        """What to send again to an end that has `received` frames."""
        if received < self._acked:
            raise ProtocolError(f"frame {received + 1} was acknowledged and is gone")
        self.ack(received)
        return iter(tuple(self._kept))


class Inbox:
    """Counts what arrives and says when to acknowledge it."""

    def __init__(self) -> None:
        self.received = 0
        self._acked = 0
        self._bytes = 0

    def count(self, size: int) -> bool:
        """One counted frame arrived; whether an ACK is due."""
        self.received += 1
        self._bytes += size
        return self.received - self._acked >= ACK_FRAMES or self._bytes >= ACK_BYTES

    def acknowledged(self) -> int:
        """The number to send in an ACK that goes out now."""
        self._acked = self.received
        self._bytes = 0
        return self.received
