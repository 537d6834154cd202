"""The election of the controller that leads, by a Lease, and the label of the pod that leads.

async with Election(client, namespace="kubetorch", place=pod_name) as election:
    await election.won()
    ...                       # until `election.lost()` returns: then end this process

The Service and clients find the pod that leads by the label.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable

from kubetorch.controller.cluster import lease
from kubetorch.controller.cluster.lease import LEASES, Candidate
from kubetorch.errors import KubernetesConflictError, KubernetesNotFoundError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Selection
from kubetorch.k8s.watching import DELETED, Change
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import labels

#: Name of the controller's Deployment, Service, service account and Lease.
NAME = "kubetorch-controller"
#: Seconds that one request may take.
_TIMEOUT = 3.0
#: Seconds between two looks whether the lease is watched at all: a watch that broke is retried
#: after longer pauses.
_LOOK = 0.5
#: Labels of all pods of the controller.
PODS_OF_CONTROLLER = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=controller"
#: Seconds until pods that could not be marked are marked again.
PAUSE = 1.0

_log = logging.getLogger(__name__)


class Election:
    """One candidate; an asynchronous context manager, which resigns when it is left."""

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        place: str,
        times: lease.Times = lease.TIMES,
        name: str = NAME,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._clock = clock
        self._ref = Ref(LEASES, name, namespace)
        self._candidate = Candidate(
            namespace=namespace,
            name=name,
            place=place,
            nonce=secrets.token_hex(4),
            times=times,
        )
        self._changes = Changes()
        self._informer = Informer(
            client, Selection(LEASES, namespace, fields=f"metadata.name={name}"), self._on_change
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Election:
        await self._informer.__aenter__()
        self._task = asyncio.create_task(self._run(), name="election")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and let the next one lead at once."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_all([task])
        await self._informer.close()
        if self._candidate.is_leading(self._clock()):
            with contextlib.suppress(KubetorchError, TimeoutError):
                async with deadlines.timeout(_TIMEOUT):
                    await self._resign()

    @property
    def is_leading(self) -> bool:
        return self._candidate.is_leading(self._clock())

    @property
    def holder(self) -> str:
        return self._candidate.holder

    async def won(self) -> None:
        """Wait until this process leads."""
        while not self.is_leading:
            await self._changes.wait()

    async def lost(self) -> None:
        """Wait until another process leads, after this one did."""
        while not self._candidate.is_lost:
            await self._changes.wait()

    def _on_change(self, change: Change) -> None:
        # Not while a lease is ours: then the answers to our own writes say it, and sooner.
        if not self.is_leading or self._is_others(change):
            found = None if change.kind == DELETED else change.object
            self._candidate.seen(found, self._clock())
        self._changes.notify()

    def _is_others(self, change: Change) -> bool:
        spec = change.object.get("spec") or {}
        return change.kind == DELETED or spec.get("holderIdentity") != self._candidate.identity

    async def _run(self) -> None:
        candidate = self._candidate
        while not candidate.is_lost:
            step = candidate.step(self._clock(), time.time())
            if isinstance(step, lease.Wait):
                with contextlib.suppress(TimeoutError):
                    async with deadlines.timeout(min(step.seconds, _LOOK)):
                        await self._changes.wait()
                if self._informer.error is not None:
                    candidate.blind(self._clock())
                continue
            led = self.is_leading
            try:
                async with deadlines.timeout(_TIMEOUT):
                    await self._do(step)
            except KubernetesConflictError:
                candidate.refused(self._clock())
            except (KubetorchError, TimeoutError) as error:
                _log.warning("lease not reached step=%s error=%r", type(step).__name__, error)
                candidate.failed(self._clock())
            if self.is_leading and not led:
                _log.info("leads identity=%s", candidate.identity)
            self._changes.notify()
        _log.error("lost the lease to %s", candidate.holder or "nobody")

    async def _resign(self) -> None:
        try:
            await self._client.replace(self._candidate.resignation(time.time()))
        except KubernetesConflictError:
            # A renewal that was cut off a moment ago arrived all the same.
            await self._do(lease.Read())
            if self._candidate.holder != self._candidate.identity:
                return
            await self._client.replace(self._candidate.resignation(time.time()))
        _log.info("resigned identity=%s", self._candidate.identity)

    async def _do(self, step: lease.Read | lease.Take) -> None:
        begun = self._clock()
        if isinstance(step, lease.Take):
            write = self._client.create if step.is_new else self._client.replace
            self._candidate.taken(await write(step.body), begun)
            return
        try:
            found = await self._client.get(self._ref)
        except KubernetesNotFoundError:
            self._candidate.seen(None, begun)
        else:
            self._candidate.seen(found, begun)


class LeaderLabel:
    """The pod that leads is marked, and no other; an asynchronous context manager.

    The pods are watched, because one that lost the lead a moment ago may have been about to mark
    itself. A process that is no pod of the installation, such as a test's, marks nothing. When it
    is left, the mark stays until the next one leads.
    """

    def __init__(
        self, client: Client, namespace: str, identity: str, won: Callable[[], Awaitable[None]]
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._won = won
        self._changed = asyncio.Event()
        self._informer = Informer(
            client,
            Selection(PODS, namespace, labels=PODS_OF_CONTROLLER),
            lambda _: self._changed.set(),
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LeaderLabel:
        await self._mark()
        await self._informer.__aenter__()
        self._task = asyncio.create_task(self._keep(), name="mark")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await cancel_all([self._task])
        await self._informer.close()

    async def _keep(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_right(self._informer.objects.values()):
                continue
            try:
                await self._mark()
            except KubetorchError as error:
                _log.warning("pod not marked pod=%s error=%s", self._identity, error)
                await asyncio.sleep(PAUSE)
                self._changed.set()

    def _is_right(self, pods: Iterable[Object]) -> bool:
        found = {one["metadata"]["name"]: one["metadata"].get("labels") or {} for one in pods}
        marked = {name: tags[labels.LEADS] for name, tags in found.items() if labels.LEADS in tags}
        return marked == ({self._identity: "true"} if self._identity in found else {})

    async def _mark(self) -> None:
        await self._won()
        selection = Selection(PODS, self._namespace, labels=f"{PODS_OF_CONTROLLER},{labels.LEADS}")
        for pod in (await self._client.list(selection)).items:
            if pod["metadata"]["name"] != self._identity:
                await self._patch(pod["metadata"]["name"], None)
        await self._patch(self._identity, "true")

    async def _patch(self, pod: str, value: str | None) -> None:
        patch: Object = {"metadata": {"labels": {labels.LEADS: value}}}
        try:
            await self._client.patch(Ref(PODS, pod, self._namespace), patch, field_manager=NAME)
        except KubernetesNotFoundError:
            return
