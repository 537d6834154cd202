"""Chunks of safetensors files as their difference to the version before, for puts from afar.

A put leaves the chunks of such files in the cache of tensors, see `TensorCache`. The next put of
the key sends of a chunk that changed the exclusive or with the chunk in its place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping

from kubetorch.datastore import manifests, weights
from kubetorch.datastore.manifests import Manifest
from kubetorch.datastore.transfer import Delta, delta
from kubetorch.datastore.weights import Place
from kubetorch.errors import ControllerRequestError, KubetorchError
from kubetorch.sdk.data.client import find_key
from kubetorch.sdk.data.tensor_cache import TensorCache
from kubetorch.sdk.transport.session import Session


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
        except (KubetorchError, ControllerRequestError, OSError):
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
