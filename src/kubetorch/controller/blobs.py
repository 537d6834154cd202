"""Blobs: where they lie, which are missing, how pods bring them back, and when they are deleted.

A blob is asked for by its digest, and who knows a digest need not be allowed to read what it
stands for. So in a cluster namespaces share nothing: a blob that nobody brought to a namespace is
not there for that namespace. On one machine there is one user, and blobs of one namespace need not
be brought again to another.

A controller whose blobs lie on an emptyDir starts without them, while the pods go on with what they
have. What a new pod of the same generation will ask for is asked of a pod that runs already, as
soon as it connects, and of one after the other as long as a pod waits for it.

Blobs are kept for the generations that are kept of each workload (wanted, last good, and the one
before), and for results of spawned calls that are kept. A blob that came in the last ten minutes is
left alone whatever refers to it: it may belong to a deploy that is on its way. A store that was
found full is looked through at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from kubetorch.controller.workload import Workload
from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore, Room
from kubetorch.errors import DataStoreError, KubetorchError, ProjectTooLargeError
from kubetorch.lib.clock import Clock, Timer
from kubetorch.lib.tasks import cancel_all
from kubetorch.specs import names
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import SendBlobs

#: Files of trees that are remembered, of all namespaces.
_REMEMBERED = 300_000
#: Threads that receive, send and read blobs: more would keep the loop waiting for its turn.
_THREADS = 2
#: Seconds that one pod has to send what it has, until another one is asked.
RECOVERY_PATIENCE = 30.0
#: The same, while a pod waits for what is missing.
WAITING_PATIENCE = 3.0
#: Pods that a reason names.
_NAMED = 3
#: Seconds after its last upload in which a blob is never deleted.
YOUNG = 600.0
#: Seconds between two collections.
COLLECTION_INTERVAL = 1800.0
#: Seconds from the start of the controller to the first one.
FIRST_COLLECTION = 20.0
# Blobs that are deleted between two looks at what is needed.
_BATCH = 100

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
            while self._count > _REMEMBERED:
                self._count -= len(self._files.popitem(last=False)[1])
            return files


class NamespaceBlobs:
    """The blobs of one namespace, or of all where namespaces share them."""

    def __init__(self, blobs: BlobStore, namespace: str | None, stores: BlobStores) -> None:
        self.namespace = namespace
        self.blobs = blobs
        #: Specs of deploys that are not stored yet, but need their blobs already.
        self.awaited: list[WorkloadSpec] = []
        #: Held while blobs are looked for, and while some are deleted.
        self.turn = asyncio.Lock()
        self._stores = stores
        # Trees whose files were all there, as long as the store has this mark.
        self._complete: set[str] = set()
        self._damage_mark = blobs.damage_mark

    def is_of(self, namespace: str) -> bool:
        return self.namespace in (None, namespace)

    async def missing(self, spec: WorkloadSpec) -> list[str]:
        """The blobs that have to come before the generation can exist."""
        async with self.turn:
            is_current = self._damage_mark is self.blobs.damage_mark
            if is_current and self._complete.issuperset(spec.trees):
                return self.find_missing(spec)  # no tree is to be read
            return await self._stores.in_thread(lambda: self.find_missing(spec))

    def find_missing(self, spec: WorkloadSpec) -> list[str]:
        if self._damage_mark is not self.blobs.damage_mark:
            self._damage_mark = self.blobs.damage_mark
            self.forget()
        arguments = [] if spec.init_args is None else [spec.init_args]
        missing = self.blobs.missing([*spec.trees, *arguments])
        here = [tree for tree in spec.trees if tree not in missing]
        for tree in here:
            missing += self._missing_files(tree)
        return missing

    def forget(self) -> None:
        """Blobs were deleted, or found broken."""
        self._complete.clear()

    def _missing_files(self, tree: str) -> list[str]:
        if tree in self._complete:
            return []
        files = self._stores.files.read(self.blobs, tree)
        known: set[str] = set()
        for digest in self._complete:
            known |= self._stores.files.get(digest)
        missing = self.blobs.missing(files - known)
        if not missing:
            self._complete.add(tree)
        return missing

    @contextlib.contextmanager
    def keep(self, spec: WorkloadSpec) -> Iterator[None]:
        """Keep the blobs that are here until the generation is stored."""
        self.awaited.append(spec)
        try:
            yield
        finally:
            self.awaited.remove(spec)


class BlobStores:
    def __init__(self, folder: Path, *, is_shared: bool = False, room: Room | None = None) -> None:
        self._folder = folder
        self._room = room or Room()
        self.on_full: Callable[[], None] = lambda: None
        self.files = TreeFiles()
        self._threads = asyncio.Semaphore(_THREADS)
        self._shared = self._new(folder, None) if is_shared else None
        self._known: dict[str, NamespaceBlobs] = {}

    def of(self, namespace: str) -> NamespaceBlobs:
        if self._shared is not None:
            return self._shared
        found = self._known.get(namespace)
        if found is None:
            names.check_namespace(namespace)
            found = self._known[namespace] = self._new(self._folder / namespace, namespace)
        return found

    def _new(self, folder: Path, namespace: str | None) -> NamespaceBlobs:
        return NamespaceBlobs(BlobStore(folder, self._room), namespace, self)

    def all(self) -> list[NamespaceBlobs]:
        """Every store that there is, also those that nobody has asked for yet."""
        if self._shared is not None:
            return [self._shared]
        if self._folder.is_dir():
            for entry in self._folder.iterdir():
                if entry.is_dir():
                    self.of(entry.name)
        return list(self._known.values())

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, which reads or writes blobs, without holding up the loop."""
        async with self._threads:
            return await asyncio.to_thread(work)


