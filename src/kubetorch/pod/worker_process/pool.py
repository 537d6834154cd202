"""The processes of a pod that serve one callable side by side, where a single worker would stand.

Each runs calls of its own; which one runs a call is the matter of `kubetorch.pod.slots`. One that
ends takes nobody along, and another one comes in its place.
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
        #: Those that live, by a number that is not used again.
        self.workers = dict(enumerate(workers))
        self._next = len(workers)
        #: Processes that ended since one had calls: each is started again later than the last.
        self.deaths = 0
        #: Called when a worker has come, or is gone.
        self.on_added: Callable[[int, Worker], None] = lambda number, worker: None
        self.on_removed: Callable[[int], None] = lambda number: None

    @property
    def pid(self) -> int:
        """Stands for its processes where one is asked for."""
        return next(iter(self.workers.values())).pid if self.workers else 0

    @property
    def takes_calls(self) -> bool:
        return any(worker.takes_calls for worker in self.workers.values())

    def takes(self, request: Open, opened: float) -> bool:
        return self.takes_calls

    def add(self, worker: Worker) -> None:
        """A worker has come in the place of one that has ended."""
        number, self._next = self._next, self._next + 1
        self.workers[number] = worker
        self.on_added(number, worker)

    def remove(self, worker: Worker) -> bool:
        """A worker has ended; whether it was one of these."""
        for number, known in self.workers.items():
            if known is worker:
                del self.workers[number]
                self.on_removed(number)
                return True
        return False

    async def drain(self, grace: float) -> None:
        """Take no more calls, let those that run end, then end the processes."""
        await asyncio.gather(*(worker.drain(grace) for worker in list(self.workers.values())))

    async def kill(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in list(self.workers.values())))
