"""Deleting blobs that nothing refers to.

What is referred to: the generations that are kept of each workload (wanted, last good, and the one
before), and results of spawned calls that are kept. A blob that came in the last ten minutes is
left alone whatever refers to it: it may belong to a deploy that is on its way. A store that was
found full is looked through at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kubetorch.controller.depots import Depot, Depots
from kubetorch.errors import KubetorchError
from kubetorch.lib.clock import Clock, Timer

#: Seconds after its last upload in which a blob is never deleted.
YOUNG = 600.0
#: Seconds between two collections.
INTERVAL = 1800.0
#: Seconds from the start of the controller to the first one.
FIRST = 20.0
# Blobs that are deleted between two looks at what is needed.
_BATCH = 100

_log = logging.getLogger(__name__)


class Garbage:
    """Collects garbage from time to time.

    Args:
        depots: Where it is.
        needed: The digests that are referred to now in a store.
        clock: Says when, and what is young.
    """

    def __init__(
        self,
        depots: Depots,
        *,
        needed: Callable[[Depot], set[str]],
        clock: Clock,
    ) -> None:
        self._depots = depots
        self._needed = needed
        self._clock = clock
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._timer = self._clock.call_later(FIRST, self._begin)

    async def close(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def hurry(self) -> None:
        """Collect now, unless that is being done: somebody found no room."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def collect(self) -> int:
        """Delete what nothing refers to; how many blobs that were."""
        return sum([await self._collect(depot) for depot in self._depots.all()])

    async def _collect(self, depot: Depot) -> int:
        blobs = depot.blobs
        await asyncio.to_thread(blobs.sweep)
        old = self._clock.time() - YOUNG
        candidates = await asyncio.to_thread(
            lambda: [blob.digest for blob in blobs.iterate() if blob.mtime < old]
        )
        deleted = 0
        for start in range(0, len(candidates), _BATCH):
            # Asked again for each batch, without giving up the loop until it is deleted: a deploy
            # either sees a blob and keeps it, or sees that it is gone and asks for it.
            needed = self._needed(depot)
            for digest in candidates[start : start + _BATCH]:
                if digest not in needed:
                    deleted += blobs.delete(digest)
            depot.completeness.forget()
            await asyncio.to_thread(_nothing)
        _log.info("blobs collected deleted=%s kept=%s", deleted, len(candidates) - deleted)
        return deleted

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._timer = self._clock.call_later(INTERVAL, self._begin)

    async def _run(self) -> None:
        try:
            await self.collect()
        except (KubetorchError, OSError):
            _log.exception("blobs not collected")


def _nothing() -> None:
    """Lets the loop do something else."""
