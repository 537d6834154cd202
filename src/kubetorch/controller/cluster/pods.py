"""What is known of the pods of workloads, for who checks the tokens of pods."""

from __future__ import annotations

from kubetorch.controller.access import PodIdentity
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import ServiceNotFoundError


class KnownPods:
    """The pods of all workloads.

    Args:
        workloads: The workloads.
    """

    def __init__(self, workloads: Workloads) -> None:
        self._workloads = workloads

    def is_pod(self, namespace: str, pod: str, uid: str) -> bool:
        """Whether there is such a pod in some workload."""
        for workload in self._workloads.in_namespace(namespace):
            for one in workload.pods:
                if one.name == pod:
                    return one.uid in ("", uid)
        return False

    def uid_of(self, pod: PodIdentity) -> str | None:
        """Identity of a pod of a workload; empty when it is not known, `None` without a pod."""
        workload = self._workloads.workload_of(pod)
        found = [] if workload is None else workload.pods
        return next((one.uid for one in found if one.name == pod.pod), None)

    def is_selector_only(self, namespace: str, workload: str) -> bool:
        """Whether there is such a workload, and its pods are made by somebody else."""
        try:
            found = self._workloads.get(namespace, workload)
        except ServiceNotFoundError:
            return False
        return found.spec.compute.is_selector_only
