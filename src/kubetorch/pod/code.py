"""The code of generations in a pod: its blobs, and folders that workers import it from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kubetorch.datastore import slots, trees
from kubetorch.datastore.blobs import BlobStore
from kubetorch.datastore.slots import CodeSlots, Slot
from kubetorch.errors import DataStoreError
from kubetorch.specs.workload import WorkloadSpec

_log = logging.getLogger(__name__)


class Blobs(Protocol):
    """Brings blobs into the pod's store."""

    async def fetch(self, digests: Iterable[str]) -> int:
        """Have these blobs in the store; how many had to be fetched."""


class Code:
    """Brings code into the pod.

    Args:
        root: Folder of the pod.
        working_dir: Where projects are shown.
        store: The pod's blobs.
        blobs: Brings blobs there.
    """

    def __init__(self, root: Path, working_dir: Path, store: BlobStore, blobs: Blobs) -> None:
        self._slots = CodeSlots(root / "code")
        self._working_dir = working_dir
        self._store = store
        self._blobs = blobs

    async def fetch(self, spec: WorkloadSpec) -> str | None:
        """Have everything that a generation consists of; its constructor's arguments."""
        arguments = [] if spec.init_args is None else [spec.init_args]
        await self._blobs.fetch([*spec.trees, *arguments])
        for digest in spec.trees:
            tree = await asyncio.to_thread(self._tree, digest)
            await self._blobs.fetch(tree.digests())
        if spec.init_args is None:
            return None
        return (await asyncio.to_thread(self._store.read, spec.init_args)).decode()

    async def materialise(self, spec: WorkloadSpec) -> Slot | None:
        """A code slot with the project in it, held for one worker."""
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

    def release(self, slot: Slot | None) -> None:
        """A worker of this slot has ended."""
        if slot is not None:
            self._slots.release(slot)

    async def show(self, slot: Slot | None) -> None:
        """Let the project be seen in the working directory, for relative paths and shells."""
        if slot is None:
            return
        try:
            await asyncio.to_thread(slots.switch, self._working_dir / slot.path.name, slot)
        except DataStoreError as error:
            _log.warning("project not shown error=%s", error.message)

    def prune(self, keep: Iterable[WorkloadSpec]) -> None:
        """Forget the blobs of all other generations."""
        needed: set[str] = set()
        for spec in keep:
            needed.update(spec.trees if spec.init_args is None else (*spec.trees, spec.init_args))
            for tree in spec.trees:
                if self._store.has(tree):
                    needed.update(self._tree(tree).digests())
        for blob in self._store.iterate():
            if blob.digest not in needed:
                self._store.delete(blob.digest)
        self._store.sweep()

    def _release_unused(self, update: asyncio.Future[Slot]) -> None:
        if not update.cancelled() and update.exception() is None:
            self.release(update.result())

    def _update_slot(self, digest: str, project: str) -> Slot:
        return self._slots.update(self._tree(digest), self._store.stream, project)

    def _tree(self, digest: str) -> trees.Tree:
        return trees.decode(self._store.read(digest))
