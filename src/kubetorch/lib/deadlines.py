"""Deadlines for coroutines, on every Python that is supported.

They stand for `asyncio.wait_for`: before Python 3.12 it drops the cancellation of a waiter whose
event comes in the same moment, and the waiter goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable
from types import TracebackType

if sys.version_info >= (3, 11):
    timeout = asyncio.timeout
else:

    class timeout:  # stands for asyncio.timeout, which Python 3.10 lacks
        """`async with timeout(seconds)`: raises `TimeoutError` inside when they are over."""

        def __init__(self, seconds: float | None) -> None:
            self._seconds = seconds
            self._expired = False
            self._handle: asyncio.TimerHandle | None = None

        async def __aenter__(self) -> timeout:
            task = asyncio.current_task()
            assert task is not None
            if self._seconds is not None:
                loop = asyncio.get_running_loop()
                self._handle = loop.call_later(self._seconds, self._expire, task)
            return self

        def _expire(self, task: asyncio.Task[object]) -> None:
            self._expired = True
            task.cancel()

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None:
            if self._handle is not None:
                self._handle.cancel()
            if self._expired and kind is asyncio.CancelledError:
                raise TimeoutError from error


async def wait_at_most(seconds: float, awaitable: Awaitable[object]) -> None:
    """Wait for something, and go on without it once the time is over."""
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        async with timeout(seconds):
            await awaitable
