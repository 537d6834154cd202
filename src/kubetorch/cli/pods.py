"""The pod of a service that the user means."""

from __future__ import annotations

from kubetorch.errors import SpecError
from kubetorch.wire.messages import PodView, WorkloadView


def choose(service: WorkloadView, wanted: str) -> PodView:
    """The pod that the user means by its name or index.

    Raises:
        SpecError: The service has no such pod.
    """
    name, pods = service.spec.name, service.pods
    there_are = f"pods are {', '.join(pod.name for pod in pods)}" if pods else "it has no pods"
    if wanted.isdigit():
        if int(wanted) < len(pods):
            return pods[int(wanted)]
        raise SpecError(f"Pod index {wanted} is out of range", hint=there_are)
    for pod in pods:
        if pod.name == wanted:
            return pod
    raise SpecError(
        f"Service {name} does not have an associated pod called {wanted}", hint=there_are
    )
