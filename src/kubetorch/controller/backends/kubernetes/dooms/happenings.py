"""Kubernetes events as lines of a deploy's progress: which are worth one, each once.

A launch of a hundred pods is told as one story: what happens to every pod alike is said of the
first one. What a verdict says better (why a pod waits, why it is doomed) is not said twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kubetorch.controller.backends.kubernetes.dooms import cluster as reading
from kubetorch.controller.backends.kubernetes.dooms import scheduling
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
#: Different happenings of one launch, at most.
LIMIT = 500


@dataclass(frozen=True)
class Happening:
    """Something that happened to a pod, or on the way to one.

    Attributes:
        reason: Kubernetes' word.
        message: The rest of the line.
        about: Name of the pod or other object.
        is_warning: Whether Kubernetes warns.
        at: Seconds since the epoch.
    """

    reason: str
    message: str
    about: str
    is_warning: bool
    at: float

    @property
    def line(self) -> str:
        """As a deploy shows it."""
        return f"{self.reason}: {self.message}"


def read(event: Object) -> Happening | None:
    """What an event tells the user; `None` if nothing."""
    about = event.get("involvedObject") or {}
    reason, said = str(event.get("reason") or ""), str(event.get("message") or "").strip()
    is_warning = event.get("type") == "Warning"
    container = _container(about)
    if container == _PROXY or reason in _ECHOES:
        return None
    if container == RUNTIME and reason == "Started":
        return None  # ours, and over in a moment
    if not is_warning and reason not in (*_STEPS, "Killing"):
        return None
    message = _worded(reason, said)
    if message is None:
        return None
    return Happening(reason, message, str(about.get("name")), is_warning, reading.when(event))


def _container(about: Object) -> str:
    match = _FIELD.search(str(about.get("fieldPath") or ""))
    return match[1] if match else ""


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


class Told:
    """What was told of one launch.

    Args:
        since: When it began, in seconds since the epoch: what is older is not its story.
        earlier: The launch before it, whose story is not told again.
    """

    def __init__(self, since: float, earlier: Told | None = None) -> None:
        # Times of events are whole seconds, rounded down: what was told of this second is known.
        self._since = float(int(since))
        self._happenings: set[Happening] = set()
        if earlier is not None:
            self._happenings |= {one for one in earlier._happenings if one.at >= self._since}
        self._known: set[tuple[str, str]] = set()

    def new(self, event: Object) -> Happening | None:
        """What an event tells that was not told before."""
        found = read(event)
        if found is None or found.at < self._since or len(self._known) >= LIMIT:
            return None
        if found in self._happenings:
            return None
        key = (found.reason, _alike(found))
        if key in self._known:
            return None
        self._known.add(key)
        self._happenings.add(found)
        return found


def _alike(happening: Happening) -> str:
    """The message without what differs from pod to pod and from time to time."""
    if happening.reason == "Scheduled":
        return ""
    text = happening.message.replace(happening.about, "")
    return re.sub(r"\d[\d.:]*\w*|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "", text)
