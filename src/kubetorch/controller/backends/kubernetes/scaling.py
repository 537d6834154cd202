"""How many pods an object asks for now; and where an autoscaled service is called.

Knative makes pods from a Revision, one for each template. It notes there how many it wants.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.dooms import cluster as reading
from kubetorch.k8s.resources import Object
from kubetorch.manifests import agent, locating, replicas
from kubetorch.manifests.kinds import Path

_API = "serving.knative.dev/"


def expected(there: Object, path: Path | None = None) -> int | None:
    """How many pods of its latest template an object asks for, at the least.

    Somebody else may have changed the number since it was applied, such as a
    HorizontalPodAutoscaler.

    Args:
        there: The object.
        path: Where its pod template lies, if a user said so.

    Returns:
        1 where the number is nobody's demand, or zero; `None` while its controller has not said.
    """
    kind = locating.kind_of(there, path)
    if kind.is_autoscaled:
        return 1
    if kind.kind == "DaemonSet":
        status = there.get("status") or {}
        is_seen = status.get("observedGeneration", 0) >= there["metadata"].get("generation", 1)
        return max(1, int(status.get("desiredNumberScheduled") or 0)) if is_seen else None
    return max(1, replicas.running(there, kind))


def rests(owners: Sequence[Object], template: str) -> bool:
    """Whether the scaler has the service without pods because nobody calls it.

    Args:
        owners: The Knative Service, and what it owns.
        template: Digest of the template that pods should have: a Revision of an older one does not
            count.
    """
    ready = {
        (one.get("status") or {}).get("latestReadyRevisionName")
        for one in _of_kind(owners, "Service")
    }
    for revision in _of_kind(owners, "Revision"):
        status = revision.get("status") or {}
        if revision["metadata"]["name"] in ready and agent.digest_of(revision) == template:
            is_ready = reading.condition(revision, "Ready").get("status") == "True"
            # Noted when the scaler has first decided.
            return is_ready and status.get("desiredReplicas") == 0
    return False


def address(owners: Sequence[Object]) -> str:
    """Where programs in the cluster call the service; empty while Knative has not said it."""
    for service in _of_kind(owners, "Service"):
        found = (service.get("status") or {}).get("address") or {}
        if found.get("url"):
            return str(found["url"])
    return ""


def _of_kind(owners: Sequence[Object], kind: str) -> list[Object]:
    return [
        one
        for one in owners
        if one["kind"] == kind and str(one.get("apiVersion", "")).startswith(_API)
    ]
