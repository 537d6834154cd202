"""Where blobs lie: in one store, or one of each namespace.

A blob is asked for by its digest, and who knows a digest need not be allowed to read what it
stands for. So in a cluster namespaces share nothing: what nobody of a namespace brought is not
there for it. On one machine there is one user, and what is in one namespace need not be brought
again to another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kubetorch.controller.completeness import Completeness
from kubetorch.datastore.blobs import BlobStore, Room
from kubetorch.specs import names


class Depot:
    """One store.

    Args:
        folder: Where it lies.
        namespace: Whose it is; `None` when all namespaces share it.
        room: What to say when it is full.
    """

    def __init__(self, folder: Path, namespace: str | None, room: Room) -> None:
        self.namespace = namespace
        self.blobs = BlobStore(folder, room)
        self.completeness = Completeness(self.blobs)

    def is_of(self, namespace: str) -> bool:
        """Whether the blobs of a namespace lie here."""
        return self.namespace in (None, namespace)


class Depots:
    """All stores.

    Args:
        folder: Where they lie.
        is_shared: Whether there is one for all namespaces.
        room: What to say when there is none left.

    Attributes:
        on_full: Called when there was none left.
    """

    def __init__(self, folder: Path, *, is_shared: bool = False, room: Room | None = None) -> None:
        self._folder = folder
        self._room = room or Room()
        self.on_full: Callable[[], None] = lambda: None
        self._shared = Depot(folder, None, self._room) if is_shared else None
        self._known: dict[str, Depot] = {}

    def of(self, namespace: str) -> Depot:
        """The store of a namespace.

        Raises:
            SpecError: There can be no such namespace.
        """
        if self._shared is not None:
            return self._shared
        found = self._known.get(namespace)
        if found is None:
            names.check_namespace(namespace)
            found = self._known[namespace] = Depot(self._folder / namespace, namespace, self._room)
        return found

    def all(self) -> list[Depot]:
        """Every store that there is, also those that nobody has asked for yet."""
        if self._shared is not None:
            return [self._shared]
        if self._folder.is_dir():
            for entry in self._folder.iterdir():
                if entry.is_dir():
                    self.of(entry.name)
        return list(self._known.values())
