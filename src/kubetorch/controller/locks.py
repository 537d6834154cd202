"""Locks by name, of which only those are kept that somebody holds or waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Locks:
    """The locks of workloads, by namespace and name."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, str], _Lock] = {}

    def __len__(self) -> int:
        """How many are held or waited for."""
        return len(self._locks)

    def of(self, key: tuple[str, str]) -> _Lock:
        """The lock of one workload, for `async with`."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = _Lock(lambda: self._locks.pop(key, None))
        return lock


class _Lock:
    """One lock.

    Args:
        on_free: Called when nobody holds it or waits for it any more.
    """

    def __init__(self, on_free: Callable[[], object]) -> None:
        self._lock = asyncio.Lock()
        self._users = 0
        self._on_free = on_free

    async def __aenter__(self) -> None:
        self._users += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        self._leave()

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._on_free()
