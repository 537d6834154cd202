"""The files of generations in a pod: brought in, held while something runs in them, forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from kubetorch.datastore import slots, trees
from kubetorch.datastore.blobs import BlobStore
from kubetorch.datastore.slots import CodeSlots, Slot
from kubetorch.errors import DataStoreError
from kubetorch.specs.workload import WorkloadSpec

#: Seconds after a reload until blobs that are not needed any more are deleted.
PRUNE_DELAY = 10.0

_log = logging.getLogger(__name__)


class Blobs(Protocol):
    """Brings blobs into the pod's store."""

    async def fetch(self, digests: Iterable[str]) -> int:
        """Have these blobs in the store; how many had to be fetched."""


class Code:
    """Code slots and blobs of one pod.

    Args:
        root: Folder of the pod.
        working_dir: Where the project is shown.
        store: The pod's blobs.
        blobs: Brings blobs there.
    """

    def __init__(self, root: Path, working_dir: Path, store: BlobStore, blobs: Blobs) -> None:
        self._working_dir = working_dir
        self._store = store
        self._blobs = blobs
        self._slots = CodeSlots(root / "code")
        # Held while blobs are brought in, used, or deleted.
        self._storing = asyncio.Lock()
        self._pruning: asyncio.Task[None] | None = None

    async def prepare(self, spec: WorkloadSpec) -> tuple[Slot | None, str | None]:
        """Bring in everything that a generation consists of.

        Returns:
            A slot with the project, held until it is released, and the JSON of the arguments of a
            class's constructor.
        """
        async with self._storing:
            init_args = await self._fetch(spec)
            return await self._materialise(spec), init_args

    async def show(self, slot: Slot) -> None:
        """Let the project be seen in the working directory, for relative paths and shells."""
        await asyncio.to_thread(self._show, slot)

    def release(self, slot: Slot | None) -> None:
        """Nothing runs in it any more."""
        if slot is not None:
            self._slots.release(slot)

    async def _fetch(self, spec: WorkloadSpec) -> str | None:
        first = [digest for digest in (spec.tree, spec.init_args) if digest is not None]
        await self._blobs.fetch(first)
        if spec.tree is not None:
            tree = await asyncio.to_thread(self._tree, spec.tree)
            await self._blobs.fetch(tree.digests())
        if spec.init_args is None:
            return None
        return (await asyncio.to_thread(self._store.read, spec.init_args)).decode()

    async def _materialise(self, spec: WorkloadSpec) -> Slot | None:
        if spec.tree is None or spec.callable.project is None:
            return None
        update = asyncio.ensure_future(
            asyncio.to_thread(self._update_slot, spec.tree, spec.callable.project)
        )
        try:
            return await asyncio.shield(update)
        except asyncio.CancelledError:
            # The thread goes on, and holds a slot that nobody will use.
            update.add_done_callback(self._release_unused)
            raise

    def _release_unused(self, update: asyncio.Future[Slot]) -> None:
        if not update.cancelled() and update.exception() is None:
            self.release(update.result())

    def _update_slot(self, digest: str, project: str) -> Slot:
        return self._slots.update(self._tree(digest), self._store.stream, project)

    def _tree(self, digest: str) -> trees.Tree:
        return trees.decode(self._store.read(digest))

    def _show(self, slot: Slot) -> None:
        try:
            slots.switch(self._working_dir / slot.path.name, slot)
        except DataStoreError as error:
            _log.warning("project not shown error=%s", error.message)

    # ---------------------------------------------------------------------------------- pruning

    def prune_later(self, keep: Callable[[], list[WorkloadSpec]]) -> None:
        """Forget blobs of older generations, once the deploy that waits for this one is done.

        Args:
            keep: The generations whose blobs stay, asked when it is done.
        """
        self.close()
        self._pruning = asyncio.get_running_loop().create_task(self._prune(keep))

    def close(self) -> None:
        """Forget nothing more."""
        if self._pruning is not None:
            self._pruning.cancel()

    async def _prune(self, keep: Callable[[], list[WorkloadSpec]]) -> None:
        await asyncio.sleep(PRUNE_DELAY)
        async with self._storing:
            await asyncio.to_thread(self._prune_store, keep())

    def _prune_store(self, keep: Iterable[WorkloadSpec]) -> None:
        needed: set[str] = set()
        for spec in keep:
            needed.update(digest for digest in (spec.tree, spec.init_args) if digest is not None)
            if spec.tree is not None and self._store.has(spec.tree):
                needed.update(self._tree(spec.tree).digests())
        for blob in self._store.iterate():
            if blob.digest not in needed:
                self._store.delete(blob.digest)
        self._store.sweep()
