"""A client of the data store that puts files from memory and reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kubetorch.datastore import manifests, transfer
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.transfer import Receiver
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data.client import DataClient
from kubetorch.wire.data import FindKeys, KeyView, PutKey, RemovePath

#: A file is a key's if its path is empty.
Files = Mapping[str, bytes]


class KeyStore:
    def __init__(self, http: HttpClient, folder: Path, namespace: str = "default") -> None:
        self.client = DataClient(Controller(http), namespace)
        self._blobs = BlobStore(folder)

    def put(self, key: str, files: Files | bytes, **options: str) -> KeyView:
        """Put files at a key, with the blobs that are missing."""
        manifest, blobs = packed(files)
        digest, encoded = manifests.encode(manifest)
        blobs[digest] = encoded
        missing = self.client.missing({name: len(blob) for name, blob in blobs.items()})
        self.upload({name: blobs[name] for name in missing})
        answer = self.client.put_key(PutKey(key=key, manifest=digest, **options))
        assert answer.key is not None, answer
        return answer.key

    def upload(self, blobs: Mapping[str, bytes]) -> None:
        self.client.upload(
            transfer.compressed(blobs, lambda name: (len(blobs[name]), [blobs[name]]))
        )

    def get(self, path: str) -> dict[str, bytes]:
        """All files below a path, by their paths relative to it."""
        files: dict[str, bytes] = {}
        for part in self.client.find(FindKeys(path=path)).keys:
            self.fetch([part.key.manifest])
            manifest = manifests.read(self._blobs, part.key.manifest)
            self.fetch(manifest.digests())
            base = part.key.key if not part.inside else path
            for entry in manifest.entries:
                if entry.kind != "file" or not _is_below(entry.path, part.inside):
                    continue
                if any(_is_below(entry.path, shadowed) for shadowed in part.shadowed):
                    continue
                full = f"{part.key.key}/{entry.path}".rstrip("/")
                content = b"".join(self._blobs.read(chunk.digest) for chunk in entry.chunks)
                files[full[len(path) :].lstrip("/")] = content
            assert base
        return files

    def fetch(self, digests: list[str]) -> None:
        receiver = Receiver(self._blobs)
        for piece in self.client.fetch(digests):
            receiver.feed(piece)
        receiver.finish()

    def rm(self, path: str, *, recursive: bool = False, is_prefix: bool = False) -> list[str]:
        remove = RemovePath(path=path, recursive=recursive, is_prefix=is_prefix)
        return list(self.client.remove(remove).keys)

    def ls(self, path: str = "") -> list[str]:
        """Names directly below a path, folders with a `/` at the end."""
        return [row.name + "/" * row.is_directory for row in self.client.list(path)]


def packed(files: Files | bytes) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest of files, and their blobs by digest."""
    by_path = {"": files} if isinstance(files, bytes) else files
    blobs = {digest_of(data): data for data in by_path.values() if data}
    entries = tuple(
        Entry(path, chunks=(Chunk(digest_of(data), len(data)),) if data else ())
        for path, data in sorted(by_path.items())
    )
    return Manifest("file" if isinstance(files, bytes) else "folder", entries), blobs


def _is_below(path: str, folder: str) -> bool:
    return not folder or path == folder or path.startswith(f"{folder}/")
