"""What a pod of this machine may use."""

from __future__ import annotations

from kubetorch.controller.backends import devices
from kubetorch.manifests import gpus as manifests
from kubetorch.manifests.deployment import Wanted
from kubetorch.specs import quantity
from kubetorch.wire.podenv import MEMORY_LIMIT


def limits(wanted: Wanted, gpus: str) -> dict[str, str]:
    """Variables that say what a pod may use.

    Args:
        wanted: What its manifest says.
        gpus: The GPUs that are its own.
    """
    memory = dict(wanted.limits).get("memory")
    found = {}
    if memory is not None:
        found[MEMORY_LIMIT] = str(quantity.size_bytes(memory, parameter="limits.memory"))
    if gpus:
        found[devices.VISIBLE] = gpus
    return found


def gpus(wanted: Wanted) -> int:
    """GPUs of each pod."""
    resources = {**dict(wanted.requests), **dict(wanted.limits)}
    return int(resources.get(manifests.RESOURCE, 0))
