"""Copying what a step brings along into the pod."""

from __future__ import annotations

import asyncio
import itertools
import posixpath
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore
from kubetorch.datastore.materialising import materialise
from kubetorch.datastore.trees import Tree
from kubetorch.pod.image import running
from kubetorch.pod.image.running import Place, Progress
from kubetorch.specs.image import CopyStep

#: Removes byte code: Python would take a same-size edit within one second for no edit.
_FORGET = (
    "find . -type d -exec sh -c 'for folder; do rm -rf \"$0/$folder/__pycache__\"; done' "
    "{target} {{}} +"
)


class Blobs(Protocol):
    """Brings blobs into the pod's store."""

    async def fetch(self, digests: Iterable[str]) -> int:
        """Have these blobs in the store; how many had to be fetched."""


class Copying:
    """Copies files and folders, several at once too: each is put together in a folder of its own.

    Args:
        folder: Where those are; what an earlier process of the agent left there goes.
        working_dir: What relative destinations are relative to.
        store: The pod's blobs.
        blobs: Brings blobs there.
    """

    def __init__(self, folder: Path, working_dir: str, store: BlobStore, blobs: Blobs) -> None:
        self._folder = folder
        self._working_dir = working_dir
        self._store = store
        self._blobs = blobs
        self._numbers = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)

    def target(self, step: CopyStep) -> str:
        """Absolute path of the copy."""
        return posixpath.normpath(posixpath.join(self._working_dir, step.target))

    async def run(self, step: CopyStep, place: Place, progress: Progress) -> None:
        """Copy.

        Raises:
            ImageStepError: The destination cannot be written.
            DataStoreError: What is to be copied did not come.
        """
        if step.digest is None:
            raise running.failure(step, "names no files: it was not sent by a deploy")
        await self._blobs.fetch([step.digest])
        tree = await asyncio.to_thread(self._tree, step.digest)
        await self._blobs.fetch(tree.digests())
        source = self._folder / str(next(self._numbers))
        try:
            await asyncio.to_thread(self._put_together, source, tree)
            await running.shell(step, self._command(step, source), place, progress)
        finally:
            await asyncio.to_thread(shutil.rmtree, source, ignore_errors=True)

    def entries(self, step: CopyStep) -> tuple[str, ...]:
        """What to import a copied package from."""
        folder = Path(self.target(step))
        if (folder / "__init__.py").exists():
            return (str(folder.parent),)
        source = folder / "src"
        return (str(source), str(folder)) if source.is_dir() else (str(folder),)

    def _command(self, step: CopyStep, source: Path) -> str:
        target = shlex.quote(self.target(step))
        if step.is_folder:
            folder = shlex.quote(str(source))
            copy = f"mkdir -p {target} && cp -RPp {folder}/. {target}/"
            return f"{copy} && cd {folder} && {_FORGET.format(target=target)}"
        (file,) = source.iterdir()
        if step.target.endswith("/"):
            return f"mkdir -p {target} && cp -p {shlex.quote(str(file))} {target}/"
        above = shlex.quote(posixpath.dirname(self.target(step)))
        return f"mkdir -p {above} && cp -p {shlex.quote(str(file))} {target}"

    def _tree(self, digest: str) -> Tree:
        return trees.decode(self._store.read(digest))

    def _put_together(self, folder: Path, tree: Tree) -> None:
        folder.mkdir(parents=True)
        materialise(str(folder), tree, self._store.stream, {}, [])
