"""The data store: the keys of each namespace, what they hold, and their end.

A namespace is like a file system in which a put at a key replaces at once what the key holds. A key
holds a manifest (`kubetorch.datastore.manifests`), a blob that names the blobs of its files.

    a          a folder with x/1 and y/2
    a/x        put later: hides what the folder of `a` has below x

So the content of a path is that of the key at it, or of the part that the nearest key above it has,
and of the keys below it. A put removes the keys below it whose paths its folder has.

Who reads leases the manifests that were answered: their blobs stay though the keys are put again
meanwhile. A controller that starts anew knows no leases, so the blobs of a version become young
when the version ends: young blobs are never collected.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kubetorch.controller.blobs import BlobStores, NamespaceBlobs
from kubetorch.controller.holders import Holders, Windows, check_holder, check_part, check_service
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.datastore import addresses, keys, manifests
from kubetorch.datastore.addresses import WRITABLE
from kubetorch.datastore.blobs import BlobStore, check_digest
from kubetorch.datastore.key_folder import KeyFolder, Surroundings
from kubetorch.datastore.manifests import Entry, EntryKind, Manifest
from kubetorch.errors import DataStoreError, KubetorchError, StorageFullError, StoreUnavailableError
from kubetorch.lib.asgi import with_status
from kubetorch.lib.clock import Clock
from kubetorch.specs import names
from kubetorch.wire.data import (
    CheckedKey,
    FindKeys,
    GetSource,
    HoldManifest,
    JoinGet,
    JoinWindow,
    KeyView,
    ListedPath,
    PathKey,
    PathKeys,
    PutAnswer,
    PutKey,
    RemoveAnswer,
    RemovePath,
    WindowView,
)

_log = logging.getLogger(__name__)


class Content(msgspec.Struct, frozen=True, dict=True):
    """A manifest, and what is looked up in it."""

    manifest: Manifest

    def kind(self, path: str) -> EntryKind | None:
        """The kind of a path; a folder may have no entry of its own, only entries below it."""
        entry = self._first_from(path)
        if entry is not None and entry.path == path:
            return entry.kind
        # Names such as `path-1` lie between a folder and what is below it.
        entry = self._first_from(f"{path}/")
        return "folder" if entry is not None and entry.path.startswith(f"{path}/") else None

    def _first_from(self, path: str) -> Entry | None:
        """The first entry at a path or behind it, in the order of paths."""
        entries = self.manifest.entries
        index = bisect.bisect_left(entries, path, key=_path_of)
        return entries[index] if index < len(entries) else None

    @cached_property
    def digests(self) -> frozenset[str]:
        return frozenset(self.manifest.digests())

    def file_above(self, path: str) -> str | None:
        """A file or link above a path, at which no folder can be."""
        while path := path.rpartition("/")[0]:
            if self.kind(path) in ("file", "symlink"):
                return path
        return None


_path_of, _key_of = attrgetter("path"), attrgetter("key")


class Contents:
    """The manifests that were read last, of all stores."""

    def __init__(self) -> None:
        self._contents: OrderedDict[str, Content] = OrderedDict()
        self._count = 0
        # One manifest at a time: the largest takes 200 MB while it is read.
        self._lock = threading.Lock()

    def read(self, blobs: BlobStore, digest: str) -> Content:
        with self._lock:
            content = self._contents.pop(digest, None)
            if content is None:
                # The next one takes memory from its first entry on.
                self._drop(blobs.size(digest) // LIMITS.manifest_row_bytes)
                content = Content(manifests.read(blobs, digest))
                self._count += _weight(content)
                self._drop(0)
            self._contents[digest] = content
            return content

    def _drop(self, expected: int) -> None:
        """Forget the manifests that were read longest ago, until there is room for more rows."""
        while self._contents and self._count + expected > LIMITS.remembered_files:
            self._count -= _weight(self._contents.popitem(last=False)[1])


def _weight(content: Content) -> int:
    return sum(1 + len(entry.chunks) for entry in content.manifest.entries)


class DataStore:
    def __init__(
        self,
        folder: Path,
        blob_stores: BlobStores,
        clock: Clock,
        *,
        has_service: Callable[[str, str], bool],
        holders: Holders,
    ) -> None:
        self._root = folder
        self._blob_stores = blob_stores
        self._clock = clock
        self._has_service = has_service
        self._holders = holders
        self._windows = Windows()
        self._contents = Contents()
        self._folders: dict[str, KeyFolder] = {}
        # By namespace and manifest: the end of the last lease.
        self._leases: dict[tuple[str, str], float] = {}
        self._bucket = blob_stores.bucket
        entries = folder.iterdir() if folder.is_dir() else ()
        # Of a store that got a bucket, the disk has the keys that are not there yet.
        self._unmoved: dict[str, KeyFolder] = {}
        for entry in entries:
            if entry.is_dir() and self._bucket is None:
                self._folder(entry.name)
            elif entry.is_dir():
                self._unmoved[entry.name] = KeyFolder(entry)

    def _folder(self, namespace: str) -> KeyFolder:
        folder = self._folders.get(namespace)
        if folder is None:
            names.check_namespace(namespace)
            records = None if self._bucket is None else self._bucket.keys(namespace)
            folder = self._folders[namespace] = KeyFolder(self._root / namespace, records)
        return folder

    # ----------------------------------------------------------------------------------- a bucket

    async def load(self) -> None:
        """Read the keys that a bucket has.

        Raises:
            StoreUnavailableError: It does not answer.
        """
        if self._bucket is not None:
            await asyncio.to_thread(self._load)

    def _load(self) -> None:
        self._blob_stores.load()
        for namespace in self._namespaces():
            self._folder(namespace).refresh()

    def _namespaces(self) -> list[str]:
        in_bucket = [] if self._bucket is None else self._bucket.folders("keys")
        return sorted({*self._folders, *filter(names.is_namespace, in_bucket)})

    def refresh(self, store: NamespaceBlobs, only_unsettled: bool) -> None:
        """Know the keys of a store as its bucket has them, before blobs are deleted."""
        for namespace in list(self._folders) if only_unsettled else self._namespaces():
            if store.is_of(namespace):
                folder = self._folder(namespace)
                if folder.is_unsettled or not only_unsettled:
                    folder.refresh()

    async def move(self) -> None:
        """Move keys that were put before the store had a bucket there."""
        for namespace, on_disk in self._unmoved.items():
            for view in on_disk.all():
                try:
                    async with self._blob_stores.of(namespace).lock:
                        await self._blob_stores.in_data_thread(
                            partial(self._move, namespace, on_disk, view)
                        )
                except (KubetorchError, OSError) as error:  # it is tried at the next start
                    _log.warning("key not moved key=%s/%s error=%s", namespace, view.key, error)

    def _move(self, namespace: str, on_disk: KeyFolder, view: KeyView) -> None:
        folder = self._folder(namespace)
        newer = folder.around(view.key).exact
        if newer is None or newer.created < view.created:
            digests = () if view.publisher else self._content(namespace, view).digests
            blobs = self._blob_stores.of(namespace).blobs
            blobs.save(digests)
            blobs.save((view.manifest,))
            folder.put(view)
            _log.info("key moved to the bucket key=%s/%s", namespace, view.key)
        on_disk.remove((view.key,))

    def _content(self, namespace: str, view: KeyView) -> Content:
        """What a key holds; an error names the key."""
        blobs = self._blob_stores.of(namespace).blobs
        try:
            blobs.fetch((view.manifest,))
            return self._contents.read(blobs, view.manifest)
        except StoreUnavailableError:
            raise
        except DataStoreError as error:
            raise DataStoreError(
                f"the key {view.key!r} cannot be read: {error.message}", hint="put it again"
            ) from error

    # ---------------------------------------------------------------------------------- the blobs

    def manifests(self, store: NamespaceBlobs) -> set[str]:
        """The manifests of a store that keys hold or that are leased, whose blobs stay."""
        now = self._clock.time()
        self._leases = {lease: end for lease, end in self._leases.items() if end > now}
        needed = {manifest for namespace, manifest in self._leases if store.is_of(namespace)}
        for namespace, folder in [*self._folders.items(), *self._unmoved.items()]:
            if store.is_of(namespace):
                needed.update(view.manifest for view in folder.beginning(""))
        self._holders.forget_all_but(needed, store.is_of)
        return needed

    async def missing(
        self, namespace: str, sizes: Mapping[str, int], *, is_check: bool = False
    ) -> list[str]:
        """The missing ones of some blobs, for which there is room; the others become young."""
        blobs = self._blob_stores.of(namespace).blobs

        def find_missing() -> list[str]:
            if is_check:
                blobs.remove_damaged(sizes)
            missing = blobs.missing(sizes)
            absent = frozenset(missing)
            blobs.touch(digest for digest in sizes if digest not in absent)
            blobs.check_room(sum(sizes[digest] for digest in missing))
            return missing

        try:
            return await self._blob_stores.in_data_thread(find_missing)
        except StorageFullError:
            self._blob_stores.on_full()
            raise

    async def check_readable(self, namespace: str, digests: Iterable[str]) -> None:
        """Refuse blobs that no key has: who may read the data may not read what deploys need."""
        unknown = await self.unreadable(namespace, digests)
        if unknown:
            raise with_status(
                DataStoreError(
                    f"{len(unknown)} blobs belong to no key, such as {min(unknown)}",
                    hint="the keys were put again or deleted meanwhile; get them again",
                ),
                404,
            )

    async def unreadable(self, namespace: str, digests: Iterable[str]) -> set[str]:
        """The blobs among these that no key has."""
        unknown = set(digests)
        if not unknown:
            return unknown
        leased = [manifest for where, manifest in self._leases if where == namespace]
        folder = self._folder(namespace)

        def find_unreadable() -> set[str]:
            # Mostly the last lease has them.
            remaining = self._unreadable(namespace, unknown, reversed(leased))
            if not remaining:
                return remaining
            current = dict.fromkeys(view.manifest for view in folder.beginning(""))
            unread = current.keys() - set(leased)
            return self._unreadable(namespace, remaining, unread)

        return await self._blob_stores.in_data_thread(find_unreadable)

    def _unreadable(self, namespace: str, unknown: set[str], manifests: Iterable[str]) -> set[str]:
        blobs = self._blob_stores.of(namespace).blobs
        for manifest in manifests:
            unknown.discard(manifest)
            if unknown and blobs.has(manifest):
                unknown -= self._contents.read(blobs, manifest).digests
            if not unknown:
                break
        return unknown

    # ------------------------------------------------------------------------------------ reading

    async def find(self, namespace: str, find: FindKeys) -> PathKeys:
        path = keys.canonical(find.path)
        around = self._around(namespace, path)
        views = [view for view in (around.above, around.exact) if view is not None]
        seconds = min(max(find.lease_seconds, 0.0), TIMING.longest_data_lease_seconds)
        self._lease(namespace, (view.manifest for view in [*views, *around.below]), seconds)
        path_keys = await self._blob_stores.in_data_thread(
            lambda: self._find(namespace, path, around)
        )
        # Pods change in the loop.
        described_keys = []
        for path_key in path_keys:
            key = path_key.key
            sources = self._holders.sources(namespace, key, has_all=find.wants_all_sources)
            described_keys.append(
                replace(path_key, key=self._described(namespace, key), sources=sources)
            )
        return PathKeys(keys=tuple(described_keys))

    def _around(self, namespace: str, path: str) -> Surroundings:
        """The keys around a path, without those that only pods had which are gone."""
        above, exact, below = self._folder(namespace).around(path)
        return Surroundings(
            None if above is None or self._holders.is_gone(namespace, above) else above,
            None if exact is None or self._holders.is_gone(namespace, exact) else exact,
            [view for view in below if not self._holders.is_gone(namespace, view)],
        )

    def hold(self, namespace: str, hold: HoldManifest) -> None:
        """Note that a pod has a version whole, or not any more."""
        manifest = check_digest(hold.manifest)
        if not hold.is_whole:
            self._holders.remove(namespace, manifest, hold.holder)
            return
        # Pods that got a version have leased it.
        if (namespace, manifest) not in self._leases and all(
            view.manifest != manifest for view in self._folder(namespace).beginning("")
        ):
            raise DataStoreError(f"no key has the manifest {manifest}")
        check_part(hold.holder.part)
        self._holders.add(namespace, manifest, hold.holder)

    def join(self, namespace: str, join: JoinGet) -> GetSource:
        """The source from which to get a version, which the getter has leased."""
        manifest = check_digest(join.manifest)
        if not 0 < len(join.getter) <= LIMITS.getter_characters:
            raise DataStoreError(f"getter is {join.getter[:100]!r}; it must name a get")
        check_part(join.part)
        if join.fanout < 0:
            raise DataStoreError(f"fanout is {join.fanout}; it must be a number of getters")
        for holder in (join.holder, join.failed):
            if holder is not None:
                check_holder(holder)
        view = self._folder(namespace).around(keys.check(join.key)).exact
        if view is None or view.manifest != manifest:  # put again, or deleted, meanwhile
            view = KeyView(key=join.key, kind="folder", manifest=manifest)
        now = self._clock.time()
        end = self._leases.get((namespace, manifest), now)
        if end <= now and not join.is_done:
            raise DataStoreError(
                f"the version {manifest} of {join.key!r} is not leased", hint="get the key again"
            )
        source = self._holders.join(namespace, view, join, now=now, end=end)
        _log.debug(
            "get joined key=%s getter=%s source=%s failed=%s",
            join.key,
            join.getter,
            "store" if source is None else source.pod,
            "" if join.failed is None else join.failed.pod,
        )
        return GetSource(source)

    def join_window(self, namespace: str, join: JoinWindow) -> WindowView:
        return self._windows.join(namespace, join, self._clock.time())

    def _lease(self, namespace: str, manifests: Iterable[str], seconds: float) -> None:
        end = self._clock.time() + seconds
        for manifest in manifests:
            lease = namespace, manifest
            # The last lease is at the end, where it is looked for first.
            self._leases[lease] = max(end, self._leases.pop(lease, 0.0))

    def _find(self, namespace: str, path: str, around: Surroundings) -> list[PathKey]:
        path_keys = []
        if around.exact is not None:
            path_keys.append(self._path_key(namespace, around.exact, "", around.below))
        elif around.above is not None:
            inside = path[len(around.above.key) + 1 :]
            if self._content(namespace, around.above).kind(inside) is not None:
                path_keys.append(self._path_key(namespace, around.above, inside, around.below))
        path_keys += [self._path_key(namespace, view, "", around.below) for view in around.below]
        return path_keys

    def _path_key(
        self, namespace: str, view: KeyView, inside: str, below: Sequence[KeyView]
    ) -> PathKey:
        start = f"{view.key}/"
        first = bisect.bisect_left(below, start, key=_key_of)
        end = bisect.bisect_left(below, f"{view.key}0", lo=first, key=_key_of)  # `0` follows `/`
        paths = [nested.key[len(start) :] for nested in below[first:end]]
        shadowed: tuple[str, ...] = ()
        if paths:
            content = self._content(namespace, view)
            shadowed = tuple(path for path in paths if content.kind(path) is not None)
        return PathKey(key=view, inside=inside, shadowed=shadowed)

    def _list(self, namespace: str, path: str, around: Surroundings) -> list[ListedPath]:
        view, inside = around.exact, ""
        if view is None and around.above is not None:
            view, inside = around.above, path[len(around.above.key) + 1 :]
        rows: dict[str, ListedPath] = {}
        if view is not None:
            content = self._content(namespace, view)
            kind = content.kind(inside) if inside or not content.manifest.is_folder else None
            if kind in ("file", "symlink"):
                entry = next(entry for entry in content.manifest.entries if entry.path == inside)
                return [_listed(path.rpartition("/")[2], entry, view, None if inside else view)]
            if not inside or kind is not None:
                rows = _rows(content.manifest, view, inside)
        for nested in around.below:
            name, _, rest = nested.key[len(path) + 1 if path else 0 :].partition("/")
            row = rows.get(name)
            if not rest:
                is_directory = nested.kind == "folder"
                rows[name] = ListedPath(
                    name=name,
                    is_directory=is_directory,
                    size=nested.size,
                    created=nested.created,
                    locale=_locale(nested),
                    key=nested,
                )
            elif row is None:
                rows[name] = ListedPath(
                    name=name,
                    is_directory=True,
                    size=nested.size,
                    created=nested.created,
                    locale=_locale(nested),
                )
            else:
                rows[name] = replace(
                    row,
                    is_directory=True,
                    size=row.size + nested.size,
                    created=max(row.created, nested.created),
                    # Of the keys in it: the store if it has one, else a pod.
                    locale=row.locale if nested.publisher is not None else "store",
                )
        return [rows[name] for name in sorted(rows)]

    async def verify(self, namespace: str, path: str) -> AsyncGenerator[CheckedKey, None]:
        """The keys that have a part of a path, compared with their digests piece by piece.

        A damaged blob is removed, so that the next put of its key uploads it again.
        """
        answer = await self.find(namespace, FindKeys(path=path))
        for path_key in answer.keys:
            if path_key.key.publisher is not None:
                continue  # the pods that have it say whether they do
            check = self._check(namespace, path_key.key)
            read_on = partial(next, check, None)
            while (row := await self._blob_stores.in_data_thread(read_on)) is not None:
                yield row

    def _check(self, namespace: str, view: KeyView) -> Iterator[CheckedKey]:
        blobs = self._blob_stores.of(namespace).blobs
        row = CheckedKey(key=view.key, version=view.version, size=view.size)
        faults: dict[str, str] = {}
        checked = unreported = 0
        try:
            manifest = self._content(namespace, view).manifest
        except DataStoreError as error:
            yield replace(row, faults=(error.message,), is_whole=False)
            return
        for digest in manifest.digests():
            try:
                for piece in blobs.verify(digest):
                    unreported += len(piece)
                    if unreported >= LIMITS.verified_piece_bytes:
                        checked, unreported = checked + unreported, 0
                        yield replace(row, checked=checked)
            except StoreUnavailableError as error:
                yield replace(row, faults=(error.message,), is_whole=False)
                return
            except DataStoreError as error:
                faults[digest] = error.message
        affected = tuple(
            f"{entry.path or view.key}: {faults[digest]}"
            for entry in manifest.entries
            for digest in dict.fromkeys(map(manifest.blob_of, entry.chunks))
            if digest in faults
        )
        yield replace(
            row,
            checked=checked + unreported,
            faults=affected[: LIMITS.named_faults],
            is_whole=not affected,
        )

    # ----------------------------------------------------------------------------------- changing

    async def put(
        self, namespace: str, put: PutKey, creator: str, *, is_pulled: bool = False
    ) -> PutAnswer:
        """Let a key hold a manifest, which comes from a client unless the controller pulled it."""
        key = keys.check(put.key)
        digest = check_digest(put.manifest)
        if put.service:
            check_service(put.service)
        if put.publisher is not None:
            check_holder(put.publisher)
        store, folder = self._blob_stores.of(namespace), self._folder(namespace)

        def decode() -> Content | None:
            if not store.blobs.has(digest):
                return None
            return self._contents.read(store.blobs, digest)

        content = await self._blob_stores.in_data_thread(decode)
        if content is None:
            return PutAnswer(missing=(digest,))
        # Pods pull with their own identity; what the controller pulls is only what is there.
        if content.manifest.tags and not is_pulled and addresses.scheme_of(key) not in WRITABLE:
            raise DataStoreError(
                f"the manifest for {key!r} has tags of a bucket, and no pod pulls to that key",
                hint=f"keys of {', '.join(f'{scheme}://' for scheme in WRITABLE)} may have tags",
            )
        previous = folder.around(key).exact
        await self._blob_stores.in_data_thread(
            lambda: self._sync(namespace, put, content, previous)
        )
        # The collector either sees the key, or has deleted blobs that are then missing.
        async with store.lock:
            answer = await self._blob_stores.in_data_thread(
                lambda: self._put(namespace, folder, replace(put, key=key), content, creator)
            )
        if answer.key is None:
            return answer
        return PutAnswer(key=self._described(namespace, answer.key))

    def _described(self, namespace: str, view: KeyView) -> KeyView:
        in_store = ("store",) if view.publisher is None else ()
        return replace(view, holders=(*in_store, *self._holders.pods(namespace, view)))

    def _put(  # as `put`
        self, namespace: str, folder: KeyFolder, put: PutKey, content: Content, creator: str
    ) -> PutAnswer:
        key = put.key
        missing: list[str] = []
        if put.publisher is None:
            missing = _missing(self._blob_stores.of(namespace).blobs, content.manifest)
        if self._blob_stores.of(namespace).blobs.kept_size(put.manifest) is None:
            missing.insert(0, put.manifest)
        if missing:
            return PutAnswer(missing=tuple(missing))
        around = folder.around(key)
        self._check_above(namespace, key, around)
        # What was pulled from an address is all that is there: keys below it are older pulls.
        is_pulled = bool(content.manifest.tags) and addresses.scheme_of(key) is not None
        replaced = around.below if is_pulled else _replaced(key, content, around)
        if around.exact is None and len(folder) - len(replaced) >= LIMITS.namespace_keys:
            raise DataStoreError(
                f"namespace {namespace} has {len(folder):,} keys; {LIMITS.namespace_keys:,} are "
                "allowed",
                hint="put many files at one key, as a folder, or delete keys: kt rm",
            )
        service = self._service(namespace, put)
        view = KeyView(
            key=key,
            kind=content.manifest.kind,
            manifest=put.manifest,
            version=1 if around.exact is None else around.exact.version + 1,
            size=content.manifest.size,
            files=sum(entry.kind == "file" for entry in content.manifest.entries),
            created=self._clock.time(),
            creator=creator,
            lifespan="resource" if service else "cluster",
            service=service,
            publisher=put.publisher,
        )
        folder.put(view, [nested.key for nested in replaced])
        self._release(namespace, [*replaced, *([around.exact] if around.exact else [])])
        _log.info("key put key=%s/%s version=%s size=%s", namespace, key, view.version, view.size)
        return PutAnswer(key=view)

    def _sync(
        self, namespace: str, put: PutKey, content: Content, previous: KeyView | None
    ) -> None:
        """Have what a key will hold on disk, or in the bucket; that of the version before is."""
        digests = {put.manifest}
        if put.publisher is None:
            digests |= content.digests
        blobs = self._blob_stores.of(namespace).blobs
        if self._bucket is not None:
            blobs.save(digests - {put.manifest})
            blobs.save((put.manifest,))
            return
        if previous is not None and previous.publisher is None:
            with contextlib.suppress(DataStoreError):
                digests -= {previous.manifest, *self._content(namespace, previous).digests}
        blobs.sync(digests)

    def _service(self, namespace: str, put: PutKey) -> str:
        """The service with which the key ends; empty for a key that stays."""
        if put.lifespan == "cluster":
            return ""
        first = put.key.partition("/")[0]
        if self._has_service(namespace, first):
            return first
        publisher = "" if put.publisher is None else put.publisher.workload
        return publisher if put.lifespan is None else put.service or publisher or first

    def _check_above(self, namespace: str, key: str, around: Surroundings) -> None:
        if around.above is None:
            return
        content = self._content(namespace, around.above)
        file = content.file_above(key[len(around.above.key) + 1 :])
        if not content.manifest.is_folder or file:
            path = f"{around.above.key}/{file}" if file else around.above.key
            raise DataStoreError(
                f"the key {key!r} lies below {path!r}, which is a file",
                hint=f"choose another key, or delete {path!r} first",
            )

    async def remove(self, namespace: str, remove: RemovePath, remover: str) -> RemoveAnswer:
        path = _prefix(remove.path) if remove.is_prefix else keys.check(remove.path)
        folder = self._folder(namespace)
        async with self._blob_stores.of(namespace).lock:
            return await self._blob_stores.in_data_thread(
                lambda: self._remove(namespace, folder, replace(remove, path=path), remover)
            )

    def _remove(
        self, namespace: str, folder: KeyFolder, remove: RemovePath, remover: str
    ) -> RemoveAnswer:
        path = remove.path
        if remove.is_prefix:
            return self._delete(namespace, folder.beginning(path))
        around = folder.around(path)
        views = [*([around.exact] if around.exact else []), *around.below]
        above = around.above
        inside = path[len(above.key) + 1 :] if above is not None else ""
        content = None if above is None else self._content(namespace, above)
        kind = None if content is None else content.kind(inside)
        is_folder = around.exact is not None and around.exact.kind == "folder"
        if (is_folder or kind == "folder" or around.below) and not remove.recursive:
            raise DataStoreError(
                f"{path!r} is a folder", hint="recursive=True, or kt rm --recursive, deletes it"
            )
        if above is None or content is None or kind is None:
            return self._delete(namespace, views)
        if above.publisher is not None:
            raise DataStoreError(
                f"{path!r} is a part of what the pod {above.publisher.pod} publishes in place",
                hint=f"delete it in the pod and put {above.key!r} again, or delete all of the key",
            )
        view = self._without(namespace, above, content.manifest, inside)
        view = replace(view, creator=remover)
        folder.put(view, [nested.key for nested in views])
        self._release(namespace, [above, *views])
        _log.info("path deleted path=%s/%s version=%s", namespace, path, view.version)
        return RemoveAnswer(keys=(above.key, *(nested.key for nested in views)))

    def _without(self, namespace: str, view: KeyView, manifest: Manifest, inside: str) -> KeyView:
        """The next version of a key, without a path of its folder."""
        entries = tuple(
            entry
            for entry in manifest.entries
            if entry.path != inside and not entry.path.startswith(f"{inside}/")
        )
        blobs = self._blob_stores.of(namespace).blobs
        smaller, packs = _repacked(blobs, manifest, entries)
        digest, encoded = manifests.encode(smaller)
        blobs.put(digest, encoded)
        blobs.sync((*packs, digest))
        return replace(
            view,
            manifest=digest,
            version=view.version + 1,
            size=smaller.size,
            files=sum(entry.kind == "file" for entry in entries),
            created=self._clock.time(),
        )

    def _delete(self, namespace: str, views: list[KeyView]) -> RemoveAnswer:
        deleted = tuple(view.key for view in views)
        self._folder(namespace).remove(deleted)
        self._release(namespace, views)
        if deleted:
            _log.info("keys deleted namespace=%s count=%s", namespace, len(deleted))
        return RemoveAnswer(keys=deleted)

    def _release(self, namespace: str, views: Iterable[KeyView]) -> None:
        """Keep the blobs of versions that end as long as those of an upload: they may be read."""
        blobs = self._blob_stores.of(namespace).blobs
        for view in views:
            try:
                digests = self._content(namespace, view).digests
            except DataStoreError as error:
                _log.warning("version not read at its end key=%s error=%s", view.key, error)
            else:
                blobs.touch((view.manifest, *digests))

    async def end_service(self, namespace: str, service: str) -> int:
        """Delete the keys of a service that was torn down; returns their number."""
        views = [
            view
            for view in self._folder(namespace).beginning("")
            if service in (view.service, view.publisher and view.publisher.workload)
        ]
        if not views:
            return 0
        async with self._blob_stores.of(namespace).lock:
            await self._blob_stores.in_data_thread(lambda: self._delete(namespace, views))
        return len(views)

    async def list(self, namespace: str, path: str) -> list[ListedPath]:
        path = keys.canonical(path)
        around = self._around(namespace, path)
        rows = await self._blob_stores.in_data_thread(lambda: self._list(namespace, path, around))
        return [
            row if row.key is None else replace(row, key=self._described(namespace, row.key))
            for row in rows
        ]


def _locale(view: KeyView) -> str:
    return "store" if view.publisher is None else view.publisher.pod


def _missing(blobs: BlobStore, manifest: Manifest) -> list[str]:
    """The blobs that are missing.

    Raises:
        DataStoreError: A blob has another size than the manifest says.
    """
    sizes: dict[str, int | None] = {}
    for entry in manifest.entries:
        for chunk in entry.chunks:
            if not chunk.digest:
                continue
            digest = manifest.blob_of(chunk)
            if digest not in sizes:
                sizes[digest] = blobs.kept_size(digest)
            size, end = sizes[digest], chunk.offset + chunk.size
            if size is not None and (size < end if chunk.pack is not None else size != end):
                raise DataStoreError(
                    f"the blob {digest} of {entry.path!r} has {size:,} bytes; its manifest "
                    f"says {end:,}"
                )
    return [digest for digest, size in sizes.items() if size is None]


def _repacked(
    blobs: BlobStore, manifest: Manifest, entries: tuple[Entry, ...]
) -> tuple[Manifest, list[str]]:
    """A manifest with these of its entries, and the packs that it has instead of others.

    A pack with bytes of other entries could not be made of its files, as pods do that have it.
    """
    packed, remaining = _packed(manifest.entries), _packed(entries)
    packs, offsets, new_packs = list(manifest.packs), dict[tuple[int | None, int], int](), []
    for pack, sizes in remaining.items():
        if len(sizes) == len(packed[pack]):
            continue
        try:
            data, content = blobs.read(packs[pack]), bytearray()
        except StoreUnavailableError:
            raise
        except DataStoreError:  # it is damaged: a get says so
            continue
        for offset, size in sorted(sizes.items()):
            offsets[pack, offset] = len(content)
            content += data[offset : offset + size]
        packs[pack] = blobs.add(bytes(content))
        new_packs.append(packs[pack])
    moved_entries = tuple(
        replace(
            entry,
            chunks=tuple(
                replace(chunk, offset=offsets.get((chunk.pack, chunk.offset), chunk.offset))
                for chunk in entry.chunks
            ),
        )
        for entry in entries
    )
    return replace(manifest, entries=moved_entries, packs=tuple(packs)), new_packs


def _packed(entries: Iterable[Entry]) -> dict[int, dict[int, int]]:
    """By number of a pack: the sizes of its chunks by their offsets."""
    packed: dict[int, dict[int, int]] = {}
    for entry in entries:
        for chunk in entry.chunks:
            if chunk.pack is not None:
                packed.setdefault(chunk.pack, {})[chunk.offset] = chunk.size
    return packed


def _replaced(key: str, content: Content, around: Surroundings) -> list[KeyView]:
    """The keys below a key whose paths its new folder has.

    Raises:
        DataStoreError: A key below would lie below a file.
    """
    replaced = []
    for view in around.below:
        path = view.key[len(key) + 1 :]
        file = content.file_above(path) if content.manifest.is_folder else key
        if file is not None:
            raise DataStoreError(
                f"{key!r} cannot be put: {file!r} would be a file, and {view.key!r} is below it",
                hint=f"choose another key, or delete the keys below first: kt rm {key} --recursive",
            )
        if content.kind(path) is not None:
            replaced.append(view)
    return replaced


def _rows(manifest: Manifest, view: KeyView, inside: str) -> dict[str, ListedPath]:
    """What is directly below a path of a key's folder."""
    start = f"{inside}/" if inside else ""
    rows: dict[str, ListedPath] = {}
    for entry in manifest.entries:
        if not entry.path.startswith(start):
            continue
        name, _, rest = entry.path[len(start) :].partition("/")
        row = rows.get(name)
        if row is not None:
            rows[name] = replace(row, is_directory=True, size=row.size + entry.size)
        elif rest:
            rows[name] = replace(_listed(name, entry, view), is_directory=True)
        else:
            rows[name] = _listed(name, entry, view)
    return rows


def _listed(name: str, entry: Entry, view: KeyView, key: KeyView | None = None) -> ListedPath:
    return ListedPath(
        name=name,
        is_directory=entry.kind == "folder",
        size=entry.size,
        created=view.created,
        locale=_locale(view),
        key=key,
    )


def _prefix(path: str) -> str:
    """The characters with which keys begin, as a key in canonical form."""
    key = keys.check(path)
    return f"{key}/" if path.endswith("/") else key
