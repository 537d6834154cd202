"""The state of a controller in a cluster: one `KubetorchWorkload` object for each workload.

Reads see a change at once; it is written behind, by one task for each workload that has unwritten
changes. The objects are watched, so that what users do to them has an effect: the workload of a
deleted object is torn down, and an edited object is put right. The writes are decided without I/O:

    put, delete ────► desired content ─┐
                                       ├─ step ──► Create | Replace | ReplaceStatus | Delete | Read
    observe, failed ► server object ───┘             | Wait | Rest

`PendingWrite` compares the desired content with the object that the API server has, so several
changes in a row are written once, and edits by others are put right. After an answer that got lost
it reads first. An object that disappears was deleted by another program: it is not made again.
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
from kubetorch.controller.tuning import LIMITS, TIMING
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
from kubetorch.k8s.informers import DELETED, Change, Informer
from kubetorch.k8s.resources import Object, Ref, Selection, key, version
from kubetorch.lib import backoff, deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all, start_task

#: Statuses of refusals that pass: another client was faster, or the server is busy.
_TRANSIENT_STATUSES = (401, 408, 409, 429)
#: A new controller skips so many epochs: its predecessor may have announced epochs after the one
#: that it wrote last, though never so many.
EPOCHS_SKIPPED = 10_000
_Key = tuple[str, str]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Create:
    body: Object


@dataclass(frozen=True)
class Replace:
    """Change the spec, by a JSON patch."""

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
    """Read the object."""


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Rest:
    """Nothing, until something changes."""


Step = Create | Replace | ReplaceStatus | Delete | Read | Wait | Rest


class PendingWrite:
    """Decides the writes of one workload's object."""

    def __init__(self, namespace: str, name: str) -> None:
        self.namespace, self.name = namespace, name
        #: The content that the object is to have; `None`: there is to be no object.
        self.desired_content: Content | None = None
        #: The object as the API server had it last; `None`: it had none.
        self.server_object: Object | None = None
        #: Why the last change was given up; `None` if it was not.
        self.error: KubetorchError | None = None
        self._desired_spec: Object | None = None
        #: The last content that was desired and written: a change that fails returns to it.
        self._stored_content: Content | None = None
        #: Whether the server still has `server_object`: not after a request whose answer got lost.
        self._is_server_object_known = True
        #: Whether the status may have to be written.
        self._is_status_touched = False
        #: Whether the difference is a change of ours, which is written without a pause, and not an
        #: edit by others.
        self._is_own_change = False
        self._pause_until = self._replaced_at = self._status_due = self._status_written_at = 0.0
        self._pauses: Iterator[float] | None = None

    @property
    def uid(self) -> str:
        return str(self.server_object["metadata"]["uid"]) if self.server_object is not None else ""

    @property
    def is_durable(self) -> bool:
        if not self._is_server_object_known:
            return False
        if self.desired_content is None or self.server_object is None:
            return self.desired_content is None and self.server_object is None
        return bool(self.server_object.get("spec") == self._desired_spec)

    @property
    def has_worlds(self) -> bool:
        if self.desired_content is None:
            return True
        status = (self.server_object or {}).get("status") or {}
        return bool(self.desired_content.record.worlds == (status.get("worlds") or ""))

    @property
    def is_over(self) -> bool:
        return self.desired_content is None and self.is_durable

    # ------------------------------------------------------------------------- desired

    def put(self, content: Content, *, is_new: bool) -> None:
        if is_new:
            self._desired_spec = resource.spec(content)
            self._is_own_change, self.error = True, None
            self._status_due = 0.0  # a later controller must know the grant of the generation
            # A new generation does not wait for the pauses after failures of an earlier one.
            self._pauses, self._pause_until = None, 0.0
        elif self.desired_content is None:
            return
        elif content.record.failure not in ("", self.desired_content.record.failure):
            self._status_due = 0.0  # a later controller must not take it for a deploy under way
        self.desired_content = content
        self._is_status_touched = True
        self._settle()

    def delete(self) -> None:
        self.desired_content, self._desired_spec, self.error = None, None, None
        self._is_own_change = True

    def touch(self) -> None:
        """The status may have changed."""
        self._is_status_touched = True

    def write_worlds_now(self) -> None:
        """Write the worlds at once: a later controller must know the worlds that pods know."""
        self._status_due = 0.0
        self._is_status_touched = True

    def write_status_now(self) -> None:
        """Write the status at once, if it has changed."""
        self._status_due = self._status_written_at = -TIMING.activity_interval_seconds

    def give_up(self, error: KubetorchError) -> None:
        """Return to the content that the server had before."""
        self.error = error
        self.desired_content = self._stored_content
        self._desired_spec = (
            None if self.desired_content is None else resource.spec(self.desired_content)
        )

    # -------------------------------------------------------------------------- the server

    def observe(self, server_object: Object | None) -> bool:
        """Note the server's object; returns whether another program deleted the workload."""
        if server_object is not None and "deletionTimestamp" in server_object["metadata"]:
            server_object = None
        self.server_object, self._is_server_object_known = server_object, True
        if server_object is None and self._stored_content is not None:
            is_elsewhere = self.desired_content is not None
            if is_elsewhere:
                self.error = ServiceNotFoundError(
                    f"the service {self.name} in namespace {self.namespace} was deleted meanwhile",
                    hint="deploy it again",
                )
            self.desired_content = self._desired_spec = self._stored_content = None
            return is_elsewhere
        self._is_status_touched = True
        self._settle()
        return False

    def observe_change(self, watched_object: Object | None, uid: str) -> bool:
        """Note what the watch says of the object with this uid; `None`: it was deleted."""
        if self.server_object is None:
            # An object appeared that we have not made: read it before anything is written.
            self._is_server_object_known = self._is_server_object_known and watched_object is None
            return False
        if uid != self.uid or (
            watched_object is not None and _is_older(watched_object, self.server_object)
        ):
            return False
        return self.observe(watched_object)

    def written(self, step: Step, answer: Object | None, now: float) -> bool:
        """Note the answer to a step; returns whether another program deleted the workload."""
        self._pauses = None
        if isinstance(step, ReplaceStatus):
            self._status_written_at = now
        elif isinstance(step, (Create, Replace)):
            self._replaced_at, self._is_own_change = now, False
            sent_spec = step.body["spec"] if isinstance(step, Create) else step.patch[-1]["value"]
            if answer is not None and answer.get("spec") != sent_spec:
                self.server_object = answer
                pruned = VersionMismatchError(
                    "the cluster's definition of KubetorchWorkload does not know all fields of "
                    "this version: it is older than the controller",
                    hint="kt upgrade brings the definition up to date",
                )
                self.give_up(pruned)
                return False
        elif isinstance(step, Delete):
            answer = None
            if self.desired_content is None:
                self._stored_content = None
        return self.observe(answer)

    def failed(self, step: Step, error: KubetorchError, now: float) -> None:
        status = error.status_code if isinstance(error, KubernetesRequestError) else None
        is_refused = status is not None and status < 500 and status not in _TRANSIENT_STATUSES
        if isinstance(step, ReplaceStatus):
            self._is_server_object_known = False
            self._status_due = now + (
                TIMING.refused_status_interval_seconds
                if is_refused
                else TIMING.status_interval_seconds
            )
            return
        is_changed = isinstance(step, (Replace, Delete)) and status in (404, 422)
        if is_refused and not is_changed and not isinstance(step, Read):
            self.give_up(_explained(error))
        self._is_server_object_known = False
        if self._pauses is None:
            self._pauses = backoff.jittered(
                first=TIMING.state_write_first_delay_seconds,
                limit=TIMING.state_write_longest_delay_seconds,
            )
        self._pause_until = now + next(self._pauses)

    def _settle(self) -> None:
        if self.is_durable:
            self._stored_content, self._is_own_change = self.desired_content, False

    # ----------------------------------------------------------------------------- what to do

    def step(self, now: float, summary: Callable[[str, str], Summary | None]) -> Step:
        if now < self._pause_until:
            return Wait(self._pause_until - now)
        if not self._is_server_object_known:
            return Read()
        if self.desired_content is None:
            return Rest() if self.server_object is None else Delete(self.uid)
        if self.server_object is None:
            return Create(resource.manifest(self.desired_content))
        if not self.is_durable:
            seconds_left = (
                0.0
                if self._is_own_change
                else self._replaced_at + TIMING.status_interval_seconds - now
            )
            if seconds_left > 0:
                return Wait(seconds_left)
            return Replace(self._patch(self.desired_content, self.server_object))
        return self._status_step(self.desired_content, self.server_object, now, summary)

    def _status_step(
        self,
        desired_content: Content,
        server_object: Object,
        now: float,
        summary: Callable[[str, str], Summary | None],
    ) -> Step:
        if not self._is_status_touched:
            return Rest()
        if now < self._status_due:
            return Wait(self._status_due - now)
        self._status_due = now + TIMING.status_interval_seconds
        server_status = server_object.get("status") or {}
        status = resource.status(desired_content, summary(self.namespace, self.name), server_status)
        if status == server_status:
            self._is_status_touched = False
            return Rest()
        if _without_active(status) == _without_active(server_status):
            seconds_left = self._status_written_at + TIMING.activity_interval_seconds - now
            if seconds_left > 0:
                return Wait(seconds_left)
        return ReplaceStatus(
            [
                {"op": "test", "path": "/metadata/uid", "value": self.uid},
                {"op": "add", "path": "/status", "value": status},
            ]
        )

    def _patch(self, desired_content: Content, server_object: Object) -> list[Object]:
        labels = {
            **(server_object["metadata"].get("labels") or {}),
            **resource.object_labels(desired_content),
        }
        return [
            {"op": "test", "path": "/metadata/uid", "value": self.uid},
            {"op": "add", "path": "/metadata/labels", "value": labels},
            {"op": "add", "path": "/spec", "value": self._desired_spec},
        ]


