"""The workers of a pod that serve one callable side by side, in place of a single worker.

Each worker runs calls of its own; `kubetorch.pod.slots` chooses the worker of a call. The end of
one worker does not end the others, and another worker replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kubetorch.pod.worker_process.worker import Worker
from kubetorch.wire.frames import Open


class WorkerPool:
    """The workers of one generation; there is at least one when it is made."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.generation = workers[0].generation
        #: The living workers, by numbers that are not used again.
        self.workers = dict(enumerate(workers))
        self._next = len(workers)
        #: Workers that ended since one had calls: each is restarted after a longer delay.
        self.deaths = 0
        #: Called when a worker is added, or removed.
        self.on_added: Callable[[int, Worker], None] = lambda number, worker: None
        self.on_removed: Callable[[int], None] = lambda number: None

    @property
    def pid(self) -> int:
        """The process of the first living worker; 0 without one."""
        return next(iter(self.workers.values())).pid if self.workers else 0

    @property
    def accepts_calls(self) -> bool:
        return any(worker.accepts_calls for worker in self.workers.values())

    def accepts(self, request: Open, opened: float) -> bool:
        return self.accepts_calls

    def add(self, worker: Worker) -> None:
        number, self._next = self._next, self._next + 1
        self.workers[number] = worker
        self.on_added(number, worker)

    def remove(self, worker: Worker) -> bool:
        """Remove a worker that ended; false if it is no worker of this pool."""
        for number, pool_worker in self.workers.items():
            if pool_worker is worker:
                del self.workers[number]
                self.on_removed(number)
                return True
        return False

    async def drain(self, grace: float) -> None:
        """Accept no more calls, let the running ones end, then end the processes."""
        await asyncio.gather(*(worker.drain(grace) for worker in list(self.workers.values())))

    async def kill(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in list(self.workers.values())))
