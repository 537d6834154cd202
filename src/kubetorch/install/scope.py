"""The namespaces that an installation works in, and the other installations of the cluster.

Two controllers that see the same services take each other's for lost; a service that no controller
sees is neither followed nor ever torn down. Both are refused before anything is applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from kubetorch.errors import InstallError, KubernetesNotFoundError
from kubetorch.install import readiness
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import DEPLOYMENTS, Object, Resource, Selection

#: The kind of a workload's own object.
WORKLOADS = Resource(
    "kubetorch.com", "v1alpha1", "kubetorchworkloads", "KubetorchWorkload", is_namespaced=True
)
#: Names in one message.
_NAMED = 10


@dataclass(frozen=True)
class Scope:
    namespaces: tuple[str, ...] | None = None
    without: frozenset[str] = frozenset()

    @classmethod
    def of(cls, watched: Iterable[str]) -> Scope:
        """The namespaces that a controller watches, given its value `watchNamespaces`."""
        return cls(tuple(sorted(set(watched))) or None)

    def has(self, namespace: str) -> bool:
        if self.namespaces is None:
            return namespace not in self.without
        return namespace in self.namespaces

    def meets(self, other: Scope) -> bool:
        if self.namespaces is None:
            return other.namespaces is None or any(map(self.has, other.namespaces))
        return any(map(other.has, self.namespaces))

    def is_less_than(self, other: Scope) -> bool:
        """True if the other scope contains this one and more."""
        if self.namespaces is None or self == other:
            return False
        return all(map(other.has, self.namespaces))

    async def workloads(self, client: Client) -> list[Object]:
        """The workloads; none where their kind is not served."""
        try:
            return await self.list(client, WORKLOADS)
        except KubernetesNotFoundError:
            return []

    async def list(self, client: Client, resource: Resource, labels: str = "") -> list[Object]:
        where = self.namespaces if resource.is_namespaced else None
        places: Iterable[str | None] = (None,) if where is None else where
        selections = [Selection(resource, namespace, labels) for namespace in places]
        listings = await asyncio.gather(*map(client.list, selections))
        found = [item for listing in listings for item in listing.items]
        return [one for one in found if one["metadata"].get("namespace") not in self.without]


def names(workloads: Iterable[Object]) -> list[str]:
    """The names of workloads, `namespace/name`: the first of them if there are many."""
    both = ((one["metadata"]["namespace"], one["metadata"]["name"]) for one in workloads)
    found = [f"{namespace}/{name}" for namespace, name in sorted(both)]
    more = len(found) - _NAMED
    return found if more <= 0 else [*found[:_NAMED], f"{more} more"]


@dataclass(frozen=True)
class Installation:
    namespace: str
    scope: Scope


async def everywhere(client: Client) -> list[Installation]:
    """The installations of the cluster, but for those that are being removed."""
    listing = await client.list(Selection(DEPLOYMENTS, labels=readiness.LABELS))
    return [
        Installation(one["metadata"]["namespace"], Scope.of(readiness.watched(one)))
        for one in listing.items
        if one["metadata"]["name"] == readiness.NAME
        and not one["metadata"].get("deletionTimestamp")
    ]


async def others(client: Client, namespace: str) -> list[Installation]:
    """The installations of the cluster other than that in a namespace."""
    return [one for one in await everywhere(client) if one.namespace != namespace]


async def check(client: Client, namespace: str, wanted: Scope) -> None:
    """Refuse what would give services two controllers, or none."""
    found = await everywhere(client)
    beside = [one for one in found if one.namespace != namespace]
    former = next((one.scope for one in found if one.namespace == namespace), None)
    # Where two overlap already, either of them may withdraw.
    if former is None or not wanted.is_less_than(former):
        _check_overlap(wanted, beside)
    if former is not None:
        await _check_left_behind(client, wanted, former, beside)


def _check_overlap(wanted: Scope, beside: Iterable[Installation]) -> None:
    for one in beside:
        if wanted.meets(one.scope):
            watched = one.scope.namespaces
            where = f"namespaces {', '.join(watched)}" if watched else "all namespaces"
            raise InstallError(
                f"the Kubetorch in namespace {one.namespace} works in {where}, and a namespace has "
                "one controller",
                hint="give each installation namespaces of its own with --set "
                "watchNamespaces={a,b}, first the one that is there",
            )


async def _check_left_behind(
    client: Client, wanted: Scope, former: Scope, beside: Iterable[Installation]
) -> None:
    left = [
        one
        for one in await Scope().workloads(client)
        if former.has(where := one["metadata"]["namespace"])
        and not wanted.has(where)
        and not any(other.scope.has(where) for other in beside)
    ]
    if left:
        raise InstallError(
            f"watchNamespaces leaves out services, which no controller would look after: "
            f"{', '.join(names(left))}",
            hint="kt teardown them first, or name their namespaces in watchNamespaces too",
        )
