"""One call on its worker: its state, its cancellation, its progress."""

from __future__ import annotations

import asyncio
import json
import queue
import time
from typing import Any

from kubetorch.errors import CallCancelledError, CallTimeoutError, KubetorchError
from kubetorch.pod.worker import protocol
from kubetorch.pod.worker.connection import Connection
from kubetorch.pod.worker.interrupts import Interruptible

#: Seconds between two reports of progress; the last one is always sent.
PROGRESS_INTERVAL = 0.05


class Call:
    """One call."""

    def __init__(
        self,
        number: int,
        *,
        request_id: str,
        method: str | None,
        codec: str,
        segments: list[memoryview],
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.number = number
        self.request_id = request_id
        self.method = method
        self.codec = codec
        #: The encoded arguments; taken away when they are decoded, so that memory is freed.
        self.segments = segments
        self.interruptible = Interruptible()
        #: Why it is to end.
        self.cancelled: KubetorchError | None = None
        # Taken, atomically, by whoever deals with it: its thread, or its cancellation before.
        self._claims = [None]
        #: The task that runs it, for a call on the event loop.
        self.task: asyncio.Task[Any] | None = None
        self._connection = connection
        self._loop = loop
        # Values that a generator may still send.
        self._grant = protocol.FIRST_GRANT
        self._grants: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._granted: asyncio.Future[None] | None = None
        self._progress: bytes | None = None
        self._progress_sent = 0.0

    def claim(self) -> bool:
        """Whether it is the caller's to run, or to end without running; true once."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    # --------------------------------------------------------------------------- cancellation

    def cancel(self, reason: str, *, timed_out: bool) -> None:
        """End it soon: by an exception where it runs."""
        if self.cancelled is not None:
            return
        error = CallTimeoutError if timed_out else CallCancelledError
        self.cancelled = error(reason)
        self.interruptible.interrupt(error)
        self._grants.put(0)
        self._loop.call_soon_threadsafe(self._cancel_task)

    def check(self) -> None:
        """Raise what the call was cancelled with."""
        if self.cancelled is not None:
            raise self.cancelled

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()

    # ----------------------------------------------------------------------------- generators

    def grant(self, count: int) -> None:
        """The caller takes so many more values."""
        self._grants.put(count)
        self._loop.call_soon_threadsafe(self._wake)

    def wait_for_grant(self) -> None:
        """Wait in a thread until a value may be sent.

        Raises:
            CallCancelledError, CallTimeoutError: The call is to end instead.
        """
        while self._grant == 0:
            self.check()
            self._grant += self._grants.get()  # ends: the agent grants, cancels, or is gone
        self.check()
        self._grant -= 1

    async def wait_for_grant_async(self) -> None:
        """Wait on the event loop until a value may be sent."""
        while True:
            while not self._grants.empty():
                self._grant += self._grants.get()
            if self._grant:
                self._grant -= 1
                return
            self._granted = self._loop.create_future()
            await self._granted

    def _wake(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    # ------------------------------------------------------------------------------- progress

    def progress(self, current: float, total: float | None, message: str | None) -> None:
        """Tell the caller how far the call has come."""
        report = json.dumps([current, total, message]).encode()
        now = time.monotonic()
        due = self._progress_sent + PROGRESS_INTERVAL
        if now >= due:
            self._progress, self._progress_sent = None, now
            self._connection.send(protocol.PROGRESS, self.number, report)
            return
        is_scheduled = self._progress is not None
        self._progress = report
        if not is_scheduled:
            self._later(due - now)

    def finish_progress(self) -> None:
        """Send the last report if it is still to be sent."""
        report, self._progress = self._progress, None
        if report is not None:
            self._progress_sent = time.monotonic()
            self._connection.send(protocol.PROGRESS, self.number, report)

    def _later(self, delay: float) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, delay, self.finish_progress)
