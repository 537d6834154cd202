"""The keys of a namespace on disk or in a bucket: a small file for each, written at once.

    <root>/<digest of the key>   the digest of the rest as a line, then a `KeyRecord` as JSON

The files are all there is: they are read at the start, so no database can be lost. A file that is
damaged is left out, with a line in the log. In a bucket they are objects, and the disk has none.

A put removes keys below its own, each of which is a file. A process that is killed in between left
some of them; the record of the put names them, so the next start removes them.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kubetorch.datastore.blobs import digest_of, is_digest, storage_error
from kubetorch.errors import StoreUnavailableError
from kubetorch.lib.files import write_atomically
from kubetorch.wire.data import KeyView

if TYPE_CHECKING:
    from kubetorch.datastore.bucket_store import BucketKeys

_log = logging.getLogger(__name__)


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key, and the keys below it that its put removed.

    Attributes:
        order: Counts the writes of the namespace: a record removes only records before it.
    """

    view: KeyView
    order: int
    removed: tuple[str, ...] = ()


_decoder = msgspec.json.Decoder(KeyRecord)


class Surroundings(NamedTuple):
    """The nearest key above a path, the key at the path, and all keys below it in order."""

    above: KeyView | None
    exact: KeyView | None
    below: list[KeyView]


class KeyFolder:
    """The keys of one namespace; one thread at a time may change them, while others read.

    Args:
        bucket: The records in a bucket, instead of those on disk; `refresh` reads them.
    """

    def __init__(self, root: Path, bucket: BucketKeys | None = None) -> None:
        self._root = root
        self._bucket = bucket
        #: Whether a request to the bucket failed, which may have changed it.
        self.is_unsettled = False
        self._lock = threading.Lock()
        self._views: dict[str, KeyView] = {}
        self._ordered: list[str] = []
        self._order = 0
        if bucket is None:
            self._delete(self._take(self._files()))

    def _files(self) -> Iterator[tuple[str, bytes]]:
        if not self._root.is_dir():
            return
        for path in self._root.iterdir():
            if not is_digest(path.name):
                path.unlink(missing_ok=True)  # half-written
                continue
            try:
                yield path.name, path.read_bytes()
            except OSError as error:
                _log.warning("key left out file=%s error=%s", path, error)

    def _take(self, files: Iterable[tuple[str, bytes]]) -> list[str]:
        """Let these records replace those of their keys; returns keys that a put had removed."""
        records: dict[str, KeyRecord] = {}
        for name, data in files:
            try:
                record = _decode(name, data)
            except (msgspec.MsgspecError, ValueError) as error:
                _log.warning("key left out file=%s/%s error=%s", self._root, name, error)
                continue
            records[record.view.key] = record
            self._order = max(self._order, record.order)
        removed = [
            key
            for record in records.values()
            for key in record.removed
            if key in records and records[key].order < record.order
        ]
        with self._lock:
            self._views |= {key: record.view for key, record in records.items()}
            self._ordered = sorted(self._views)
            self._forget(removed)
        return removed

    def refresh(self) -> None:
        """Read the records of the bucket that are not known, as after a request that failed.

        Raises:
            StoreUnavailableError: The bucket does not answer.
        """
        if self._bucket is None:
            return
        if self.is_unsettled:
            self._bucket.forget()
        self.is_unsettled = True
        names, files = self._bucket.changes()
        with self._lock:
            self._forget([key for key in self._ordered if _name(key) not in names])
        self._bucket.remove(map(_name, self._take(files.items())))
        self.is_unsettled = False

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """A request that changes the bucket, once it is known what the last one has done."""
        if self.is_unsettled:
            self.refresh()
        self.is_unsettled = True
        yield
        self.is_unsettled = False

    def _write(self, key: str, data: bytes) -> None:
        """Write a record, at once."""
        if self._bucket is not None:
            with self._change():
                self._bucket.put(_name(key), data)
            return
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._root / _name(key), data, is_synced=True)
        except OSError as error:
            raise storage_error(error, self._root) or error from error

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete the records of keys."""
        if self._bucket is not None and keys:
            with self._change():
                self._bucket.remove(map(_name, keys))
            return
        for key in keys:
            (self._root / _name(key)).unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------ reading

    def __len__(self) -> int:
        return len(self._views)

    def all(self) -> list[KeyView]:
        with self._lock:
            return [self._views[key] for key in self._ordered]

    def beginning(self, characters: str) -> list[KeyView]:
        """The keys that begin with these characters, in order."""
        with self._lock:
            return self._beginning(characters)

    def around(self, path: str) -> Surroundings:
        """The keys that have a part of what is below a path, as they are at one moment."""
        with self._lock:
            return Surroundings(
                self._above(path), self._views.get(path), self._beginning(path and f"{path}/")
            )

    def _above(self, path: str) -> KeyView | None:
        while path := path.rpartition("/")[0]:
            if path in self._views:
                return self._views[path]
        return None

    def _beginning(self, characters: str) -> list[KeyView]:
        views = []
        for index in range(bisect.bisect_left(self._ordered, characters), len(self._ordered)):
            key = self._ordered[index]
            if not key.startswith(characters):
                break
            views.append(self._views[key])
        return views

    # ----------------------------------------------------------------------------------- changing

    def put(self, view: KeyView, removed: Iterable[str] = ()) -> None:
        """Store a key in the place of its earlier version and of these keys below it.

        Raises:
            StorageFullError: The disk is full.
            StoreUnavailableError: The bucket does not answer; it may have the record all the same.
        """
        removed = tuple(removed)
        self._order += 1
        record = msgspec.json.encode(KeyRecord(view=view, order=self._order, removed=removed))
        self._write(view.key, digest_of(record).encode() + b"\n" + record)
        with self._lock:
            if view.key not in self._views:
                bisect.insort(self._ordered, view.key)
            self._views[view.key] = view
            self._forget(removed)
        try:
            self._delete(removed)
        except StoreUnavailableError as error:  # the next `refresh` does it
            _log.warning("keys not deleted below=%s error=%s", view.key, error)

    def remove(self, keys: Iterable[str]) -> None:
        """Delete keys; as `put`."""
        keys = tuple(keys)
        self._delete(keys)
        with self._lock:
            self._forget(keys)

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self._views.pop(key, None) is not None:
                del self._ordered[bisect.bisect_left(self._ordered, key)]


def _name(key: str) -> str:
    """The name of the record of a key."""
    return digest_of(key.encode())


def _decode(name: str, data: bytes) -> KeyRecord:
    digest, _, record_bytes = data.partition(b"\n")
    if digest.decode() != digest_of(record_bytes):
        raise ValueError("its content does not have its digest")
    record = _decoder.decode(record_bytes)
    if _name(record.view.key) != name:
        raise ValueError(f"it has the key {record.view.key!r}, of another file")
    return record
