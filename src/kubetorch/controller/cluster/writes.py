"""The pending writes of one workload: a state machine without I/O.

    put, delete ──► wanted ─┐
                            ├─ step ──► Create | Replace | ReplaceStatus | Delete | Read | Wait
    seen, failed ──► there ─┘

It compares what is wanted with what the API server has, so what is wanted several times in a row is
written once, and what somebody else changed is put right. After an answer that got lost it looks
first. An object that was there and is not there any more was deleted by somebody else: it is not
made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kubetorch.controller.cluster import resource
from kubetorch.controller.cluster.resource import Content
from kubetorch.controller.state import Summary
from kubetorch.errors import (
    KubernetesForbiddenError,
    KubernetesRequestError,
    KubetorchError,
    ServiceNotFoundError,
    VersionMismatchError,
)
from kubetorch.k8s.resources import Object, version
from kubetorch.lib import backoff

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
