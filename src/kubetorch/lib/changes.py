"""Waking everybody who waits for something to be different."""

from __future__ import annotations

import asyncio


class Changes:
    """Says that something changed, to any number of waiters, and keeps nothing."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next change; look at the state before this, with no `await` in between."""
        await self._next.wait()
