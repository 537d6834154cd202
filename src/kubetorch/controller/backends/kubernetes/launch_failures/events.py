"""Kubernetes events as lines of a deploy's progress: which events are reported, each once.

Events that are alike for all pods of a launch are reported for the first pod. Reasons that a
verdict has (why a pod waits, why it cannot start) are not repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kubetorch.controller.backends.kubernetes.launch_failures import scheduling, snapshot
from kubetorch.controller.tuning import LIMITS
from kubetorch.k8s.resources import Object
from kubetorch.manifests.agent import RUNTIME

#: Reasons of normal events that are reported; the others are routine of a cluster.
_REPORTED_REASONS = (
    "Scheduled",
    "Pulling",
    "Pulled",
    "Started",
    "TriggeredScaleUp",
    "Nominated",
    "Preempted",
    "QuotaReserved",
    "Admitted",
    "Pending",
)
#: Reasons of warnings that repeat another event or the verdict.
_REPEATING_REASONS = (
    "BackOff",
    "FailedCreate",
    "InspectFailed",
    "DNSConfigForming",
    "FailedToUpdateEndpoint",
)
#: The container that Knative adds to pods.
_KNATIVE_CONTAINER = "queue-proxy"
#: Messages of a probe before the agent listens.
_STARTUP_PROBE = re.compile(r"^(?:Startup|Readiness) probe (?:failed|errored)")
_FIELD = re.compile(r"\{([^}]*)\}")


@dataclass(frozen=True)
class LaunchEvent:
    """An event of a launch that is worth a line.

    Attributes:
        reason: The reason in the words of Kubernetes, such as `Pulling`.
        message: The message, as one line.
        object_name: The name of the object that the event regards, mostly a pod.
        is_warning: Whether the event is a warning.
        time: Seconds since the epoch of the last occurrence.
    """

    reason: str
    message: str
    object_name: str
    is_warning: bool
    time: float

    @property
    def line(self) -> str:
        return f"{self.reason}: {self.message}"


def read(event: Object) -> LaunchEvent | None:
    """Read an event; `None` if it is not reported."""
    involved_object = event.get("involvedObject") or {}
    reason, text = str(event.get("reason") or ""), str(event.get("message") or "").strip()
    is_warning = event.get("type") == "Warning"
    field = _FIELD.search(str(involved_object.get("fieldPath") or ""))
    container = field[1] if field else ""
    if container == _KNATIVE_CONTAINER or reason in _REPEATING_REASONS:
        return None
    if container == RUNTIME and reason == "Started":
        return None  # the init container with Kubetorch's runtime ends in a moment
    if not is_warning and reason not in (*_REPORTED_REASONS, "Killing"):
        return None
    message = _line_text(reason, text)
    if message is None:
        return None
    return LaunchEvent(
        reason, message, str(involved_object.get("name")), is_warning, snapshot.last_time(event)
    )


def _line_text(reason: str, text: str) -> str | None:
    """The message as a line; `None` if it is not reported."""
    if reason == "Pulled" and "already present" in text:
        return None
    if reason == "Killing" and "probe" not in text:
        return None  # the pod is being replaced
    if reason == "Unhealthy" and _STARTUP_PROBE.search(text):
        return None
    if reason == "Failed" and text.startswith(("Error: ", "Failed to pull image")):
        return None  # the verdict explains it
    if reason == "Scheduled":
        node = text.rpartition(" to ")[2]
        return f"assigned to node {node}" if node else text
    if reason == "FailedScheduling":
        return scheduling.brief(text)
    return text.splitlines()[0] if text else reason


class ReportedEvents:
    """The events of a workload that its deploys have reported, since the last apply."""

    def __init__(self, since: float, earlier: ReportedEvents | None = None) -> None:
        # Times of events are whole seconds, rounded down: an event of this second may have been
        # reported by the deploy before, whose events are kept.
        self._since = float(int(since))
        self._events: set[LaunchEvent] = set()
        if earlier is not None:
            self._events |= {event for event in earlier._events if event.time >= self._since}
        self._reported_texts: set[tuple[str, str]] = set()

    def new(self, event: Object) -> LaunchEvent | None:
        """Read an event; `None` if it is not reported, or was reported before."""
        launch_event = read(event)
        if (
            launch_event is None
            or launch_event.time < self._since
            or len(self._reported_texts) >= LIMITS.reported_events
        ):
            return None
        if launch_event in self._events:
            return None
        key = (launch_event.reason, _common_text(launch_event))
        if key in self._reported_texts:
            return None
        self._reported_texts.add(key)
        self._events.add(launch_event)
        return launch_event


def _common_text(event: LaunchEvent) -> str:
    """The message without names, numbers and times, which differ between pods."""
    if event.reason == "Scheduled":
        return ""
    text = event.message.replace(event.object_name, "")
    return re.sub(r"\d[\d.:]*\w*|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "", text)
