"""Trees of declared data that the pods of a node share, in a folder of the node.

    <root>/<user>/trees/<identity>/…   a version, as a tree or a file that appears at once
    <root>/<user>/leases/<pod>         the identities that a pod shows; its agent has the lock
    <root>/<user>/lock                 held for moments, while leases and trees are compared
    <root>/<user>/removed-…            a tree that is being removed

Locks are `flock`: they end with the process, also by `kill -9`, and they hold between containers of
a node. A program that needs a tree leases it first, and fetches it while it has the lock of the
tree's folder: other programs wait, and the next one takes over when the program dies. A tree
without a lease is removed by the next agent that looks.

Pods of one user share trees. The root belongs to one namespace: other pods do not have it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from kubetorch.datastore.blobs import digest_of, is_digest
from kubetorch.datastore.tuning import TIMING
from kubetorch.lib import files
from kubetorch.lib.files import FileLock

_REMOVED = "removed-"
#: Name of what a tree's folder has. A path with a suffix is that of a file, as in `kt.get`.
_CONTENT, _CONTENT_FILE = "content", "content.file"


class NodeTrees:
    """The trees of this user in a folder of the node.

    Raises:
        OSError: The folder cannot be used; a `TimeoutError` if a process holds its lock for long.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve() / str(os.geteuid())
        self._trees = self._root / "trees"
        self._leases = self._root / "leases"
        for folder in (self._trees, self._leases):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root.chmod(0o700)

    def content(self, digest: str, name: str) -> Path:
        """Where the tree of a version lies that a path of this name shows."""
        content = _CONTENT_FILE if "." in name.strip(".") else _CONTENT
        return self._trees / digest_of(f"{digest}\0{content}".encode()) / content

    # ------------------------------------------------------------------------------------- leases

    def new_lease(self) -> Lease:
        """A lease of this process, which shows no tree yet."""
        with self._locked():
            return Lease(self._leases / uuid.uuid4().hex)

    def add(self, lease: Path, content: Path) -> bool:
        """Lease a tree for a pod; returns whether it is there."""
        with self._locked(), lease.open("a") as file:
            file.write(f"{content.parent.name}\n")
            return os.path.lexists(content)

    def update(self, lease: Lease, targets: Iterable[Path]) -> None:
        """Lease the trees among these paths alone, and remove those that no pod leases."""
        identities = {path.parent.name for path in targets if path.is_relative_to(self._trees)}
        with self._locked():
            lease.write(identities)
            self._retire()
        for path in self._root.glob(f"{_REMOVED}*"):
            files.remove_tree(path)

    def _retire(self) -> None:
        """Take trees without a lease out of their places."""
        leased: set[str] = set()
        for path in self._leases.iterdir():
            lock = FileLock(path)
            if lock.get_at_once():  # its agent has ended
                path.unlink(missing_ok=True)
            else:
                leased.update(path.read_text().split())
            lock.close()
        for tree in self._trees.iterdir():
            if is_digest(tree.name) and tree.name not in leased:
                tree.rename(self._root / f"{_REMOVED}{uuid.uuid4().hex}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self._root / "lock")
        try:
            if not lock.get(TIMING.node_lock_seconds):
                raise TimeoutError(f"{self._root} is locked")
            yield
        finally:
            lock.close()

    # ----------------------------------------------------------------------------------- fetching

    @contextlib.contextmanager
    def fetching(self, content: Path, seconds: float) -> Iterator[bool]:
        """Hold the lock of a leased tree, to write it unless it is there; yields if it is.

        Raises:
            TimeoutError: Another program has fetched it for so long.
        """
        content.parent.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(content.parent)
        try:
            if not lock.get(seconds):
                raise TimeoutError(f"another pod of the node has been fetching {content} for long")
            is_there = os.path.lexists(content)
            if not is_there:
                for path in content.parent.iterdir():  # of a program that died
                    files.remove_tree(path)
                    path.unlink(missing_ok=True)
            yield is_there
        finally:
            lock.close()


class Lease:
    """What a pod shows; it ends when this process ends, or closes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path)
        self._lock.get_at_once()

    def write(self, identities: Iterable[str]) -> None:
        self.path.write_text("".join(f"{identity}\n" for identity in sorted(identities)))

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self._lock.close()
