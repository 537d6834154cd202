"""Tolerations as a manifest has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.place import Place, assign
from kubetorch.specs.compute import Toleration

#: What nodes with GPUs usually demand.
OF_GPUS = (
    Toleration("nvidia.com/gpu", "Exists", effect="NoSchedule"),
    Toleration("dedicated", "Equal", "gpu", "NoSchedule"),
)


def parse(found: Mapping[str, Any]) -> Toleration:
    """One entry of `tolerations`; text that is empty is the same as none."""
    return Toleration(
        key=found.get("key") or None,
        operator=found.get("operator") or None,
        value=found.get("value") or None,
        effect=found.get("effect") or None,
        seconds=found.get("tolerationSeconds"),
    )


def render(wanted: Toleration) -> Manifest:
    """One entry of `tolerations`."""
    found = {
        "key": wanted.key,
        "operator": wanted.operator,
        "value": wanted.value,
        "effect": wanted.effect,
        "tolerationSeconds": wanted.seconds,
    }
    return {name: value for name, value in found.items() if value is not None}


def read(place: Place) -> list[Toleration]:
    """All that the pods tolerate."""
    return [parse(one) for one in place.pod.get("tolerations") or ()]


def add(place: Place, wanted: Collection[Toleration]) -> None:
    """Tolerate these too."""
    there = read(place)
    found = [render(one) for one in wanted if one not in there]
    if found:
        assign(place.pod, "tolerations", [*(place.pod.get("tolerations") or ()), *found])


def remove(place: Place, unwanted: Collection[Toleration]) -> None:
    """Tolerate these no longer."""
    found = place.pod.get("tolerations") or []
    assign(place.pod, "tolerations", [one for one in found if parse(one) not in unwanted])
