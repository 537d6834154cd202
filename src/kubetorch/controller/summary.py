"""How a workload is, in a few words: what `kubectl get` shows of it."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """A workload at one moment.

    Attributes:
        phase: The word of `kt list`.
        kind: Kind of its manifest.
        ready: How many pods serve the wanted generation.
        pods: How many there should be.
        is_ready: Whether calls are served.
        message: Why not.
        ttl: Its `inactivity_ttl`.
        time: The moment, in seconds since the epoch.
    """

    phase: str
    kind: str
    ready: int
    pods: int
    is_ready: bool
    message: str
    ttl: str
    time: float


class Observer(Protocol):
    """Whom a state asks and tells about workloads."""

    def summary(self, namespace: str, name: str) -> Summary | None:
        """How a workload is; `None` when there is none of that name."""

    def on_deleted_elsewhere(self, namespace: str, name: str) -> None:
        """Somebody else deleted a workload: what it runs on is to go too."""
