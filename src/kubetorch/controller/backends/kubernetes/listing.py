"""Objects of a namespace, or of all that the controller has a say in."""

from __future__ import annotations

import asyncio

from kubetorch.controller.backends.kubernetes import refusals
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Resource, Selection, key


async def find(
    client: Client, resource: Resource, namespace: str | None, watched: tuple[str, ...], label: str
) -> list[Object]:
    """Those that have a label, by namespace and name.

    Args:
        client: Asks the API server.
        resource: Their kind.
        namespace: Where; `None` for everywhere.
        watched: What everywhere is, for a controller that may not look elsewhere; all namespaces
            if there are none.
        label: The label, whatever its value.

    Raises:
        SpecError: The controller has no say in that namespace.
    """
    if namespace is not None:
        refusals.check_watched(namespace, watched)
    places: tuple[str | None, ...] = (namespace,) if namespace is not None else watched or (None,)
    listings = await asyncio.gather(
        *(client.list(Selection(resource, place, labels=label)) for place in places)
    )
    return sorted((found for listing in listings for found in listing.items), key=key)
