"""How a workload is, in a few words: what `kubectl get` shows of it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kubetorch.wire.messages import WorkloadView

#: The words of a status with which calls are served, or have been: an app that has done its work.
_SERVED = ("Ready", "Scaling", "Running", "Succeeded")


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


def of(view: WorkloadView, now: float) -> Summary:
    """A workload as it is at this moment.

    Args:
        view: What is known of it.
        now: Seconds since the epoch.
    """
    failure = view.failure or {}
    return Summary(
        phase=view.status,
        kind=view.kind,
        ready=sum(pod.is_ready and pod.generation == view.generation for pod in view.pods),
        pods=view.spec.compute.pods,
        is_ready=view.status in _SERVED,
        message=str(failure.get("message") or ""),
        ttl=view.spec.compute.inactivity_ttl or "",
        time=now,
    )


class Observer(Protocol):
    """Whom a state asks and tells about workloads."""

    def summary(self, namespace: str, name: str) -> Summary | None:
        """How a workload is; `None` when there is none of that name."""

    def on_deleted_elsewhere(self, namespace: str, name: str) -> None:
        """Somebody else deleted a workload: what it runs on is to go too."""
