"""Applying a chart to a cluster: in order, and what it no longer has is deleted.

An upgrade keeps the values that were given before. An image is the exception: its tag or digest is
that of the version before, which with the kind and the roles of another one is no version at all.
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
from kubetorch.install.values import Values
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import Object, Ref, Selection, version
from kubetorch.wire import versions

#: Told what is going on, a line each.
Report = Callable[[str], object]
#: What is `kept` was given up, for whoever wants it.
Change = Literal["created", "changed", "unchanged", "deleted", "kept"]

#: Seconds that the API server may take to serve a definition.
_ESTABLISHED = 30.0


@dataclass(frozen=True)
class Applied:
    release: Release
    changes: Mapping[Item, Change]

    @property
    def is_changed(self) -> bool:
        return any(change != "unchanged" for change in self.changes.values())


async def apply(
    client: Client,
    chart: Chart,
    values: Mapping[str, Any],
    *,
    namespace: str,
    report: Report,
) -> Applied:
    objects = chart.render(values, namespace=namespace)
    former = await releases.load(client, namespace)
    there = await asyncio.gather(*(get(client, Item.of(one)) for one in objects))
    verb = "upgrade" if former else "install"
    for found in there:
        if found is not None:
            releases.check(found, namespace, verb=verb)
            if found["metadata"].get("deletionTimestamp"):
                # As during an uninstall: what is changed now would go all the same.
                raise InstallError(
                    f"{Item.of(found)} is being deleted", hint="try again when it is gone"
                )
    await _check_namespaces(client, objects, namespace)
    await scope.check(client, namespace, Scope.of(chart.values(values)["watchNamespaces"]))
    release = Release(
        namespace,
        str(chart.about["version"]),
        dict(values),
        tuple(Item.of(one) for one in objects),
    )
    earlier = former.items if former else ()
    await ensure_namespace(client, namespace, report)
    await releases.save(client, release.with_former(earlier))
    changes: dict[Item, Change] = {}
    for one, before in zip(objects, there, strict=True):
        changes[Item.of(one)] = change = await _apply(client, one, before)
        if change != "unchanged":
            report(f"{change} {Item.of(one)}")
    for item in reversed(release.without(earlier)):
        change_of_former = await _remove(client, item, namespace)
        if change_of_former != "unchanged":
            changes[item] = change_of_former
            report(f"{change_of_former} {item}")
    await releases.save(client, release)
    return Applied(release, changes)


async def _check_namespaces(client: Client, objects: list[Object], namespace: str) -> None:
    """Refuse values that name a namespace which is not there, before anything is applied."""
    named = {one["metadata"].get("namespace") for one in objects} - {None, namespace}
    for other in sorted(named):
        if await get(client, Item("v1", "Namespace", "", other)) is None:
            raise InstallError(
                f"there is no namespace {other!r}",
                hint=f"kubectl create namespace {other}, or take it out of watchNamespaces",
            )


async def _apply(client: Client, manifest: Object, before: Object | None) -> Change:
    after = await client.apply(manifest, force=True)
    if manifest["kind"] == "CustomResourceDefinition":
        await _established(client, manifest)
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
                # All that the chart runs keeps to it.
                "pod-security.kubernetes.io/warn": "restricted",
            },
        },
    }


async def ensure_namespace(client: Client, namespace: str, report: Report) -> None:
    """Make a namespace if there is none; one that is there is left as it is."""
    manifest = namespace_manifest(namespace)
    found = await get(client, Item.of(manifest))
    if found is None:
        await client.create(manifest)
        report(f"created Namespace {namespace}")
    elif found["metadata"].get("deletionTimestamp"):
        raise InstallError(
            f"the namespace {namespace} is being deleted", hint="try again when it is gone"
        )


async def _established(client: Client, manifest: Object) -> None:
    """Wait until the API server serves a definition."""
    ref = await find(client, Item.of(manifest))
    assert ref is not None
    selection = Selection(ref.resource, fields=f"metadata.name={ref.name}")
    try:
        async with Informer(client, selection) as there:
            await there.until(
                lambda found: any(map(_is_established, found.values())), timeout=_ESTABLISHED
            )
    except TimeoutError as error:
        raise InstallError(
            f"{Item.of(manifest)} was not established within {_ESTABLISHED:g} s",
            hint="kubectl describe crd says why",
        ) from error


def _is_established(found: Object) -> bool:
    conditions = (found.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


async def _remove(client: Client, item: Item, namespace: str) -> Change:
    """Delete an object that the installation had, if it is there and ours."""
    ref = await find(client, item)
    if ref is None:
        return "unchanged"
    try:
        found = await client.get(ref)
        if not releases.is_of(found, namespace):
            return "unchanged"
        if item.is_same_as(releases.DEFINITION):
            # All services of the cluster would go with it.
            await releases.give_up(client, found)
            return "kept"
        await client.delete(ref, preconditions={"uid": found["metadata"]["uid"]})
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
    """An object; `None` when it is not there."""
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


def keep(chart: Chart, former: Release, given: Values) -> Values:
    """Values over those that were given before."""
    found = values.layered(former.values, given)
    now = set(chart.faults(given))
    if kept := [one for one in chart.faults(found) if one not in now]:
        raise ConfigError(
            f"values that were given to the installed {former.version} cannot be used by "
            f"{chart.about['version']}:\n  " + "\n  ".join(kept),
            hint=f"kt upgrade -n {former.namespace} --set KEY=null forgets one of them, "
            "--reset-values all values that were given before",
        )
    _check_image(chart, former, given)
    return found


def _check_image(chart: Chart, former: Release, given: Values) -> None:
    """Refuse to leave an installation of one version with the image of another."""
    if former.version == chart.about["version"]:
        return
    ours = str(chart.about["appVersion"])
    found = values.merged(chart.defaults, values.layered(former.values, given))["image"]
    decides = "digest" if found.get("digest") else "tag"
    if decides in (given.get("image") or {}) or found.get(decides) in (None, "", ours):
        return
    present = values.written(found, ours)
    raise InstallError(
        f"the image {present} was given to the installed {former.version}; Kubetorch {ours} needs "
        "its own",
        hint=f"kt upgrade -n {former.namespace} {_images(chart, former, given)} once that is "
        f"there, or --reset-values for the chart's own; --image {present} keeps the present one",
    )


def _images(chart: Chart, former: Release, given: Values) -> str:
    """The options that name the images of the new version where the old ones were."""
    ours = str(chart.about["appVersion"])
    found: list[str] = []
    for option, key in (("--image", "image"), ("--pod-image", "podImage")):
        image = {**chart.defaults[key], **(former.values.get(key) or {}), **(given.get(key) or {})}
        tag = str(image["tag"] or "")
        is_of_version = former.version in tag
        # An image for pods may be anything; one with Kubetorch's version in its tag is Kubetorch's.
        if key == "image" or (is_of_version and key not in given):
            new = tag.replace(former.version, ours) if is_of_version else ours
            found.append(f"{option} {image['repository']}:{new}")
    return " ".join(found)