class BlobRecovery:
    def __init__(self, blob_stores: BlobStores, clock: Clock) -> None:
        self._blob_stores = blob_stores
        self._clock = clock
        # When a pod of each workload was asked last; only workloads that lack something are here.
        self._asked: dict[tuple[str, str], float] = {}
        # When each of its pods was asked, at first and last.
        self._asked_pods: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}

    async def ask_for(self, workload: Workload, pod: str) -> str:
        """Have what a pod waits for asked of the next of the others; from whom it is awaited."""
        senders = {name: send for name, send in workload.senders().items() if name != pod}
        asked = self._asked_pods.setdefault(workload.key, {})
        for gone in asked.keys() - senders.keys():
            del asked[gone]
        now = self._clock.time()
        if not senders:
            reason = "no other pod is connected that may have them; the next deploy brings them"
            await self._end_deploy(workload, reason)
            return reason
        latest = max((last for _, last in asked.values()), default=-WAITING_PATIENCE)
        if now - latest >= WAITING_PATIENCE:
            chosen = min(senders, key=lambda name: asked[name][1] if name in asked else -1.0)
            first, _ = asked.get(chosen, (now, now))
            asked[chosen] = first, now
            message = await self._missing(workload)
            if message is not None:
                _log.info("blobs awaited workload=%s of=%s by=%s", workload.key, chosen, pod)
                senders[chosen](message)
        names = sorted(asked)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        known = f"asked of {', '.join(names[:_NAMED])}{more}"
        newest = max(first for first, _ in asked.values())
        if len(asked) < len(senders) or now - newest < WAITING_PATIENCE:
            return known
        reason = f"{known}, without success so far; the next deploy brings them"
        await self._end_deploy(workload, reason)
        return reason

    async def _end_deploy(self, workload: Workload, reason: str) -> None:
        """A deploy that waits for blobs which nobody has would wait until its timeout."""
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

    async def ask(self, workload: Workload, send: Callable[[SendBlobs], None]) -> None:
        """Ask a pod that serves, if something is missing and no other pod was asked just now."""
        now = self._clock.time()
        if now - self._asked.get(workload.key, -RECOVERY_PATIENCE) < RECOVERY_PATIENCE:
            return
        self._asked[workload.key] = now
        message = None
        try:
            message = await self._missing(workload)
        except (KubetorchError, OSError) as error:
            _log.warning("blobs not looked for workload=%s error=%s", workload.key, error)
        if message is None:
            self._asked.pop(workload.key, None)
            self._asked_pods.pop(workload.key, None)
            return
        _log.info(
            "blobs missing workload=%s count=%s", workload.key, len(message.blobs + message.trees)
        )
        send(message)

    async def _missing(self, workload: Workload) -> SendBlobs | None:
        blobs: dict[str, None] = {}
        trees: dict[str, None] = {}
        for spec in workload.specs:
            missing = await self._blob_stores.of(spec.namespace).missing(spec)
            found = dict.fromkeys(missing)
            trees |= {digest: None for digest in found if digest in spec.trees}
            blobs |= found
        lost = tuple(digest for digest in blobs if digest not in trees)
        return SendBlobs(blobs=lost, trees=tuple(trees)) if blobs else None


