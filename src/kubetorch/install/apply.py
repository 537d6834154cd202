"""Applies a chart to a cluster: its objects in order; objects of the former chart are deleted.

An upgrade keeps the values of the former release, but for the image of another version: a
controller needs the kind and the roles of its own version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kubetorch.errors import ConfigError, InstallError, KubernetesNotFoundError
from kubetorch.install import releases, scope, values
from kubetorch.install.chart import Chart
from kubetorch.install.releases import Item, Release
from kubetorch.install.scope import Scope
from kubetorch.install.tuning import TIMING
from kubetorch.install.values import Values
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Selection, version
from kubetorch.wire import versions

#: Called with a line of text for each change.
Report = Callable[[str], object]
#: A `kept` object stays in the cluster, and belongs to no installation any more.
Change = Literal["created", "changed", "unchanged", "deleted", "kept"]


@dataclass(frozen=True)
class Applied:
    release: Release
    changes: Mapping[Item, Change]

    @property
    def is_changed(self) -> bool:
        return any(change != "unchanged" for change in self.changes.values())


async def apply(
    client: Client, chart: Chart, values: Mapping[str, Any], *, namespace: str, report: Report
) -> Applied:
    objects = chart.render(values, namespace=namespace)
    former = await releases.load(client, namespace)
    present_objects = await asyncio.gather(
        *(get(client, Item.of(manifest)) for manifest in objects)
    )
    verb = "upgrade" if former else "install"
    for present_object in present_objects:
        if present_object is not None:
            releases.check(present_object, namespace, verb=verb)
            if present_object["metadata"].get("deletionTimestamp"):
                # As during an uninstall: a changed object would be deleted all the same.
                raise InstallError(
                    f"{Item.of(present_object)} is being deleted", hint="try again when it is gone"
                )
    await _check_namespaces(client, objects, namespace)
    await scope.check(client, namespace, Scope.of(chart.values(values)["watchNamespaces"]))
    release = Release(
        namespace,
        str(chart.about["version"]),
        dict(values),
        tuple(Item.of(manifest) for manifest in objects),
    )
    earlier = former.items if former else ()
    await ensure_namespace(client, namespace, report)
    await releases.save(client, release.with_former(earlier))
    changes: dict[Item, Change] = {}
    for manifest, before in zip(objects, present_objects, strict=True):
        changes[Item.of(manifest)] = change = await _apply(client, manifest, before)
        if change != "unchanged":
            report(f"{change} {Item.of(manifest)}")
    for item in reversed(release.without(earlier)):
        change_of_former = await _remove(client, item, namespace)
        if change_of_former != "unchanged":
            changes[item] = change_of_former
            report(f"{change_of_former} {item}")
    await releases.save(client, release)
    return Applied(release, changes)


async def _check_namespaces(client: Client, objects: list[Object], namespace: str) -> None:
    """Refuse values that name an absent namespace, before any object is applied."""
    namespaces = {manifest["metadata"].get("namespace") for manifest in objects}
    namespaces -= {None, namespace}
    for other_namespace in sorted(namespaces):
        if await get(client, Item("v1", "Namespace", "", other_namespace)) is None:
            raise InstallError(
                f"there is no namespace {other_namespace!r}",
                hint=f"kubectl create namespace {other_namespace}, or take it out of "
                "watchNamespaces",
            )


async def _apply(client: Client, manifest: Object, before: Object | None) -> Change:
    after = await client.apply(manifest, force=True)
    if manifest["kind"] == "CustomResourceDefinition":
        await _wait_until_established(client, manifest)
    if before is None:
        return "created"
    return "unchanged" if version(before) == version(after) else "changed"


def namespace_manifest(namespace: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": namespace,
            "labels": {
                releases.MANAGED_BY: releases.OURS,
                releases.INSTALL_NAMESPACE: namespace,
                # All pods of the chart comply with it.
                "pod-security.kubernetes.io/warn": "restricted",
            },
        },
    }


async def ensure_namespace(client: Client, namespace: str, report: Report) -> None:
    """Make a namespace if it is absent; a present namespace is left as it is."""
    manifest = namespace_manifest(namespace)
    present_namespace = await get(client, Item.of(manifest))
    if present_namespace is None:
        await client.create(manifest)
        report(f"created Namespace {namespace}")
    elif present_namespace["metadata"].get("deletionTimestamp"):
        raise InstallError(
            f"the namespace {namespace} is being deleted", hint="try again when it is gone"
        )


async def _wait_until_established(client: Client, manifest: Object) -> None:
    """Wait until the API server serves a definition."""
    ref = await find(client, Item.of(manifest))
    assert ref is not None
    selection = Selection(ref.resource, fields=f"metadata.name={ref.name}")
    try:
        async with Informer(client, selection) as informer:
            await informer.until(
                lambda definitions: any(map(_is_established, definitions.values())),
                timeout=TIMING.kind_established_seconds,
            )
    except TimeoutError as error:
        raise InstallError(
            f"{Item.of(manifest)} was not established within {TIMING.kind_established_seconds:g} s",
            hint="kubectl describe crd says why",
        ) from error


def _is_established(definition: Object) -> bool:
    conditions = (definition.get("status") or {}).get("conditions") or []
    return any(
        condition["type"] == "Established" and condition["status"] == "True"
        for condition in conditions
    )


async def _remove(client: Client, item: Item, namespace: str) -> Change:
    """Delete an object that the former chart had, if it is present and ours."""
    ref = await find(client, item)
    if ref is None:
        return "unchanged"
    try:
        present_object = await client.get(ref)
        if not releases.is_of(present_object, namespace):
            return "unchanged"
        if item.is_same_as(releases.DEFINITION):
            # All services of the cluster would be deleted with it.
            await releases.give_up(client, present_object)
            return "kept"
        await client.delete(ref, preconditions={"uid": present_object["metadata"]["uid"]})
    except KubernetesNotFoundError:
        return "unchanged"
    return "deleted"


async def find(client: Client, item: Item) -> Ref | None:
    """The reference of an object; `None` if the cluster does not serve its kind."""
    try:
        resource = await client.discovery.find(item.api_version, item.kind)
    except KubernetesNotFoundError:
        return None
    return Ref(resource, item.name, item.namespace or None)


async def get(client: Client, item: Item) -> Object | None:
    """An object; `None` when it is absent."""
    ref = await find(client, item)
    if ref is None:
        return None
    try:
        return await client.get(ref)
    except KubernetesNotFoundError:
        return None


def check_version(chart: Chart, former: Release) -> None:
    """Refuse to put an older version in the place of a newer one."""
    ours = str(chart.about["version"])
    if versions.is_newer(former.version, ours):
        raise InstallError(
            f"Kubetorch {former.version} is installed in namespace {former.namespace}, and this "
            f"package is of the older version {ours}",
            hint=f"pip install kubetorch=={former.version}; kt upgrade --downgrade makes the "
            "controller and the kind older, for everybody",
        )


def keep(chart: Chart, former: Release, new_values: Values) -> Values:
    """The new values over those of the former release.

    Raises:
        ConfigError: The chart has no place for a former value.
        InstallError: The image is of the former version.
    """
    layered_values = values.layered(former.values, new_values)
    new_faults = set(chart.faults(new_values))
    if old_faults := [fault for fault in chart.faults(layered_values) if fault not in new_faults]:
        raise ConfigError(
            f"values that were given to the installed {former.version} cannot be used by "
            f"{chart.about['version']}:\n  " + "\n  ".join(old_faults),
            hint=f"kt upgrade -n {former.namespace} --set KEY=null forgets one of them, "
            "--reset-values all values that were given before",
        )
    _check_image(chart, former, new_values)
    return layered_values


def _check_image(chart: Chart, former: Release, new_values: Values) -> None:
    """Refuse to upgrade an installation whose values name the image of the former version."""
    if former.version == chart.about["version"]:
        return
    ours = str(chart.about["appVersion"])
    image = values.merged(chart.defaults, values.layered(former.values, new_values))["image"]
    decides = "digest" if image.get("digest") else "tag"
    if decides in (new_values.get("image") or {}) or image.get(decides) in (None, "", ours):
        return
    present = values.image_reference(image, ours)
    raise InstallError(
        f"the image {present} was given to the installed {former.version}; Kubetorch {ours} needs "
        "its own",
        hint=f"kt upgrade -n {former.namespace} {_image_options(chart, former, new_values)} once "
        f"that is there, or --reset-values for the chart's own; --image {present} keeps the "
        "present one",
    )


def _image_options(chart: Chart, former: Release, new_values: Values) -> str:
    """The options of `kt upgrade` that name the images of the new version in the same registry."""
    ours = str(chart.about["appVersion"])
    options: list[str] = []
    for option, key in (("--image", "image"), ("--pod-image", "podImage")):
        image = {
            **chart.defaults[key],
            **(former.values.get(key) or {}),
            **(new_values.get(key) or {}),
        }
        tag = str(image["tag"] or "")
        is_of_version = former.version in tag
        # An image for pods may be anything; one with Kubetorch's version in its tag is Kubetorch's.
        if key == "image" or (is_of_version and key not in new_values):
            new = tag.replace(former.version, ours) if is_of_version else ours
            options.append(f"{option} {image['repository']}:{new}")
    return " ".join(options)
