"""A bucket that keeps a data store; the disk has copies of the blobs that were used last.

    <prefix>/blobs/<namespace>/<digest>             a blob, as on disk
    <prefix>/keys/<namespace>/<digest of the key>   the record of a key, as on disk

    put:  blobs ──► manifest ──► record of the key
    get:  disk, else bucket ──► digest checked ──► disk

Each object is there before an object that names it, so a put that is cut leaves the version before.
Nothing relies on conditional writes: one store writes below a prefix.

Namespaces that share their blobs have them below `_shared`. Only processes that fork nothing use
this module (see `buckets`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from kubetorch.datastore import addresses, buckets
from kubetorch.datastore.addresses import Address
from kubetorch.datastore.blobs import BlobInfo, BlobStore, Room, check_digest, digest_of, is_digest
from kubetorch.datastore.tuning import LIMITS, TIMING, Timing
from kubetorch.errors import ConfigError, DataStoreError, StorageFullError, StoreUnavailableError

try:
    import obstore
except ImportError:
    obstore = None  # type: ignore[assignment]  # `Bucket` says so

_T = TypeVar("_T")
_R = TypeVar("_R")

#: The folder of the blobs that namespaces share; no namespace has such a name.
SHARED = "_shared"
_SECRET_HINT = (
    "the store's bucket needs credentials that may list, read, write and delete: the Secret of the "
    "chart's store.secretName or the role of the controller's service account; for the local "
    "service the default profile of ~/.aws/credentials"
)


class StoredObject(NamedTuple):
    """An object as a list has it: its name in its folder, and seconds since the epoch."""

    name: str
    size: int
    tag: str
    mtime: float


class StoreBucket:
    """Objects below a prefix; paths are relative to it.

    Each method raises `StoreUnavailableError` when the bucket does not answer in time, or refuses.
    """

    def __init__(
        self, address: Address, options: Mapping[str, str], *, is_own: bool, timing: Timing
    ) -> None:
        self.address = address
        patience = buckets.Patience(
            LIMITS.store_attempts, timing.store_retry_seconds, timing.store_request_seconds
        )
        bucket = buckets.Bucket(address, options, is_own=is_own, patience=patience)
        self._store = bucket.store

    def folders(self, path: str) -> list[str]:
        """The names of the folders directly below a path."""
        with self._errors(path):
            result = obstore.list_with_delimiter(self._store, self._location(path))
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in result["common_prefixes"]]

    def list(self, folder: str) -> Iterator[StoredObject]:
        with self._errors(folder):
            for page in obstore.list(self._store, self._location(folder), chunk_size=1000):
                for meta in page:
                    name = meta["path"].rpartition("/")[2]
                    mtime = meta["last_modified"].timestamp()
                    if is_digest(name):
                        yield StoredObject(name, meta["size"], meta["e_tag"] or "", mtime)

    def get(self, path: str) -> bytes | None:
        """The content of an object; `None` if it is absent."""
        with self._errors(path):
            try:
                return bytes(obstore.get(self._store, self._location(path)).bytes())
            except FileNotFoundError:
                return None

    def put(self, path: str, data: bytes) -> str:
        """Write an object, which appears at once or not at all; returns its tag."""
        with self._errors(path):
            # In one request: the parts of one that is cut would stay and cost.
            result = obstore.put(self._store, self._location(path), data, use_multipart=False)
        return result["e_tag"] or ""

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Remove objects of a folder; absent ones are no error."""
        locations = [self._location(f"{folder}/{name}") for name in names]
        if locations:
            with self._errors(folder), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, locations)

    def blobs(self, root: Path, room: Room, namespace: str | None) -> BlobStore:
        """The blobs of a namespace, or of all, with a folder for copies."""
        return BucketBlobs(root, room, self, namespace or SHARED)

    def keys(self, namespace: str) -> BucketKeys:
        return BucketKeys(self, namespace)

    def name(self, path: str) -> str:
        """An object, for messages."""
        return f"s3://{self.address.bucket}/{self._location(path)}"

    def _location(self, path: str) -> str:
        return f"{self.address.path}/{path}" if self.address.path else path

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            with buckets.errors_of(self.address, path, _SECRET_HINT):
                yield
        except DataStoreError as error:
            message = f"the bucket of the data store: {error.message}"
            raise StoreUnavailableError(message, hint=error.hint) from None


