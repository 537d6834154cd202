"""A backend whose pods run at once and never change."""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.base import (
    Backend,
    Listener,
    Manifest,
    PodStatus,
    PortRequest,
    Stores,
)
from kubetorch.controller.backends.process.stores import SecretFiles, VolumeFolders
from kubetorch.manifests.desired_pods import MountedNames
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec

Key = tuple[str, str]


def pod_name(workload: str, ordinal: int) -> str:
    """What a pod is called."""
    return f"{workload}-{ordinal}"


class SimulatedBackend(Backend):
    """Has the pods that were asked for.

    Args:
        secrets, volumes: What deploys would find there.
    """

    #: It stands for a cluster.
    name = "kubernetes"

    def __init__(self, secrets: SecretFiles, volumes: VolumeFolders) -> None:
        self.stores = Stores(secrets, volumes)
        self._pods: dict[Key, list[PodStatus]] = {}
        self._listener: Listener = lambda namespace, name: None

    def watch(self, listener: Listener) -> None:
        """Tell `listener` of every change from now on."""
        self._listener = listener

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Have the pods of these."""
        for spec, *_ in specs:
            await self.apply(spec)

    async def apply(self, spec: WorkloadSpec) -> None:
        """Have the pods of this one."""
        key = (spec.namespace, spec.name)
        if len(self._pods.get(key, ())) != spec.compute.pods:
            self._pods[key] = [
                # Addresses of a cluster's size, so that messages have the length that they have.
                PodStatus(
                    pod_name(spec.name, ordinal),
                    ordinal,
                    "Running",
                    f"http://10.{ordinal // 65536}.{ordinal // 256 % 256}.{ordinal % 256}:32300",
                )
                for ordinal in range(spec.compute.pods)
            ]
            self._listener(*key)

    async def release(self, namespace: str, name: str) -> None:
        """Have no pods of this one."""
        self._pods.pop((namespace, name), None)

    def lose(self, namespace: str, name: str, count: int) -> None:
        """Have so many pods less: the last ones are gone at once."""
        key = (namespace, name)
        self._pods[key] = self.pods(*key)[:-count]
        self._listener(*key)

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        """Have no pods of this one."""
        self._pods.pop((namespace, name), None)
        return []

    def scale(self, namespace: str, name: str, size: int, leaving: Sequence[str] = ()) -> None:
        raise AssertionError(f"{name} has a fixed number of pods")

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        """The pods of a workload."""
        return self._pods.get((namespace, name), [])

    def expected(self, namespace: str, name: str) -> int | None:
        """All of them are there."""
        return len(self.pods(namespace, name))

    def check(self, spec: WorkloadSpec) -> None:
        """Everything can run."""

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        """None."""
        return ()

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        """None."""
        return ()

    def mounted(self, namespace: str, name: str, pod: str) -> MountedNames:
        return MountedNames()

    def ports(self, namespace: str, name: str, wanted: PortRequest) -> tuple[int, ...]:
        return (wanted.first,) * wanted.count

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        """Nothing was written."""
        return []

    async def close(self, *, pods: bool) -> None:
        """Nothing runs."""
