"""Blobs: their stores, which of them are missing, how pods send them back, and their deletion.

A blob is named by its digest, and a user who knows a digest need not be allowed to read the blob.
So in a cluster namespaces share nothing: each has only the blobs that were uploaded to it. On one
machine there is one user, and namespaces share their blobs.

A controller whose blobs are on an emptyDir starts without them, while the pods have theirs. The
blobs that a new pod of the same generation will need are requested from a pod that runs already, as
soon as it connects, and from one pod after the other while a pod waits for them.

Blobs are kept for the stored generations of each workload (wanted, last good, and the one before),
for the stored results of spawned calls, and for the keys of the data store. A blob of the last ten
minutes is never deleted: it may belong to a deploy that has just begun. A store that is full is
cleaned at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Workload
from kubetorch.datastore import manifests, trees
from kubetorch.datastore.blobs import BlobStore, Room
from kubetorch.errors import (
    DataStoreError,
    KubetorchError,
    ProjectTooLargeError,
    StoreUnavailableError,
)
from kubetorch.lib.clock import Clock, Timer
from kubetorch.lib.tasks import cancel_all
from kubetorch.specs import names
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.data import CollectionReport
from kubetorch.wire.messages import SendBlobs

if TYPE_CHECKING:
    from kubetorch.datastore.bucket_store import StoreBucket

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class TreeFiles:
    """The files of the trees that were read last."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._count = 0
        # One tree at a time: the largest takes 100 MB while it is read.
        self._lock = threading.Lock()

    def get(self, tree: str) -> frozenset[str]:
        """The files of a tree, as far as they are remembered."""
        return self._files.get(tree, frozenset())

    def read(self, blobs: BlobStore, tree: str) -> frozenset[str]:
        with self._lock:
            files = self._files.pop(tree, None)
            if files is None:
                files = frozenset(trees.read(blobs, tree).digests())
                self._count += len(files)
            self._files[tree] = files
            while self._count > LIMITS.remembered_files:
                self._count -= len(self._files.popitem(last=False)[1])
            return files


class NamespaceBlobs:
    """The blobs of one namespace, or of all where namespaces share them."""

    def __init__(self, blobs: BlobStore, namespace: str | None, stores: BlobStores) -> None:
        self.namespace = namespace
        self.blobs = blobs
        #: Specs of deploys that are not stored yet, but whose blobs must not be deleted.
        self.awaited: list[WorkloadSpec] = []
        #: Held while blobs are looked for, and while some are deleted.
        self.lock = asyncio.Lock()
        self._stores = stores
        # Trees of which the store has all files, as long as it has this mark.
        self._complete_trees: set[str] = set()
        self._damage_mark = blobs.damage_mark

    def is_of(self, namespace: str) -> bool:
        return self.namespace in (None, namespace)

    async def missing(self, spec: WorkloadSpec) -> list[str]:
        """The blobs of a spec that have to be uploaded before its generation can exist."""
        async with self.lock:
            if self._damage_mark is self.blobs.damage_mark and self._complete_trees.issuperset(
                spec.trees
            ):
                return self.find_missing(spec)  # no tree is to be read
            return await self._stores.in_thread(lambda: self.find_missing(spec))

    def find_missing(self, spec: WorkloadSpec) -> list[str]:
        if self._damage_mark is not self.blobs.damage_mark:
            self._damage_mark = self.blobs.damage_mark
            self.forget()
        arguments = [] if spec.init_args is None else [spec.init_args]
        missing = self.blobs.missing([*spec.trees, *arguments])
        stored_trees = [tree for tree in spec.trees if tree not in missing]
        for tree in stored_trees:
            missing += self._missing_files(tree)
        return missing

    def forget(self) -> None:
        """Blobs were deleted, or found broken."""
        self._complete_trees.clear()

    def _missing_files(self, tree: str) -> list[str]:
        if tree in self._complete_trees:
            return []
        files = self._stores.files.read(self.blobs, tree)
        stored_files: set[str] = set()
        for digest in self._complete_trees:
            stored_files |= self._stores.files.get(digest)
        missing = self.blobs.missing(files - stored_files)
        if not missing:
            self._complete_trees.add(tree)
        return missing

    @contextlib.contextmanager
    def keep(self, spec: WorkloadSpec) -> Iterator[None]:
        """Keep the blobs of a spec until its generation is stored."""
        self.awaited.append(spec)
        try:
            yield
        finally:
            self.awaited.remove(spec)


