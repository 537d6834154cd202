"""Which workloads see a secret, or have a volume mounted."""

from __future__ import annotations

from collections.abc import Iterator

from kubetorch.controller.workloads import Workloads
from kubetorch.manifests import deployment
from kubetorch.manifests.attached import Attached


def users_of_secret(workloads: Workloads, namespace: str, object_name: str) -> tuple[str, ...]:
    """The names of the workloads that see a secret."""
    return tuple(
        name
        for name, attached in _attached(workloads, namespace)
        if object_name in attached.all_secrets
    )


def users_of_claim(workloads: Workloads, namespace: str, claim: str) -> tuple[str, ...]:
    """The names of the workloads that have a volume mounted."""
    return tuple(
        name
        for name, attached in _attached(workloads, namespace)
        if any(one.claim == claim for one in attached.claims)
    )


def _attached(workloads: Workloads, namespace: str) -> Iterator[tuple[str, Attached]]:
    for workload in workloads.in_namespace(namespace):
        manifest = deployment.of_workload(workload.spec)
        yield workload.key[1], deployment.read(manifest).attached
