"""Kubernetes events as lines of a deploy's progress: which are worth one, each once.

A launch of a hundred pods is one story: what happens to every pod alike is reported for the first
one. Reasons that a verdict has (why a pod waits, why it cannot start) are not repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kubetorch.controller.backends.kubernetes.launch_failures import scheduling, snapshot
from kubetorch.k8s.resources import Object
from kubetorch.manifests.agent import RUNTIME

#: Normal events that are worth a line; the others are a cluster's routine.
_STEPS = (
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
#: Warnings that say nothing of their own: another event or the verdict has it.
_ECHOES = ("BackOff", "FailedCreate", "InspectFailed", "DNSConfigForming", "FailedToUpdateEndpoint")
#: A container that Knative adds.
_PROXY = "queue-proxy"
#: What a probe says before the agent listens.
_STARTING = re.compile(r"^(?:Startup|Readiness) probe (?:failed|errored)")
_FIELD = re.compile(r"\{([^}]*)\}")
#: Different events of one launch, at most.
LIMIT = 500


@dataclass(frozen=True)
class LaunchEvent:
    reason: str
    message: str
    about: str
    is_warning: bool
    at: float

    @property
    def line(self) -> str:
        return f"{self.reason}: {self.message}"


def read(event: Object) -> LaunchEvent | None:
    """Read an event; `None` if it is not worth a line."""
    about = event.get("involvedObject") or {}
    reason, said = str(event.get("reason") or ""), str(event.get("message") or "").strip()
    is_warning = event.get("type") == "Warning"
    field = _FIELD.search(str(about.get("fieldPath") or ""))
    container = field[1] if field else ""
    if container == _PROXY or reason in _ECHOES:
        return None
    if container == RUNTIME and reason == "Started":
        return None  # ours, and over in a moment
    if not is_warning and reason not in (*_STEPS, "Killing"):
        return None
    message = _worded(reason, said)
    if message is None:
        return None
    return LaunchEvent(reason, message, str(about.get("name")), is_warning, snapshot.when(event))


def _worded(reason: str, said: str) -> str | None:
    """The message as a line; `None` if it is not worth one."""
    if reason == "Pulled" and "already present" in said:
        return None
    if reason == "Killing" and "probe" not in said:
        return None  # a pod that is replaced
    if reason == "Unhealthy" and _STARTING.search(said):
        return None
    if reason == "Failed" and said.startswith(("Error: ", "Failed to pull image")):
        return None  # the verdict says what it means
    if reason == "Scheduled":
        node = said.rpartition(" to ")[2]
        return f"assigned to node {node}" if node else said
    if reason == "FailedScheduling":
        return scheduling.brief(said)
    return said.splitlines()[0] if said else reason


class ReportedEvents:
    def __init__(self, since: float, earlier: ReportedEvents | None = None) -> None:
        # Times of events are whole seconds, rounded down: events of this second may be known.
        self._since = float(int(since))
        self._events: set[LaunchEvent] = set()
        if earlier is not None:
            self._events |= {one for one in earlier._events if one.at >= self._since}
        self._known: set[tuple[str, str]] = set()

    def new(self, event: Object) -> LaunchEvent | None:
        """Read an event that was not reported before."""
        found = read(event)
        if found is None or found.at < self._since or len(self._known) >= LIMIT:
            return None
        if found in self._events:
            return None
        key = (found.reason, _alike(found))
        if key in self._known:
            return None
        self._known.add(key)
        self._events.add(found)
        return found


def _alike(event: LaunchEvent) -> str:
    """The message without what differs from pod to pod and from time to time."""
    if event.reason == "Scheduled":
        return ""
    text = event.message.replace(event.about, "")
    return re.sub(r"\d[\d.:]*\w*|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "", text)
