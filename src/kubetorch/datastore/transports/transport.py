"""What a transport does, and the thread in which it may hang without harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from kubetorch.datastore.transports.rendezvous import Link
from kubetorch.datastore.tuning import TIMING
from kubetorch.errors import DataStoreError, KubetorchError

#: A tensor of bytes, in one piece, on the device of its process.
Frame = Any
#: A `torch.device`.
Device = Any
#: What torch and its libraries raise, beside our own errors.
FAILURES = (
    *(KubetorchError, OSError, RuntimeError, ValueError, TypeError),
    *(AttributeError, ImportError, LookupError),
)


class Transport(Protocol):
    """Moves frames from a putter to its getters: all of them have the same frames, in order."""

    def send(self, frames: Iterable[Frame]) -> Iterator[None]:
        """Send frames; yields whenever something has moved."""

    def receive(self, frames: Iterable[Frame]) -> Iterator[None]:
        """Fill frames; yields whenever something has moved."""


class Transfer(threading.Thread):
    """Steps in a thread of their own, which is left to itself when nothing moves any more.

    A library that hangs, in whatever call, so hangs no put and no get.
    """

    def __init__(self, steps: Iterator[None]) -> None:
        super().__init__(name="kubetorch-transport", daemon=True)
        self._steps = steps
        self._moved = time.monotonic()
        self._error: BaseException | None = None
        self._is_done = False
        self.start()

    def run(self) -> None:
        try:
            for _ in self._steps:
                self._moved = time.monotonic()
            self._is_done = True
        except FAILURES as error:
            self._error = error
        finally:
            del self._steps  # with the memory that it has

    def wait(self, links: Iterable[Link] = ()) -> None:
        """Wait for the end.

        Args:
            links: To members whose end is the end of the transfer; it does not use them itself.

        Raises:
            DataStoreError: The transfer failed, or nothing moved for `transport_silence_seconds`.
        """
        while self.is_alive():
            self.join(TIMING.transport_poll_seconds)
            if self.is_alive():
                for link in links:
                    link.has_message()
                if time.monotonic() > self._moved + TIMING.transport_silence_seconds:
                    seconds = TIMING.transport_silence_seconds
                    raise DataStoreError(f"nothing came for {seconds:.0f} s")
        if not self._is_done:
            if isinstance(self._error, KubetorchError):
                raise self._error
            sentence = str(self._error).partition("\n")[0].partition(". ")[0]
            raise DataStoreError(f"the transfer failed: {sentence[:200]}") from self._error
