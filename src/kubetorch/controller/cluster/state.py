"""The state of a controller in a cluster: one `KubetorchWorkload` object for each workload.

What is put is seen at once, and written behind: by one task for each workload that has something
to be written. The same objects are watched, so that what users do to them has an effect: a deleted
one is torn down, an edited one is put right. What a task writes is decided without I/O:

    put, delete ──► wanted ─┐
                            ├─ step ──► Create | Replace | ReplaceStatus | Delete | Read | Wait
    seen, failed ──► there ─┘

`PendingWrite` compares what is wanted with what the API server has, so what is wanted several times
in a row is written once, and what somebody else changed is put right. After an answer that got lost
it looks first. An object that was there and is not there any more was deleted by somebody else: it
is not made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kubetorch.controller.cluster import resource
from kubetorch.controller.cluster.access import beyond_rendered
from kubetorch.controller.cluster.resource import WORKLOADS, Content
from kubetorch.controller.state import Contents, Generation, Observer, Summary, WorkloadRecord
from kubetorch.errors import (
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    KubetorchError,
    ServiceNotFoundError,
    ServiceTimeoutError,
    SpecError,
    VersionMismatchError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Selection, key, version
from kubetorch.k8s.watching import DELETED, Change
from kubetorch.lib import backoff, deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all

#: Seconds between two writes of a status, and between two corrections of what somebody edits.
STATUS_INTERVAL = 1.0
#: Seconds between two writes that say nothing new but when the last call was.
ACTIVE_INTERVAL = 60.0
#: Seconds until a status that was refused is tried again.
REFUSED_INTERVAL = 60.0
#: Pauses after failures, in seconds.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
#: Statuses of refusals that come of a moment: somebody else was faster, or the server is busy.
_MOMENTARY = (401, 408, 409, 429)
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


@dataclass(frozen=True)
class Create:
    body: Object


@dataclass(frozen=True)
class Replace:
    """Change what is wanted, by a JSON patch."""

    patch: list[Object]


@dataclass(frozen=True)
class ReplaceStatus:
    """Change the status, by a JSON patch."""

    patch: list[Object]


@dataclass(frozen=True)
class Delete:
    uid: str


@dataclass(frozen=True)
class Read:
    """Look what is there."""


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Rest:
    """Nothing, until something changes."""


Step = Create | Replace | ReplaceStatus | Delete | Read | Wait | Rest


class PendingWrite:
    def __init__(self, namespace: str, name: str) -> None:
        self.namespace, self.name = namespace, name
        self.wanted: Content | None = None
        self.there: Object | None = None
        self.error: KubetorchError | None = None
        self._spec: Object | None = None
        self._durable: Content | None = None
        self._is_sure = True
        self._is_touched = False
        self._is_news = False
        self._pause_until = self._replaced = self._status_until = self._status_written = 0.0
        self._pauses: Iterator[float] | None = None
        # The last status that was sent, and what an older definition left of it.
        self._sent: tuple[Object, Object] | None = None
        # Those that were sent last.
        self._worlds = ""

    @property
    def uid(self) -> str:
        return str(self.there["metadata"]["uid"]) if self.there is not None else ""

    @property
    def is_durable(self) -> bool:
        if not self._is_sure:
            return False
        if self.wanted is None or self.there is None:
            return self.wanted is None and self.there is None
        return bool(self.there.get("spec") == self._spec)

    @property
    def has_worlds(self) -> bool:
        """True if the wanted worlds were written, be it to an older definition."""
        if self.wanted is None:
            return True
        status = (self.there or {}).get("status") or {}
        return self.wanted.record.worlds in (status.get("worlds") or "", self._worlds)

    @property
    def is_over(self) -> bool:
        return self.wanted is None and self.is_durable

    # ------------------------------------------------------------------------- what is wanted

    def put(self, content: Content, *, is_new: bool) -> None:
        if is_new:
            self._spec = resource.spec(content)
            self._is_news, self.error = True, None
            self._status_until = 0.0  # a later controller must know what is granted with it
            # Whoever waits for this is not to wait for what failed before.
            self._pauses, self._pause_until = None, 0.0
        elif self.wanted is None:
            return
        elif content.record.failure not in ("", self.wanted.record.failure):
            self._status_until = 0.0  # a later controller must not take it for a deploy under way
        self.wanted = content
        self._is_touched = True
        self._settle()

    def delete(self) -> None:
        self.wanted, self._spec, self.error = None, None, None
        self._is_news = True

    def touch(self) -> None:
        """The status may be another one."""
        self._is_touched = True

    def hurry_worlds(self) -> None:
        """Write the worlds at once: a later controller must know of those that pods know of."""
        self._status_until = 0.0
        self._is_touched = True

    def hurry(self) -> None:
        """Write the status at once, if it is another one."""
        self._status_until = self._status_written = -ACTIVE_INTERVAL

    def give_up(self, error: KubetorchError) -> None:
        """Return to the content that the server had before."""
        self.error = error
        self.wanted = self._durable
        self._spec = None if self.wanted is None else resource.spec(self.wanted)

    # -------------------------------------------------------------------------- what is there

    def seen(self, found: Object | None) -> bool:
        """The server has this; whether somebody else deleted the workload."""
        if found is not None and "deletionTimestamp" in found["metadata"]:
            found = None
        self.there, self._is_sure = found, True
        if found is None and self._durable is not None:
            is_elsewhere = self.wanted is not None
            if is_elsewhere:
                self.error = ServiceNotFoundError(
                    f"the service {self.name} in namespace {self.namespace} was deleted meanwhile",
                    hint="deploy it again",
                )
            self.wanted = self._spec = self._durable = None
            return is_elsewhere
        self._is_touched = True
        self._settle()
        return False

    def watched(self, found: Object | None, uid: str) -> bool:
        """The watch says that the object with this identity is so now; `None`: it is gone."""
        if self.there is None:
            # What is to be deleted, or not made yet, is looked at when that is written.
            self._is_sure = self._is_sure and found is None
            return False
        if uid != self.uid or (found is not None and _is_older(found, self.there)):
            return False
        return self.seen(found)

    def written(self, step: Step, answer: Object | None, now: float) -> bool:
        """A step was done; whether somebody else deleted the workload."""
        self._pauses = None
        if isinstance(step, ReplaceStatus):
            self._status_written = now
            if answer is not None:
                self._sent = (step.patch[-1]["value"], answer.get("status") or {})
                self._worlds = self._sent[0].get("worlds") or ""
        elif isinstance(step, (Create, Replace)):
            self._replaced, self._is_news = now, False
            said = step.body["spec"] if isinstance(step, Create) else step.patch[-1]["value"]
            if answer is not None and answer.get("spec") != said:
                self.there = answer
                pruned = VersionMismatchError(
                    "the cluster's definition of KubetorchWorkload does not know all fields of "
                    "this version: it is older than the controller",
                    hint="kt upgrade brings the definition up to date",
                )
                self.give_up(pruned)
                return False
        elif isinstance(step, Delete):
            answer = None
            if self.wanted is None:
                self._durable = None
        return self.seen(answer)

    def failed(self, step: Step, error: KubetorchError, now: float) -> None:
        status = error.status_code if isinstance(error, KubernetesRequestError) else None
        is_refused = status is not None and status < 500 and status not in _MOMENTARY
        if isinstance(step, ReplaceStatus):
            self._is_sure = False
            self._status_until = now + (REFUSED_INTERVAL if is_refused else STATUS_INTERVAL)
            return
        is_changed = isinstance(step, (Replace, Delete)) and status in (404, 422)
        if is_refused and not is_changed and not isinstance(step, Read):
            self.give_up(_explained(error))
        self._is_sure = False
        if self._pauses is None:
            delays = backoff.exponential(first=FIRST_PAUSE, limit=LONGEST_PAUSE)
            self._pauses = backoff.jittered(delays)
        self._pause_until = now + next(self._pauses)

    def _settle(self) -> None:
        if self.is_durable:
            self._durable, self._is_news = self.wanted, False

    # ----------------------------------------------------------------------------- what to do

    def step(self, now: float, summary: Callable[[str, str], Summary | None]) -> Step:
        if now < self._pause_until:
            return Wait(self._pause_until - now)
        if not self._is_sure:
            return Read()
        if self.wanted is None:
            return Rest() if self.there is None else Delete(self.uid)
        if self.there is None:
            return Create(resource.manifest(self.wanted))
        if not self.is_durable:
            left = 0.0 if self._is_news else self._replaced + STATUS_INTERVAL - now
            return Wait(left) if left > 0 else Replace(self._patch(self.wanted, self.there))
        return self._status_step(self.wanted, self.there, now, summary)

    def _status_step(
        self,
        wanted: Content,
        there: Object,
        now: float,
        summary: Callable[[str, str], Summary | None],
    ) -> Step:
        if not self._is_touched:
            return Rest()
        if now < self._status_until:
            return Wait(self._status_until - now)
        self._status_until = now + STATUS_INTERVAL
        before = there.get("status") or {}
        status = resource.status(wanted, summary(self.namespace, self.name), before)
        if status == before or (status, before) == self._sent:
            self._is_touched = False
            return Rest()
        if _without_active(status) == _without_active(before):
            left = self._status_written + ACTIVE_INTERVAL - now
            if left > 0:
                return Wait(left)
        return ReplaceStatus(
            [
                {"op": "test", "path": "/metadata/uid", "value": self.uid},
                {"op": "add", "path": "/status", "value": status},
            ]
        )

    def _patch(self, wanted: Content, there: Object) -> list[Object]:
        labels = {**(there["metadata"].get("labels") or {}), **resource.object_labels(wanted)}
        return [
            {"op": "test", "path": "/metadata/uid", "value": self.uid},
            {"op": "add", "path": "/metadata/labels", "value": labels},
            {"op": "add", "path": "/spec", "value": self._spec},
        ]


def _is_older(found: Object, known: Object) -> bool:
    """True if the watch repeats known state: it comes after the answers to our writes."""
    theirs, ours = version(found), version(known)
    return theirs.isdecimal() and ours.isdecimal() and int(theirs) <= int(ours)


def _without_active(status: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in status.items() if name != "lastActive"}


def _explained(error: KubetorchError) -> KubetorchError:
    """A refusal, with what to do about the usual ones."""
    if isinstance(error, KubernetesForbiddenError) and "being terminated" in error.message:
        error.hint = "the namespace is being deleted: wait until it is gone, and create it again"
    elif isinstance(error, KubernetesForbiddenError):
        error.hint = "kt upgrade gives the controller the permissions that it needs"
    elif isinstance(error, KubernetesRequestError) and error.status_code == 404:
        error.hint = (
            "the namespace has to exist, and kt install has to have been run for this cluster"
        )
    return error


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
        self._events: set[asyncio.Task[None]] = set()
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
        await cancel_all([*tasks, *self._events])
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
                if isinstance(step, Rest):
                    break
                if not self._may_write():
                    step = Wait(_FOLLOWING)
                if isinstance(step, Wait):
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
        is_read = isinstance(step, Read)
        if answer is not None and not is_read:
            self._report(resource.event(pending.there, answer, time.time()))
        if pending.seen(answer) if is_read else pending.written(step, answer, self._clock()):
            self._deleted_elsewhere(pending.namespace, pending.name)

    def _report(self, event: Object | None) -> None:
        """Write an event, if there is one; nothing waits for it."""
        if event is not None:
            task = asyncio.get_running_loop().create_task(self._write_event(event))
            self._events.add(task)
            task.add_done_callback(self._events.discard)

    async def _write_event(self, event: Object) -> None:
        try:
            await self._client.create(event)
        except KubetorchError as error:
            _log.info("event not written name=%s error=%s", event["metadata"]["name"], error)

    async def _send(self, pending: PendingWrite, step: Step) -> Object | None:
        """Do a step; returns the object that the API server has then, if it has one."""
        ref = Ref(WORKLOADS, pending.name, pending.namespace)
        match step:
            case Create(body):
                return await self._client.create(body)
            case Replace(patch):
                return await self._client.patch(ref, patch)
            case ReplaceStatus(patch):
                part = Ref(WORKLOADS, pending.name, pending.namespace, "status")
                return await self._client.patch(part, patch)
        try:
            if isinstance(step, Delete):
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
