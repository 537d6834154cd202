"""What Knative says of an autoscaled service: whether it needs no pods now, and where it is called.

Knative makes pods from a Revision, one for each template. It notes there how many it wants.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.kubernetes.dooms import cluster as reading
from kubetorch.k8s.resources import Object
from kubetorch.manifests import agent

_API = "serving.knative.dev/"


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
