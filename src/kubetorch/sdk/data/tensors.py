"""Tensors to the data store and back.

    tensors ── chunks ── those that the store lacks, as deltas to its version ── manifest ── key

The store of this machine's own service is a folder of this user, so a process writes chunks into it
and reads them from it. From any other store chunks come through a cache on disk, which has the last
versions that this user put or got: they are the bases of deltas in both directions.

A get writes to the destination when all chunks for it are there and verified. In a pod it is a part
of the tree of `sdk.data.peers`, which gives other pods the chunks of its cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from kubetorch.config import environment
from kubetorch.datastore import keys, manifests, weights
from kubetorch.datastore.blobs import digest_of, poisoned
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.tensors import Contents, TensorFile
from kubetorch.datastore.transfer import Delta, Receiver, compressed, delta
from kubetorch.datastore.tuning import LIMITS as STORE_LIMITS
from kubetorch.datastore.weights import Place, StoredTensors
from kubetorch.errors import DataStoreError
from kubetorch.sdk.data.client import DataClient, ask, find_key, move_undamaged
from kubetorch.sdk.data.direct import Sink, Version
from kubetorch.sdk.data.download import no_key
from kubetorch.sdk.data.peers import Part, Peers, offer
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.data.tensor_cache import TensorCache
from kubetorch.sdk.data.upload import Renewal
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS
from kubetorch.wire.data import KeyView, Lifespan, PathKey, PutKey


class _Blob(NamedTuple):
    """The bytes of a blob, and the place if it is a chunk of tensors."""

    content: bytes
    place: Place | None = None


def put(
    session: Session,
    namespace: str,
    key: str,
    value: object,
    progress: Progress,
    *,
    lifespan: Lifespan | None = None,
) -> Version:
    """Store tensors as the next version of a key; until its end a get has the version before."""
    name = keys.check(key)
    file = TensorFile(value)
    progress.begin(file.size, 1)
    _check_room(session, namespace, file)
    store = _Sender(session, namespace, name, file.size, progress)
    groups = _groups(_chunk(file, number) for number in range(len(file.header.cuts)))
    digests = [digest for group in weights.in_threads(store.add, groups) for digest in group]
    manifest = weights.manifest_of(file, digests)
    digest, encoded = manifests.encode(manifest)
    head = [_Blob(file.encoded_header), _Blob(encoded)]
    store.add(head)
    numbers = {digest: number for number, digest in enumerate(digests)}
    request = PutKey(
        key=name, manifest=digest, lifespan=lifespan, service=environment.pod_service()
    )
    for _ in range(LIMITS.data_attempts):
        answer = ask(session, namespace, lambda client: client.put_key(request))
        if answer.key is not None:
            store.cache.trim()
            return Version(name, digest, file)
        for missing in answer.missing:  # collected meanwhile
            store.add([_chunk(file, numbers[missing])] if missing in numbers else head)
    raise DataStoreError(
        f"the blobs of {name!r} vanish from the store, {LIMITS.data_attempts} times in a row",
        hint="put it again when the store is at rest",
    )


def _check_room(session: Session, namespace: str, file: TensorFile) -> None:
    """Refuse tensors for which the store has no room, before the first of them is sent.

    Raises:
        StorageFullError: It has none for what it lacks of them.
    """
    if ask(session, namespace, lambda client: client.has_room(file.size)):
        return

    def size_of(number: int) -> tuple[str, int]:
        content = _chunk(file, number).content
        return digest_of(content), len(content)

    # Most of them may be there: what is missing decides.
    sizes = dict(weights.in_threads(size_of, range(len(file.header.cuts))))
    ask(session, namespace, lambda client: client.missing(sizes))


def _chunk(file: TensorFile, number: int) -> _Blob:
    cut = file.header.cuts[number]
    # A copy: the tensors may be those of a model that another thread trains.
    return _Blob(bytes(file.chunk(number)), (cut.name, cut.offset, cut.end - cut.begin))


def _groups(blobs: Iterable[_Blob]) -> Iterator[list[_Blob]]:
    """Blobs that one request moves."""
    group: list[_Blob] = []
    for blob in blobs:
        group.append(blob)
        if sum(len(blob.content) for blob in group) >= LIMITS.data_batch_bytes:
            yield group
            group = []
    if group:
        yield group


def _batched(digests: Sequence[str]) -> Iterator[Sequence[str]]:
    """Digests of chunks that one request moves."""
    count = max(1, LIMITS.data_batch_bytes // STORE_LIMITS.tensor_chunk_bytes)
    return (digests[begin : begin + count] for begin in range(0, len(digests), count))


class _Sender:
    """Stores the blobs of one put; threads may share it."""

    def __init__(
        self, session: Session, namespace: str, key: str, size: int, progress: Progress
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._progress = progress
        self.cache = TensorCache(session, size)
        self._bases: Mapping[Place, str] = {}
        self._renewal = Renewal(
            lambda sizes: ask(session, namespace, lambda client: client.missing(sizes))
        )
        if not self.cache.is_store and self.cache.is_used:
            view = find_key(session, namespace, key)
            self._bases = {} if view is None else self.cache.places(view.manifest)

    def add(self, blobs: Sequence[_Blob]) -> list[str]:
        """Store blobs; returns their digests."""
        if self.cache.is_store:
            digests = [digest_of(blob.content) for blob in blobs]
            for digest, blob in zip(digests, blobs, strict=True):
                if not self.cache.blobs.has(digest):
                    self._progress.add_moved(len(blob.content))
                self.cache.blobs.add(blob.content, digest)
        else:
            digests = [digest_of(blob.content) for blob in blobs]
            self._send_verified(dict(zip(digests, blobs, strict=True)))
            if self.cache.is_used:
                # The store has them: the cache only spares later transfers.
                with contextlib.suppress(DataStoreError, OSError):
                    for digest, blob in zip(digests, blobs, strict=True):
                        self.cache.blobs.add(blob.content, digest)
        sizes = [len(blob.content) for blob in blobs]
        self._renewal.add(dict(zip(digests, sizes, strict=True)))
        self._renewal.renew()
        self._progress.add(sum(sizes))
        return digests

    def _send_verified(self, blobs: Mapping[str, _Blob]) -> None:
        move_undamaged(lambda attempt: self._send(blobs, may_have_deltas=attempt == 1))

    def _send(self, blobs: Mapping[str, _Blob], *, may_have_deltas: bool) -> None:
        def delta_of(digest: str) -> Delta | None:
            content, place = blobs[digest]
            base = self._bases.get(place, "") if place is not None else ""
            base_content = self.cache.content(base) if base else None
            return None if base_content is None else delta(content, base, base_content)

        def source(digest: str) -> tuple[int, Iterable[bytes]]:
            content = blobs[digest].content
            return len(content), (content,)

        def send(client: DataClient) -> None:
            missing = client.missing({digest: len(blob.content) for digest, blob in blobs.items()})
            if missing:
                packed = compressed(missing, source, delta_of if may_have_deltas else None)
                client.upload(self._counted(packed))

        ask(self._session, self._namespace, send)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._progress.add_moved(len(piece))
            yield piece


def get(  # noqa: PLR0913  # what is read, and the two ways of its bytes
    session: Session,
    namespace: str,
    key: str,
    view: KeyView | None,
    dest: object,
    progress: Progress,
    *,
    only: Sequence[str] = (),
    sink: Sink | None = None,
) -> Any:  # noqa: ANN401  # what was put
    """The tensors of a version of a key, or of a file of safetensors; into `dest` if it is given.

    With a `sink` they may come from the process that put them.

    Raises:
        DataStoreError: The destination does not fit, or no tensor has such a name. The destination
            is as before.
    """
    if view is None:
        raise no_key(key, namespace)
    cache = TensorCache(session, view.size)
    fetch = _Fetch(session, namespace, cache, progress)
    fetch([view.manifest])
    manifest = manifests.read(cache.blobs, view.manifest)
    head: set[str] = set()

    def read(digest: str) -> bytes:
        head.add(digest)
        fetch([digest])
        return cache.blobs.read(digest)

    stored = StoredTensors(manifest, read)
    contents = Contents(stored.header, only)
    destination = contents.new_destination() if dest is None else contents.destination(dest)
    sizes = stored.blob_sizes(contents.tensors)
    progress.begin(sum(sizes.values()), 1)
    if sink is not None and sink.fill(view.manifest, stored, contents, destination):
        progress.add(progress.total)
        progress.add_moved(progress.total)
        progress.add_from_pods(progress.total)
        return contents.value(destination) if dest is None else dest
    cache.blobs.touch(sizes)  # so that other processes delete them last
    bases = cache.bases(namespace, view.key, stored)
    missing = cache.blobs.missing(sizes)
    part = _part(view, manifest, {*head, *sizes})
    is_in_tree = environment.is_in_pod() and not cache.is_store and not manifest.packs

    def path_of(entry: Entry) -> str:
        return str(cache.blobs.path(entry.path))

    try:
        # What comes as a small difference comes from the store.
        new_bytes = sum(sizes[digest] for digest in missing if digest not in bases)
        if is_in_tree and new_bytes >= LIMITS.joined_get_bytes:
            fetch.peers = Peers([part], progress, is_joined=True)
            fetch.peers.offer(part, path_of, missing)
        fetched = fetch(sizes, bases)
        damaged = weights.damaged(cache.blobs, sizes.keys() - fetched)
        if damaged and cache.is_store:
            raise poisoned(
                damaged[0], "its file in the store was damaged; it is removed: put it again"
            )
        fetch(damaged)
        stored.fill(destination, contents, cache.blobs)
        if is_in_tree and sum(sizes.values()) >= LIMITS.joined_get_bytes:
            ask(session, namespace, partial(offer, part=part, path_of=path_of))
    finally:
        ask(session, namespace, fetch.peers.end)
    progress.add(sum(sizes.values()))
    cache.note(namespace, view)
    cache.trim()
    return contents.value(destination) if dest is None else dest


def _part(view: KeyView, manifest: Manifest, needed: Collection[str]) -> Part:
    """The blobs that a get needs, each a file of its own, as in the cache."""
    chunks = {chunk.digest: chunk for entry in manifest.entries for chunk in entry.chunks}
    entries = {
        digest: Entry(digest, chunks=(Chunk(digest, chunk.size),))
        for digest, chunk in chunks.items()
        if digest and chunk.pack is None
    }
    blobs = replace(manifest, entries=tuple(entries.values()))
    return Part(
        PathKey(key=view), blobs, tuple(entries[name] for name in entries if name in needed)
    )


class _Fetch:
    """Brings blobs into the cache; a call returns the digests of those that were not there.

    Attributes:
        peers: Pods that may have them.
    """

    def __init__(
        self, session: Session, namespace: str, cache: TensorCache, progress: Progress
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._blobs = cache.blobs
        self._progress = progress
        self.peers = Peers((), progress)

    def __call__(self, digests: Iterable[str], bases: Mapping[str, str] | None = None) -> set[str]:
        missing = self._blobs.missing(digests)
        groups = _batched(missing)
        for _ in weights.in_threads(lambda group: self._fetch(group, bases or {}), groups):
            pass
        return set(missing)

    def _fetch(self, digests: Sequence[str], bases: Mapping[str, str]) -> None:
        def receive(attempt: int) -> None:
            missing = self._blobs.missing(digests)
            is_first = attempt == 1
            usable = {digest: bases[digest] for digest in missing if digest in bases and is_first}
            question = partial(self._receive, digests=missing, bases=usable)
            ask(self._session, self._namespace, question)

        move_undamaged(receive)
        for digest in digests:
            self.peers.note(digest)

    def _receive(
        self, client: DataClient, digests: Sequence[str], bases: Mapping[str, str]
    ) -> None:
        new = [digest for digest in digests if digest not in bases]
        absent = self.peers.fetch(client, new, self._blobs)
        came = set(new).difference(absent)
        self._progress.add_moved(sum(map(self._blobs.size, came)))
        digests = [digest for digest in digests if digest not in came]
        if not digests:
            return
        receiver = Receiver(self._blobs, bases=self._blobs)
        try:
            for piece in client.fetch(digests, bases):
                receiver.feed(piece)
                self._progress.add_moved(len(piece))
            receiver.finish()
        finally:
            receiver.close()
