"""Whose an object is: this installation's, another one's, or helm's."""

from __future__ import annotations

from collections.abc import Mapping

from kubetorch.errors import InstallError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref
from kubetorch.sdk.installing import releases

_HELM = "Helm"
_RELEASE_NAME = "meta.helm.sh/release-name"
_RELEASE_NAMESPACE = "meta.helm.sh/release-namespace"


def labels(found: Object) -> Mapping[str, str]:
    """The labels of an object."""
    return found["metadata"].get("labels") or {}


def owner(found: Object) -> str | None:
    """The namespace of the installation that an object belongs to."""
    return labels(found).get(releases.INSTALL_NAMESPACE)


def is_of(found: Object, namespace: str) -> bool:
    """Whether `kt install` made an object, for the installation in that namespace."""
    is_ours = labels(found).get(releases.MANAGED_BY) == releases.OURS
    return is_ours and owner(found) == namespace


def is_of_release(found: Object, namespace: str) -> bool:
    """Whether helm made an object, for the installation in that namespace."""
    return labels(found).get(releases.MANAGED_BY) == _HELM and owner(found) == namespace


async def give_up(client: Client, found: Object) -> None:
    """Have an object belong to nobody, so that the next installation that wants it may take it."""
    ref = Ref(await client.discovery.resource_of(found), found["metadata"]["name"])
    marks = {releases.MANAGED_BY: None, releases.INSTALL_NAMESPACE: None}
    notes = {_RELEASE_NAME: None, _RELEASE_NAMESPACE: None}
    await client.patch(ref, {"metadata": {"labels": marks, "annotations": notes}})


def check(found: Object, namespace: str, *, verb: str) -> None:
    """Refuse an object that is somebody else's.

    Args:
        found: The object, as it is in the cluster.
        namespace: Of the installation that is worked on.
        verb: What is done: `install`, `upgrade` or `uninstall`.

    Raises:
        InstallError: It belongs to helm or to another installation.
    """
    item = releases.Item.of(found)
    if labels(found).get(releases.MANAGED_BY) == _HELM:
        notes = found["metadata"].get("annotations") or {}
        release = notes.get(_RELEASE_NAME, "RELEASE")
        where = notes.get(_RELEASE_NAMESPACE, namespace)
        raise InstallError(
            f"{item} belongs to the helm release {release} in namespace {where}",
            hint=f"use helm {verb} {release} --namespace {where}",
        )
    other = owner(found)
    if other is not None and other != namespace:
        raise InstallError(
            f"{item} belongs to the Kubetorch in namespace {other}",
            hint=f"kt {verb} --namespace {other} works on that one; one more beside it needs "
            "--set crd.create=false,rbac.userRoles=false and watchNamespaces of its own",
        )
