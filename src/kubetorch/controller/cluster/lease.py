"""Elects the leader: a Lease comes in, a candidate's action out. A state machine without I/O.

    not there, free, or not renewed for its duration ──► Take ──► leading ──(each period)──► Take
    somebody else's ──► Wait                                         │
                                       (somebody else's) ──► lost ◄──┘

The clocks of two machines are never compared: what counts is how long this candidate has seen the
lease unchanged, by its own clock. A lease is written only over the version that was seen, so of two
candidates that take it at the same time one finds out.

A leader that cannot reach the API server does not know whether it still leads, and changes nothing.
It goes on when it finds its lease as it left it: as long as nobody reaches the API server, nobody
takes over. A candidate that could not look counts from when it could.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone

from kubetorch.k8s.resources import Object, Resource

LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")


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
