"""Installations beside each other in one cluster: no namespace has two controllers, or loses its.

Two controllers that see the same services take each other's for lost; a service that none sees
is neither followed nor ever torn down. Both are refused before anything is applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kubetorch.errors import InstallError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Resource, Selection
from kubetorch.sdk.installing import readiness, scope
from kubetorch.sdk.installing.scope import Scope

_DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")


@dataclass(frozen=True)
class Installation:
    """One that has a controller.

    Attributes:
        namespace: Where that is.
        scope: The namespaces that it watches.
    """

    namespace: str
    scope: Scope


async def everywhere(client: Client) -> list[Installation]:
    """The installations of the cluster, but for those that are being removed."""
    listing = await client.list(Selection(_DEPLOYMENTS, labels=readiness.LABELS))
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
    """Refuse what would give services two controllers, or none.

    Args:
        client: Asks the server.
        namespace: Of the installation.
        wanted: The namespaces that it is to watch.

    Raises:
        InstallError: Another installation watches some of them, or services would be left behind.
    """
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
            f"{', '.join(scope.names(left))}",
            hint="kt teardown them first, or name their namespaces in watchNamespaces too",
        )
