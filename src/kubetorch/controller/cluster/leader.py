"""The election of the controller that leads, by a Lease, and the label of the pod that leads.

async with Election(client, namespace="kubetorch", place=pod_name) as election:
    await election.won()
    ...                       # until `election.lost()` returns: then end this process

A `Candidate` decides, without I/O: a Lease comes in, an action out.

    not there, free, or not renewed for its duration ──► Take ──► leading ──(each period)──► Take
    somebody else's ──► Wait                                         │
                                       (somebody else's) ──► lost ◄──┘

The clocks of two machines are never compared: what counts is how long this candidate has seen the
lease unchanged, by its own clock. A lease is written only over the version that was seen, so of two
candidates that take it at the same time one finds out.

A leader that cannot reach the API server does not know whether it still leads, and changes nothing.
It goes on when it finds its lease as it left it: as long as nobody reaches the API server, nobody
takes over. A candidate that could not look counts from when it could.

The Service and clients find the pod that leads by the label.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone

from kubetorch.errors import KubernetesConflictError, KubernetesNotFoundError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection
from kubetorch.k8s.watching import DELETED, Change
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import labels

LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
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


@dataclass(frozen=True)
class Times:
    duration: float = 10.0
    tenure: float = 7.0
    period: float = 2.0


TIMES = Times()


@dataclass(frozen=True)
class Read:
    """Look at the lease."""


@dataclass(frozen=True)
class Take:
    """Write the lease: to lead, or to go on leading."""

    body: Object
    is_new: bool


@dataclass(frozen=True)
class Wait:
    seconds: float


Step = Read | Take | Wait


class Candidate:
    def __init__(
        self, *, namespace: str, name: str, place: str, nonce: str, times: Times = TIMES
    ) -> None:
        self.identity = f"{place}_{nonce}"
        self.was_leading = False
        self._place = place
        self._times = times
        self._metadata = {"namespace": namespace, "name": name}
        self._lease: Object | None = None
        self._is_known = False
        self._since = 0.0
        self._renewed: float | None = None
        self._pause_until = -math.inf

    @property
    def holder(self) -> str:
        """The leader, as far as is known; empty without a leader."""
        spec = (self._lease or {}).get("spec") or {}
        return str(spec.get("holderIdentity") or "")

    @property
    def is_lost(self) -> bool:
        """True if another candidate leads now, after this one."""
        is_others = self.holder not in ("", self.identity)
        return self.was_leading and self._is_known and is_others

    def is_leading(self, now: float) -> bool:
        """True if this candidate may change something now."""
        return (
            self._renewed is not None
            and now < self._renewed + self._times.tenure
            and not self.is_lost
        )

    def seen(self, lease: Object | None, now: float) -> None:
        """The server has this lease, or none."""
        if _told(lease) != _told(self._lease) or not self._is_known:
            self._since = now
        self._lease, self._is_known = lease, True
        if self.holder != self.identity:
            self._renewed = None

    def taken(self, lease: Object, now: float) -> None:
        """The server took what was written at this moment."""
        self.seen(lease, now)
        self._renewed = now
        self.was_leading = True
        self._pause_until = -math.inf

    def blind(self, now: float) -> None:
        """Changes of the lease would not arrive at this moment."""
        self._since = now

    def refused(self, now: float) -> None:
        """Another candidate was faster."""
        self._is_known = False
        self._pause_until = now

    def failed(self, now: float) -> None:
        """The server did not answer, so nobody can say how old the lease is."""
        self._is_known = False
        self._since = now
        self._pause_until = now + self._times.period / 2

    def step(self, now: float, moment: float) -> Step:
        if now < self._pause_until:
            return Wait(self._pause_until - now)
        if not self._is_known:
            return Read()
        left = self._left(now)
        return Wait(left) if left > 0 else Take(self._body(moment), self._lease is None)

    def resignation(self, moment: float) -> Object:
        """The lease without a holder: the next one takes it at once."""
        body = self._body(moment)
        return {**body, "spec": {**body["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}

    def _left(self, now: float) -> float:
        """Seconds until the lease can be taken, or has to be renewed."""
        if self.holder == self.identity:
            return 0.0 if self._renewed is None else self._renewed + self._times.period - now
        if not self.holder or self.holder.rpartition("_")[0] == self._place:
            return 0.0
        duration = (self._lease or {})["spec"].get("leaseDurationSeconds") or self._times.duration
        return self._since + float(duration) - now

    def _body(self, moment: float) -> Object:
        old = (self._lease or {}).get("spec") or {}
        time = datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="microseconds")
        time = time.replace("+00:00", "Z")
        is_mine = self.holder == self.identity
        changes = int(old.get("leaseTransitions") or 0)
        metadata = (self._lease or {}).get("metadata") or self._metadata
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": int(self._times.duration),
                "acquireTime": old.get("acquireTime") if is_mine else time,
                "renewTime": time,
                "leaseTransitions": changes if is_mine or not old else changes + 1,
            },
        }


def _told(lease: Object | None) -> tuple[object, object] | None:
    """The parts of a lease that change with each renewal."""
    if lease is None:
        return None
    spec = lease.get("spec") or {}
    return spec.get("holderIdentity"), spec.get("renewTime")


class Election:
    """One candidate; an asynchronous context manager, which resigns when it is left."""

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        place: str,
        times: Times = TIMES,
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
            if isinstance(step, Wait):
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
            await self._do(Read())
            if self._candidate.holder != self._candidate.identity:
                return
            await self._client.replace(self._candidate.resignation(time.time()))
        _log.info("resigned identity=%s", self._candidate.identity)

    async def _do(self, step: Read | Take) -> None:
        begun = self._clock()
        if isinstance(step, Take):
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
