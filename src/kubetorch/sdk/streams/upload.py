"""A large payload on its way out: cut into chunks, no faster than the other end grants room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kubetorch.wire import codecs, frames

Buffer = bytes | bytearray | memoryview

#: Pieces of one chunk that are handed to the kernel as they are; more are put together first.
_PIECES = 64


class Upload:
    """The payload of one OPEN frame that is longer than a chunk.

    Args:
        number: The call that it belongs to.
        segments: The encoded arguments.
        total: Bytes of the payload.
        on_sent: Called by a thread of the stream once the last chunk was handed over.
    """

    def __init__(
        self,
        number: int,
        segments: Sequence[Buffer],
        total: int,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        #: Frames of the stream up to the last chunk that was taken.
        self.frames = 0
        self.number = number
        self.on_sent = on_sent
        self._segments = segments
        self._total = total
        self.rewind()

    def rewind(self) -> None:
        """Begin again: the end that received what was sent is gone."""
        self._pieces: Iterator[Buffer] = iter(codecs.join(self._segments))
        self._piece = memoryview(b"")
        self._left = self._total
        self._room = frames.WINDOW

    def forget(self) -> None:
        """Let go of the user's memory."""
        self._segments = ()
        self._pieces = iter(())
        self._piece = memoryview(b"")
        self.on_sent = None

    @property
    def is_done(self) -> bool:
        """Whether everything was taken."""
        return self._left == 0

    @property
    def can_send(self) -> bool:
        """Whether there is room for the next chunk."""
        return self._left > 0 and self._room >= min(frames.CHUNK, self._left)

    def grant(self, size: int) -> None:
        """The other end has room for so many more bytes."""
        self._room += size

    def take(self) -> list[Buffer]:
        """The buffers of the next chunk."""
        want = min(frames.CHUNK, self._left)
        self._left -= want
        self._room -= want
        parts: list[Buffer] = []
        while want:
            if not self._piece:
                self._piece = memoryview(next(self._pieces))
                continue
            part, self._piece = self._piece[:want], self._piece[want:]
            parts.append(part)
            want -= len(part)
        return parts if len(parts) <= _PIECES else [b"".join(parts)]


class Uploads:
    """The payloads of a stream that are on their way; those that have room take turns."""

    def __init__(self) -> None:
        self._by_number: dict[int, Upload] = {}
        self._ready: deque[Upload] = deque()

    @property
    def has_ready(self) -> bool:
        """Whether a chunk can be taken."""
        return bool(self._ready)

    def begin(self, upload: Upload) -> None:
        """One more payload."""
        self._by_number[upload.number] = upload
        self._ready.append(upload)

    def grant(self, number: int, size: int) -> None:
        """The other end has room for so many more bytes of this payload."""
        upload = self._by_number.get(number)
        if upload is not None:
            was_ready = upload.can_send
            upload.grant(size)
            if upload.can_send and not was_ready:
                self._ready.append(upload)

    def drop(self, number: int) -> None:
        """Nothing more of this payload is wanted."""
        upload = self._by_number.pop(number, None)
        if upload is not None:
            if upload.can_send:
                self._ready.remove(upload)
            upload.forget()

    def next(self) -> Upload:
        """The payload whose turn it is; `end_turn` is to follow."""
        return self._ready.popleft()

    def end_turn(self, upload: Upload) -> None:
        """A chunk was taken."""
        if upload.can_send:
            self._ready.append(upload)
        elif upload.is_done:
            del self._by_number[upload.number]
            if upload.on_sent is not None:
                upload.on_sent()

    def clear(self) -> None:
        """Forget them all; a payload may begin again."""
        self._by_number.clear()
        self._ready.clear()
