"""Deleting blobs that nothing refers to.

What is referred to: the generations that are kept of each workload (wanted, last good, and the one
before), and results of spawned calls that are kept. A blob that came in the last ten minutes is
left alone whatever refers to it: it may belong to a deploy that is on its way. A store that was
found full is looked through at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kubetorch.controller.depots import Depot, Depots
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.lib.clock import Clock, Timer
from kubetorch.specs.workload import WorkloadSpec

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
        specs: The generations that are kept now.
        results: The digests of the results that are kept now in a store.
        expire: Gives up results that are too old.
        clock: Says when, and what is young.
    """

    def __init__(
        self,
        depots: Depots,
        *,
        specs: Callable[[], Iterable[WorkloadSpec]],
        results: Callable[[Depot], set[str]],
        expire: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._depots = depots
        self._specs = specs
        self._results = results
        self._expire = expire
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
        self._expire()
        return sum([await self._collect(depot) for depot in self._depots.all()])

    async def _collect(self, depot: Depot) -> int:
        blobs = depot.blobs
        await asyncio.to_thread(blobs.sweep)
        old = self._clock.time() - YOUNG
        candidates = await asyncio.to_thread(
            lambda: [blob.digest for blob in blobs.iterate() if blob.mtime < old]
        )
        needed, deleted = _Needed(blobs), 0
        # All trees are read once, beside the loop, and then only those that come meanwhile.
        await asyncio.to_thread(needed.add, self._specs_of(depot))
        for start in range(0, len(candidates), _BATCH):
            # Asked again for each batch, without giving up the loop until it is deleted: a deploy
            # either sees a blob and keeps it, or sees that it is gone and asks for it.
            needed.add(self._specs_of(depot))
            results = self._results(depot)
            for digest in candidates[start : start + _BATCH]:
                if digest not in needed and digest not in results:
                    deleted += blobs.delete(digest)
            depot.completeness.forget()
            await asyncio.to_thread(_nothing)
        _log.info("blobs collected deleted=%s kept=%s", deleted, len(candidates) - deleted)
        return deleted

    def _specs_of(self, depot: Depot) -> list[WorkloadSpec]:
        return [spec for spec in self._specs() if depot.is_of(spec.namespace)]

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._timer = self._clock.call_later(INTERVAL, self._begin)

    async def _run(self) -> None:
        try:
            await self.collect()
        except (KubetorchError, OSError):
            _log.exception("blobs not collected")


class _Needed:
    """What the generations refer to that a collection has seen: it only grows.

    Args:
        blobs: Where their trees are.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._trees: set[str] = set()
        self._digests: set[str] = set()

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def add(self, specs: Iterable[WorkloadSpec]) -> None:
        """Generations that are kept."""
        for spec in specs:
            if spec.init_args is not None:
                self._digests.add(spec.init_args)
            for tree in spec.trees:
                if tree not in self._trees:
                    self._trees.add(tree)
                    self._digests.update((tree, *self._files_of(tree)))

    def _files_of(self, tree: str) -> Iterable[str]:
        if not self._blobs.has(tree):
            return ()
        try:
            return trees.decode(self._blobs.read(tree)).digests()
        except DataStoreError as error:  # whoever deploys it again brings its files too
            _log.warning("tree not readable tree=%s error=%s", tree, error)
            return ()


def _nothing() -> None:
    """Lets the loop do something else."""
