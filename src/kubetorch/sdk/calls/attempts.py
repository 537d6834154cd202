"""The driver of one call for a thread: it makes attempts and waits for their events."""

from __future__ import annotations

from _queue import SimpleQueue  # `queue` adds classes that nobody needs here

from kubetorch.errors import CallRefusedError
from kubetorch.sdk.calls.invocation import Again, Done, Invocation, Yielded
from kubetorch.sdk.streams.pending import Event, PendingCall
from kubetorch.sdk.streams.stream import Stream


class Attempts:
    """One call.

    Attributes:
        invocation: What is called.
        is_over: The call has ended, or nobody wants it any more.
    """

    __slots__ = ("_call", "_events", "_stream", "invocation", "is_over")

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation
        self.is_over = False
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._stream: Stream | None = None
        self._call: PendingCall | None = None

    def start(self) -> tuple[Stream, PendingCall]:
        """Make an attempt; after any exception it is cancelled.

        Raises:
            KubetorchError: No pod can be reached.
        """
        try:
            return self._start()
        except BaseException:
            self.cancel()
            raise

    def _start(self) -> tuple[Stream, PendingCall]:
        invocation = self.invocation
        stream = invocation.route.stream()
        if stream is None:
            try:
                stream = invocation.route.connect(invocation.patience)
            except CallRefusedError as error:
                raise invocation.refused(error) from error
        self._stream = stream
        # Noted before it is opened, so that whatever interrupts this can cancel it.
        self._call = call = stream.prepare(self._events.put)
        invocation.start(stream, call, reads=True)
        return stream, call

    def next(self) -> Done | Yielded:
        """How the call ends, or a value of its generator; after any exception it is cancelled.

        Raises:
            KubetorchError: No pod can be reached.
        """
        invocation = self.invocation
        try:
            while True:
                stream, call = self._stream, self._call
                if stream is None or call is None:
                    stream, call = self._start()
                event = stream.wait(call, self._events, invocation.expires)
                step = invocation.step(stream, event)
                if step is None:
                    continue
                if isinstance(step, Again):
                    self._stream = self._call = None
                    invocation.route.pause(step.delay)
                    continue
                self.is_over = isinstance(step, Done)
                return step
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        self.is_over = True
        if self._stream is not None and self._call is not None:
            self._stream.cancel(self._call)
        self.invocation.end_lines()
