"""The chunks of tensors that this process reads and writes without a request.

On the machine of the local service that is the folder of the store; elsewhere a cache of the
versions that this user put or got last.

A put from afar leaves the chunks of safetensors files in that cache, too. The next put of the key
sends of a chunk that changed the exclusive or with the chunk in its place, see `FileDeltas`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from kubetorch.config import environment
from kubetorch.datastore import manifests, weights
from kubetorch.datastore.blobs import BlobStore, digest_of, is_digest
from kubetorch.datastore.manifests import Manifest
from kubetorch.datastore.transfer import Delta, delta
from kubetorch.datastore.tuning import LIMITS as STORE_LIMITS
from kubetorch.datastore.weights import Place, StoredTensors
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.lib.files import write_atomically
from kubetorch.local.home import Home
from kubetorch.sdk.data.client import find_key
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


class FileDeltas:
    """The chunks of one put of a key, which has so many bytes; threads may share it."""

    def __init__(self, session: Session, namespace: str, key: str, size: int) -> None:
        self._session = session
        self._namespace = namespace
        self._key = key
        self._cache = TensorCache(session, size)
        self._lock = threading.Lock()
        self._places: dict[str, Place] = {}
        self._bases_by_place: Mapping[Place, str] | None = None

    def add(self, digest: str, place: Place | None) -> None:
        """Note where a chunk lies, if it is one of tensors."""
        if place is not None and self._cache.is_used:
            with self._lock:
                self._places[digest] = place

    def has_any(self, digests: Collection[str]) -> bool:
        with self._lock:
            return any(digest in self._places for digest in digests)

    def delta(self, digest: str, content: bytes | memoryview) -> Delta | None:
        """The difference to the chunk before; `None` if the chunk is to be sent whole."""
        with self._lock:
            if digest not in self._places:
                return None
            if self._bases_by_place is None:
                self._bases_by_place = self._read_bases()
            base = self._bases_by_place.get(self._places[digest], "")
        base_content = self._cache.content(base) if base else None
        if base_content is None or len(base_content) != len(content):
            return None
        return delta(content, base, base_content)

    def _read_bases(self) -> Mapping[Place, str]:
        try:
            view = find_key(self._session, self._namespace, self._key)
            if view is None:
                return {}
            return weights.places_in(manifests.read(self._cache.blobs, view.manifest))
        except (KubetorchError, OSError):
            # This user may put but not read, or may not read the cache.
            return {}

    def keep(
        self, digests: Collection[str], content_of: Callable[[str], bytes | memoryview]
    ) -> None:
        """Keep those chunks among some blobs that the next put may need."""
        with self._lock:
            chunks = [digest for digest in digests if digest in self._places]
        # The store has them: the cache only spares later transfers.
        with contextlib.suppress(KubetorchError, OSError):
            for digest in chunks:
                self._cache.blobs.add(bytes(content_of(digest)), digest)

    def keep_manifest(self, manifest: Manifest, digest: str, encoded: bytes) -> None:
        """Keep the manifest of a version that has such chunks, and the chunks that did not change.

        A put reads no files that are as they were.
        """
        with contextlib.suppress(KubetorchError, OSError):
            if self._places:
                self._cache.blobs.touch(manifest.digests())
                self._cache.blobs.add(encoded, digest)
                self._cache.trim()
