"""The chunks of tensors that this process reads and writes without a request.

On the machine of the local service that is the folder of the store; elsewhere a cache of the
versions that this user put or got last.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from kubetorch.config import environment
from kubetorch.datastore import manifests
from kubetorch.datastore.blobs import BlobStore, digest_of, is_digest
from kubetorch.datastore.tuning import LIMITS as STORE_LIMITS
from kubetorch.datastore.weights import Place, StoredTensors
from kubetorch.errors import DataStoreError
from kubetorch.lib.files import write_atomically
from kubetorch.local.home import Home
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire.data import KeyView


class TensorCache:
    """The chunks that this process can read and write without a request.

    Attributes:
        is_store: True for the folder of the store itself, which is complete.
        is_used: False if two versions have no room in a cache.
    """

    def __init__(self, session: Session, size: int) -> None:
        store = store_here(session)
        self.is_store = store is not None
        self._place = session.pod_location
        limit = STORE_LIMITS.chunk_cache_bytes
        self.is_used = self.is_store or 2 * size <= limit
        self.blobs = store or BlobStore(environment.cache_dir() / "tensors")

    def content(self, digest: str) -> bytes | None:
        try:
            with self.blobs.open(digest) as file:
                return file.read()
        except (DataStoreError, OSError):
            return None

    def places(self, manifest: str) -> dict[Place, str]:
        """The chunks of a version by their places, if the cache has it."""
        try:
            return StoredTensors(manifests.read(self.blobs, manifest), self.blobs.read).places()
        except (DataStoreError, OSError):
            return {}

    def bases(self, namespace: str, key: str, stored: StoredTensors) -> dict[str, str]:
        """For chunks of a version those in their places of the version that was fetched last."""
        if self.is_store:
            return {}
        try:
            last = self._version(namespace, key).read_text()
        except (OSError, UnicodeDecodeError):
            return {}
        old = self.places(last) if is_digest(last) else {}
        candidates = ((digest, old.get(place)) for place, digest in stored.places().items())
        return {digest: base for digest, base in candidates if base and self.blobs.has(base)}

    def note(self, namespace: str, view: KeyView) -> None:
        """Remember that the cache has this version."""
        if not self.is_store:
            path = self._version(namespace, view.key)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, view.manifest.encode())

    def _version(self, namespace: str, key: str) -> Path:
        name = digest_of(f"{self._place}\0{namespace}\0{key}".encode())
        return self.blobs.root / "versions" / name

    def trim(self) -> None:
        if self.is_store:
            return
        with contextlib.suppress(OSError):  # blobs of another user stay
            shrink(self.blobs, STORE_LIMITS.chunk_cache_bytes)


def shrink(cache: BlobStore, limit_bytes: int) -> None:
    """Delete what was used longest ago, down to the limit; not what other gets may be reading."""
    cache.sweep()
    blobs = sorted(cache.iterate(), key=lambda blob: blob.mtime)
    surplus = sum(blob.size for blob in blobs) - limit_bytes
    old = time.time() - TIMING.young_chunk_seconds
    for blob in blobs:
        if surplus <= 0 or blob.mtime > old:
            return
        surplus -= blob.size
        cache.delete(blob.digest)


def store_here(session: Session) -> BlobStore | None:
    """The blobs of the store, if this process can read and write them without a request."""
    if not session.is_local:
        return None
    session.controller()  # a service that starts makes its folder
    home = Home(environment.local_dir())
    running = home.running()
    return None if running is not None and running.has_bucket else BlobStore(home.blobs)
