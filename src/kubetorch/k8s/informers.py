"""A selection of objects, always as the server has it, and callbacks when it changes.

       list ──(on_list)──► watch ──(on_event: ADDED, MODIFIED, DELETED, BOOKMARK)──► …
       ▲                      │  ▲
       │                      │  └──(on_end, on_failure: resume at the last version, after a pause)
       └──(410: forgotten)────┘

A list after a gap is compared with the known objects, so an object that was deleted during the gap
is reported as deleted.

No event is queued here: callbacks run before the next event is read, and later events wait in the
socket. A server that has to wait for too long ends the watch, which is then resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import (
    KubernetesError,
    KubernetesRequestError,
    KubernetesUnavailableError,
    KubetorchError,
)
from kubetorch.k8s import failures
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Selection, key, version
from kubetorch.k8s.tuning import TIMING
from kubetorch.lib import backoff, deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all

#: Statuses of a list that will fail until a user changes the cluster or the request.
_HOPELESS_STATUSES = (400, 401, 403, 404, 405, 422)

ADDED, MODIFIED, DELETED = "added", "modified", "deleted"

Key = tuple[str, str]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    kind: str
    object: Object


class WatchState:
    """The known objects of a selection, and the next request: a state machine without I/O."""

    def __init__(self, action: failures.Action) -> None:
        #: The known objects.
        self.objects: dict[Key, Object] = {}
        #: True once all objects were listed.
        self.is_listed = False
        #: Seconds to wait before the next request.
        self.pause = 0.0
        self._action = action
        #: The version to watch from; empty when all objects have to be listed.
        self.version = ""
        #: True while the present watch has sent no event.
        self._is_silent = True
        #: The pauses after further failures; `None` after a success.
        self._pauses: Iterator[float] | None = None

    def on_list(self, items: list[Object], resource_version: str) -> list[Change]:
        """Take the list of all objects, as of a version; return the changes."""
        changes = [change for item in items for change in self._put(item)]
        present = {key(item) for item in items}
        deleted_keys = [known_key for known_key in self.objects if known_key not in present]
        changes += [Change(DELETED, old) for old in map(self.objects.pop, deleted_keys)]
        self.version = resource_version
        self._is_silent = True
        self.is_listed = True
        self._reset_pause()
        return changes

    def on_event(self, event: Mapping[str, Any]) -> list[Change]:
        """Take an event of the watch; return the changes."""
        kind, item = event.get("type"), event.get("object")
        if kind == "ERROR" and isinstance(item, dict):
            raise failures.refused_by(self._action, item)
        if not isinstance(item, dict) or not version(item):
            raise failures.garbled(self._action, "the API server", f"{event!r:.80}")
        self.version = version(item)
        self._is_silent = False
        if kind == "BOOKMARK":
            return []
        if kind == "DELETED":
            previous = self.objects.pop(key(item), None)
            return [] if previous is None else [Change(DELETED, item)]
        return self._put(item)

    def on_end(self, seconds: float) -> None:
        """The server ended the watch after so many seconds, as it does with each watch."""
        if self._is_silent and seconds >= TIMING.silent_watch_seconds:
            self.version = ""
        self._is_silent = True
        if seconds >= TIMING.healthy_watch_seconds:
            self._reset_pause()
        else:
            self._lengthen_pause(None)

    def on_failure(self, error: KubetorchError, seconds: float = 0.0) -> None:
        self._is_silent = True
        if seconds >= TIMING.healthy_watch_seconds:
            self._reset_pause()
        refused = error if isinstance(error, KubernetesRequestError) else None
        if refused is not None and _is_forgotten(refused):
            self.version = ""
        self._lengthen_pause(refused.retry_after if refused is not None else None)

    def _put(self, item: Object) -> list[Change]:
        previous = self.objects.get(key(item))
        if previous is not None and version(previous) == version(item):
            return []
        item["metadata"].pop("managedFields", None)
        self.objects[key(item)] = item
        return [Change(ADDED if previous is None else MODIFIED, item)]

    def _reset_pause(self) -> None:
        self.pause = 0.0
        self._pauses = None

    def _lengthen_pause(self, retry_after: float | None) -> None:
        if self._pauses is None:
            self._pauses = backoff.jittered(
                first=TIMING.watch_first_delay_seconds, limit=TIMING.watch_longest_delay_seconds
            )
        self.pause = max(next(self._pauses), retry_after or 0.0)


def _is_forgotten(error: KubernetesRequestError) -> bool:
    """True if the server has forgotten the version, or never had it (etcd was restored)."""
    never_was = any(cause["reason"] == "ResourceVersionTooLarge" for cause in error.causes)
    return error.status_code == 410 or error.reason in ("Expired", "Gone") or never_was


class Informer:
    """Lists and watches a selection until it is closed; an asynchronous context manager."""

    def __init__(
        self,
        client: Client,
        selection: Selection,
        on_change: Callable[[Change], object] | None = None,
        *,
        watch_seconds: tuple[float, float] = (
            TIMING.watch_shortest_seconds,
            TIMING.watch_longest_seconds,
        ),
    ) -> None:
        #: The error of the last request; `None` after a success.
        self.error: KubetorchError | None = None
        self._client = client
        self._selection = selection
        self._on_change = on_change
        self._watch_seconds = watch_seconds
        self._action = client.action_on("watch", selection)
        self._state = WatchState(self._action)
        self._changes = Changes()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Informer:
        self._task = asyncio.create_task(self._run(), name=f"watch {self._selection.resource}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await cancel_all([task])

    @property
    def objects(self) -> Mapping[Key, Object]:
        """All objects by namespace and name; not to be changed."""
        return self._state.objects

    @property
    def is_listed(self) -> bool:
        """True once all objects were listed; until then, an empty set says nothing."""
        return self._state.is_listed

    def get(self, name: str, namespace: str = "") -> Object | None:
        return self._state.objects.get((namespace, name))

    async def listed(self, *, timeout: float) -> None:
        try:
            async with deadlines.timeout(timeout):
                while not self._state.is_listed:
                    error = self.error
                    if (
                        isinstance(error, KubernetesRequestError)
                        and error.status_code in _HOPELESS_STATUSES
                    ):
                        raise error
                    await self._changes.wait()
        except TimeoutError as error:
            raise self.error or KubernetesUnavailableError(
                f"cannot {self._action}: not listed within {timeout:g} s"
            ) from error

    async def until(
        self, condition: Callable[[Mapping[Key, Object]], bool], *, timeout: float | None
    ) -> None:
        async with deadlines.timeout(timeout):
            while not (self._state.is_listed and condition(self.objects)):
                await self._changes.wait()

    async def _run(self) -> None:
        state, loop = self._state, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(state.pause)
            begun = loop.time()
            try:
                if state.version:
                    await self._watch(state.version)
                    state.on_end(loop.time() - begun)
                else:
                    listing = await self._client.list(self._selection)
                    self._notify(state.on_list(listing.items, listing.resource_version))
                    self._note_success()
            except KubetorchError as error:
                self._note_failure(error, loop.time() - begun)
            except Exception as error:  # a defect must not end the watch for good
                _logger.exception("cannot %s", self._action)
                wrapped = KubernetesError(f"cannot {self._action}: {error!r}")
                self._note_failure(wrapped, loop.time() - begun)

    async def _watch(self, resource_version: str) -> None:
        seconds = random.uniform(*self._watch_seconds)
        events = self._client.watch(
            self._selection, resource_version, seconds=seconds, on_open=self._note_success
        )
        async with contextlib.aclosing(events):
            async for event in events:
                self._notify(self._state.on_event(event))
                self._note_success()

    def _note_failure(self, error: KubetorchError, seconds: float) -> None:
        self._state.on_failure(error, seconds)
        self.error = error
        self._changes.notify()

    def _note_success(self) -> None:
        self.error = None
        self._changes.notify()

    def _notify(self, changes: list[Change]) -> None:
        for change in changes:
            if self._on_change is not None:
                try:
                    self._on_change(change)
                except Exception:  # the owner's bug must not stop the watch
                    _logger.exception("a callback for a change of %s failed", self._action.resource)
