"""The election of the controller that leads, by a Lease, and the label of the pod that leads.

async with Election(client, namespace="kubetorch", pod=pod_name) as election:
    await election.won()
    ...                       # until `election.lost()` returns: then end this process

A `Candidate` decides, without I/O: a Lease comes in, an action out.

    missing, free, or not renewed for its duration ──► Write ──► leading ──(each period)──► Write
    of another candidate ──► Wait                                  │
                              (another candidate writes it) ──► lost

The clocks of two machines are never compared: what counts is how long this candidate has seen the
lease unchanged, by its own clock. A lease is written only over the version that was seen, so of two
candidates that write it at the same time, one gets a conflict.

A leader that cannot reach the API server does not know whether it still leads, and changes nothing.
It goes on when it finds its lease as it left it: as long as no candidate reaches the API server,
none takes over. A candidate whose watch was broken counts from the moment at which it worked again.

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

from kubetorch.controller.tuning import TIMING, Timing
from kubetorch.errors import KubernetesConflictError, KubernetesNotFoundError, KubetorchError
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import DELETED, Change, Informer
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import labels

LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
#: Name of the controller's Deployment, Service, service account and Lease.
NAME = "kubetorch-controller"
#: Name of the Deployment, Service, service account and Lease of a data store of its own.
STORE = "kubetorch-store"
#: Labels of all pods of the controller, and of such a store.
PODS_OF_CONTROLLER = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=controller"
PODS_OF_STORE = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=store"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Read:
    """Read the lease."""


@dataclass(frozen=True)
class Write:
    """Write the lease: to lead, or to go on leading."""

    body: Object
    is_new: bool


@dataclass(frozen=True)
class Wait:
    seconds: float


Step = Read | Write | Wait


class Candidate:
    """Decides when to read and when to write the lease.

    Attributes:
        identity: Name in the lease: the pod, and a number that differs for each of its processes.
        was_leading: Whether this candidate has led, now or before.
    """

    def __init__(
        self, *, namespace: str, name: str, pod: str, nonce: str, timing: Timing = TIMING
    ) -> None:
        self.identity = f"{pod}_{nonce}"
        self.was_leading = False
        self._pod = pod
        self._timing = timing
        self._metadata = {"namespace": namespace, "name": name}
        #: The lease as the server had it last.
        self._lease: Object | None = None
        #: Whether the server still has it: not after a conflict, nor after a request that failed.
        self._is_lease_known = False
        #: When the lease was seen to change last, by this candidate's clock.
        self._unchanged_since = 0.0
        #: When this candidate began its last successful write; `None` while it does not lead.
        self._renewed_at: float | None = None
        self._pause_until = -math.inf

    @property
    def holder(self) -> str:
        """The identity of the leader, as far as is known; empty without a leader."""
        spec = (self._lease or {}).get("spec") or {}
        return str(spec.get("holderIdentity") or "")

    @property
    def is_lost(self) -> bool:
        """True if another candidate leads now, after this one."""
        is_others = self.holder not in ("", self.identity)
        return self.was_leading and self._is_lease_known and is_others

    def is_leading(self, now: float) -> bool:
        """True if this candidate may change something now."""
        return (
            self._renewed_at is not None
            and now < self._renewed_at + self._timing.lease_tenure_seconds
            and not self.is_lost
        )

    def observe(self, lease: Object | None, now: float) -> None:
        """Note the lease that the server has, or that it has none."""
        if _renewal(lease) != _renewal(self._lease) or not self._is_lease_known:
            self._unchanged_since = now
        self._lease, self._is_lease_known = lease, True
        if self.holder != self.identity:
            self._renewed_at = None

    def written(self, lease: Object, now: float) -> None:
        """Note a lease that this candidate has written; the write began at this moment."""
        self.observe(lease, now)
        self._renewed_at = now
        self.was_leading = True
        self._pause_until = -math.inf

    def watch_failed(self, now: float) -> None:
        """Note that changes of the lease do not arrive at this moment."""
        self._unchanged_since = now

    def conflicted(self, now: float) -> None:
        """Note that another candidate wrote first."""
        self._is_lease_known = False
        self._pause_until = now

    def failed(self, now: float) -> None:
        """Note that the server did not answer, so that the age of the lease is not known."""
        self._is_lease_known = False
        self._unchanged_since = now
        self._pause_until = now + self._timing.lease_renewal_interval_seconds / 2

    def step(self, now: float, moment: float) -> Step:
        if now < self._pause_until:
            return Wait(self._pause_until - now)
        if not self._is_lease_known:
            return Read()
        seconds_left = self._seconds_left(now)
        if seconds_left > 0:
            return Wait(seconds_left)
        return Write(self._body(moment), self._lease is None)

    def resignation(self, moment: float) -> Object:
        """The lease without a holder: the next candidate writes it at once."""
        body = self._body(moment)
        return {**body, "spec": {**body["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}

    def _seconds_left(self, now: float) -> float:
        """Seconds until this candidate may write the lease, or has to renew it."""
        if self.holder == self.identity:
            if self._renewed_at is None:
                return 0.0
            return self._renewed_at + self._timing.lease_renewal_interval_seconds - now
        if not self.holder or self.holder.rpartition("_")[0] == self._pod:
            return 0.0
        spec = (self._lease or {})["spec"]
        duration = spec.get("leaseDurationSeconds") or self._timing.lease_seconds
        return self._unchanged_since + float(duration) - now

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
                "leaseDurationSeconds": int(self._timing.lease_seconds),
                "acquireTime": old.get("acquireTime") if is_mine else time,
                "renewTime": time,
                "leaseTransitions": changes if is_mine or not old else changes + 1,
            },
        }


def _renewal(lease: Object | None) -> tuple[object, object] | None:
    """The parts of a lease that change with each renewal."""
    if lease is None:
        return None
    spec = lease.get("spec") or {}
    return spec.get("holderIdentity"), spec.get("renewTime")


class Election:
    """Takes part in the election as one candidate; the end of the context resigns."""

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        pod: str,
        timing: Timing = TIMING,
        name: str = NAME,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._clock = clock
        self._ref = Ref(LEASES, name, namespace)
        self._candidate = Candidate(
            namespace=namespace, name=name, pod=pod, nonce=secrets.token_hex(4), timing=timing
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
        """Stop, and let the next candidate lead at once."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_all([task])
        await self._informer.close()
        if self._candidate.is_leading(self._clock()):
            with contextlib.suppress(KubetorchError, TimeoutError):
                async with deadlines.timeout(TIMING.lease_request_seconds):
                    await self._resign()

    @property
    def is_leading(self) -> bool:
        return self._candidate.is_leading(self._clock())

    async def won(self) -> None:
        while not self.is_leading:
            await self._changes.wait()

    async def lost(self) -> None:
        """Wait until another process leads, after this one did."""
        while not self._candidate.is_lost:
            await self._changes.wait()

    def _on_change(self, change: Change) -> None:
        # While the lease is ours, the answers to our own writes are sooner than the watch.
        if not self.is_leading or self._is_others(change):
            lease = None if change.kind == DELETED else change.object
            self._candidate.observe(lease, self._clock())
        self._changes.notify()

    def _is_others(self, change: Change) -> bool:
        spec = change.object.get("spec") or {}
        return change.kind == DELETED or spec.get("holderIdentity") != self._candidate.identity

    async def _run(self) -> None:
        candidate = self._candidate
        while not candidate.is_lost:
            step = candidate.step(self._clock(), time.time())
            if isinstance(step, Wait):
                seconds = min(step.seconds, TIMING.lease_watch_interval_seconds)
                await deadlines.wait_at_most(seconds, self._changes.wait())
                if self._informer.error is not None:
                    candidate.watch_failed(self._clock())
                continue
            was_leading = self.is_leading
            try:
                async with deadlines.timeout(TIMING.lease_request_seconds):
                    await self._carry_out(step)
            except KubernetesConflictError:
                candidate.conflicted(self._clock())
            except (KubetorchError, TimeoutError) as error:
                _log.warning("lease not reached step=%s error=%r", type(step).__name__, error)
                candidate.failed(self._clock())
            if self.is_leading and not was_leading:
                _log.info("leads identity=%s", candidate.identity)
            self._changes.notify()
        _log.error("lost the lease to %s", candidate.holder or "nobody")

    async def _resign(self) -> None:
        try:
            await self._client.replace(self._candidate.resignation(time.time()))
        except KubernetesConflictError:
            # A renewal that was cut off a moment ago arrived all the same.
            await self._carry_out(Read())
            if self._candidate.holder != self._candidate.identity:
                return
            await self._client.replace(self._candidate.resignation(time.time()))
        _log.info("resigned identity=%s", self._candidate.identity)

    async def _carry_out(self, step: Read | Write) -> None:
        started_at = self._clock()
        if isinstance(step, Write):
            write = self._client.create if step.is_new else self._client.replace
            self._candidate.written(await write(step.body), started_at)
            return
        try:
            lease = await self._client.get(self._ref)
        except KubernetesNotFoundError:
            self._candidate.observe(None, started_at)
        else:
            self._candidate.observe(lease, started_at)


