"""Which workloads see a secret, or have a volume mounted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kubetorch.controller.workloads import Workloads
from kubetorch.manifests import deployment
from kubetorch.manifests.attached import Attached

#: Names of workloads by namespace and name of what they use.
Users = dict[tuple[str, str], tuple[str, ...]]


def of_secrets(workloads: Workloads, namespace: str | None) -> Users:
    """The workloads of a namespace, or of all, that see each secret."""
    return _users(workloads, namespace, lambda attached: attached.all_secrets)


def of_claims(workloads: Workloads, namespace: str | None) -> Users:
    """The workloads of a namespace, or of all, that have each volume mounted."""
    return _users(workloads, namespace, lambda attached: [one.claim for one in attached.claims])


def _users(
    workloads: Workloads, namespace: str | None, used: Callable[[Attached], Iterable[str]]
) -> Users:
    found: Users = {}
    for workload in workloads.in_namespace(namespace):
        where, name = workload.key
        manifest = deployment.of_workload(workload.spec)
        path = workload.spec.compute.pod_template_path
        wanted = deployment.read(manifest, pod_template_path=path)
        for one in dict.fromkeys(used(wanted.attached)):
            found[where, one] = (*found.get((where, one), ()), name)
    return found
