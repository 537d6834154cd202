"""The seam between the controller and what runs pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Literal, Protocol

import msgspec

from kubetorch.controller.backends.stores import Stores
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Ending

Manifest = dict[str, Any]
Phase = Literal["Pending", "Running", "Failed", "Terminating"]

#: Told of a workload (namespace, name) whose pods changed in any way.
Listener = Callable[[str, str], None]


class PodStatus(msgspec.Struct, frozen=True):
    """A pod, as its backend sees it.

    Attributes:
        name: Its name, which it keeps as long as it lives.
        ordinal: Its number in the workload.
        phase: Kubernetes' word.
        url: Base URL of its agent.
        is_retiring: It was made from an older template, or is surplus, and ends soon.
        restarts: How often its agent was started again.
        reason: Why it does not run.
        failure: Why it cannot run (`kubetorch.wire.failures`), once that is certain.
        pid: Process id of its agent, where pods are processes.
        started: Seconds since the epoch of its agent's start.
        is_down: Its agent has certainly ended, or never started: what a session of it says is old.
        uid: Identity that no other pod ever has, where there are such.
        is_called: Whether calls go to it, or it only helps those that they go to.
        ending: Why somebody else ends it, or why its agent has ended.
        is_ours: Whether Kubetorch rendered it, so that what it writes is the workload's.
    """

    name: str
    ordinal: int
    phase: Phase
    url: str
    is_retiring: bool = False
    restarts: int = 0
    reason: str = ""
    failure: dict[str, Any] | None = None
    pid: int | None = None
    started: float = 0.0
    is_down: bool = False
    uid: str = ""
    is_called: bool = True
    ending: Ending | None = None
    is_ours: bool = True


class Trouble(msgspec.Struct, frozen=True):
    """What keeps a workload from having its pods.

    Attributes:
        reason: As one sentence; empty when nothing does.
        failure: Why it never will have them (`kubetorch.wire.failures`), once that is certain.
    """

    reason: str = ""
    failure: dict[str, Any] | None = None


class News(msgspec.Struct, frozen=True):
    """Something happened on the way to the pods of a workload.

    Attributes:
        message: As one line.
        pod: What it happened to.
        is_warning: Whether it should not have.
    """

    message: str
    pod: str = ""
    is_warning: bool = False


class Backend(Protocol):
    """Runs workloads as pods.

    It is told what there should be and says what there is; it knows nothing of generations. Whoever
    uses it calls `watch` and then `start` first.
    """

    @property
    def name(self) -> str:
        """What the `backend` setting calls it."""

    @property
    def stores(self) -> Stores:
        """What keeps the secrets and volumes of its pods."""

    def watch(self, listener: Listener) -> None:
        """Tell `listener` of every change from now on."""

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Take up the pods that an earlier controller left.

        Args:
            specs: What there should be, of each workload the wanted one first, then those of which
                there may be something if that was not applied; pods of anything else are ended.
        """

    def check(self, spec: WorkloadSpec) -> None:
        """Refuse what cannot run here, before anything of it is stored.

        Raises:
            KubetorchError: It cannot.
        """

    async def apply(self, spec: WorkloadSpec) -> None:
        """Make the pods of a workload what its manifest says; returns before they run.

        Raises:
            KubetorchError: The manifest cannot be applied.
        """

    async def delete(self, namespace: str, name: str, *, grace: float) -> None:
        """End all pods of a workload; returns when nothing of them is left.

        Args:
            namespace: Namespace of the workload.
            name: Its name.
            grace: Seconds that their calls have to end.
        """

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        """The pods of a workload, by ordinal."""

    def trouble(self, namespace: str, name: str) -> Trouble:
        """What keeps a workload from having its pods, if anything does."""

    def news(self, namespace: str, name: str) -> list[News]:
        """What happened to its pods since this was asked the last time, from its last apply on."""

    def expected(self, namespace: str, name: str) -> int | None:
        """How many pods of its present template a workload should have, at the least.

        Returns:
            0 where a scaler has it without pods because nobody calls it; `None` while that is not
            known yet.
        """

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:
        """These pods serve what they should; once all new ones do, retiring ones can end.

        Called often; the set is not to be kept.
        """

    def prepare(self) -> None:
        """A workload that does not exist yet will be applied in a moment."""

    def warnings(self, manifest: Manifest) -> tuple[str, ...]:
        """What whoever deploys a manifest should be told at once, one sentence each."""

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        """What there is of a workload: this, or what was before if this could not be applied."""

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        """Where all pods of a workload are called together; empty where each is called alone."""

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        """What the backend cannot honour of a compute and its manifest, one sentence each."""

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        """The last lines that a pod wrote, without its agent's help.

        Returns:
            Lines of its log (docs/design/logs.md), the oldest first; none where there are none.
        """

    async def close(self, *, pods: bool) -> None:
        """The controller stops.

        Args:
            pods: Whether the pods stop too, until `start`; else they go on.
        """
