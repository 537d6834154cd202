"""Kinds as the API serves them, paths of their objects, and times as the API writes them. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

#: An object of the API, or a part of one.
Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(
        self, *, namespace: str | None = None, name: str | None = None, subresource: str = ""
    ) -> str:
        parts = [group_path(self.api_version)]
        if self.is_namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


@dataclass(frozen=True)
class Ref:
    resource: Resource
    name: str
    namespace: str | None = None
    subresource: str = ""


def is_leaving(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_over(pod: Object) -> bool:
    """True if all containers of a pod have ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Selection:
    resource: Resource
    namespace: str | None = None
    labels: str = ""
    fields: str = ""

    @property
    def query(self) -> dict[str, str]:
        """The query of a URL, but for the namespace."""
        query = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: value for name, value in query.items() if value}


def group_path(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


PODS = Resource("", "v1", "pods", "Pod")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
SERVICES = Resource("", "v1", "services", "Service")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")


def key(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """Namespace (empty when it lies in none) and name of an object."""
    metadata = manifest["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


def version(manifest: Mapping[str, Any]) -> str:
    """The `resourceVersion` of an object or a list; empty if it has none."""
    return str((manifest.get("metadata") or {}).get("resourceVersion") or "")


def seconds(timestamp: str | None) -> float:
    """Seconds since the epoch of a time such as `2026-01-31T12:00:00Z`; 0 for none."""
    if not timestamp:
        return 0.0
    return datetime.datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