class BlobStores:
    """The stores of all namespaces; `bucket` keeps those of their blobs that keys have."""

    def __init__(
        self,
        folder: Path,
        *,
        is_shared: bool = False,
        room: Room | None = None,
        bucket: StoreBucket | None = None,
    ) -> None:
        self._folder = folder
        self._room = room or Room()
        self.bucket = bucket
        self.on_full: Callable[[], None] = lambda: None
        self.files = TreeFiles()
        self._threads = asyncio.Semaphore(LIMITS.blob_threads)
        # A deploy does not wait for a bucket that is slow.
        self._data_threads = (
            self._threads if bucket is None else asyncio.Semaphore(LIMITS.bucket_threads)
        )
        self._shared = self._new(folder, None) if is_shared else None
        self._by_namespace: dict[str, NamespaceBlobs] = {}

    def of(self, namespace: str) -> NamespaceBlobs:
        if self._shared is not None:
            return self._shared
        store = self._by_namespace.get(namespace)
        if store is None:
            names.check_namespace(namespace)
            store = self._by_namespace[namespace] = self._new(self._folder / namespace, namespace)
        return store

    def _new(self, folder: Path, namespace: str | None) -> NamespaceBlobs:
        blobs = BlobStore(folder, self._room)
        if self.bucket is not None:
            blobs = self.bucket.blobs(folder, self._room, namespace)
        return NamespaceBlobs(blobs, namespace, self)

    def load(self) -> None:
        """List what the bucket has."""
        if self.bucket is not None and self._shared is None:
            for namespace in filter(names.is_namespace, self.bucket.folders("blobs")):
                self.of(namespace)
        for store in self.all():
            store.blobs.everywhere()

    def all(self) -> list[NamespaceBlobs]:
        """Every store, also those of namespaces without a request so far."""
        if self._shared is not None:
            return [self._shared]
        if self._folder.is_dir():
            for entry in self._folder.iterdir():
                if entry.is_dir():
                    self.of(entry.name)
        return list(self._by_namespace.values())

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, which reads or writes blobs, without holding up the loop."""
        async with self._threads:
            return await asyncio.to_thread(work)

    async def in_data_thread(self, work: Callable[[], _T]) -> _T:
        """As `in_thread`, for what keys have: it may be in a bucket."""
        async with self._data_threads:
            return await asyncio.to_thread(work)


class BlobRecovery:
    def __init__(self, blob_stores: BlobStores, clock: Clock) -> None:
        self._blob_stores = blob_stores
        self._clock = clock
        # By workload with missing blobs: the time of the last request to a pod that connected.
        self._workload_request_times: dict[tuple[str, str], float] = {}
        # By workload and pod: the times of the first and the last request while a pod waits.
        self._pod_request_times: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}

    async def request_for(self, workload: Workload, pod: str) -> str:
        """Request the blobs that a pod waits for from the next of the other pods.

        Returns from which pods they are awaited, or why they will not come, in words.
        """
        senders = {name: send for name, send in workload.senders().items() if name != pod}
        request_times = self._pod_request_times.setdefault(workload.key, {})
        for disconnected_pod in request_times.keys() - senders.keys():
            del request_times[disconnected_pod]
        now = self._clock.time()
        if not senders:
            reason = "no other pod is connected that may have them; the next deploy brings them"
            await self._end_deploy(workload, reason)
            return reason
        latest = max(
            (last for _, last in request_times.values()),
            default=-TIMING.awaited_blob_recovery_seconds,
        )
        if now - latest >= TIMING.awaited_blob_recovery_seconds:
            chosen = min(
                senders, key=lambda name: request_times[name][1] if name in request_times else -1.0
            )
            first, _ = request_times.get(chosen, (now, now))
            request_times[chosen] = first, now
            message = await self._missing_blobs(workload)
            if message is not None:
                _log.info("blobs awaited workload=%s of=%s by=%s", workload.key, chosen, pod)
                senders[chosen](message)
        names = sorted(request_times)
        more = (
            f" and {len(names) - LIMITS.named_pods} more" if len(names) > LIMITS.named_pods else ""
        )
        requests_in_words = f"asked of {', '.join(names[: LIMITS.named_pods])}{more}"
        newest = max(first for first, _ in request_times.values())
        if len(request_times) < len(senders) or now - newest < TIMING.awaited_blob_recovery_seconds:
            return requests_in_words
        reason = f"{requests_in_words}, without success so far; the next deploy brings them"
        await self._end_deploy(workload, reason)
        return reason

    async def _end_deploy(self, workload: Workload, reason: str) -> None:
        """End a deploy that waits for blobs which no pod has: it would wait until its timeout."""
        spec = workload.spec
        missing = await self._blob_stores.of(spec.namespace).missing(spec)
        if missing:
            workload.end_deploy(
                DataStoreError(
                    f"{len(missing)} blobs of {spec.name} are not here any more, such as "
                    f"{missing[0]}: {reason}",
                    hint="deploy again: the client uploads what is missing",
                )
            )

    async def request(self, workload: Workload, send: Callable[[SendBlobs], None]) -> None:
        """Request missing blobs from a pod that serves, unless another pod has just been asked."""
        now = self._clock.time()
        if (
            now - self._workload_request_times.get(workload.key, -TIMING.blob_recovery_seconds)
            < TIMING.blob_recovery_seconds
        ):
            return
        self._workload_request_times[workload.key] = now
        message = None
        try:
            message = await self._missing_blobs(workload)
        except (KubetorchError, OSError) as error:
            _log.warning("blobs not looked for workload=%s error=%s", workload.key, error)
        if message is None:
            self._workload_request_times.pop(workload.key, None)
            self._pod_request_times.pop(workload.key, None)
            return
        _log.info(
            "blobs missing workload=%s count=%s", workload.key, len(message.blobs + message.trees)
        )
        send(message)

    async def _missing_blobs(self, workload: Workload) -> SendBlobs | None:
        blobs: dict[str, None] = {}
        trees: dict[str, None] = {}
        for spec in workload.specs:
            missing = await self._blob_stores.of(spec.namespace).missing(spec)
            missing_digests = dict.fromkeys(missing)
            trees |= {digest: None for digest in missing_digests if digest in spec.trees}
            blobs |= missing_digests
        files = tuple(digest for digest in blobs if digest not in trees)
        return SendBlobs(blobs=files, trees=tuple(trees)) if blobs else None


class GarbageCollector:
    def __init__(
        self,
        blob_stores: BlobStores,
        *,
        specs: Callable[[], Iterable[WorkloadSpec]],
        results: Callable[[NamespaceBlobs], set[str]],
        manifests: Callable[[NamespaceBlobs], set[str]],
        refresh: Callable[[NamespaceBlobs, bool], None],
        expire: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._blob_stores = blob_stores
        self._specs = specs
        self._results = results
        self._manifests = manifests
        self._refresh = refresh
        self._expire = expire
        self._clock = clock
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._timer = self._clock.call_later(TIMING.collection_first_delay_seconds, self._begin)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await cancel_all([self._task])

    def hurry(self) -> None:
        """Collect now, unless a collection runs: an upload found no room."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def collect(self) -> int:
        """Delete the blobs that nothing refers to; returns their number."""
        self._expire()
        return sum(
            [(await self._collect(store)).deleted_blobs for store in self._blob_stores.all()]
        )

    async def collect_one(self, store: NamespaceBlobs, is_dry: bool) -> CollectionReport:
        """Delete the blobs of one store that nothing refers to, or count them."""
        self._expire()
        return await self._collect(store, is_dry=is_dry)

    async def _collect(self, store: NamespaceBlobs, *, is_dry: bool = False) -> CollectionReport:
        blobs = store.blobs
        await asyncio.to_thread(blobs.sweep)
        old = self._clock.time() - TIMING.young_blob_seconds
        infos = await asyncio.to_thread(blobs.everywhere)
        async with store.lock:
            await asyncio.to_thread(self._refresh, store, False)
        needed = _NeededBlobs(blobs)
        # All trees are read once here, and then only those of deploys that begin meanwhile.
        await asyncio.to_thread(needed.add, self._specs_of(store), self._manifests(store))
        results = self._results(store)
        unneeded = [info for info in infos if not needed.has(info.digest, results)]
        young = [info for info in unneeded if info.mtime >= old]
        candidates = [info.digest for info in unneeded if info.mtime < old]
        sizes = {info.digest: info.size for info in infos}
        deleted: list[str] = candidates if is_dry else []
        for start in range(0, 0 if is_dry else len(candidates), LIMITS.collection_batch_blobs):
            # The specs and keys are read again for each batch, under the lock: a deploy or put
            # either sees a blob and keeps it, or sees that it was deleted and asks for it.
            async with store.lock:
                await asyncio.to_thread(self._refresh, store, True)
                specs, results = self._specs_of(store), self._results(store)
                batch = candidates[start : start + LIMITS.collection_batch_blobs]
                await asyncio.to_thread(needed.add, specs, self._manifests(store))
                deleted += await asyncio.to_thread(needed.delete_unneeded, batch, results)
                store.forget()
        _log.info("blobs collected deleted=%s of=%s is_dry=%s", len(deleted), len(infos), is_dry)
        size, young_size = sum(map(sizes.__getitem__, deleted)), sum(info.size for info in young)
        return CollectionReport(
            deleted_blobs=len(deleted),
            deleted_size=size,
            young_blobs=len(young),
            young_size=young_size,
            remaining_blobs=len(infos) - len(deleted) - len(young),
            remaining_size=sum(sizes.values()) - size - young_size,
        )

    def _specs_of(self, store: NamespaceBlobs) -> list[WorkloadSpec]:
        return [*store.awaited, *(spec for spec in self._specs() if store.is_of(spec.namespace))]

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._timer = self._clock.call_later(TIMING.collection_interval_seconds, self._begin)

    async def _run(self) -> None:
        try:
            await self.collect()
        except (KubetorchError, OSError):
            _log.exception("blobs not collected")


