"""The state of a controller in a cluster: one `KubetorchWorkload` object for each workload.

What is put is seen at once, and written behind: by one task for each workload that has something
to be written, which does what `kubetorch.controller.cluster.writes` says. The same objects are
watched, so that what users do to them has an effect: a deleted one is torn down, an edited one is
put right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kubetorch.controller.cluster import resource, writes
from kubetorch.controller.cluster.access import beyond_rendered
from kubetorch.controller.cluster.resource import WORKLOADS, Content
from kubetorch.controller.cluster.writes import PendingWrite, Step
from kubetorch.controller.state import Contents, Generation, Observer, Summary, WorkloadRecord
from kubetorch.errors import KubernetesNotFoundError, KubetorchError, ServiceTimeoutError, SpecError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Selection, key
from kubetorch.k8s.watching import DELETED, Change
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all

#: Seconds that a deploy or a delete waits for an API server that is away.
PATIENCE = 45.0
#: Seconds that a new world is not announced because it is not written yet.
WORLDS_PATIENCE = 5.0
#: Seconds that what is not written yet has when the controller stops.
CLOSE_GRACE = 5.0
#: Requests at the same time.
WRITERS = 16
#: The number of an epoch that was not written any more is lower than the one that was by less.
EPOCHS = 10_000

# Seconds until a process that does not lead looks again whether it does.
_FOLLOWING = 0.2
_Key = tuple[str, str]

_log = logging.getLogger(__name__)


class KubernetesState:
    """The workloads of a cluster; `load` comes first, `close` last."""

    def __init__(
        self,
        client: Client,
        *,
        namespaces: Sequence[str] = (),
        may_write: Callable[[], bool] = lambda: True,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._may_write = may_write
        self._patience = patience
        self._clock = clock
        self._observer: Observer | None = None
        self._entries: dict[_Key, _Entry] = {}
        self._writers = asyncio.Semaphore(WRITERS)
        self._is_loaded = self._is_closed = False
        self._informers = [
            Informer(client, Selection(WORKLOADS, namespace), self._on_change)
            for namespace in (namespaces or (None,))
        ]

    # -------------------------------------------------------------------------- start and end

    async def load(self, *, timeout: float = 60.0) -> None:
        """Read all workloads, and go on watching them."""
        for informer in self._informers:
            await informer.__aenter__()
        try:
            for informer in self._informers:
                await informer.listed(timeout=timeout)
        except BaseException:
            await self._stop_watching()
            raise
        for informer in self._informers:
            for found in informer.objects.values():
                self._adopt(found)
        self._is_loaded = True

    async def close(self) -> None:
        """Write what is not written yet, if that is quickly done, and stop."""
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for entry in self._entries.values():
            entry.is_hurried = True
            entry.pending.hurry()
            entry.changes.notify()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_GRACE)
        self._is_closed = True
        await cancel_all(tasks)
        await self._stop_watching()

    async def _stop_watching(self) -> None:
        for informer in self._informers:
            await informer.close()

    def _adopt(self, found: Object) -> None:
        entry = _Entry(*key(found))
        try:
            content = resource.read(found)
            for generation in content.generations:
                _check_deployed(generation)
            entry.pending.put(content, is_new=True)
            entry.pending.seen(found)
        except Exception as error:  # noqa: BLE001  # anybody may have written it
            self.reject_workload(*key(found), f"{type(error).__name__}: {error}")
            return
        self._entries[key(found)] = entry

    # ------------------------------------------------------------------------ State's methods

    def contents(self) -> Contents:  # State's
        found = [entry.pending.wanted for entry in self._entries.values()]
        known = [content for content in found if content is not None]
        return Contents(
            # A later epoch than any that was announced: the last ones may not be written.
            tuple(replace(one.record, epoch=one.record.epoch + EPOCHS) for one in known),
            {(one.record.namespace, one.record.name): one.generations for one in known},
        )

    def put_workload(  # State's
        self,
        workload: WorkloadRecord,
        *,
        generation: Generation | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        at = (workload.namespace, workload.name)
        entry = self._entries.get(at)
        if entry is None:
            if generation is None:
                return  # it was deleted meanwhile
            entry = _Entry(*at)
        wanted = entry.pending.wanted
        generations = () if wanted is None else wanted.generations
        if generation is not None:
            others = (one for one in generations if one.number != generation.number)
            generations = (*others, generation)
        kept = tuple(one for one in generations if not keep or one.number in keep)
        is_new = generation is not None or kept != generations
        entry.pending.put(Content(workload, kept), is_new=is_new)
        self._entries[at] = entry
        self._changed(entry)

    def delete_workload(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is not None:
            entry.pending.delete()
            self._changed(entry)

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:
        """Leave a workload alone: its pods go on, and another version may understand it."""
        self._entries.pop((namespace, name), None)
        _log.error(
            "workload left alone, since it cannot be read workload=%s/%s: %s",
            *(namespace, name, reason),
        )

    def observe(self, observer: Observer) -> None:  # State's
        self._observer = observer
        for at in self._entries:
            self.touch(*at)

    def touch(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is not None and self._observer is not None:
            entry.pending.touch()
            self._changed(entry)

    async def flush(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is None:
            return
        entry.flushing += 1
        try:
            await self._flush(entry)
        finally:
            entry.flushing -= 1
            self._forget(entry)

    async def _flush(self, entry: _Entry) -> None:
        pending = entry.pending
        try:
            async with deadlines.timeout(self._patience):
                while pending.error is None and not pending.is_durable:
                    await entry.changes.wait()
        except TimeoutError:
            pending.give_up(
                entry.failure
                or ServiceTimeoutError(
                    f"{pending.namespace}/{pending.name} was not stored within "
                    f"{self._patience:g} s",
                    hint="try again in a moment; kt check says how the cluster is",
                )
            )
            self._changed(entry)
        if pending.error is not None:
            raise pending.error

    async def flush_worlds(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is None:
            return
        entry.pending.hurry_worlds()
        self._changed(entry)
        with contextlib.suppress(TimeoutError):
            async with deadlines.timeout(WORLDS_PATIENCE):
                while not entry.pending.has_worlds:
                    await entry.changes.wait()
                return
        _log.warning("worlds not written yet workload=%s/%s", namespace, name)

    # -------------------------------------------------------------------------- for a backend

    def uid(self, namespace: str, name: str) -> str:
        """Identity of a workload's object, for owner references; empty while there is none."""
        entry = self._entries.get((namespace, name))
        return "" if entry is None else entry.pending.uid

    # -------------------------------------------------------------------------- what others do

    def _on_change(self, change: Change) -> None:
        if not self._is_loaded or self._is_closed:
            return
        at, is_gone = key(change.object), change.kind == DELETED
        entry = self._entries.get(at)
        if entry is not None:
            found = None if is_gone else change.object
            if entry.pending.watched(found, change.object["metadata"]["uid"]):
                self._deleted_elsewhere(*at)
            self._changed(entry)

    def _deleted_elsewhere(self, namespace: str, name: str) -> None:
        _log.info("workload deleted by its object workload=%s/%s", namespace, name)
        if self._observer is not None:
            self._observer.on_deleted_elsewhere(namespace, name)

    # --------------------------------------------------------------------------------- writing

    def _changed(self, entry: _Entry) -> None:
        entry.changes.notify()
        if entry.task is None and not self._is_closed:
            entry.task = asyncio.get_running_loop().create_task(self._write(entry))

    def _forget(self, entry: _Entry) -> None:
        pending = entry.pending
        if pending.is_over and not entry.flushing and entry.task is None:
            at = (pending.namespace, pending.name)
            if self._entries.get(at) is entry:
                del self._entries[at]

    async def _write(self, entry: _Entry) -> None:
        """Do what there is to be done, until nothing is."""
        pending = entry.pending
        try:
            while True:
                step = pending.step(self._clock(), self._summary)
                if isinstance(step, writes.Rest):
                    break
                if not self._may_write():
                    step = writes.Wait(_FOLLOWING)
                if isinstance(step, writes.Wait):
                    if entry.is_hurried:
                        break
                    with contextlib.suppress(TimeoutError):
                        async with deadlines.timeout(step.seconds):
                            await entry.changes.wait()
                    continue
                await self._do(entry, step)
                entry.changes.notify()
        except Exception:  # noqa: BLE001  # a fault of ours must not be silent
            _log.exception("workload not written workload=%s/%s", pending.namespace, pending.name)
        finally:
            entry.task = None
            entry.changes.notify()
            self._forget(entry)

    def _summary(self, namespace: str, name: str) -> Summary | None:
        return None if self._observer is None else self._observer.summary(namespace, name)

    async def _do(self, entry: _Entry, step: Step) -> None:
        pending = entry.pending
        try:
            async with self._writers:
                answer = await self._send(pending, step)
        except KubetorchError as error:
            entry.failure = error
            _log.warning(
                "workload not written step=%s workload=%s/%s error=%s",
                *(type(step).__name__, pending.namespace, pending.name, error),
            )
            pending.failed(step, error, self._clock())
            return
        entry.failure = None
        is_read = isinstance(step, writes.Read)
        if pending.seen(answer) if is_read else pending.written(step, answer, self._clock()):
            self._deleted_elsewhere(pending.namespace, pending.name)

    async def _send(self, pending: PendingWrite, step: Step) -> Object | None:
        """Do a step; returns the object that the API server has then, if it has one."""
        ref = Ref(WORKLOADS, pending.name, pending.namespace)
        match step:
            case writes.Create(body):
                return await self._client.create(body)
            case writes.Replace(patch):
                return await self._client.patch(ref, patch)
            case writes.ReplaceStatus(patch):
                part = Ref(WORKLOADS, pending.name, pending.namespace, "status")
                return await self._client.patch(part, patch)
        try:
            if isinstance(step, writes.Delete):
                await self._client.delete(ref, preconditions={"uid": step.uid})
                return None
            return await self._client.get(ref)
        except KubernetesNotFoundError:
            return None


def _check_deployed(generation: Generation) -> None:
    """Refuse what was written by hand, and which only somebody with more rights may deploy."""
    if generation.grant is None or generation.grant.user is not None:
        return
    compute = generation.spec.compute
    why = "its pods are found by labels" if compute.selector else beyond_rendered(generation.spec)
    if why:
        raise SpecError(
            f"generation {generation.number} was written by hand, and {why}",
            hint="let somebody deploy it who may have such an object",
        )


class _Entry:
    def __init__(self, namespace: str, name: str) -> None:
        self.pending = PendingWrite(namespace, name)
        self.changes = Changes()
        self.task: asyncio.Task[None] | None = None
        self.flushing = 0
        self.failure: KubetorchError | None = None
        self.is_hurried = False
