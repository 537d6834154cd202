"""The namespaces that an installation works in, and the other installations of the cluster.

Two controllers that watch the same services take each other's pods for lost; a service that no
controller watches is neither followed nor ever torn down. Both are refused before any object is
applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from kubetorch.errors import InstallError, KubernetesNotFoundError
from kubetorch.install import readiness
from kubetorch.install.tuning import LIMITS
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import DEPLOYMENTS, Object, Resource, Selection

#: The kind of a workload's own object.
WORKLOADS = Resource(
    "kubetorch.com", "v1alpha1", "kubetorchworkloads", "KubetorchWorkload", is_namespaced=True
)


@dataclass(frozen=True)
class Scope:
    """A set of namespaces: those named, or with `None` all but the excluded."""

    namespaces: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, watched: Iterable[str]) -> Scope:
        """The namespaces that a controller watches, given its value `watchNamespaces`."""
        return cls(tuple(sorted(set(watched))) or None)

    def has(self, namespace: str) -> bool:
        if self.namespaces is None:
            return namespace not in self.excluded
        return namespace in self.namespaces

    def meets(self, other_scope: Scope) -> bool:
        if self.namespaces is None:
            return other_scope.namespaces is None or any(map(self.has, other_scope.namespaces))
        return any(map(other_scope.has, self.namespaces))

    def is_less_than(self, other_scope: Scope) -> bool:
        """True if the other scope contains this one and more."""
        if self.namespaces is None or self == other_scope:
            return False
        return all(map(other_scope.has, self.namespaces))

    async def workloads(self, client: Client) -> list[Object]:
        """The workloads; none where their kind is not served."""
        try:
            return await self.list(client, WORKLOADS)
        except KubernetesNotFoundError:
            return []

    async def list(self, client: Client, resource: Resource, labels: str = "") -> list[Object]:
        where = self.namespaces if resource.is_namespaced else None
        namespaces: Iterable[str | None] = (None,) if where is None else where
        selections = [Selection(resource, namespace, labels) for namespace in namespaces]
        listings = await asyncio.gather(*map(client.list, selections))
        manifests = [item for listing in listings for item in listing.items]
        return [
            manifest
            for manifest in manifests
            if manifest["metadata"].get("namespace") not in self.excluded
        ]


def workload_names(workloads: Iterable[Object]) -> list[str]:
    """The names of workloads, `namespace/name`: the first of them if there are many."""
    both = (
        (workload["metadata"]["namespace"], workload["metadata"]["name"]) for workload in workloads
    )
    all_names = [f"{namespace}/{name}" for namespace, name in sorted(both)]
    more = len(all_names) - LIMITS.named_objects
    return all_names if more <= 0 else [*all_names[: LIMITS.named_objects], f"{more} more"]


@dataclass(frozen=True)
class Installation:
    namespace: str
    scope: Scope


async def find_installations(client: Client) -> list[Installation]:
    """The installations of the cluster, but for those that are being removed."""
    listing = await client.list(Selection(DEPLOYMENTS, labels=readiness.LABELS))
    return [
        Installation(deployment["metadata"]["namespace"], Scope.of(readiness.watched(deployment)))
        for deployment in listing.items
        if deployment["metadata"]["name"] == readiness.NAME
        and not deployment["metadata"].get("deletionTimestamp")
    ]


async def find_other_installations(client: Client, namespace: str) -> list[Installation]:
    """The installations of the cluster other than that in a namespace."""
    return [
        installation
        for installation in await find_installations(client)
        if installation.namespace != namespace
    ]


async def check(client: Client, namespace: str, new_scope: Scope) -> None:
    """Refuse a scope that would give services two controllers, or none."""
    installations = await find_installations(client)
    other_installations = [
        installation for installation in installations if installation.namespace != namespace
    ]
    former = next(
        (
            installation.scope
            for installation in installations
            if installation.namespace == namespace
        ),
        None,
    )
    # Where two installations overlap already, either of them may take back namespaces.
    if former is None or not new_scope.is_less_than(former):
        _check_overlap(new_scope, other_installations)
    if former is not None:
        await _check_left_behind(client, new_scope, former, other_installations)


def _check_overlap(new_scope: Scope, other_installations: Iterable[Installation]) -> None:
    for installation in other_installations:
        if new_scope.meets(installation.scope):
            watched = installation.scope.namespaces
            where = f"namespaces {', '.join(watched)}" if watched else "all namespaces"
            raise InstallError(
                f"the Kubetorch in namespace {installation.namespace} works in {where}, and a "
                "namespace has one controller",
                hint="give each installation namespaces of its own with --set "
                "watchNamespaces={a,b}, first the one that is there",
            )


async def _check_left_behind(
    client: Client, new_scope: Scope, former: Scope, other_installations: Iterable[Installation]
) -> None:
    abandoned = [
        workload
        for workload in await Scope().workloads(client)
        if former.has(where := workload["metadata"]["namespace"])
        and not new_scope.has(where)
        and not any(installation.scope.has(where) for installation in other_installations)
    ]
    if abandoned:
        raise InstallError(
            f"watchNamespaces leaves out services, which no controller would look after: "
            f"{', '.join(workload_names(abandoned))}",
            hint="kt teardown them first, or name their namespaces in watchNamespaces too",
        )