def open_bucket(
    address: str,
    endpoint: str,
    environ: Mapping[str, str],
    *,
    has_identity: bool,
    timing: Timing = TIMING,
) -> StoreBucket:
    """The bucket of a store, which answers.

    Args:
        address: As `s3://bucket/prefix`.
        endpoint: URL of its server; empty for AWS.
        environ: Has the credentials, as `AWS_ACCESS_KEY_ID`.
        has_identity: Whether this process has an identity of its own, for want of credentials.
        timing: How long a request may take, and is sent again.

    Raises:
        ConfigError: It is no address of a bucket of S3.
        DataStoreError: `obstore` is missing, or the bucket does not answer.
    """
    try:
        parsed = addresses.parse(address)
        options = addresses.options_for("s3", environ)
        if endpoint:
            options["AWS_ENDPOINT_URL_S3"] = endpoint
        addresses.check_options("s3", options)
    except DataStoreError as error:
        raise ConfigError(
            f"the bucket of the data store: {error.message}", hint=error.hint
        ) from None
    if parsed.scheme != "s3":
        raise ConfigError(
            f"the bucket of the data store is {address!r}", hint="such as s3://bucket/prefix"
        )
    bucket = StoreBucket(parsed, options, is_own=has_identity, timing=timing)
    bucket.folders("keys")
    return bucket


