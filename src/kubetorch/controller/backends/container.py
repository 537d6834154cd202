"""What a pod of this machine is told of its container: variables, and what it may use."""

from __future__ import annotations

from kubetorch.manifests.deployment import Wanted
from kubetorch.specs import quantity
from kubetorch.wire.podenv import MEMORY_LIMIT


def environment(wanted: Wanted) -> tuple[tuple[str, str], ...]:
    """The variables of the container, and its limits."""
    limit = memory_limit(wanted)
    own = () if limit is None else ((MEMORY_LIMIT, str(limit)),)
    return (*wanted.environment, *own)


def memory_limit(wanted: Wanted) -> int | None:
    """Bytes that a pod may use."""
    found = dict(wanted.limits).get("memory")
    return None if found is None else quantity.size_bytes(found, parameter="limits.memory")
