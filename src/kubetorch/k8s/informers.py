"""A selection of objects, always as the server has it, and callbacks when it changes.

No event is queued here: callbacks run before the next event is read, and later events wait in the
socket. A server that has to wait for too long ends the watch, which is then resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping

from kubetorch.errors import (
    KubernetesError,
    KubernetesRequestError,
    KubernetesUnavailableError,
    KubetorchError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Selection
from kubetorch.k8s.tuning import TIMING
from kubetorch.k8s.watching import Change, Key, WatchState
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all

#: Statuses of a list that will fail until a user changes the cluster or the request.
_HOPELESS_STATUSES = (400, 401, 403, 404, 405, 422)

_logger = logging.getLogger(__name__)


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