def _in_threads(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    with ThreadPoolExecutor(LIMITS.bucket_streams, "kubetorch-bucket") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class BucketKeys:
    """The records of the keys of one namespace."""

    def __init__(self, bucket: StoreBucket, namespace: str) -> None:
        self._bucket = bucket
        self._folder = f"keys/{namespace}"
        #: By name: the tag of what was read or written last.
        self._tags: dict[str, str] = {}

    def changes(self) -> tuple[frozenset[str], dict[str, bytes]]:
        """The names of all records, and the content of those that are not known."""
        listed = {stored.name: stored.tag for stored in self._bucket.list(self._folder)}
        changed = [name for name, tag in listed.items() if not tag or self._tags.get(name) != tag]
        contents = _in_threads(lambda name: self._bucket.get(f"{self._folder}/{name}"), changed)
        self._tags = listed
        pairs = zip(changed, contents, strict=True)
        return frozenset(listed), {name: data for name, data in pairs if data is not None}

    def forget(self) -> None:
        """Know no record any more."""
        self._tags.clear()

    def put(self, name: str, data: bytes) -> None:
        self._tags[name] = self._bucket.put(f"{self._folder}/{name}", data)

    def remove(self, names: Iterable[str]) -> None:
        self._bucket.delete(self._folder, names)


class BucketBlobs(BlobStore):
    """Blobs in a bucket, of which the disk has as many as it may.

    Blobs on disk that were never saved, as those of deploys, are on disk alone.
    """

    def __init__(self, root: Path, room: Room, bucket: StoreBucket, folder: str) -> None:
        super().__init__(root, room)
        self._bucket = bucket
        self._remote = f"blobs/{folder}"
        #: The lengths of the blobs in the bucket, by digest in bytes: there may be a million.
        self._lengths: dict[bytes, int] = {}
        #: When blobs of the bucket were needed: it has no such times.
        self._touched: dict[str, float] = {}

    def _length(self, digest: str) -> int | None:
        return self._lengths.get(bytes.fromhex(check_digest(digest)))

    # ------------------------------------------------------------------------------------ reading

    def has(self, digest: str) -> bool:
        return self.is_on_disk(digest) or self._length(digest) is not None

    def kept_size(self, digest: str) -> int | None:
        return self._length(digest)

    def size(self, digest: str) -> int:
        length = self._length(digest)
        return super().size(digest) if length is None else length

    def read(self, digest: str) -> bytes:
        if self.is_on_disk(digest) or self._length(digest) is None:
            return super().read(digest)
        data = self._read(digest)
        with contextlib.suppress(StorageFullError):
            self._copy(digest, data)
        return data

    def open(self, digest: str) -> BinaryIO:
        if self._length(digest) is not None:
            if self.is_on_disk(digest):
                super().touch((digest,))  # what was used last goes last
            else:
                self._copy(digest, self._read(digest))
        return super().open(digest)

    def fetch(self, digests: Iterable[str]) -> None:
        absent = [
            digest
            for digest in dict.fromkeys(digests)
            if not self.is_on_disk(digest) and self._length(digest) is not None
        ]
        if absent:
            _in_threads(self.read, absent)

    def verify(self, digest: str) -> Iterator[bytes]:
        yield self._read(digest) if self._length(digest) is not None else self.read(digest)

    def _copy(self, digest: str, data: bytes) -> None:
        with self.writer(digest, len(data), is_hashed=True) as writer:
            writer.write(data)

    def _read(self, digest: str) -> bytes:
        """The bytes of a blob in the bucket, checked."""
        path = f"{self._remote}/{digest}"
        data = self._bucket.get(path)
        if data is None or digest_of(data) != digest:
            # The next put of its key writes it again.
            self._lengths.pop(bytes.fromhex(digest), None)
            fault = (
                "is gone" if data is None else f"is damaged: {len(data):,} bytes of other content"
            )
            raise DataStoreError(
                f"the object {self._bucket.name(path)} {fault}",
                hint="kt store verify names the keys that have it: put these again",
            )
        return data

    # ------------------------------------------------------------------------------------ writing

    def touch(self, digests: Iterable[str]) -> None:
        digests = list(digests)
        super().touch(digests)
        now = time.time()
        self._touched.update(
            (digest, now) for digest in digests if self._length(digest) is not None
        )

    def save(self, digests: Iterable[str]) -> None:
        new = [
            digest
            for digest in dict.fromkeys(digests)
            if self._length(digest) is None and self.is_on_disk(digest)
        ]
        if new:
            _in_threads(self._save, new)

    sync = save

    def _save(self, digest: str) -> None:
        data = self.read(digest)
        self._bucket.put(f"{self._remote}/{digest}", data)
        self._lengths[bytes.fromhex(digest)] = len(data)

    def delete_all(self, digests: Iterable[str]) -> list[str]:
        digests = list(digests)
        stored = [digest for digest in digests if self._length(digest) is not None]
        self._bucket.delete(self._remote, stored)
        for digest in stored:
            self._lengths.pop(bytes.fromhex(digest), None)
            self._touched.pop(digest, None)
        return [digest for digest in digests if self.delete(digest) or digest in stored]

    def check_room(self, length: int) -> None:
        """Nothing is refused: what is saved makes room for what comes."""

    def _reserve(self, length: int) -> None:
        try:
            super()._reserve(length)
        except StorageFullError:
            self.make_room(length)
            super()._reserve(length)

    def make_room(self, length: int) -> None:
        """Remove copies from disk, those first that were used longest ago."""
        limit = self.room.limit_bytes
        if limit is None:
            return
        blobs = sorted(self.iterate(), key=lambda blob: blob.mtime)
        # A tenth more: the next blobs do not look for room again.
        surplus = sum(blob.size for blob in blobs) + length - limit + limit // 10
        for blob in blobs:
            if surplus <= 0:
                return
            if self._length(blob.digest) is not None and self.delete(blob.digest):
                surplus -= blob.size

    # ----------------------------------------------------------------------------------- the whole

    def everywhere(self) -> list[BlobInfo]:
        """All blobs, after the bucket was listed anew."""
        infos = {info.digest: info for info in self.iterate()}
        old = time.time() - TIMING.remembered_use_seconds
        self._touched = {name: end for name, end in self._touched.items() if end > old}
        lengths: dict[bytes, int] = {}
        for stored in self._bucket.list(self._remote):
            lengths[bytes.fromhex(stored.name)] = stored.size
            on_disk = infos.get(stored.name)
            times = (stored.mtime, self._touched.get(stored.name, 0.0))
            mtime = max(times if on_disk is None else (*times, on_disk.mtime))
            infos[stored.name] = BlobInfo(stored.name, stored.size, mtime)
        self._lengths = lengths
        return list(infos.values())
