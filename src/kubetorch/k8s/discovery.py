"""Which kinds a cluster serves, asked once for each version of an API group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kubetorch.errors import KubernetesError, KubernetesNotFoundError
from kubetorch.k8s.resources import Object, Resource, group_path

#: Gets the document at a path.
Fetch = Callable[[str], Awaitable[Object]]


class Served(NamedTuple):
    """What a cluster serves.

    Attributes:
        kinds: All kinds that it says it has.
        unanswered: Versions of API groups whose server does not say.
    """

    kinds: list[Resource]
    unanswered: list[str]


class Discovery:
    """The kinds of one cluster.

    What is known stays known; a kind that is not known is looked for again each time, so that one
    whose definition was just created is found.

    Args:
        fetch: Gets a document.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._known: dict[str, dict[str, Resource]] = {}

    async def find(self, api_version: str, kind: str) -> Resource:
        """How a kind is served.

        Raises:
            KubernetesNotFoundError: The cluster does not have it.
        """
        known = self._known.get(api_version, {})
        if kind not in known:
            try:
                known = parse(api_version, await self._fetch(group_path(api_version)))
            except KubernetesNotFoundError as error:
                raise _unknown(api_version, kind) from error
            self._known[api_version] = known
        if kind not in known:
            raise _unknown(api_version, kind)
        return known[kind]

    async def resource_of(self, manifest: Mapping[str, Any]) -> Resource:
        """How the kind of an object is served.

        Raises:
            KubernetesNotFoundError: The cluster does not have it.
        """
        return await self.find(str(manifest["apiVersion"]), str(manifest["kind"]))

    async def everything(self, *verbs: str) -> Served:
        """All kinds of the cluster, each in one version: that which its group prefers, if it can.

        Args:
            verbs: What must be possible with them.
        """
        groups = (await self._fetch("/apis")).get("groups") or []
        versions = ["v1", *(version for group in groups for version in _versions(group))]
        documents = await asyncio.gather(*map(self._resources, versions))
        found: dict[str, Resource] = {}
        unanswered = []
        for version, document in zip(versions, documents, strict=True):
            if document is None:
                unanswered.append(version)
                continue
            for resource in parse(version, document, verbs).values():
                found.setdefault(str(resource), resource)
        return Served(list(found.values()), unanswered)

    async def _resources(self, api_version: str) -> Object | None:
        try:
            return await self._fetch(group_path(api_version))
        except KubernetesError:
            return None

    def forget(self, api_version: str) -> None:
        """A path of this version is not served any more."""
        self._known.pop(api_version, None)


def _versions(group: Mapping[str, Any]) -> list[str]:
    """The versions of an API group, the preferred one first."""
    preferred = str(group["preferredVersion"]["groupVersion"])
    every = [str(one["groupVersion"]) for one in group.get("versions") or []]
    return [preferred, *(one for one in every if one != preferred)]


def parse(api_version: str, document: Object, verbs: Iterable[str] = ()) -> dict[str, Resource]:
    """The kinds in an `APIResourceList`, those with which all of the verbs are possible."""
    group, _, version = api_version.rpartition("/")
    found = {}
    for entry in document.get("resources") or []:
        is_able = set(verbs) <= set(entry.get("verbs") or [])
        if "/" not in entry["name"] and is_able:  # a subresource may have another kind
            resource = Resource(group, version, entry["name"], entry["kind"], entry["namespaced"])
            found[resource.kind] = resource
    return found


def _unknown(api_version: str, kind: str) -> KubernetesNotFoundError:
    error = KubernetesNotFoundError(
        f"the cluster has no kind {kind} in {api_version}",
        hint="install the operator that brings it, or correct apiVersion and kind",
    )
    error.resource = f"{kind}.{api_version}"
    error.status_code = 404
    error.reason = "NoKindMatch"
    return error
