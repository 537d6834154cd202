"""Whether the blobs that a generation needs are here: its trees, the files in them, its init args.

The files of the tree that was checked last for a workload are remembered, so an edit of one file
of five thousand costs one look at the disk.
"""

from __future__ import annotations

from collections import OrderedDict

from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore
from kubetorch.specs.workload import WorkloadSpec

#: Trees whose files are remembered.
_REMEMBERED = 16


class Completeness:
    """Finds what is missing.

    Args:
        blobs: What is here.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._files: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._complete: set[str] = set()
        self._mark = blobs.mark

    def missing(self, spec: WorkloadSpec) -> list[str]:
        """The blobs that have to come before the generation can exist.

        Raises:
            DataStoreError: What should be a tree is none, or one that must not be materialised.
        """
        if self._mark is not self._blobs.mark:
            self._mark = self._blobs.mark
            self.forget()
        arguments = [] if spec.init_args is None else [spec.init_args]
        missing = self._blobs.missing([*spec.trees, *arguments])
        here = [tree for tree in spec.trees if tree not in missing]
        for tree in here:
            missing += self._missing_files(tree)
        return missing

    def forget(self) -> None:
        """Blobs were deleted, or found broken."""
        self._complete.clear()

    def _missing_files(self, tree: str) -> list[str]:
        if tree in self._complete:
            return []
        files = self._files_of(tree)
        known: set[str] = set()
        for digest in self._complete:
            known |= self._files.get(digest, frozenset())
        missing = self._blobs.missing(sorted(files - known))
        if not missing:
            self._complete.add(tree)
        return missing

    def _files_of(self, tree: str) -> frozenset[str]:
        files = self._files.get(tree)
        if files is None:
            files = frozenset(trees.decode(self._blobs.read(tree)).digests())
            self._files[tree] = files
            while len(self._files) > _REMEMBERED:
                dropped, _ = self._files.popitem(last=False)
                self._complete.discard(dropped)
        self._files.move_to_end(tree)
        return files
