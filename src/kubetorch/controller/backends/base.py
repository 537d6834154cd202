"""The seams between the controller and what runs pods, and what keeps their secrets and volumes.

Names are checked before they come here. On Kubernetes a secret is a Secret and a volume a
PersistentVolumeClaim; `kubetorch.manifests.secrets` and `kubetorch.manifests.storage` say what the
fields are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from kubetorch.errors import (
    KubetorchError,
    SecretConflictError,
    SecretNotFound,
    SpecError,
    VolumeNotFoundError,
)
from kubetorch.lib.secret_bytes import SecretBytes
from kubetorch.manifests.desired_pods import Attached, MountedNames
from kubetorch.specs import secret as specs
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.volume import VolumeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.messages import Ending, Equipment
from kubetorch.wire.secrets import Outcome, PutSecret, SecretView, StoredSecret
from kubetorch.wire.volumes import CreatedVolume, StorageClass, VolumeView

Manifest = dict[str, Any]
#: The ending of a pod that has disappeared, where its backend knows no other reason.
DELETED = Ending(reason="Deleted", message="it is not there any more")
Phase = Literal["Pending", "Running", "Failed", "Terminating"]
#: Notified of a workload (namespace, name) whose pods changed in any way.
Listener = Callable[[str, str], None]


class SecretStore(Protocol):
    async def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        """Store the values of a secret: all of them, or none."""

    async def get(self, namespace: str, object_name: str) -> SecretView | None:
        """A secret without its values; `None` if no secret has that name."""

    async def values(self, namespace: str, object_name: str) -> dict[str, bytes]:
        """The values of a secret by key."""

    async def list(self, namespace: str | None) -> list[SecretView]:
        """The secrets of a namespace, or of all; on Kubernetes those that Kubetorch made."""

    async def delete(self, namespace: str, object_name: str) -> bool:
        """Delete a secret; returns `False` if there was none."""


class VolumeStore(Protocol):
    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        """Make a volume; a volume that exists stays as it is."""

    async def get(self, namespace: str, claim: str) -> VolumeView | None:
        """A volume; `None` if no volume has that name."""

    async def list(self, namespace: str | None) -> list[VolumeView]:
        """The volumes of a namespace, or of all; on Kubernetes those that Kubetorch made."""

    async def delete(
        self, namespace: str, claim: str, *, wait: float, is_forced: bool = False
    ) -> bool:
        """Delete a volume and its content; a volume that pods hold disappears after those pods.

        Args:
            namespace: The namespace of the volume.
            claim: The name of the volume's claim.
            wait: Seconds for which to wait until the volume has disappeared.
            is_forced: Delete a volume although pods hold it.

        Returns:
            `True` if the volume has disappeared by now.
        """

    async def storage_class(self, spec: VolumeSpec) -> StorageClass:
        """The storage class and the access mode that a new volume would get."""


class Stores(NamedTuple):
    secrets: SecretStore
    volumes: VolumeStore


def check_views(
    namespace: str,
    attached: Attached,
    secrets: Mapping[str, SecretView | None],
    volumes: Mapping[str, VolumeView | None],
) -> None:
    """Refuse pods whose secrets, keys of secrets, or volumes do not exist.

    Args:
        namespace: The namespace of the pods.
        attached: The secrets and volumes that the pods mount or read.
        secrets: These secrets by name; `None` for a secret that does not exist.
        volumes: These volumes by claim; `None` for a volume that does not exist.
    """
    for name in attached.required_secrets:
        if secrets[name] is None:
            raise SecretNotFound(name, namespace)
    needed_keys = [
        (variable.secret, variable.key)
        for variable in attached.variables
        if variable.key and not variable.optional
    ]
    for files in attached.files:
        if not files.optional:
            needed_keys += [(files.secret, key) for key, _ in files.items]
    for name, key in needed_keys:
        view = secrets[name]
        if view is not None and key not in view.keys:
            raise SpecError(
                f"the secret {name!r} in namespace {namespace!r} has no {key!r}; it has "
                f"{', '.join(view.keys) or 'nothing'}"
            )
    for claim in attached.claims:
        if volumes[claim.claim] is None:
            raise missing_volume(namespace, claim.claim)


def missing_volume(namespace: str, claim: str) -> VolumeNotFoundError:
    return VolumeNotFoundError(
        f"Volume {claim!r} does not exist in namespace {namespace!r}",
        hint=f"kt volumes -n {namespace} lists the volumes; kt volumes create makes one",
    )


def decide_put(
    namespace: str, put: PutSecret, stored_values: dict[str, bytes] | None
) -> tuple[Outcome, dict[str, bytes]]:
    """Decide what an upload does to a secret; returns the values that the secret has afterwards."""
    outcome: Outcome = "created"
    values = put.values
    if stored_values is None:
        if put.collision == "merge":
            raise SecretNotFound(put.draft.name, namespace)
    else:
        if put.collision == "merge":
            values = {**stored_values, **put.values}
        if put.collision == "keep" or values == stored_values:
            return "unchanged", stored_values
        if put.collision == "same":
            raise SecretConflictError(put.draft.name, namespace)
        outcome = "merged" if put.collision == "merge" else "replaced"
    specs.check_size(SecretBytes(values).size_bytes)
    return outcome, values


class PodStatus(msgspec.Struct, frozen=True):
    """A pod, as its backend sees it.

    Attributes:
        name: The pod keeps its name as long as it lives.
        address: IP address of the pod where it is not the host of `url`.
        is_retiring: The pod was made from an older template, or is surplus, and ends soon.
        restarts: How often the agent of the pod was started again.
        reason: Why the pod does not run; empty if it runs.
        failure: Why the pod can never run, once that is certain.
        pid: Process id of its agent, where pods are processes.
        started: Seconds since the epoch of its agent's start.
        is_down: The agent has certainly ended, or never started: what its session reports is old.
        uid: Identity that no other pod ever has; empty in a backend without such identities.
        is_called: Whether calls go to the pod; `False` for a pod that only helps called pods.
        ending: Why the cluster ends the pod, or why its agent has ended.
        is_ours: Whether Kubetorch rendered the pod, so that its logs are logs of the workload.
        last_ending: Why the previous agent of the pod ended, where the agent was started again.
    """

    name: str
    ordinal: int
    phase: Phase
    url: str
    is_retiring: bool = False
    restarts: int = 0
    reason: str = ""
    failure: Failure | None = None
    pid: int | None = None
    started: float = 0.0
    is_down: bool = False
    uid: str = ""
    is_called: bool = True
    ending: Ending | None = None
    is_ours: bool = True
    last_ending: Ending | None = None
    address: str = ""

    @property
    def may_run_calls(self) -> bool:
        return self.phase != "Failed"


class Trouble(msgspec.Struct, frozen=True):
    """Why a workload lacks pods.

    Attributes:
        reason: Why pods are missing; empty if none is.
        failure: Why these pods can never come, once that is certain.
    """

    reason: str = ""
    failure: Failure | None = None


class PortRequest(msgspec.Struct, frozen=True):
    """A request for ports on which the processes of a distributed service meet.

    Attributes:
        first: The first port; the others follow it.
        is_declared: Whether the user declared `first`, so that no other port will do.
        count: The number of ports.
        per_pod: The number of these ports in one pod, where each pod has ports of its own.
        further: The number of free ports in addition, where pods share the ports of a machine.
    """

    first: int
    is_declared: bool
    count: int = 1
    per_pod: int = 1
    further: int = 0


class EventLine(msgspec.Struct, frozen=True):
    """An event of a launch as one line of a deploy's progress; `pod` names its subject."""

    message: str
    pod: str = ""
    is_warning: bool = False