def _is_older(watched_object: Object, server_object: Object) -> bool:
    """True if the watch repeats an older state: it is slower than the answers to our writes."""
    watched_version, server_version = version(watched_object), version(server_object)
    return (
        watched_version.isdecimal()
        and server_version.isdecimal()
        and int(watched_version) <= int(server_version)
    )


def _without_active(status: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in status.items() if name != "lastActive"}


def _explained(error: KubetorchError) -> KubetorchError:
    """A refusal, with a hint for the usual ones."""
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
        patience: float = TIMING.state_write_patience_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._may_write = may_write
        self._patience = patience
        self._clock = clock
        self._observer: Observer | None = None
        self._entries: dict[_Key, _Entry] = {}
        self._writers = asyncio.Semaphore(LIMITS.concurrent_writes)
        self._events: set[asyncio.Task[None]] = set()
        self._is_loaded = self._is_closed = False
        self._informers = [
            Informer(client, Selection(WORKLOADS, namespace), self._on_change)
            for namespace in (namespaces or (None,))
        ]

    # -------------------------------------------------------------------------- start and end

    async def load(self, *, timeout: float = TIMING.workload_list_seconds) -> None:
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
            for workload_object in informer.objects.values():
                self._adopt(workload_object)
        self._is_loaded = True

    async def close(self) -> None:
        """Write the unwritten changes, if the API server is quick, and stop."""
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for entry in self._entries.values():
            entry.is_hurried = True
            entry.pending.write_status_now()
            entry.changes.notify()
        if tasks:
            await asyncio.wait(tasks, timeout=TIMING.state_close_seconds)
        self._is_closed = True
        await cancel_all([*tasks, *self._events])
        await self._stop_watching()

    async def _stop_watching(self) -> None:
        for informer in self._informers:
            await informer.close()

    def _adopt(self, workload_object: Object) -> None:
        entry = _Entry(*key(workload_object))
        try:
            content = resource.read(workload_object)
            for generation in content.generations:
                _check_deployed(generation)
            entry.pending.put(content, is_new=True)
            entry.pending.observe(workload_object)
        except Exception as error:  # noqa: BLE001  # any user may have written it
            self.reject_workload(*key(workload_object), f"{type(error).__name__}: {error}")
            return
        self._entries[key(workload_object)] = entry

    # ------------------------------------------------------------------------ State's methods

    def contents(self) -> Contents:  # State's
        desired_contents = [entry.pending.desired_content for entry in self._entries.values()]
        contents = [content for content in desired_contents if content is not None]
        return Contents(
            # A later epoch than any that was announced: the last epochs may not be written.
            tuple(
                replace(content.record, epoch=content.record.epoch + EPOCHS_SKIPPED)
                for content in contents
            ),
            {
                (content.record.namespace, content.record.name): content.generations
                for content in contents
            },
        )

    def put_workload(  # State's
        self,
        workload: WorkloadRecord,
        *,
        generation: Generation | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        entry_key = (workload.namespace, workload.name)
        entry = self._entries.get(entry_key)
        if entry is None:
            if generation is None:
                return  # it was deleted meanwhile
            entry = _Entry(*entry_key)
        desired_content = entry.pending.desired_content
        generations = () if desired_content is None else desired_content.generations
        if generation is not None:
            other_generations = (
                earlier for earlier in generations if earlier.number != generation.number
            )
            generations = (*other_generations, generation)
        kept_generations = tuple(
            candidate for candidate in generations if not keep or candidate.number in keep
        )
        is_new = generation is not None or kept_generations != generations
        entry.pending.put(Content(workload, kept_generations), is_new=is_new)
        self._entries[entry_key] = entry
        self._start_writing(entry)

    def delete_workload(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is not None:
            entry.pending.delete()
            self._start_writing(entry)

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:
        """Leave a workload alone: its pods go on, and another version may understand it."""
        self._entries.pop((namespace, name), None)
        _log.error(
            "workload left alone, since it cannot be read workload=%s/%s: %s",
            *(namespace, name, reason),
        )

    def observe(self, observer: Observer) -> None:  # State's
        self._observer = observer
        for entry_key in self._entries:
            self.touch(*entry_key)

    def touch(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is not None and self._observer is not None:
            entry.pending.touch()
            self._start_writing(entry)

    async def flush(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is None:
            return
        entry.flush_count += 1
        try:
            await self._flush(entry)
        finally:
            entry.flush_count -= 1
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
            self._start_writing(entry)
        if pending.error is not None:
            raise pending.error

    async def flush_worlds(self, namespace: str, name: str) -> None:  # State's
        entry = self._entries.get((namespace, name))
        if entry is None:
            return
        entry.pending.write_worlds_now()
        self._start_writing(entry)
        with contextlib.suppress(TimeoutError):
            async with deadlines.timeout(TIMING.world_write_seconds):
                while not entry.pending.has_worlds:
                    await entry.changes.wait()
                return
        _log.warning("worlds not written yet workload=%s/%s", namespace, name)

    # -------------------------------------------------------------------------- for a backend

    def uid(self, namespace: str, name: str) -> str:
        """Identity of a workload's object, for owner references; empty while there is none."""
        entry = self._entries.get((namespace, name))
        return "" if entry is None else entry.pending.uid

    # -------------------------------------------------------------------------- changes by others

    def _on_change(self, change: Change) -> None:
        if not self._is_loaded or self._is_closed:
            return
        entry_key, is_gone = key(change.object), change.kind == DELETED
        entry = self._entries.get(entry_key)
        if entry is not None:
            watched_object = None if is_gone else change.object
            if entry.pending.observe_change(watched_object, change.object["metadata"]["uid"]):
                self._deleted_elsewhere(*entry_key)
            self._start_writing(entry)

    def _deleted_elsewhere(self, namespace: str, name: str) -> None:
        _log.info("workload deleted by its object workload=%s/%s", namespace, name)
        if self._observer is not None:
            self._observer.on_deleted_elsewhere(namespace, name)

    # --------------------------------------------------------------------------------- writing

    def _start_writing(self, entry: _Entry) -> None:
        entry.changes.notify()
        if entry.task is None and not self._is_closed:
            entry.task = asyncio.get_running_loop().create_task(self._write(entry))

    def _forget(self, entry: _Entry) -> None:
        pending = entry.pending
        if pending.is_over and not entry.flush_count and entry.task is None:
            entry_key = (pending.namespace, pending.name)
            if self._entries.get(entry_key) is entry:
                del self._entries[entry_key]

    async def _write(self, entry: _Entry) -> None:
        """Carry out steps until there is nothing to do."""
        pending = entry.pending
        try:
            while True:
                step = pending.step(self._clock(), self._summary)
                if isinstance(step, Rest):
                    break
                if not self._may_write():
                    step = Wait(TIMING.follower_interval_seconds)
                if isinstance(step, Wait):
                    if entry.is_hurried:
                        break
                    await deadlines.wait_at_most(step.seconds, entry.changes.wait())
                    continue
                await self._carry_out(entry, step)
                entry.changes.notify()
        except Exception:  # noqa: BLE001  # a fault of ours must not be silent
            _log.exception("workload not written workload=%s/%s", pending.namespace, pending.name)
        finally:
            entry.task = None
            entry.changes.notify()
            self._forget(entry)

    def _summary(self, namespace: str, name: str) -> Summary | None:
        return None if self._observer is None else self._observer.summary(namespace, name)

    async def _carry_out(self, entry: _Entry, step: Step) -> None:
        pending = entry.pending
        # Now: the watch may bring the change before its answer comes.
        object_before = pending.server_object
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
            self._report(resource.event(object_before, answer, time.time()))
        if pending.observe(answer) if is_read else pending.written(step, answer, self._clock()):
            self._deleted_elsewhere(pending.namespace, pending.name)

    def _report(self, event: Object | None) -> None:
        """Write an event, if there is one; nothing waits for it."""
        if event is not None:
            start_task(self._write_event(event), self._events)

    async def _write_event(self, event: Object) -> None:
        try:
            await self._client.create(event)
        except KubetorchError as error:
            _log.info("event not written name=%s error=%s", event["metadata"]["name"], error)

    async def _send(self, pending: PendingWrite, step: Step) -> Object | None:
        """Carry out a step; returns the object that the API server has then, if it has one."""
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
    """Refuse a generation that was written by hand if its deploy would need further rights."""
    if generation.grant.user is not None:
        return
    compute = generation.spec.compute
    why = "its pods are found by labels" if compute.selector else beyond_rendered(generation.spec)
    if why:
        raise SpecError(
            f"generation {generation.number} was written by hand, and {why}",
            hint="let somebody deploy it who may have such an object",
        )


class _Entry:
    """The pending write of a workload, and the task that carries it out."""

    def __init__(self, namespace: str, name: str) -> None:
        self.pending = PendingWrite(namespace, name)
        self.changes = Changes()
        self.task: asyncio.Task[None] | None = None
        #: How many callers wait in `flush`.
        self.flush_count = 0
        #: Why the last step failed; `None` if it did not.
        self.failure: KubetorchError | None = None
        #: Whether the controller stops, so that the task does not wait any more.
        self.is_hurried = False
