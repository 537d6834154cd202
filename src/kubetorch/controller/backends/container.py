"""What a pod of this machine is told of its container: variables, and what it may use."""

from __future__ import annotations

from collections.abc import Iterator

from kubetorch.controller.backends import devices
from kubetorch.controller.state import PodRecord
from kubetorch.manifests import gpus as manifests
from kubetorch.manifests.deployment import Wanted
from kubetorch.specs import quantity
from kubetorch.wire.podenv import MEMORY_LIMIT

Variables = Iterator[tuple[str, str]]


def environment(wanted: Wanted, record: PodRecord) -> tuple[tuple[str, str], ...]:
    """The variables of the container, and of what it may use."""
    return (*wanted.environment, *_limits(wanted, record))


def _limits(wanted: Wanted, record: PodRecord) -> Variables:
    limit = dict(wanted.limits).get("memory")
    if limit is not None:
        yield MEMORY_LIMIT, str(quantity.size_bytes(limit, parameter="limits.memory"))
    if record.devices:
        yield devices.VISIBLE, record.devices


def gpus(wanted: Wanted) -> int:
    """GPUs of each pod."""
    resources = {**dict(wanted.requests), **dict(wanted.limits)}
    return int(resources.get(manifests.RESOURCE, 0))