class _NeededBlobs:
    """The blobs that generations and keys refer to; during a collection this set only grows."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._trees: set[str] = set()
        self._manifests: set[str] = set()
        self._digests: set[str] = set()

    def has(self, digest: str, results: set[str]) -> bool:
        return digest in self._digests or digest in results

    def delete_unneeded(self, digests: Iterable[str], results: set[str]) -> list[str]:
        """Delete those of `digests` that nothing refers to; returns them."""
        return self._blobs.delete_all(
            [digest for digest in digests if not self.has(digest, results)]
        )

    def add(self, specs: Iterable[WorkloadSpec], key_manifests: set[str]) -> None:
        new_manifests = key_manifests - self._manifests
        # Nothing may be deleted while a bucket does not answer, or a manifest is damaged there.
        self._blobs.fetch(new_manifests)
        for manifest in new_manifests:
            self._manifests.add(manifest)
            self._digests.update((manifest, *self._chunks_of(manifest)))
        for spec in specs:
            if spec.init_args is not None:
                self._digests.add(spec.init_args)
            for tree in spec.trees:
                if tree not in self._trees and self._blobs.has(tree):
                    self._trees.add(tree)
                    self._digests.update((tree, *self._files_of(tree)))

    def _chunks_of(self, manifest: str) -> Iterable[str]:
        try:
            return manifests.read(self._blobs, manifest).digests()
        except StoreUnavailableError:
            raise
        except DataStoreError as error:  # the next put uploads its chunks again
            _log.warning("manifest not readable manifest=%s error=%s", manifest, error)
            return ()

    def _files_of(self, tree: str) -> Iterable[str]:
        try:
            return trees.read(self._blobs, tree).digests()
        except (
            DataStoreError,
            ProjectTooLargeError,
        ) as error:  # the next deploy uploads its files again
            _log.warning("tree not readable tree=%s error=%s", tree, error)
            return ()
