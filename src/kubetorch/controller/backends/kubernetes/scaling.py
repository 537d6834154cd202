"""The number of pods of services that Kubetorch scales, and the way to them while there is none.

scale() ──► the wanted number ──► 1. at zero the Service of the workload leads to the controller
            (the latest wins)     2. pods that are to go first cost the least to delete
                                  3. `spec.replicas` of the Deployment, by a manager of its own
                                  4. once a pod is ready, the Service leads to pods alone

The applies of deploys have no `spec.replicas`, so they never change the number. Somebody else who
changes the number has theirs until the wanted number changes, or the next deploy.

kube-proxy merges all EndpointSlices of a Service, and the controller that makes them for pods
leaves those of another manager alone. The slice of the controller is there before the last pod
goes, and goes after the first pod is in a slice, so the Service never leads nowhere. The relay of
the controller passes on or holds what comes to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from kubetorch.controller.backends.kubernetes.apply import FIELD_MANAGER, SCALER_MANAGER, Applier
from kubetorch.controller.backends.kubernetes.launch_failures import snapshot
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesError,
    KubernetesNotFoundError,
    KubetorchError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection, is_leaving, is_over
from kubetorch.lib import backoff
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest
from kubetorch.wire.messages import Ending

ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
#: Labels of EndpointSlices: the Service, and who manages the slice.
SLICE_SERVICE = "kubernetes.io/service-name"
SLICE_MANAGER = "endpointslice.kubernetes.io/managed-by"
#: The ending of a pod that the scaler does not need any more.
SCALED_DOWN = Ending(reason="ScaledDown", message="there was too little to do")

#: What scales services: Knative where the cluster has it, or always the same.
Engine = Literal["auto", "kubetorch", "knative"]

_MANAGER = "kubetorch.com"
_SLICE_SUFFIX = "-kubetorch"
_log = logging.getLogger(__name__)


class ControllerAddress(msgspec.Struct, frozen=True):
    ip: str
    port: int


class ControllerEndpoints:
    """The EndpointSlices by which Services without a pod lead to this controller."""

    def __init__(
        self,
        client: Client,
        address: ControllerAddress | None,
        owner: Callable[[str, str], Manifest | None],
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._client = client
        self._address = address
        self._owner = owner
        self._namespaces = namespaces
        # By workload: the Service whose slice exists, and whether it has this controller's address.
        self._slices: dict[Key, tuple[str, bool]] = {}

    async def start(self) -> None:
        """Find the slices of the controller that led before."""
        if self._address is None:
            return
        for namespace in self._namespaces or (None,):
            selection = Selection(
                ENDPOINT_SLICES, namespace, labels=f"{SLICE_MANAGER}={_MANAGER},{labels.SERVICE}"
            )
            try:
                listing = await self._client.list(selection)
            except KubernetesError as error:  # rights that an older installation lacks
                _log.warning("endpoint slices not listed error=%s", error)
                continue
            for endpoint_slice in listing.items:
                metadata = endpoint_slice["metadata"]
                key = (metadata["namespace"], metadata["labels"][labels.SERVICE])
                self._slices[key] = (metadata["labels"].get(SLICE_SERVICE, ""), False)

    def exists(self, key: Key) -> bool:
        return key in self._slices

    async def add(self, key: Key, service: str) -> None:
        """Have a Service lead to this controller, beside its pods."""
        if self._address is None or self._slices.get(key) == (service, True):
            return
        previous_service, _ = self._slices.get(key, (service, False))
        if previous_service != service:
            await self.remove(key)
        await self._client.apply(
            self._slice(key, service, self._address), field_manager=FIELD_MANAGER, force=True
        )
        self._slices[key] = (service, True)

    async def remove(self, key: Key) -> None:
        """Have the Service lead to pods alone."""
        if key not in self._slices:
            return
        service, _ = self._slices[key]
        with contextlib.suppress(KubernetesNotFoundError):  # it goes with the workload's object
            await self._client.delete(Ref(ENDPOINT_SLICES, f"{service}{_SLICE_SUFFIX}", key[0]))
        self._slices.pop(key, None)

    async def has_pods(self, key: Key) -> bool:
        """True if the Service leads to a pod: kube-proxy learns of that before `remove`."""
        service, _ = self._slices[key]
        selection = Selection(ENDPOINT_SLICES, key[0], labels=f"{SLICE_SERVICE}={service}")
        return any(
            (endpoint.get("conditions") or {}).get("ready")
            for endpoint_slice in (await self._client.list(selection)).items
            if endpoint_slice["metadata"]["labels"].get(SLICE_MANAGER) != _MANAGER
            for endpoint in endpoint_slice.get("endpoints") or ()
        )

    def _slice(self, key: Key, service: str, address: ControllerAddress) -> Object:
        namespace, name = key
        metadata: Object = {
            "name": f"{service}{_SLICE_SUFFIX}",
            "namespace": namespace,
            "labels": {
                **labels.of_pods(name=name, username=None),
                SLICE_SERVICE: service,
                SLICE_MANAGER: _MANAGER,
            },
        }
        owner = self._owner(*key)
        if owner is not None:
            identity = {part: owner["metadata"][part] for part in ("name", "uid")}
            metadata["ownerReferences"] = [
                {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **identity}
            ]
        conditions = {"ready": True, "serving": True, "terminating": False}
        return {
            "apiVersion": ENDPOINT_SLICES.api_version,
            "kind": ENDPOINT_SLICES.kind,
            "metadata": metadata,
            "addressType": f"IPv{ipaddress.ip_address(address.ip).version}",
            "endpoints": [{"addresses": [address.ip], "conditions": conditions}],
            "ports": [{"name": "http", "port": address.port, "protocol": "TCP"}],
        }


class _Scaled(msgspec.Struct):
    #: The wanted number of pods, and the pods that are to go first.
    size: int
    leaving: tuple[str, ...] = ()
    #: The Deployment that is applied; `None` before the first apply.
    deployment: Manifest | None = None
    #: The Service that leads to its pods; empty without one.
    service: str = ""
    #: The number that the Deployment was given last; `None` if that is not known.
    given_size: int | None = None
    #: Whether something is to be done.
    is_behind: bool = False
    task: asyncio.Task[None] | None = None


class DeploymentScaler:
    """Gives Deployments their numbers of pods: a task for each workload that is to change."""

    def __init__(
        self,
        client: Client,
        applier: Applier,
        endpoints: ControllerEndpoints,
        *,
        pods: Callable[[Key], Mapping[str, Object]],
        on_change: Callable[[Key], None],
    ) -> None:
        self._client = client
        self._applier = applier
        self._endpoints = endpoints
        self._pods = pods
        self._on_change = on_change
        self._scaled: dict[Key, _Scaled] = {}
        # Uids of pods that are deleted because fewer are needed.
        self._surplus: set[str] = set()
        self._slots = asyncio.Semaphore(LIMITS.concurrent_annotations)
        #: Why a workload does not have its number of pods, by workload.
        self.reasons: dict[Key, str] = {}

    async def start(self) -> None:
        await self._endpoints.start()

    def size(self, key: Key) -> int | None:
        """The wanted number of pods; `None` if Kubetorch does not scale the workload."""
        scaled = self._scaled.get(key)
        return None if scaled is None else scaled.size

    def scale(self, key: Key, size: int, leaving: Sequence[str] = ()) -> None:
        scaled = self._scaled.setdefault(key, _Scaled(size))
        scaled.size, scaled.leaving = size, tuple(leaving)
        self._act_soon(key, scaled)

    def applied(
        self, key: Key, deployment: Manifest, service: str, *, given_size: int | None
    ) -> None:
        """A deploy has applied a Deployment, or a controller that starts has found it."""
        scaled = self._scaled.get(key)
        if scaled is not None:
            scaled.deployment, scaled.service = deployment, service
            scaled.given_size = given_size
            self._act_soon(key, scaled)

    def pods_changed(self, key: Key) -> None:
        scaled = self._scaled.get(key)
        if scaled is not None and self._is_door_needless(key, scaled):
            self._act_soon(key, scaled)

    def is_surplus(self, key: Key, pod: Object) -> bool:
        """True if a pod that is being deleted is one too many, and not lost.

        Without a lost pod there are fewer than wanted, until its owner has made another one.
        """
        scaled, uid = self._scaled.get(key), pod["metadata"]["uid"]
        if scaled is not None and uid not in self._surplus:
            staying_pods = [
                member
                for member in self._pods(key).values()
                if not (is_leaving(member) or is_over(member))
            ]
            if len(staying_pods) >= scaled.size:
                self._surplus.add(uid)
        return uid in self._surplus

    def forget_pod(self, pod: Object) -> None:
        self._surplus.discard(pod["metadata"].get("uid"))

    async def forget(self, key: Key) -> None:
        """Stop scaling a workload: it is deleted, or an operator scales it."""
        scaled = self._scaled.pop(key, None)
        self.reasons.pop(key, None)
        if scaled is not None and scaled.task is not None:
            await cancel_all([scaled.task])
        await self._endpoints.remove(key)

    async def close(self) -> None:
        await cancel_all(
            [scaled.task for scaled in self._scaled.values() if scaled.task is not None]
        )

    # ------------------------------------------------------------------------------------ inside

    def _act_soon(self, key: Key, scaled: _Scaled) -> None:
        scaled.is_behind = True
        if scaled.task is None and scaled.deployment is not None:
            scaled.task = asyncio.create_task(self._act(key, scaled), name=f"scale {key}")

    async def _act(self, key: Key, scaled: _Scaled) -> None:
        pauses = _pauses()
        while scaled.is_behind:
            scaled.is_behind = False
            try:
                await self._carry_out(key, scaled)
            except KubetorchError as error:
                scaled.is_behind = True
                self._note(key, f"its number of pods cannot be set to {scaled.size}: {error}")
                await asyncio.sleep(next(pauses))
                continue
            self._note(key, "")
            pauses = _pauses()
            if not scaled.is_behind and self._is_door_needless(key, scaled):
                scaled.is_behind = True
                await asyncio.sleep(TIMING.endpoints_recheck_seconds)
        scaled.task = None

    def _note(self, key: Key, reason: str) -> None:
        """Keep the reason why a workload does not have its number of pods; empty if it has."""
        if self.reasons.get(key, "") == reason:
            return
        if reason:
            _log.warning("not scaled workload=%s/%s because=%s", *key, reason)
            self.reasons[key] = reason
        else:
            del self.reasons[key]
        self._on_change(key)

    async def _carry_out(self, key: Key, scaled: _Scaled) -> None:
        size, deployment = scaled.size, scaled.deployment
        assert deployment is not None
        # The slice of an earlier controller has an address that does not answer any more.
        is_door_needed = self._endpoints.exists(key) and not self._has_ready_pod(key)
        if scaled.service and (size == 0 or is_door_needed):
            await self._endpoints.add(key, scaled.service)
        await self._mark_leaving(key, scaled.leaving)
        if scaled.given_size != size:
            await self._applier.scale(deployment, size)
            scaled.given_size = size
            _log.info("deployment scaled workload=%s/%s pods=%s", *key, size)
        if self._is_door_needless(key, scaled) and await self._endpoints.has_pods(key):
            await self._endpoints.remove(key)

    def _is_door_needless(self, key: Key, scaled: _Scaled) -> bool:
        """True if the Service leads to the controller, and pods can do without that."""
        return scaled.size > 0 and self._endpoints.exists(key) and self._has_ready_pod(key)

    def _has_ready_pod(self, key: Key) -> bool:
        return any(
            snapshot.condition(pod, "Ready").get("status") == "True" and not is_leaving(pod)
            for pod in self._pods(key).values()
        )

    async def _mark_leaving(self, key: Key, leaving: Sequence[str]) -> None:
        """Write on the pods that go first that they cost less than others, which cost nothing."""
        costs = {name: str(index - len(leaving)) for index, name in enumerate(leaving)}
        patches = []
        for name, pod in self._pods(key).items():
            present_cost = (pod["metadata"].get("annotations") or {}).get(labels.DELETION_COST)
            cost = costs.get(name)
            is_outdated = cost != present_cost if cost else str(present_cost).startswith("-")
            if is_outdated and not is_leaving(pod):
                patches.append(self._write_cost(pod, cost))
        await asyncio.gather(*patches)

    async def _write_cost(self, pod: Object, cost: str | None) -> None:
        metadata = pod["metadata"]
        patch = {"uid": metadata["uid"], "annotations": {labels.DELETION_COST: cost}}
        ref = Ref(PODS, metadata["name"], metadata["namespace"])
        async with self._slots:
            with contextlib.suppress(KubernetesNotFoundError, KubernetesConflictError):
                await self._client.patch(ref, {"metadata": patch}, field_manager=SCALER_MANAGER)


def _pauses() -> Iterator[float]:
    return backoff.exponential(
        first=TIMING.scale_first_delay_seconds, limit=TIMING.scale_longest_delay_seconds
    )
