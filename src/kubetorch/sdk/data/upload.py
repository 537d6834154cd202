"""Uploads the blobs of a put, as they are read, in parallel streams.

Each stream asks which blobs of a batch are missing and sends these. Blobs that arrived stay for a
while, so a put that was cut goes on where it was. The store of this machine's own service is a
folder of this user: blobs are written there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.scan import FileChangedError
from kubetorch.datastore.snapshots import Extent, Piece, read_extents
from kubetorch.datastore.transfer import Delta, DeltaOf, compressed
from kubetorch.errors import DataStoreError, StorageFullError
from kubetorch.sdk.data.client import DataClient, ask, move_undamaged
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.data.tensor_cache import FileDeltas, store_here
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire.data import PutKey

_T = TypeVar("_T")


def _absolute(extent: Extent) -> Extent:
    """The same bytes for the agent, which has another working directory."""
    return extent._replace(path=os.path.abspath(extent.path))  # noqa: PTH100  # links stay


class Renewal:
    """Keeps the blobs of a put from the store's collector while the put goes on.

    The store collects blobs that no key has, unless they are young; a question for blobs makes them
    young again. Threads may share a renewal.
    """

    def __init__(
        self,
        missing: Callable[[Mapping[str, int]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._missing = missing
        self._clock = clock
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._due = clock() + TIMING.blob_renewal_seconds

    def add(self, sizes: Mapping[str, int]) -> None:
        """Note blobs that the store has."""
        with self._lock:
            self._sizes.update(sizes)

    def renew(self) -> None:
        """Ask for the blobs, if they were not asked for during a while."""
        with self._lock:
            if self._clock() < self._due:
                return
            self._due = self._clock() + TIMING.blob_renewal_seconds
            sizes = dict(self._sizes)
        if sizes:
            # Without room for blobs that vanished: the end of the put sends them again, or fails.
            with contextlib.suppress(StorageFullError):
                self._missing(sizes)


class Upload:
    """The sink of a `Snapshot`.

    Attributes:
        is_sending: False to compute digests first, and send with `send_unread`.
        deltas: What is known of the version before, if chunks may go as differences to it.
        is_published: Whether nothing but the manifest is sent: this pod serves the files.
        is_forced: Whether blobs that the store has are sent again if they are damaged there.
    """

    def __init__(
        self, session: Session, namespace: str, progress: Progress, *, is_published: bool = False
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._progress = progress
        self.is_published = is_published
        self.is_sending = not is_published
        self.is_forced = False
        self.deltas: FileDeltas | None = None
        self._store = None if is_published else store_here(session)
        self._pool = ThreadPoolExecutor(LIMITS.data_streams, "kubetorch-put")
        self._batch: list[Piece] = []
        self._batch_bytes = 0
        self._running: deque[Future[None]] = deque()
        #: Where the bytes of each blob are on disk, with its size.
        self._extents: dict[str, tuple[int, tuple[Extent, ...]]] = {}
        #: Blobs that were not read, because their files are as they were.
        self._unread: dict[str, int] = {}
        self._renewal = Renewal(lambda sizes: self._ask(lambda client: client.missing(sizes)))

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------------------- as a sink

    def add(self, piece: Piece) -> None:
        if piece.digest:
            self._extents[piece.digest] = (piece.size, piece.extents)
            self._unread[piece.digest] = piece.size
            return
        self._batch.append(piece)
        self._batch_bytes += piece.size
        if self._batch_bytes >= LIMITS.data_batch_bytes:
            self._submit()

    def flush(self) -> None:
        if self._batch:
            self._submit()
        while self._running:
            self._running.popleft().result()

    def _submit(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        # The batches that wait are in memory.
        while len(self._running) > LIMITS.data_streams:
            self._running.popleft().result()
        self._renewal.renew()
        self._running.append(self._pool.submit(self._take, batch))

    def _take(self, batch: list[Piece]) -> None:
        blobs: dict[str, bytes | memoryview] = {}
        size = 0
        for piece in batch:
            assert piece.data is not None
            piece.digest = digest_of(piece.data)
            blobs[piece.digest] = piece.data
            if self.deltas is not None:
                self.deltas.add(piece.digest, piece.place)
            size += piece.size
            self._extents[piece.digest] = (piece.size, piece.extents)
            piece.data = None
        if self.is_sending:
            sizes = {digest: len(data) for digest, data in blobs.items()}
            self._progress.add_moved(self._send_missing(sizes, blobs.__getitem__))
            self._progress.add(size)

    # ------------------------------------------------------------------------------------ sending

    def has_room(self, size: int) -> bool:
        """Whether the store has room for so many bytes."""
        return self._ask(lambda client: client.has_room(size))

    def send_unread(self) -> None:
        """Send the blobs that the store lacks, of files that were read before."""
        if self.is_published:
            return
        sizes = self._unread
        if not self.is_sending:
            sizes = {digest: size for digest, (size, _) in self._extents.items()}
        if not sizes:
            return
        # Damage is looked for batch by batch: the store reads what it has of each.
        missing = [*sizes] if self.is_forced else self._ask(lambda client: client.missing(sizes))
        absent = frozenset(missing)
        present = {digest: size for digest, size in sizes.items() if digest not in absent}
        self._renewal.add(present)
        self._progress.add(sum(present.values()))
        self._send_read(missing)

    def _send_read(self, digests: Iterable[str]) -> None:
        """Read blobs from disk and send them."""
        sizes = {digest: self._extents[digest][0] for digest in digests}
        for batch in batches(sizes):
            while len(self._running) > LIMITS.data_streams:
                self._running.popleft().result()
            self._renewal.renew()
            self._running.append(self._pool.submit(self._read_and_send, batch))
        self.flush()

    def _read_and_send(self, batch: dict[str, int]) -> None:
        sent = self._send_missing(
            batch, lambda digest: read_extents(self._extents[digest][1], digest)
        )
        self._progress.add_moved(sent)
        self._progress.add(sum(batch.values()))

    def put_key(self, put: PutKey, encoded: bytes) -> None:
        """Store the manifest, then let the key hold it."""
        if self.is_published:
            extents = {
                digest: tuple(_absolute(extent) for extent in extents)
                for digest, (_, extents) in self._extents.items()
            }
            holder = self._ask(lambda client: client.publish(put.manifest, extents))
            put = replace(put, publisher=holder)
        sizes = {put.manifest: len(encoded)}
        self._send_missing(sizes, lambda _: encoded)
        for _ in range(LIMITS.data_attempts):
            answer = self._ask(lambda client: client.put_key(put))
            if answer.key is not None:
                return
            # A controller that was restarted may have collected some of them meanwhile.
            missing = set(answer.missing)
            if put.manifest in missing:
                self._send_missing(sizes, lambda _: encoded)
            self._send_read(missing - {put.manifest})
        raise DataStoreError(
            f"the blobs of {put.key!r} vanish from the store again and again",
            hint="kt put it again when the store is at rest",
        )

    def _send_once(
        self,
        client: DataClient,
        sizes: dict[str, int],
        data_of: Callable[[str], bytes | memoryview],
        delta_of: DeltaOf | None,
    ) -> int:
        missing = client.missing(sizes, is_check=self.is_forced)
        # Of blobs that go whole their own bytes count, as in a get.
        whole_bytes = sum(sizes[digest] for digest in missing)
        sent_bytes = 0

        def source(digest: str) -> tuple[int, Iterator[bytes]]:
            data = data_of(digest)
            return len(data), _slices(memoryview(data))  # type: ignore[return-value]  # as good

        def counted() -> Iterator[bytes]:
            nonlocal sent_bytes
            for packed in compressed(missing, source, delta_of):
                sent_bytes += len(packed)
                yield packed

        if missing:
            client.upload(counted())
        return whole_bytes if delta_of is None else min(sent_bytes, whole_bytes)

    def _write_missing(
        self,
        store: BlobStore,
        sizes: dict[str, int],
        data_of: Callable[[str], bytes | memoryview],
    ) -> int:
        """Write those of some blobs that the store on this machine lacks; returns their bytes."""
        if self.is_forced:
            store.remove_damaged(sizes)
        missing = store.missing(sizes)
        store.touch(sizes.keys() - missing)
        for digest in missing:
            data = data_of(digest)
            with store.writer(digest, len(data), is_hashed=True) as writer:
                writer.write(data)
        return sum(sizes[digest] for digest in missing)

    def _send_missing(
        self, sizes: dict[str, int], data_of: Callable[[str], bytes | memoryview]
    ) -> int:
        """Send those of some blobs that the store lacks; returns how many bytes that were."""
        if self._store is not None:
            written_bytes = self._write_missing(self._store, sizes, data_of)
            self._renewal.add(sizes)
            return written_bytes
        deltas = self.deltas if self.deltas is not None and self.deltas.has_any(sizes) else None

        def send(attempt: int) -> int:
            delta_of = None
            if deltas is not None and attempt == 1:  # later, a base may be what is missing
                delta_of = partial(_delta, deltas, data_of)
            return self._ask(
                partial(self._send_once, sizes=sizes, data_of=data_of, delta_of=delta_of)
            )

        moved = move_undamaged(send, final=(FileChangedError,))
        self._renewal.add(sizes)
        if deltas is not None:
            deltas.keep(sizes, data_of)
        return moved

    def _ask(self, question: Callable[[DataClient], _T]) -> _T:
        return ask(self._session, self._namespace, question)


def _delta(
    deltas: FileDeltas, data_of: Callable[[str], bytes | memoryview], digest: str
) -> Delta | None:
    return deltas.delta(digest, data_of(digest))


def _slices(data: memoryview) -> Iterator[memoryview]:
    """Pieces of a blob: each is copied on its way, and a whole blob is large."""
    for begin in range(0, len(data), LIMITS.data_piece_bytes):
        yield data[begin : begin + LIMITS.data_piece_bytes]


def batches(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Blobs by digest, in groups that one request moves."""
    batch: dict[str, int] = {}
    batch_bytes = 0
    for digest, size in sizes.items():
        batch[digest] = size
        batch_bytes += size
        if batch_bytes >= LIMITS.data_batch_bytes:
            yield batch
            batch, batch_bytes = {}, 0
    if batch:
        yield batch
