"""Values of the chart of 0.5, and their successors. Pure.

A value that this table does not have lies below one of its sections, and gets the section's line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NO_PROXY = "no proxy stands between clients and the controller"
_NO_PROMETHEUS = "the chart installs no Prometheus, and nothing needs one"
_NO_LOG_STORE = "logs come from the pods themselves"
_IDLE = "the controller ends idle services itself, without Prometheus"
_ELSEWHERE = "install it with its own chart"

#: By the path of an earlier value or section: the paths of the values in its place.
SUCCESSORS: Mapping[str, tuple[str, ...]] = {
    "kubetorchConfig.deployment_namespaces": ("watchNamespaces",),
    "kubetorchConfig.serviceAccountAnnotations": ("workloads.serviceAccountAnnotations",),
    "dataStore.cpu": ("resources.requests.cpu",),
    "dataStore.memory": ("resources.requests.memory", "resources.limits.memory"),
    "dataStore.ephemeralStorage": ("blobs.emptyDir.sizeLimit",),
    "dataStore.storage.size": ("blobs.persistence.size", "blobs.persistence.enabled"),
    "dataStore.storage.storageClassName": (
        "blobs.persistence.storageClassName",
        "blobs.persistence.enabled",
    ),
    "dataStore.tolerations": ("tolerations",),
    "dataStore.affinity": ("affinity",),
    "nginxProxy.tolerations": ("tolerations",),
    "nginxProxy.affinity": ("affinity",),
    "metrics.enabled": ("serviceMonitor.enabled",),
    "metrics.prometheus.scrapeInterval": ("serviceMonitor.interval",),
    "kubetorchController.tolerations": ("tolerations",),
    "kubetorchController.affinity": ("affinity",),
}
#: By the path of an earlier value or section without a successor: why it needs none.
WITHOUT_SUCCESSOR: Mapping[str, str] = {
    "kubetorchConfig": "docs/install.md has the values of today",
    "kubetorchConfig.otelEnabled": "the chart installs no collector of OpenTelemetry",
    "dataStore": "the controller keeps code and arguments itself, see blobs",
    "nginxProxy": _NO_PROXY,
    "metrics": _NO_PROMETHEUS,
    "logStreaming": _NO_LOG_STORE,
    "opentelemetry-collector": _ELSEWHERE,
    "nvidia-device-plugin": _ELSEWHERE,
    "dcgm-exporter": _ELSEWHERE,
    "kubetorchController": "docs/install.md has the values of today",
    "kubetorchController.nginx": _NO_PROXY,
    "kubetorchController.ttl": _IDLE,
}
SECTIONS = frozenset(path.partition(".")[0] for path in (*SUCCESSORS, *WITHOUT_SUCCESSOR))


def faults(user_values: Mapping[str, Any]) -> list[str]:
    """A line for each value of the earlier chart, with its successor."""
    earlier = _paths({key: user_values[key] for key in user_values if key in SECTIONS})
    return [f"{path} was a value of 0.5{_outcome(path)}" for path in earlier]


def _outcome(path: str) -> str:
    if successors := SUCCESSORS.get(path):
        return f": use {' and '.join(successors)}"
    section = path
    while section not in WITHOUT_SUCCESSOR:
        section = section.rpartition(".")[0]
    return f", and has no successor: {WITHOUT_SUCCESSOR[section]}"


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of the values, down to those that the table has; `None` takes a value away."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if value is None:
            continue
        if isinstance(value, Mapping) and value and path not in SUCCESSORS:
            yield from _paths(value, f"{path}.")
        else:
            yield path
