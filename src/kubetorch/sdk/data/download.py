"""Fetches what a get needs, in parallel streams, and writes it to the destination."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from kubetorch.config import environment
from kubetorch.datastore import keys, manifests
from kubetorch.datastore.blobs import BlobStore, digest_of, poisoned
from kubetorch.datastore.checkout import Checkout, write_error
from kubetorch.datastore.chunk_cache import ChunkCache
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.sources import FilterOptions
from kubetorch.datastore.transfer import Destination, Receiver
from kubetorch.datastore.tuning import LIMITS as STORE_LIMITS
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.sdk.data.client import DataClient, ask, move_undamaged
from kubetorch.sdk.data.peers import Part, Peers, offer
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.data.tensor_cache import store_here
from kubetorch.sdk.data.upload import batches
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire.data import FindKeys, PathKey

#: Damaged files that an error names.
_NAMED = 5


class _Manifests:
    """Receives manifests into memory."""

    def __init__(self) -> None:
        self.by_digest: dict[str, Manifest] = {}

    def writer(self, digest: str, length: int) -> _ManifestWriter:
        return _ManifestWriter(self, digest)


class _ManifestWriter:
    def __init__(self, received: _Manifests, digest: str) -> None:
        self._received = received
        self._digest = digest
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def finish(self) -> None:
        encoded = b"".join(self._pieces)
        if digest_of(encoded) != self._digest:
            raise poisoned(self._digest, "what came has another digest")
        self._received.by_digest[self._digest] = manifests.decode(encoded)

    def drop(self) -> None:
        self._pieces.clear()


@dataclass(frozen=True)
class DeclaredData:
    """What a pod declares, as it was found; see `Checkout` for the rest."""

    parts: list[tuple[PathKey, Manifest]]
    is_read_only: bool
    former: str = ""


class Download:
    """A get of files.

    Args:
        fanout: Getters that each source is to serve at a time; 0: the controller decides.
    """

    def __init__(
        self, session: Session, namespace: str, progress: Progress, *, fanout: int = 0
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._progress = progress
        self._fanout = fanout
        self._peers = Peers((), progress)
        # A pod gets files from other pods on any backend, and serves them to those.
        self._store = None if environment.is_in_pod() else store_here(session)

    def find(self, find: FindKeys) -> list[tuple[PathKey, Manifest]]:
        """The keys that have a part of a path, with what they hold.

        Raises:
            DataStoreError: There is none.
        """
        answer = ask(self._session, self._namespace, lambda client: client.find(find))
        if not answer.keys:
            raise no_key(find.path, self._namespace)
        received = _Manifests()
        digests = dict.fromkeys(path_key.key.manifest for path_key in answer.keys)
        try:
            self._fetch(digests, received, received.by_digest.keys())
        except DataStoreError as error:
            blobs = {path_key.key.key: (path_key.key.manifest,) for path_key in answer.keys}
            raise self._described(error, find.path, blobs) from error
        parts = [(path_key, received.by_digest[path_key.key.manifest]) for path_key in answer.keys]
        wholes = [Part(path_key, manifest, manifest.entries) for path_key, manifest in parts]
        self._peers = Peers(wholes, self._progress)
        return parts

    def get(
        self,
        key: str,
        dest: str | None,
        *,
        contents: bool,
        filter_options: str | None = None,
        is_forced: bool = False,
        only: Sequence[str] = (),
        declared: DeclaredData | None = None,
    ) -> None:
        """Bring what a path has to a destination.

        The blobs stay in the store for a while though the keys are put again or deleted meanwhile.
        """
        path = keys.check(key)
        parts = self.find(FindKeys(path=path)) if declared is None else declared.parts
        options = FilterOptions(filter_options)
        files, needed_parts = _select(path, parts, options, only)
        folder, rename = _destination(dest, files)
        root, below = _existing(folder)
        try:
            with Checkout(
                root,
                ChunkCache(environment.cache_dir(), f"{folder}\0{path}"),
                is_forced=is_forced,
                is_read_only=declared is not None and declared.is_read_only,
                former="" if declared is None else declared.former,
            ) as checkout:
                placement = _Placement(path, below, contents, rename)
                for target, entry, manifest in files:
                    checkout.add(placement.at(target), entry, manifest)
                sizes = checkout.sizes
                size = sum(entry.size for _, entry, _ in files)
                self._progress.begin(size, sum(entry.kind == "file" for _, entry, _ in files))
                self._progress.add(size - sum(sizes.values()))
                checkout.begin()
                is_joined = (
                    environment.is_in_pod() and sum(sizes.values()) >= LIMITS.joined_get_bytes
                )
                if is_joined:
                    self._peers = Peers(
                        needed_parts, self._progress, is_joined=True, fanout=self._fanout
                    )
                try:
                    if is_joined:
                        self._offer_arriving(needed_parts, placement, checkout, sizes)
                    self._fetch_from_sources(path, sizes, checkout, needed_parts)
                    checkout.install()
                    if not files and declared is None:
                        self._make_folder(folder, "" if contents else path.rpartition("/")[2])
                    offered = [part for part in needed_parts if part.is_whole or is_joined]
                    self._offer(offered, placement, root)
                finally:
                    ask(self._session, self._namespace, self._peers.end)
        except OSError as error:
            if isinstance(error, KubetorchError):
                raise
            raise write_error(error, root) from error

    def _make_folder(self, folder: str, name: str) -> None:
        """Make the folder of a key that has nothing in it."""
        os.makedirs(os.path.join(folder, name), exist_ok=True)  # noqa: PTH103, PTH118  # text

    def _offer_arriving(
        self, parts: list[Part], placement: _Placement, checkout: Checkout, sizes: Mapping[str, int]
    ) -> None:
        """Offer what comes to other getters, as this pod takes part in a tree."""
        checkout.on_written = self._peers.note
        for part in parts:

            def path_of(entry: Entry, path_key: PathKey = part.path_key) -> str:
                return checkout.disk_path(placement.of(path_key, entry))

            self._peers.offer(part, path_of, sizes)

    def _offer(self, parts: list[Part], placement: _Placement, root: str) -> None:
        """Offer what was written to getters after this one, if this is a pod."""
        for part in parts:

            def path_of(entry: Entry, path_key: PathKey = part.path_key) -> str:
                return f"{root}/{placement.of(path_key, entry)}"

            ask(self._session, self._namespace, partial(offer, part=part, path_of=path_of))

    # ----------------------------------------------------------------------------------- fetching

    def _fetch_from_sources(
        self, path: str, sizes: dict[str, int], checkout: Checkout, parts: Sequence[Part]
    ) -> None:
        try:
            self._fetch_parallel(sizes, checkout)
        except DataStoreError as error:
            blobs = {
                f"{part.path_key.key.key}/{entry.path}".rstrip("/"): {
                    *map(part.manifest.blob_of, filter(_is_stored, entry.chunks))
                }
                for part in parts
                if part.path_key.key.publisher is None
                for entry in part.entries
            }
            raise self._described(error, path, blobs) from error

    def _described(
        self, error: DataStoreError, path: str, blobs: Mapping[str, Collection[str]]
    ) -> DataStoreError:
        """The error of a get, which names the files whose blobs the store lacks, if it does.

        The store has removed damaged blobs when it read them.
        """
        if type(error) is not DataStoreError:
            return error
        digests = {digest for file_digests in blobs.values() for digest in file_digests}
        try:
            question = dict.fromkeys(digests, 0)
            missing = ask(self._session, self._namespace, lambda client: client.missing(question))
        except KubetorchError:  # who may not put may not ask
            return error
        names = sorted(name for name in blobs if not set(missing).isdisjoint(blobs[name]))
        if not names:
            return error
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return DataStoreError(
            f"the store's copy of {', '.join(names[:_NAMED])}{more} is damaged: {error.message}",
            hint=f"kt store verify {path} says what else is; put it again with force=True, or "
            "kt put --force",
        )

    def _fetch_parallel(self, sizes: dict[str, int], checkout: Checkout) -> None:
        def fetch(batch: dict[str, int]) -> None:
            size = sum(batch.values())
            moved = self._fetch(batch, checkout, _Written(checkout, batch), checkout)
            self._progress.add(size)
            self._progress.add_moved(size if moved is None else min(moved, size))

        with ThreadPoolExecutor(LIMITS.data_streams, "kubetorch-get") as pool:
            futures = [pool.submit(fetch, batch) for batch in batches(sizes)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _fetch(
        self,
        digests: Iterable[str],
        destination: Destination,
        written: Iterable[str],
        older_files: Checkout | None = None,
    ) -> int | None:
        """Fetch blobs; those in `written` came with an earlier attempt.

        From afar chunks come as their difference to those that older files have in their places;
        the bytes that came then are returned.
        """

        def receive(client: DataClient, older_files: Checkout | None) -> int | None:
            done = set(written)
            missing = [digest for digest in digests if digest not in done]
            missing = self._peers.fetch(client, missing, destination)
            if self._store is not None:
                missing = _copied(self._store, missing, destination)
            if not missing:
                return None
            received_bytes = 0
            receiver = Receiver(destination, bases=older_files)
            bases = {}
            if older_files is not None:
                pairs = ((digest, older_files.base_of(digest)) for digest in missing)
                bases = {digest: base for digest, base in pairs if base}
            # If the store is silent, the next attempt goes on with pods.
            has_pods = self._peers.have(missing)
            silence = TIMING.peer_silence_seconds if has_pods else TIMING.data_answer_seconds
            try:
                for piece in client.fetch(missing, bases, silence):
                    received_bytes += len(piece)
                    receiver.feed(piece)
                receiver.finish()
                return received_bytes if bases else None
            finally:
                receiver.close()

        def ask_once(attempt: int) -> int | None:
            may_have_deltas = attempt == 1 and not self._session.is_local
            bases = older_files if may_have_deltas else None
            return ask(self._session, self._namespace, partial(receive, older_files=bases))

        return move_undamaged(ask_once)


def _copied(store: BlobStore, digests: Iterable[str], destination: Destination) -> list[str]:
    """Copy blobs from the folder of the store; returns those that are not there."""
    missing = []
    for digest in digests:
        try:
            file = store.open(digest)
        except DataStoreError:
            missing.append(digest)
            continue
        with file:
            writer = destination.writer(digest, os.fstat(file.fileno()).st_size)
            while piece := os.read(file.fileno(), STORE_LIMITS.largest_chunk_bytes):
                writer.write(piece)
        try:
            writer.finish()
        except DataStoreError:
            store.delete(digest)
            missing.append(digest)
    return missing


def no_key(path: str, namespace: str) -> DataStoreError:
    return DataStoreError(
        f"there is no key {path!r} in namespace {namespace}", hint="kt ls shows the keys"
    )


class _Placement(NamedTuple):
    """Where entries land below the root of a get of a path.

    Attributes:
        rename: The name that the user gave the only file.
    """

    path: str
    below: str
    contents: bool
    rename: str | None

    def of(self, path_key: PathKey, entry: Entry) -> str:
        return self.at(_target(self.path, path_key, entry))

    def at(self, target: str) -> str:
        name = _placed(self.path, target, self.contents) if self.rename is None else self.rename
        return self.below + name


class _Written:
    """The blobs of a batch that are in their files."""

    def __init__(self, checkout: Checkout, digests: Iterable[str]) -> None:
        self._checkout = checkout
        self._digests = digests

    def __iter__(self) -> Iterator[str]:
        return (digest for digest in self._digests if self._checkout.is_written(digest))


# -------------------------------------------------------------------------------------- placement


def _select(
    path: str,
    parts: Sequence[tuple[PathKey, Manifest]],
    options: FilterOptions,
    only: Sequence[str],
) -> tuple[list[tuple[str, Entry, Manifest]], list[Part]]:
    """The entries that a get wants, each with its target, and the parts that have them.

    Raises:
        DataStoreError: Nothing has one of the names.
    """
    files: list[tuple[str, Entry, Manifest]] = []
    needed_parts: list[Part] = []
    for path_key, manifest in parts:
        targets = [
            (target, entry)
            for entry in _entries(path_key, manifest)
            if not options.leaves_out(
                target := _target(path, path_key, entry), is_folder=entry.kind == "folder"
            )
            and (not only or _matches(target, only))
        ]
        files += [(target, entry, manifest) for target, entry in targets]
        if targets:
            entries = tuple(entry for _, entry in targets)
            needed_parts.append(Part(path_key, manifest, entries))
    if only and not files:
        names = ", ".join(map(repr, only))
        raise DataStoreError(
            f"nothing in {path!r} has a name such as {names}", hint=f"kt ls {path} shows the names"
        )
    return files, needed_parts


def _is_stored(chunk: Chunk) -> bool:
    """False for a hole."""
    return bool(chunk.digest)


def _entries(path_key: PathKey, manifest: Manifest) -> Iterator[Entry]:
    """The entries of a key that belong to the path that a user named."""
    inside, hidden = path_key.inside, set(path_key.shadowed)
    for entry in manifest.entries:
        path = entry.path
        if inside and path != inside and not path.startswith(f"{inside}/"):
            continue
        if hidden:
            above = path
            while above and above not in hidden:
                above = above.rpartition("/")[0]
            if above:
                continue
        yield entry


def _matches(target: str, patterns: Sequence[str]) -> bool:
    """True if a path, or a folder above it, matches one of some patterns."""
    while target:
        if any(fnmatchcase(target, pattern) for pattern in patterns):
            return True
        target = target.rpartition("/")[0]
    return False


def _target(path: str, path_key: PathKey, entry: Entry) -> str:
    """The path of an entry below the path that a user named; empty for this path itself."""
    full = f"{path_key.key.key}/{entry.path}" if entry.path else path_key.key.key
    return full[len(path) :].strip("/") if path else full


def _placed(path: str, target: str, contents: bool) -> str:
    """The path of an entry in the destination."""
    name = path.rpartition("/")[2]
    if not target:
        return name
    return target if contents or not name else f"{name}/{target}"


def _destination(
    dest: str | None, files: list[tuple[str, Entry, Manifest]]
) -> tuple[str, str | None]:
    """The folder for a get; and the name of the file there, if the user named it.

    A path with a suffix at which there is no folder is that of the file.
    """
    folder = os.path.abspath(os.path.expanduser(dest or "."))  # noqa: PTH100, PTH111  # links stay
    is_single = len(files) == 1 and files[0][1].kind != "folder" and not files[0][0]
    is_folder = dest is None or dest.endswith("/") or os.path.isdir(folder)  # noqa: PTH112  # text
    if is_single and not is_folder:
        parent, _, name = folder.rpartition("/")
        if os.path.lexists(folder) or "." in name.strip("."):
            return parent or "/", name
    if os.path.lexists(folder) and not os.path.isdir(folder):  # noqa: PTH112  # text
        raise DataStoreError(f"{folder} is a file; dest must be a folder")
    return folder, None


def _existing(folder: str) -> tuple[str, str]:
    """The nearest folder that exists, and the rest of the path with a `/` behind it."""
    rest = ""
    while not os.path.isdir(folder) and folder != "/":  # noqa: PTH112  # text
        folder, _, name = folder.rpartition("/")
        folder, rest = folder or "/", f"{name}/{rest}"
    return folder, rest
