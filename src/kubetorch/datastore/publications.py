"""Publications: content of keys that lies in files of a pod, which serves it from there.

    <folder>/<digest of a manifest>          where the bytes of each of its blobs are, in files of
                                             the pod
    <folder>/offers/<digest of a manifest>   the same of a version that the pod got; the newest
                                             ones stay
    <folder>/arriving/<digest>               the same of a version that a program is getting now
    <folder>/arriving/<digest>.arrived       the digests of the blobs that are there, one behind the
                                             other; the program holds its lock while it lives

A program of the pod writes a publication, and its agent reads it. The files stay the program's own:
it may change them meanwhile, so bytes are compared with their digest before they are sent.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kubetorch.datastore.blobs import check_digest
from kubetorch.datastore.manifests import Entry, Manifest
from kubetorch.datastore.scan import FileChangedError
from kubetorch.datastore.snapshots import Extent, read_extents
from kubetorch.datastore.transfer import compressed
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError
from kubetorch.lib.files import FileLock, write_atomically

_log = logging.getLogger(__name__)

_OFFERS, _ARRIVING, _ARRIVED = "offers", "arriving", ".arrived"
_RECORD = struct.Struct("32s")

#: By digest: the bytes of a blob, in order.
Extents = Mapping[str, tuple[Extent, ...]]

_decoder = msgspec.msgpack.Decoder(dict[str, tuple[Extent, ...]])


def write(folder: Path, manifest: str, extents: Extents) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / check_digest(manifest), msgspec.msgpack.encode(extents))


def offer(folder: Path, manifest: str, extents: Extents) -> None:
    """As `write`, of a version that a later one replaces: the oldest offers end."""
    write(folder / _OFFERS, manifest, extents)
    times: dict[Path, int] = {}
    for path in (folder / _OFFERS).iterdir():
        with suppress(FileNotFoundError):  # another program of the pod has removed it
            times[path] = path.stat().st_mtime_ns
    for path in sorted(times, key=times.__getitem__)[: -LIMITS.offered_versions]:
        path.unlink(missing_ok=True)


class Arrival:
    """A version that this program is getting, open to other getters as far as it has come."""

    def __init__(self, folder: Path, lock: FileLock, extents: Extents) -> None:
        self._folder = folder
        self._lock = lock
        self._extents = extents
        self._log = os.open(_arrived(folder), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @classmethod
    def begin(
        cls, folder: Path, manifest: str, extents: Extents, missing: Iterable[str]
    ) -> Arrival | None:
        """Publish what is there already; `None` if another program of this pod gets it, too."""
        path = folder / _ARRIVING / check_digest(manifest)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(_arrived(path))
        if not lock.get_at_once():
            lock.close()
            return None
        absent = frozenset(missing)
        present = b"".join(bytes.fromhex(digest) for digest in extents if digest not in absent)
        write(path.parent, manifest, extents)
        # In place: the lock is that of the file.
        _arrived(path).write_bytes(present)
        return cls(path, lock, extents)

    def add(self, digest: str) -> None:
        """Note that a blob is whole in its files."""
        if digest in self._extents:
            os.write(self._log, bytes.fromhex(digest))

    def close(self) -> None:
        self._folder.unlink(missing_ok=True)
        _arrived(self._folder).unlink(missing_ok=True)
        os.close(self._log)
        self._lock.close()


def _arrived(path: Path) -> Path:
    return path.with_name(f"{path.name}{_ARRIVED}")


def extents_in(path_of: Callable[[Entry], str], manifest: Manifest) -> Extents:
    """Where the blobs of a manifest are, by the files that its entries were written to.

    A pack that has bytes which no file of the manifest has cannot be made of the files.
    """
    extents: dict[str, tuple[Extent, ...]] = {}
    packs: dict[int, dict[int, Extent]] = {}
    for entry in manifest.entries:
        path, position = path_of(entry), 0
        for chunk in entry.chunks:
            extent = Extent(path, position, chunk.size)
            position += chunk.size
            if chunk.pack is not None:
                packs.setdefault(chunk.pack, {})[chunk.offset] = extent
            elif chunk.digest:
                extents.setdefault(chunk.digest, (extent,))
    for pack, by_offset in packs.items():
        position = 0
        for offset in sorted(by_offset):
            if offset != position:
                break
            position += by_offset[offset].size
        else:
            extents[manifest.packs[pack]] = tuple(by_offset[offset] for offset in sorted(by_offset))
    return extents


@dataclass
class _Publication:
    """What a pod publishes of a manifest; `arrived` is `None` if all of it is there."""

    path: Path
    #: Inode and time of the file: another one may have its inode.
    identity: tuple[int, int]
    extents: Extents
    arrived: set[str] | None = None
    read_bytes: int = 0


class Publications:
    """The publications of a pod, for its agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._publications: OrderedDict[str, _Publication] = OrderedDict()

    def faults(self, manifest: str, digests: Iterable[str]) -> Iterator[tuple[str, str]]:
        """For each blob, which is read, why the pod does not have it; empty if it does."""
        extents = self._read(manifest).extents
        for digest in digests:
            try:
                self._blob(extents[digest], digest)
                yield digest, ""
            except KeyError:
                yield digest, f"the blob {digest} is no part of what this pod publishes"
            except DataStoreError as error:
                yield digest, error.message

    def check(self, manifest: str, digests: Sequence[str]) -> None:
        """Refuse blobs that the pod does not have, or not any more.

        The first one is read, so that a file that has changed is an error that names it.

        Raises:
            DataStoreError: A blob is not published, or its files have changed.
        """
        publication = self._read(manifest)
        unknown = next((digest for digest in digests if digest not in publication.extents), None)
        if unknown is not None:
            raise DataStoreError(f"the blob {unknown} is no part of what this pod publishes")
        if digests and publication.arrived is None:
            self._blob(publication.extents[digests[0]], digests[0])

    def arrived(self, manifest: str, digests: Iterable[str]) -> list[str]:
        """Those of some blobs that are there; others may come.

        Raises:
            DataStoreError: The pod does not publish the manifest any more.
        """
        publication = self._read(manifest)
        arrived = publication.arrived
        return [digest for digest in digests if arrived is None or digest in arrived]

    def packed(self, manifest: str, digests: Iterable[str]) -> Iterator[bytes]:
        """The pieces of a compressed stream of blobs, up to the first whose files have changed.

        Who asks for the rest again gets the error of `check`.
        """
        extents, blobs = self._read(manifest).extents, dict[str, bytes]()

        def unchanged() -> Iterator[str]:
            for digest in digests:
                try:
                    blobs[digest] = self._blob(extents[digest], digest)
                except DataStoreError as error:
                    _log.warning("published file changed error=%s", error.message)
                    return
                yield digest

        def source(digest: str) -> tuple[int, Iterable[bytes]]:
            data = blobs.pop(digest)
            return len(data), (data,)

        return compressed(unchanged(), source)

    def _blob(self, extents: tuple[Extent, ...], digest: str) -> bytes:
        try:
            return read_extents(extents, digest)
        except FileChangedError as error:
            raise DataStoreError(
                f"{extents[0].path} is not any more as it was when it was published",
                hint='put it again with locale="local"; with locale="store" the store has a copy',
            ) from error

    def _read(self, manifest: str) -> _Publication:
        check_digest(manifest)
        remembered = self._publications.pop(manifest, None)
        for folder in (self._folder, self._folder / _OFFERS, self._folder / _ARRIVING):
            path = folder / manifest
            try:
                file_stat = path.stat()
                identity = file_stat.st_ino, file_stat.st_mtime_ns
                if remembered is None or (remembered.path, remembered.identity) != (path, identity):
                    extents = _decoder.decode(path.read_bytes())
                    arrived: set[str] | None = set() if folder.name == _ARRIVING else None
                    remembered = _Publication(path, identity, extents, arrived)
                self._update(remembered)
            except FileNotFoundError:
                continue
            except (OSError, msgspec.MsgspecError) as error:
                raise _ended(manifest) from error
            self._publications[manifest] = remembered
            while len(self._publications) > LIMITS.remembered_publications:
                self._publications.popitem(last=False)
            return remembered
        raise _ended(manifest)

    def _update(self, publication: _Publication) -> None:
        """Read which blobs have come since.

        Raises:
            FileNotFoundError: They come no more: the program has ended.
        """
        if publication.arrived is None:
            return
        path = _arrived(publication.path)
        with path.open("rb") as file:
            if _is_free(file.fileno()):
                raise FileNotFoundError(str(path))
            file.seek(publication.read_bytes)
            log = file.read()
        whole = log[: len(log) // _RECORD.size * _RECORD.size]
        publication.read_bytes += len(whole)
        publication.arrived.update(digest.hex() for (digest,) in _RECORD.iter_unpack(whole))


def _ended(manifest: str) -> DataStoreError:
    return DataStoreError(f"this pod does not publish {manifest} any more")


def _is_free(descriptor: int) -> bool:
    """True if no process has the lock of a file; a question at the same time finds none either."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
