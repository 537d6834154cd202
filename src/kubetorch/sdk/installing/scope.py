"""The namespaces that an installation works in: all, or those of `watchNamespaces`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kubetorch.errors import KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Resource, Selection


@dataclass(frozen=True)
class Scope:
    """Where to look.

    Attributes:
        namespaces: Their names; empty for all of them.
    """

    namespaces: tuple[str, ...] = ()

    @classmethod
    def of(cls, watched: list[str], install_namespace: str) -> Scope:
        """The namespaces of an installation.

        Args:
            watched: Its value `watchNamespaces`.
            install_namespace: Where the controller is.
        """
        return cls(tuple(sorted({*watched, install_namespace}))) if watched else cls()

    async def list(self, client: Client, resource: Resource, labels: str) -> list[Object]:
        """The objects of a kind that have labels; none where the kind is not served.

        Args:
            client: Asks the server.
            resource: The kind.
            labels: Their selector.
        """
        where = self.namespaces if resource.is_namespaced else ()
        selections = [Selection(resource, namespace, labels) for namespace in (where or (None,))]
        listings = await asyncio.gather(*(_list(client, one) for one in selections))
        return [item for listing in listings for item in listing]


async def _list(client: Client, selection: Selection) -> list[Object]:
    try:
        return (await client.list(selection)).items
    except KubernetesNotFoundError:
        return []
