"""One pod template within a manifest, and the container in it that the agent runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kubetorch.manifests.kinds import Kind, Manifest


@dataclass(slots=True)
class Place:
    """What the parameters of a compute are written into, and read from.

    Attributes:
        manifest: The whole object.
        kind: Its kind.
        template: The pod template, with `metadata` and `spec`; the object itself for a Pod.
        container: The container that the agent runs in.
        is_primary: Whether these are the pods that are called. What stands once per object is
            written with them.
    """

    manifest: Manifest
    kind: Kind
    template: Manifest
    container: Manifest
    is_primary: bool = True

    @property
    def pod(self) -> Manifest:
        """The pod's spec."""
        spec: Manifest = self.template["spec"]
        return spec

    def mine(self, key: str) -> dict[str, str]:
        """The object's own `labels` or `annotations`, for writing."""
        return entry(entry(self.manifest, "metadata"), key)

    def labels(self) -> list[dict[str, str]]:
        """The labels that this place answers for: the object's own, then the pods'."""
        return self._metadata("labels")

    def annotations(self) -> list[dict[str, str]]:
        """As `labels`, for annotations."""
        return self._metadata("annotations")

    def _metadata(self, key: str) -> list[dict[str, str]]:
        owners = [self.manifest, self.template] if self.is_primary else [self.template]
        return [entry(entry(owner, "metadata"), key) for owner in owners]

    def own(self, key: str) -> dict[str, str]:
        """The object's `labels` or `annotations`, for reading."""
        found: dict[str, str] = (self.manifest.get("metadata") or {}).get(key) or {}
        return found

    def of_pods(self, key: str) -> dict[str, str]:
        """The `labels` or `annotations` of the pods, for reading."""
        found: dict[str, str] = (self.template.get("metadata") or {}).get(key) or {}
        return found


def entry(node: Manifest, key: str) -> dict[str, Any]:
    """The dictionary at `key`, made if there is none."""
    found = node.get(key)
    if found is None:
        found = node[key] = {}
    result: dict[str, Any] = found
    return result


def items(node: Manifest, key: str) -> list[Any]:
    """The list at `key`, made if there is none."""
    found = node.get(key)
    if found is None:
        found = node[key] = []
    result: list[Any] = found
    return result


def assign(node: Manifest, key: str, value: object) -> None:
    """Set what stands at `key`; `None` and what is empty remove it."""
    if value is None or value == {} or value == []:
        node.pop(key, None)
    else:
        node[key] = value


def named(entries: list[Any], name: str, *, by: str = "name") -> Manifest | None:
    """The entry of a list of dictionaries that has this name."""
    return next((one for one in entries if one.get(by) == name), None)
