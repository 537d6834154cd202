"""Laying one manifest over another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubetorch.manifests import storage
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.place import Place, named


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Manifest:
    """`over` laid over `under`: dictionaries key by key, all else, lists too, replaced.

    Merging the same again changes nothing.
    """
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]  # both are
    return merged


def keep_agent(place: Place, container: Manifest, volumes: list[Any]) -> None:
    """Keep what the agent needs, where a list that was laid over the pod's has replaced it.

    A list of containers replaces the pod's. The one in it that is the agent's, by its name or for
    want of any, is laid over the agent's container; where there is none, the agent's stays first.
    Volumes that are still mounted stay.

    Args:
        place: The pods, after the overlay; its container is found again.
        container: The agent's container before.
        volumes: The pod's volumes before.
    """
    found: list[Manifest] = place.pod["containers"]
    if container not in found:
        name = container["name"]
        ours = named(found, name) or next((one for one in found if not one.get("name")), {})
        place.container = merge(container, ours)
        place.pod["containers"] = [place.container, *(one for one in found if one is not ours)]
    storage.restore(place, volumes)
