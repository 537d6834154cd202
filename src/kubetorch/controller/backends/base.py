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
from kubetorch.manifests.desired_pods import Attached, Mounted
from kubetorch.specs import secret as specs
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.volume import VolumeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.messages import Ending, Equipment
from kubetorch.wire.secrets import Outcome, PutSecret, SecretView, StoredSecret
from kubetorch.wire.volumes import CreatedVolume, StorageClass, VolumeView

Manifest = dict[str, Any]
#: Why a pod was lost of which its backend knows nothing but that it is not there any more.
DELETED = Ending(reason="Deleted", message="it is not there any more")
Phase = Literal["Pending", "Running", "Failed", "Terminating"]
#: Notified of a workload (namespace, name) whose pods changed in any way.
Listener = Callable[[str, str], None]


class SecretStore(Protocol):
    async def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        """Store values, in one step."""

    async def get(self, namespace: str, object_name: str) -> SecretView | None:
        """A secret without its values, if there is one of that name."""

    async def values(self, namespace: str, object_name: str) -> dict[str, bytes]:
        """The values of a secret."""

    async def list(self, namespace: str | None) -> list[SecretView]:
        """The secrets of a namespace, or of all; on Kubernetes those that Kubetorch made."""

    async def delete(self, namespace: str, object_name: str) -> bool:
        """Delete a secret; whether there was one."""


class VolumeStore(Protocol):
    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        """Make a volume; one that exists stays as it is."""

    async def get(self, namespace: str, claim: str) -> VolumeView | None:
        """A volume, if there is one of that name."""

    async def list(self, namespace: str | None) -> list[VolumeView]:
        """The volumes of a namespace, or of all; on Kubernetes those that Kubetorch made."""

    async def delete(
        self, namespace: str, claim: str, *, wait: float, is_forced: bool = False
    ) -> bool:
        """Delete a volume and what is in it; one that pods hold is gone after them."""

    async def storage_class(self, spec: VolumeSpec) -> StorageClass:
        """The class and the access mode of a volume that is to be made."""


class Stores(NamedTuple):
    secrets: SecretStore
    volumes: VolumeStore


def check_views(
    namespace: str,
    attached: Attached,
    secrets: Mapping[str, SecretView | None],
    volumes: Mapping[str, VolumeView | None],
) -> None:
    """Refuse what pods could not be given, of the secrets and volumes that are there."""
    for name in attached.secrets:
        if secrets[name] is None:
            raise SecretNotFound(name, namespace)
    needed_keys = [
        (variable.secret, variable.key)
        for variable in attached.variables
        if variable.key and not variable.optional
    ]
    needed_keys += [
        (secret_files.secret, key)
        for secret_files in attached.files
        if not secret_files.optional
        for key, _ in secret_files.items
    ]
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
    """Decide on an upload to a secret with these values; returns the values that it has then."""
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
        name: It keeps its name as long as it lives.
        is_retiring: It was made from an older template, or is surplus, and ends soon.
        restarts: How often its agent was started again.
        reason: Why it does not run.
        failure: Why it cannot run, once that is certain.
        pid: Process id of its agent, where pods are processes.
        started: Seconds since the epoch of its agent's start.
        is_down: Its agent has certainly ended, or never started: what a session of it says is old.
        uid: Identity that no other pod ever has, where there are such.
        is_called: Whether calls go to it, or it only helps those that they go to.
        ending: Why somebody else ends it, or why its agent has ended.
        is_ours: Whether Kubetorch rendered it, so that what it writes is the workload's.
        last_ending: Why the agent before this one has ended, where it was started again.
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

    @property
    def may_run_calls(self) -> bool:
        return self.phase != "Failed"


class Trouble(msgspec.Struct, frozen=True):
    """Why a workload does not have its pods, if so, and why it never will, once that is certain."""

    reason: str = ""
    failure: Failure | None = None


class PortRequest(msgspec.Struct, frozen=True):
    """Ports that the processes of a distributed service are to meet on, as many as `count`.

    Others than from `first` on will do, unless the user declared that. With `further` ports behind
    them, whichever are free, where pods share the ports of a machine.
    """

    first: int
    is_declared: bool
    count: int = 1
    per_pod: int = 1
    further: int = 0


class EventLine(msgspec.Struct, frozen=True):
    """An event on the way to the pods of a workload, as one line."""

    message: str
    pod: str = ""
    is_warning: bool = False


class Backend(Protocol):
    """Runs workloads as pods.

    A backend makes pods from specs and reports pods; it knows nothing of generations. Call `watch`
    and then `start` first. What has a body here is so for a backend that has nothing of the kind.
    """

    #: The value of the `backend` setting for this backend.
    name: str
    #: Of its pods.
    stores: Stores

    def watch(self, listener: Listener) -> None:
        """Notify `listener` of every change from now on."""

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Take up the pods that an earlier controller left."""

    def check(self, spec: WorkloadSpec) -> None:
        """Refuse what cannot run here, before anything of it is stored."""

    async def apply(self, spec: WorkloadSpec) -> None:
        """Make the pods of a workload what its manifest says; returns before they run."""

    async def release(self, namespace: str, name: str) -> None:
        """Leave a workload without pods, which hold what others wait for, until its next apply."""

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        """End all pods of a workload; returns when nothing of them is left.

        An object that its user had before stays, and its pods are its own again: what is left is
        returned, in words.
        """
        return []

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        """The pods of a workload, by ordinal."""

    def pod_manifests(self, namespace: str, name: str) -> list[Manifest]:
        """The pods of a workload as their cluster describes them."""
        return []

    def trouble(self, namespace: str, name: str) -> Trouble:
        """The reason why a workload does not have its pods, if there is one."""
        return Trouble()

    def event_lines(self, namespace: str, name: str) -> list[EventLine]:
        """The events of its pods since the last call of this method, from its last apply on."""
        return []

    def expected(self, namespace: str, name: str) -> int | None:
        """The least number of pods of its present template that a workload should have."""

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:
        """Note pods that serve the wanted generation; once all new ones do, retiring ones can end.

        Called often; the set is not to be kept. On Kubernetes the object's own controller does it,
        by the readiness probe.
        """
        return

    def prepare(self) -> None:
        """A workload that does not exist yet will be applied in a moment."""
        return

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        """Warnings about a compute and its manifest, for the user, one sentence each."""

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        """The spec that is applied: this one, or the earlier one if this could not be applied."""
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

    def mounted(self, namespace: str, name: str, pod: str) -> Mounted:
        """The secrets and volumes that a pod of a workload has, and that are not its user's own."""

    def ports(self, namespace: str, name: str, request: PortRequest) -> tuple[int, ...]:
        """Ports that are free where the pods of a workload run; its own until the next call.

        Raises:
            ResourceNotAvailableError: Somebody else has the declared one.
        """

    def hold_ports(self, namespace: str, name: str, ports: Sequence[int]) -> None:
        """A workload has these already, since an earlier controller."""
        return

    def end_pod(self, namespace: str, name: str, pod: str, error: KubetorchError) -> None:
        """End a pod that must not have what it has mounted; this error is why."""
        return

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        """The last lines that a pod wrote, without its agent's help."""

    async def close(self, *, pods: bool) -> None:
        """The controller stops."""
