"""The installation, as the cluster remembers it: values, version, and every object.

It is a ConfigMap of the install namespace. It is written before any object is applied, with the
former and the new objects, so the next command knows all of an installation that broke off.

The labels of an object name its owner: this installation, another installation, or helm.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from kubetorch.errors import InstallError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource

NAME = "kubetorch-release"
#: On every object of the chart: the namespace of the installation that it belongs to.
INSTALL_NAMESPACE = "kubetorch.com/install-namespace"
MANAGED_BY = "app.kubernetes.io/managed-by"
#: Value of `MANAGED_BY` on objects of `kt install`.
OURS = "kubetorch"

_CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")


@dataclass(frozen=True, order=True)
class Item:
    """One object of an installation, by kind and name."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, manifest: Object) -> Item:
        metadata = manifest["metadata"]
        namespace = metadata.get("namespace") or ""
        return cls(manifest["apiVersion"], manifest["kind"], namespace, metadata["name"])

    def __str__(self) -> str:
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.kind} {self.name}{where}"

    def is_same_as(self, other_item: Item) -> bool:
        """True if both are one object, perhaps in two versions of its kind."""
        return self._key == other_item._key

    @property
    def _key(self) -> tuple[str, ...]:
        return self.api_version.rpartition("/")[0], self.kind, self.namespace, self.name


#: The definition of the kind of workloads.
DEFINITION = Item(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "kubetorchworkloads.kubetorch.com"
)


@dataclass(frozen=True)
class Release:
    namespace: str
    version: str
    values: dict[str, Any] = field(default_factory=dict)
    items: tuple[Item, ...] = ()

    @property
    def watched(self) -> list[str]:
        """The namespaces that its controller watches; empty if it watches all of them.

        They are read from the user's values alone: a chart of another version may refuse others.
        """
        return list(self.values.get("watchNamespaces") or ())

    def with_former(self, items: Iterable[Item]) -> Release:
        """This release, with the objects of the former release that are not yet deleted."""
        return replace(self, items=(*self.items, *self.without(items)))

    def without(self, items: Iterable[Item]) -> list[Item]:
        return [item for item in items if not any(item.is_same_as(mine) for mine in self.items)]


async def load(client: Client, namespace: str) -> Release | None:
    """Find the installation in a namespace; `None` without an installation."""
    try:
        config_map = await client.get(Ref(_CONFIG_MAPS, NAME, namespace))
    except KubernetesNotFoundError:
        return None
    data = config_map.get("data") or {}
    try:
        items = tuple(Item(*entry) for entry in json.loads(data["objects"]))
        return Release(namespace, data["version"], yaml.safe_load(data["values"]) or {}, items)
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise InstallError(
            f"the ConfigMap {NAME} in namespace {namespace} cannot be read: {error!r}",
            hint="delete it and run kt install again",
        ) from error


async def save(client: Client, release: Release) -> None:
    entries = [[item.api_version, item.kind, item.namespace, item.name] for item in release.items]
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": NAME,
            "namespace": release.namespace,
            "labels": {MANAGED_BY: OURS, INSTALL_NAMESPACE: release.namespace},
        },
        "data": {
            "version": release.version,
            "values": yaml.safe_dump(release.values),
            "objects": json.dumps(entries),
        },
    }
    await client.apply(manifest, force=True)


async def forget(client: Client, namespace: str) -> None:
    try:
        await client.delete(Ref(_CONFIG_MAPS, NAME, namespace))
    except KubernetesNotFoundError:
        return


HELM = "Helm"
_RELEASE_NAME = "meta.helm.sh/release-name"
_RELEASE_NAMESPACE = "meta.helm.sh/release-namespace"


def labels(manifest: Object) -> Mapping[str, str]:
    return manifest["metadata"].get("labels") or {}


def owner(manifest: Object) -> str | None:
    return labels(manifest).get(INSTALL_NAMESPACE)


def is_of(manifest: Object, namespace: str, manager: str = OURS) -> bool:
    """True if `kt install`, or helm, made an object for the installation in that namespace."""
    return labels(manifest).get(MANAGED_BY) == manager and owner(manifest) == namespace


async def give_up(client: Client, manifest: Object) -> None:
    """Remove the owner from an object, so that another installation may take it."""
    ref = Ref(await client.discovery.resource_of(manifest), manifest["metadata"]["name"])
    marks = {MANAGED_BY: None, INSTALL_NAMESPACE: None}
    notes = {_RELEASE_NAME: None, _RELEASE_NAMESPACE: None}
    await client.patch(ref, {"metadata": {"labels": marks, "annotations": notes}})


def check(manifest: Object, namespace: str, *, verb: str) -> None:
    """Refuse an object of another owner."""
    item = Item.of(manifest)
    if labels(manifest).get(MANAGED_BY) == HELM:
        notes = manifest["metadata"].get("annotations") or {}
        release = notes.get(_RELEASE_NAME, "RELEASE")
        where = notes.get(_RELEASE_NAMESPACE, namespace)
        command = f"{verb} {release}"
        if verb != "uninstall":  # the helm release exists, so it is upgraded
            command = f"upgrade {release} CHART --reset-then-reuse-values"
        raise InstallError(
            f"{item} belongs to the helm release {release} in namespace {where}",
            hint=f"use helm {command} --namespace {where}",
        )
    other_owner = owner(manifest)
    if other_owner is not None and other_owner != namespace:
        raise InstallError(
            f"{item} belongs to the Kubetorch in namespace {other_owner}",
            hint=f"kt {verb} --namespace {other_owner} works on that one; one more beside it needs "
            "--set crd.create=false,rbac.userRoles=false and watchNamespaces of its own",
        )