class Backend(Protocol):
    """Runs workloads as pods.

    A backend makes pods from specs and reports pods; it knows nothing of generations. Call `watch`
    and then `start` first. A method with a body has the answer of a backend without that feature.
    """

    #: The value of the `backend` setting for this backend.
    name: str
    #: The secrets and volumes of its pods.
    stores: Stores

    def watch(self, listener: Listener) -> None:
        """Notify `listener` of every change from now on."""

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Take up the pods that an earlier controller left."""

    def check(self, spec: WorkloadSpec) -> None:
        """Refuse a spec that this backend cannot run, before anything of the spec is stored."""

    async def apply(self, spec: WorkloadSpec) -> None:
        """Make the pods that the manifest of a workload describes; returns before they run."""

    async def release(self, namespace: str, name: str) -> None:
        """End the pods of a workload until its next apply: other workloads wait for their GPUs."""

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        """End all pods of a workload; returns when they have disappeared.

        An object that its user had before the first deploy stays, with pods of its own. Returns a
        sentence on each object that stays.
        """
        return []

    def scale(self, namespace: str, name: str, size: int, leaving: Sequence[str] = ()) -> None:
        """Let a workload have so many pods from now on, also before its first apply.

        `expected` is `size` then. Where pods are surplus, those go that `leaving` names first; they
        finish their calls.
        """
        return

    async def scales(self, spec: WorkloadSpec) -> bool:
        """True if the controller decides on the number of pods of an autoscaled workload.

        Where an operator of the cluster does, it is false.
        """
        return False

    def most_pods(self, spec: WorkloadSpec) -> int | None:
        """The number of pods of a workload for which there is room; `None` if that is unknown."""
        return None

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        """The pods of a workload, by ordinal."""

    def pod_manifests(self, namespace: str, name: str) -> list[Manifest]:
        """The pods of a workload as their cluster describes them."""
        return []

    def trouble(self, namespace: str, name: str) -> Trouble:
        """The reason why a workload lacks pods; an empty `Trouble` if it lacks none."""
        return Trouble()

    def event_lines(self, namespace: str, name: str) -> list[EventLine]:
        """The events of a workload's pods since its last apply that were not returned before."""
        return []

    def expected(self, namespace: str, name: str) -> int | None:
        """The least number of pods of its present template that a workload should have."""

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:
        """Note the pods that serve the desired generation; once all new pods do, retiring pods end.

        The controller calls this often, and changes the set afterwards. On Kubernetes the
        controller of the object ends retiring pods, by the readiness probe.
        """
        return

    async def announce(self, namespace: str, name: str, reason: str, message: str) -> None:
        """Write an event about a workload into its cluster; `reason` is one word."""
        return

    def prepare(self) -> None:
        """Get ready for the apply of a new workload, which follows in a moment."""
        return

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        """Warnings about a compute and its manifest, for the user, one sentence each."""

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        """The spec that is applied: this spec, or an earlier one if this could not be applied."""
        return spec

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        """The URL at which all pods of a workload are called together; empty without such a URL."""
        return ""

    def scaler(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        """The URL of the scaler, which makes pods for calls; empty without a scaler."""
        return ""

    def equipment(self, namespace: str, name: str) -> Equipment | None:
        """The additions to the object of a workload; `None` without an object."""
        return None

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        """The parts of a compute and its manifest that have no effect here, one sentence each."""

    def mounted(self, namespace: str, name: str, pod: str) -> MountedNames:
        """The secrets and volumes that a pod has mounted and that do not belong to its user."""

    def ports(self, namespace: str, name: str, request: PortRequest) -> tuple[int, ...]:
        """Reserve free ports where the pods of a workload run, until its next call of this method.

        Raises:
            ResourceNotAvailableError: Another process has the port that the user declared.
        """

    def hold_ports(self, namespace: str, name: str, ports: Sequence[int]) -> None:
        """Reserve the ports that a workload got from an earlier controller."""
        return

    def end_pod(self, namespace: str, name: str, pod: str, error: KubetorchError) -> None:
        """End a pod that must not have its mounts; the error says why."""
        return

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        """The last lines of a pod's log, read without its agent."""

    async def close(self, *, pods: bool) -> None:
        """Stop watching; with `pods`, end the pods as well."""
