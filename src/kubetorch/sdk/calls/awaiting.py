"""The driver of one call for a coroutine, and what a call of a generator is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from typing import Any

from kubetorch.errors import CallRefusedError
from kubetorch.sdk.calls.invocation import Again, Done, Invocation, Yielded
from kubetorch.sdk.streams.mailbox import Events
from kubetorch.sdk.streams.pending import EXPIRED, Event, PendingCall
from kubetorch.sdk.streams.stream import Stream


class Attempts:
    """One call. See `kubetorch.sdk.calls.attempts.Attempts`.

    Attributes:
        invocation: What is called.
        is_over: The call has ended, or nobody wants it any more.
    """

    __slots__ = ("_call", "_events", "_stream", "_timer", "invocation", "is_over")

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation
        self.is_over = False
        self._stream: Stream | None = None
        self._call: PendingCall | None = None
        self._events: Events | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> tuple[Stream, PendingCall, Events]:
        """Make an attempt.

        Raises:
            KubetorchError: No pod can be reached.
        """
        invocation = self.invocation
        stream = invocation.route.stream()
        if stream is None:
            try:
                stream = await invocation.route.connect_async(invocation.patience)
            except CallRefusedError as error:
                raise invocation.refused(error) from error
        loop = asyncio.get_running_loop()
        self._events = events = Events(loop)
        self._stream = stream
        self._call = call = stream.prepare(stream.mailbox(loop).put, events)
        invocation.start(stream, call)
        left = invocation.left
        if left is not None:
            expired = Event(call, EXPIRED, None, None, 0)
            self._timer = loop.call_later(left, events.put, expired)
        return stream, call, events

    async def next(self) -> Done | Yielded:
        """How the call ends, or a value of its generator; after any exception it is cancelled.

        Raises:
            KubetorchError: No pod can be reached.
        """
        invocation = self.invocation
        try:
            while True:
                stream, call, events = self._stream, self._call, self._events
                if stream is None or call is None or events is None:
                    stream, call, events = await self.start()
                step = invocation.step(stream, await events.get())
                if step is None:
                    continue
                if isinstance(step, Again):
                    self._forget()
                    await asyncio.sleep(step.delay)
                    continue
                if isinstance(step, Done):
                    self.is_over = True
                    self._forget()
                return step
        except BaseException:
            self.cancel()
            raise

    def recall(self, reason: str) -> None:
        """Ask for its end, if it has not ended, and go on waiting for it."""
        if self._stream is not None and self._call is not None:
            self._stream.cancel(self._call, reason, abandons=False)

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        self.is_over = True
        if self._stream is not None and self._call is not None:
            self._stream.cancel(self._call)
        self._forget()
        self.invocation.end_lines()

    def _forget(self) -> None:
        self._stream = self._call = self._events = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RemoteAsyncIterator(AsyncIterator[Any]):
    """The values of a generator that runs in a pod, for `async for`.

    See `kubetorch.sdk.calls.generators.RemoteIterator`. Awaiting it gives the iterator itself, so
    a call of a generator can be awaited like every other one.

    Args:
        attempts: The call.
        first: What has arrived of it: its first value, or its end.

    Attributes:
        returned: What the generator returned, at its end.
    """

    def __init__(self, attempts: Attempts, first: Done | Yielded | None = None) -> None:
        self._attempts = attempts
        self._first = first
        self.returned: Any = None

    def __await__(self) -> Generator[Any, None, RemoteAsyncIterator]:
        yield from ()
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # the user's own value
        step, self._first = self._first, None
        if step is None:
            if self._attempts.is_over:
                raise StopAsyncIteration
            step = await self._attempts.next()
        if isinstance(step, Yielded):
            return step.value
        if step.error is not None:
            raise step.error
        self.returned = step.value
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the generator, if it has not ended."""
        self.close()

    def close(self) -> None:
        """As `aclose`; it does not need to wait for anything."""
        self._first = None
        if not self._attempts.is_over:
            self._attempts.cancel()

    def __del__(self) -> None:
        self.close()


async def call(invocation: Invocation) -> Any:  # noqa: ANN401  # the user's own value
    """Make a call and return what it returns."""
    attempts = Attempts(invocation)
    step = await attempts.next()
    if isinstance(step, Yielded):
        return RemoteAsyncIterator(attempts, step)
    if step.error is not None:
        raise step.error
    return RemoteAsyncIterator(attempts, step) if step.is_streamed else step.value
