"""The namespaces that an installation works in: all, or those of `watchNamespaces`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Resource, Selection

#: The kind of a workload's own object.
WORKLOADS = Resource(
    "kubetorch.com", "v1alpha1", "kubetorchworkloads", "KubetorchWorkload", is_namespaced=True
)
#: Names in one message.
_NAMED = 10


@dataclass(frozen=True)
class Scope:
    """Where to look.

    Attributes:
        namespaces: Their names; `None` for all of them.
        without: Of all, those that are somebody else's.
    """

    namespaces: tuple[str, ...] | None = None
    without: frozenset[str] = frozenset()

    @classmethod
    def of(cls, watched: Iterable[str]) -> Scope:
        """The namespaces that a controller watches, given its value `watchNamespaces`."""
        return cls(tuple(sorted(set(watched))) or None)

    def has(self, namespace: str) -> bool:
        """Whether a namespace is one of them."""
        if self.namespaces is None:
            return namespace not in self.without
        return namespace in self.namespaces

    def meets(self, other: Scope) -> bool:
        """Whether some namespace is in both."""
        if self.namespaces is None:
            return other.namespaces is None or any(map(self.has, other.namespaces))
        return any(map(other.has, self.namespaces))

    def is_less_than(self, other: Scope) -> bool:
        """Whether all of them are in the other one, which has more."""
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
        """The objects of a kind that have labels.

        Args:
            client: Asks the server.
            resource: The kind.
            labels: Their selector.
        """
        where = self.namespaces if resource.is_namespaced else None
        places: Iterable[str | None] = (None,) if where is None else where
        selections = [Selection(resource, namespace, labels) for namespace in places]
        listings = await asyncio.gather(*map(client.list, selections))
        found = [item for listing in listings for item in listing.items]
        return [one for one in found if one["metadata"].get("namespace") not in self.without]


def names(workloads: Iterable[Object]) -> list[str]:
    """What workloads are called, `namespace/name`, the first ones of many."""
    both = ((one["metadata"]["namespace"], one["metadata"]["name"]) for one in workloads)
    found = [f"{namespace}/{name}" for namespace, name in sorted(both)]
    more = len(found) - _NAMED
    return found if more <= 0 else [*found[:_NAMED], f"{more} more"]
