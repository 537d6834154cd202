"""Which kinds a cluster serves, asked once for each version of an API group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from kubetorch.errors import KubernetesError, KubernetesNotFoundError
from kubetorch.k8s.resources import Object, Resource, group_path

#: Gets the document at a path.
Fetch = Callable[[str], Awaitable[Object]]


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

    async def everything(self, *verbs: str) -> list[Resource]:
        """All kinds of the cluster, each in the version that its group prefers.

        A group whose server does not answer is left out.

        Args:
            verbs: What must be possible with them.
        """
        groups = (await self._fetch("/apis")).get("groups") or []
        versions = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
        documents = await asyncio.gather(*map(self._resources, versions))
        return [
            found
            for version, document in zip(versions, documents, strict=True)
            for found in parse(version, document, verbs).values()
        ]

    async def _resources(self, api_version: str) -> Object:
        try:
            return await self._fetch(group_path(api_version))
        except KubernetesError:
            return {}

    def forget(self, api_version: str) -> None:
        """A path of this version is not served any more."""
        self._known.pop(api_version, None)


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