class GarbageCollector:
    def __init__(
        self,
        blob_stores: BlobStores,
        *,
        specs: Callable[[], Iterable[WorkloadSpec]],
        results: Callable[[NamespaceBlobs], set[str]],
        expire: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._blob_stores = blob_stores
        self._specs = specs
        self._results = results
        self._expire = expire
        self._clock = clock
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._timer = self._clock.call_later(FIRST_COLLECTION, self._begin)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await cancel_all([self._task])

    def hurry(self) -> None:
        """Collect now, unless that is being done: somebody found no room."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def collect(self) -> int:
        """Delete what nothing refers to; how many blobs that were."""
        self._expire()
        return sum([await self._collect(store) for store in self._blob_stores.all()])

    async def _collect(self, store: NamespaceBlobs) -> int:
        blobs = store.blobs
        await asyncio.to_thread(blobs.sweep)
        old = self._clock.time() - YOUNG
        candidates = await asyncio.to_thread(
            lambda: [blob.digest for blob in blobs.iterate() if blob.mtime < old]
        )
        needed, deleted = _Needed(blobs), 0
        # All trees are read once, and then only those that come meanwhile.
        await asyncio.to_thread(needed.add, self._specs_of(store))
        for start in range(0, len(candidates), _BATCH):
            # Asked again for each batch, in a turn: a deploy either sees a blob and keeps it, or
            # sees that it is gone and asks for it.
            async with store.turn:
                specs, results = self._specs_of(store), self._results(store)
                batch = [one for one in candidates[start : start + _BATCH] if one not in results]
                deleted += await asyncio.to_thread(needed.delete_others, specs, batch)
                store.forget()
        _log.info("blobs collected deleted=%s kept=%s", deleted, len(candidates) - deleted)
        return deleted

    def _specs_of(self, store: NamespaceBlobs) -> list[WorkloadSpec]:
        return [*store.awaited, *(one for one in self._specs() if store.is_of(one.namespace))]

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._timer = self._clock.call_later(COLLECTION_INTERVAL, self._begin)

    async def _run(self) -> None:
        try:
            await self.collect()
        except (KubetorchError, OSError):
            _log.exception("blobs not collected")


class _Needed:
    """The blobs that generations refer to; during a collection this set only grows."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._trees: set[str] = set()
        self._digests: set[str] = set()

    def delete_others(self, specs: Iterable[WorkloadSpec], digests: Iterable[str]) -> int:
        """Delete those of `digests` that no generation refers to; how many those were."""
        self.add(specs)
        return sum(self._blobs.delete(one) for one in digests if one not in self._digests)

    def add(self, specs: Iterable[WorkloadSpec]) -> None:
        for spec in specs:
            if spec.init_args is not None:
                self._digests.add(spec.init_args)
            for tree in spec.trees:
                if tree not in self._trees and self._blobs.has(tree):
                    self._trees.add(tree)
                    self._digests.update((tree, *self._files_of(tree)))

    def _files_of(self, tree: str) -> Iterable[str]:
        try:
            return trees.read(self._blobs, tree).digests()
        except (
            DataStoreError,
            ProjectTooLargeError,
        ) as error:  # whoever deploys it again brings its files too
            _log.warning("tree not readable tree=%s error=%s", tree, error)
            return ()
