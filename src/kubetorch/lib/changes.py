"""Wakes all coroutines that wait for a change of some state."""

from __future__ import annotations

import asyncio


class Changes:
    """Notifies any number of waiters of a change; a change without waiters is not remembered."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next change; check the state before, with no `await` in between."""
        await self._next.wait()