class LeaderLabel:
    """Keeps the label on the pod that leads, and on no other; an asynchronous context manager.

    It watches the pods, because a pod that lost the lead a moment ago may have been about to mark
    itself. A process that is no pod of the installation, such as a test's, marks nothing. After the
    context the label stays until the next controller leads.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        identity: str,
        won: Callable[[], Awaitable[None]],
        *,
        pods: str = PODS_OF_CONTROLLER,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._leads = won
        self._pods = pods
        self._changed = asyncio.Event()
        self._informer = Informer(
            client,
            Selection(PODS, namespace, labels=pods),
            lambda _: self._changed.set(),
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LeaderLabel:
        await self._mark()
        await self._informer.__aenter__()
        self._task = asyncio.create_task(self._keep_marked(), name="mark")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await cancel_all([self._task])
        await self._informer.close()

    async def _keep_marked(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_right(self._informer.objects.values()):
                continue
            try:
                await self._mark()
            except KubetorchError as error:
                _log.warning("pod not marked pod=%s error=%s", self._identity, error)
                await asyncio.sleep(TIMING.leader_label_retry_seconds)
                self._changed.set()

    def _is_right(self, pods: Iterable[Object]) -> bool:
        labels_by_pod = {
            pod["metadata"]["name"]: pod["metadata"].get("labels") or {} for pod in pods
        }
        marks_by_pod = {
            name: tags[labels.LEADS] for name, tags in labels_by_pod.items() if labels.LEADS in tags
        }
        return marks_by_pod == ({self._identity: "true"} if self._identity in labels_by_pod else {})

    async def _mark(self) -> None:
        await self._leads()
        selection = Selection(PODS, self._namespace, labels=f"{self._pods},{labels.LEADS}")
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
