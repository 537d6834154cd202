"""What the container of a manifest may use, as a pod of this machine is told."""

from __future__ import annotations

from kubetorch.controller.backends import devices
from kubetorch.controller.state import PodRecord
from kubetorch.manifests import gpus as manifests
from kubetorch.manifests.deployment import Wanted
from kubetorch.specs import quantity
from kubetorch.wire.podenv import MEMORY_LIMIT


def variables(wanted: Wanted, record: PodRecord) -> dict[str, str]:
    """Variables that say what the pod may use."""
    found = {}
    limit = dict(wanted.limits).get("memory")
    if limit is not None:
        found[MEMORY_LIMIT] = str(quantity.size_bytes(limit, parameter="limits.memory"))
    if record.devices:
        found[devices.VISIBLE] = record.devices
    return found


def gpus(wanted: Wanted) -> int:
    """GPUs of each pod."""
    resources = {**dict(wanted.requests), **dict(wanted.limits)}
    return int(resources.get(manifests.RESOURCE, 0))
