"""Pods as Kubernetes objects whose keys are attributes, also those of this machine."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from kubetorch.manifests import labels
from kubetorch.wire.messages import PodView, WorkloadView


class Attributes(dict[str, Any]):
    """A dictionary whose keys are attributes, too: `pod.status.phase`, `pod.status.pod_ip`.

    A key that is absent raises `AttributeError`; `pod.status.get("reason")` is `None` then. Keys
    that are methods of dictionaries are no attributes: `config_map["items"]`.
    """

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any value of the object
        if name in self:
            return self[name]
        # Programs for Kubernetes in Python say `pod_ip` for `podIP`.
        plain = name.replace("_", "").lower()
        for key, value in self.items():
            if key.lower() == plain and not name.startswith("_"):
                return value
        raise AttributeError(
            f"there is no {name!r}; the keys are {', '.join(self)}; .get({name!r}) is None"
        )


def pod_object(
    view: WorkloadView, pod: PodView, described: dict[str, Any] | None = None
) -> Attributes:
    """A pod of a workload, as its cluster describes it; without a cluster in the same form."""
    if described is None:
        attributes = _attributes(_local_description(view, pod))
    else:
        status: dict[str, Any] = described.get("status") or {}
        if pod.phase == "Running":  # the agent has answered, maybe before the cluster knows it
            status = {**status, "phase": "Running"}
        attributes = _attributes({**described, "status": status})
    assert isinstance(attributes, Attributes)
    return attributes


def _local_description(view: WorkloadView, pod: PodView) -> dict[str, Any]:
    spec = view.spec
    started = _iso_time(pod.started)
    is_ending = pod.phase == "Terminating"
    metadata = {
        "name": pod.name,
        "namespace": spec.namespace,
        "labels": {
            **dict(spec.compute.labels),
            **labels.of_pods(name=spec.name, username=spec.username),
        },
        "annotations": dict(spec.compute.annotations) or None,
        "creationTimestamp": started,
        # Nobody keeps the time of its deletion: that of the last deploy stands for it.
        "deletionTimestamp": _iso_time(view.updated) if is_ending else None,
    }
    status = {
        "phase": "Running" if is_ending else pod.phase,
        "podIP": pod.address or urlsplit(pod.url).hostname,
        "startTime": started,
        "reason": pod.reason or None,
        "containerStatuses": [
            {"name": "kubetorch", "ready": pod.is_ready, "restartCount": pod.restarts}
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


def _iso_time(seconds: float) -> str | None:
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _attributes(value: object) -> object:
    """The value with attributes for keys; as in Kubernetes, keys without a value are left out."""
    if isinstance(value, dict):
        return Attributes(
            {key: _attributes(item) for key, item in value.items() if item is not None}
        )
    return [_attributes(item) for item in value] if isinstance(value, list) else value
