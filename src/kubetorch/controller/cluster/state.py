"""The state of a controller in a cluster: one `KubetorchWorkload` object for each workload.

What is put is seen at once, and written behind: by one task for each workload that has something
to be written, which does what `kubetorch.controller.cluster.writing` says. The same objects are
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

from kubetorch.controller.cluster import resource, writing
from kubetorch.controller.cluster.resource import WORKLOADS, Content
from kubetorch.controller.cluster.writing import Step, Writing
from kubetorch.controller.state import Contents, Generation, WorkloadRecord
from kubetorch.controller.summary import Observer, Summary
from kubetorch.errors import (
    KubernetesNotFoundError,
    KubetorchError,
    ProtocolError,
    ServiceTimeoutError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Selection, key
from kubetorch.k8s.watching import DELETED, Change
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes

#: Seconds that a deploy or a delete waits for an API server that is away.
PATIENCE = 45.0
#: Seconds that what is not written yet has when the controller stops.
CLOSE_GRACE = 5.0
#: Requests at the same time.
WRITERS = 16
#: The number of an epoch that was not written any more is lower than the one that was by less.
EPOCHS = 10_000

# Seconds until a process that does not lead looks again whether it does.
_FOLLOWING = 0.2

_log = logging.getLogger(__name__)
_Key = tuple[str, str]


class KubernetesState:
    """The workloads of a cluster; `load` comes first, `close` last.

    Args:
        client: Asks the API server.
        namespaces: Where workloads may be; everywhere when there are none.
        may_write: Whether this process leads; while it does not, nothing is written.
        patience: Seconds that `flush` waits for an API server that is away.
        clock: Seconds of a clock that never goes back.
    """

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
        """Read all workloads, and go on watching them.

        Args:
            timeout: Seconds.

        Raises:
            KubernetesRequestError: They may not be listed, or their definition is not there.
            KubernetesUnavailableError: The API server did not answer.
        """
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
                self._take_up(found)
        self._is_loaded = True

    async def close(self) -> None:
        """Write what is not written yet, if that is quickly done, and stop."""
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for entry in self._entries.values():
            entry.is_hurried = True
            entry.writing.hurry()
            entry.changes.notify()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_GRACE)
        self._is_closed = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stop_watching()

    async def _stop_watching(self) -> None:
        for informer in self._informers:
            await informer.close()

    def _take_up(self, found: Object) -> None:
        try:
            content = resource.read(found)
        except ProtocolError as error:
            self._reject(key(found), str(error))
            return
        entry = self._entries[key(found)] = _Entry(*key(found))
        entry.writing.put(content, is_new=True)
        entry.writing.seen(found)

    # ------------------------------------------------------------------------ State's methods

    def contents(self) -> Contents:  # noqa: D102  # State's
        found = [entry.writing.wanted for entry in self._entries.values()]
        known = [content for content in found if content is not None]
        return Contents(
            tuple(_later(content.record) for content in known),
            {
                (content.record.namespace, content.record.name): content.generations
                for content in known
            },
        )

    def put_workload(  # noqa: D102  # State's
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
        wanted = entry.writing.wanted
        generations = () if wanted is None else wanted.generations
        if generation is not None:
            generations = (*generations, generation)
        kept = tuple(one for one in generations if not keep or one.number in keep)
        is_new = generation is not None or kept != generations
        entry.writing.put(Content(workload, kept), is_new=is_new)
        self._entries[at] = entry
        self._changed(entry)

    def delete_workload(self, namespace: str, name: str) -> None:  # noqa: D102  # State's
        entry = self._entries.get((namespace, name))
        if entry is not None:
            entry.writing.delete()
            self._changed(entry)

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:
        """It is left alone: its pods go on, and another version may know what it is."""
        self._entries.pop((namespace, name), None)
        self._reject((namespace, name), reason)

    def _reject(self, at: _Key, reason: str) -> None:
        _log.error("workload left alone, since it cannot be read workload=%s/%s: %s", *at, reason)

    def observe(self, observer: Observer) -> None:  # noqa: D102  # State's
        self._observer = observer
        for at in self._entries:
            self.touch(*at)

    def touch(self, namespace: str, name: str) -> None:  # noqa: D102  # State's
        entry = self._entries.get((namespace, name))
        if entry is not None and self._observer is not None:
            entry.writing.touch()
            self._changed(entry)

    async def flush(self, namespace: str, name: str) -> None:  # noqa: D102  # State's
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
        here = entry.writing
        try:
            async with deadlines.timeout(self._patience):
                while here.error is None and not here.is_durable:
                    await entry.changes.wait()
        except TimeoutError as error:
            here.give_up(
                entry.failure
                or ServiceTimeoutError(
                    f"{here.namespace}/{here.name} was not stored within {self._patience:g} s",
                    hint="try again in a moment; kt check says how the cluster is",
                )
            )
            self._changed(entry)
            if here.error is not None:
                raise here.error from error
        if here.error is not None:
            raise here.error

    # -------------------------------------------------------------------------- for a backend

    def uid(self, namespace: str, name: str) -> str:
        """Identity of a workload's object, for owner references; empty while there is none."""
        entry = self._entries.get((namespace, name))
        return "" if entry is None else entry.writing.uid

    # -------------------------------------------------------------------------- what others do

    def _on_change(self, change: Change) -> None:
        if not self._is_loaded or self._is_closed:
            return
        at, is_gone = key(change.object), change.kind == DELETED
        entry = self._entries.get(at)
        if entry is not None:
            found = None if is_gone else change.object
            uid = change.object["metadata"]["uid"]
            self._lost(entry, is_lost=entry.writing.told(found, uid))
            self._changed(entry)

    def _lost(self, entry: _Entry, *, is_lost: bool) -> None:
        if is_lost:
            here = entry.writing
            _log.info("workload deleted by its object workload=%s/%s", here.namespace, here.name)
            if self._observer is not None:
                self._observer.on_deleted_elsewhere(here.namespace, here.name)

    # --------------------------------------------------------------------------------- writing

    def _changed(self, entry: _Entry) -> None:
        entry.changes.notify()
        if entry.task is None and not self._is_closed:
            entry.task = asyncio.get_running_loop().create_task(self._write(entry))

    def _forget(self, entry: _Entry) -> None:
        here = entry.writing
        if here.is_over and not entry.flushing and entry.task is None:
            at = (here.namespace, here.name)
            if self._entries.get(at) is entry:
                del self._entries[at]

    async def _write(self, entry: _Entry) -> None:
        """Do what there is to be done, until nothing is."""
        here = entry.writing
        try:
            while True:
                step = here.step(self._clock(), self._summary)
                if isinstance(step, writing.Rest):
                    break
                if not self._may_write():
                    step = writing.Wait(_FOLLOWING)
                if isinstance(step, writing.Wait):
                    if entry.is_hurried:
                        break
                    with contextlib.suppress(TimeoutError):
                        async with deadlines.timeout(step.seconds):
                            await entry.changes.wait()
                    continue
                await self._do(entry, step)
                entry.changes.notify()
        except Exception:  # noqa: BLE001  # a fault of ours must not be silent
            _log.exception("workload not written workload=%s/%s", here.namespace, here.name)
        finally:
            entry.task = None
            entry.changes.notify()
            self._forget(entry)

    def _summary(self, namespace: str, name: str) -> Summary | None:
        return None if self._observer is None else self._observer.summary(namespace, name)

    async def _do(self, entry: _Entry, step: Step) -> None:
        here = entry.writing
        try:
            async with self._writers:
                answer = await self._send(here, step)
        except KubetorchError as error:
            entry.failure = error
            _log.warning(
                "workload not written step=%s workload=%s/%s error=%s",
                *(type(step).__name__, here.namespace, here.name, error),
            )
            here.failed(step, error, self._clock())
            return
        entry.failure = None
        if isinstance(step, writing.Read):
            self._lost(entry, is_lost=here.seen(answer))
        else:
            self._lost(entry, is_lost=here.written(step, answer, self._clock()))

    async def _send(self, here: Writing, step: Step) -> Object | None:
        """What the API server has after a step; `None` when there is nothing."""
        ref = Ref(WORKLOADS, here.name, here.namespace)
        match step:
            case writing.Create(body):
                return await self._client.create(body)
            case writing.Replace(patch):
                return await self._client.patch(ref, patch)
            case writing.ReplaceStatus(patch):
                part = Ref(WORKLOADS, here.name, here.namespace, "status")
                return await self._client.patch(part, patch)
        try:
            if isinstance(step, writing.Delete):
                await self._client.delete(ref, preconditions={"uid": step.uid})
                return None
            return await self._client.get(ref)
        except KubernetesNotFoundError:
            return None


class _Entry:
    """One workload, and what writes it."""

    def __init__(self, namespace: str, name: str) -> None:
        self.writing = Writing(namespace, name)
        self.changes = Changes()
        self.task: asyncio.Task[None] | None = None
        self.flushing = 0
        self.failure: KubetorchError | None = None
        self.is_hurried = False


def _later(record: WorkloadRecord) -> WorkloadRecord:
    """With an epoch that is later than any that was announced: the last ones may not be written."""
    return replace(record, epoch=record.epoch + EPOCHS)
