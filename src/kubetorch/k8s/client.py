"""The verbs of the API, objects in, objects out, as plain dicts; and which kinds a cluster serves.

async with Client(kubeconfig.find()) as client:
    deployments = await client.discovery.find("apps/v1", "Deployment")
    await client.apply(manifest, field_manager="kubetorch")
    pods = await client.list(Selection(PODS, "team", labels="app=web"))
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kubetorch.errors import KubernetesError, KubernetesNotFoundError, KubernetesRequestError
from kubetorch.k8s import failures
from kubetorch.k8s.failures import Action
from kubetorch.k8s.kubeconfig import Access
from kubetorch.k8s.resources import Object, Ref, Resource, Selection, group_path, version
from kubetorch.k8s.session import Call, Session
from kubetorch.k8s.tuning import LIMITS, TIMING
from kubetorch.lib import async_http
from kubetorch.lib.http1 import BrokenError

#: Gets the document at a path.
Fetch = Callable[[str], Awaitable[Object]]


class Served(NamedTuple):
    """The kinds of a cluster, and the API versions whose server did not answer."""

    kinds: list[Resource]
    unanswered: list[str]


class Discovery:
    """The kinds of one cluster.

    Known kinds are remembered; an unknown kind is looked up each time, so a kind whose definition
    was just created is found.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._kinds_by_version: dict[str, dict[str, Resource]] = {}

    async def find(self, api_version: str, kind: str) -> Resource:
        kinds = self._kinds_by_version.get(api_version, {})
        if kind not in kinds:
            try:
                kinds = parse(api_version, await self._fetch(group_path(api_version)))
            except KubernetesNotFoundError as error:
                raise _unknown_kind(api_version, kind) from error
            self._kinds_by_version[api_version] = kinds
        if kind not in kinds:
            raise _unknown_kind(api_version, kind)
        return kinds[kind]

    async def resource_of(self, manifest: Mapping[str, Any]) -> Resource:
        return await self.find(str(manifest["apiVersion"]), str(manifest["kind"]))

    async def all_kinds(self, *verbs: str) -> Served:
        """All kinds that the cluster serves, each in the version that its group prefers."""
        groups = (await self._fetch("/apis")).get("groups") or []
        versions = ["v1", *(name for group in groups for name in _versions(group))]
        documents = await asyncio.gather(*map(self._resources, versions))
        resources: dict[str, Resource] = {}
        unanswered = []
        for name, document in zip(versions, documents, strict=True):
            if document is None:
                unanswered.append(name)
                continue
            for resource in parse(name, document, verbs).values():
                resources.setdefault(str(resource), resource)
        return Served(list(resources.values()), unanswered)

    async def _resources(self, api_version: str) -> Object | None:
        try:
            return await self._fetch(group_path(api_version))
        except KubernetesError:
            return None

    def forget(self, api_version: str) -> None:
        """Look up the kinds of a version again: a path of one is not served any more."""
        self._kinds_by_version.pop(api_version, None)


def _versions(group: Mapping[str, Any]) -> list[str]:
    """The versions of an API group, the preferred one first."""
    preferred = str(group["preferredVersion"]["groupVersion"])
    version_names = [
        str(group_version["groupVersion"]) for group_version in group.get("versions") or []
    ]
    return [
        preferred,
        *(version_name for version_name in version_names if version_name != preferred),
    ]


def parse(api_version: str, document: Object, verbs: Iterable[str] = ()) -> dict[str, Resource]:
    """The kinds in an `APIResourceList` that take all of the verbs, by name."""
    group, _, version = api_version.rpartition("/")
    resources = {}
    for entry in document.get("resources") or []:
        is_able = set(verbs) <= set(entry.get("verbs") or [])
        if "/" not in entry["name"] and is_able:  # a subresource may have another kind
            resource = Resource(group, version, entry["name"], entry["kind"], entry["namespaced"])
            resources[resource.kind] = resource
    return resources


def _unknown_kind(api_version: str, kind: str) -> KubernetesNotFoundError:
    error = KubernetesNotFoundError(
        f"the cluster has no kind {kind} in {api_version}",
        hint="install the operator that brings it, or correct apiVersion and kind",
    )
    error.resource = f"{kind}.{api_version}"
    error.status_code = 404
    error.reason = "NoKindMatch"
    return error


#: Field manager of objects that this client makes.
_MANAGER = "kubetorch"
#: Media types of patches.
_APPLY_TYPE = "application/apply-patch+yaml"
_MERGE_TYPE = "application/merge-patch+json"
_JSON_PATCH_TYPE = "application/json-patch+json"

Pairs = dict[str, str]
#: A merge patch (RFC 7386), or the operations of a JSON patch (RFC 6902).
Patch = Object | list[Object]


@dataclass(frozen=True)
class Listing:
    items: list[Object]
    resource_version: str


class Client:
    """One user of one cluster; belongs to one event loop.

    Every verb raises `KubernetesRequestError` (or a subclass) when the server refuses the request,
    `KubernetesUnavailableError` when it does not answer, `KubernetesCredentialsError` without
    usable credentials.
    """

    def __init__(
        self,
        access: Access,
        *,
        timeout: float = TIMING.request_seconds,
        patience: float = TIMING.request_patience_seconds,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.access = access
        self._timeout = timeout
        self.session = Session(access, timeout=timeout, patience=patience, variables=variables)
        self.discovery = Discovery(self._document)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.session.close()

    async def server_version(self) -> str:
        """The version of the API server, such as `v1.34.4`."""
        return str((await self._document("/version")).get("gitVersion") or "")

    async def schemas(self, api_version: str) -> Object:
        """The schemas (OpenAPI 3) of this version's kinds, by name."""
        document = await self._document(f"/openapi/v3{group_path(api_version)}")
        schemas: Object = (document.get("components") or {}).get("schemas") or {}
        return schemas

    # ------------------------------------------------------------------------------------ reading

    async def get(self, ref: Ref) -> Object:
        return await self._send("GET", self.action("get", ref), self.path(ref))

    async def list(self, selection: Selection, *, page: int = LIMITS.page_objects) -> Listing:
        """All objects of a selection, fetched in pages."""
        try:
            return await self._list(selection, page)
        except KubernetesRequestError as error:
            if error.status_code != 410:
                raise
        # 410: the server has forgotten the version of the first pages, so all objects at once.
        return await self._list(selection, 0)

    async def _list(self, selection: Selection, page: int) -> Listing:
        action = self.action_on("list", selection)
        path = selection.resource.path(namespace=selection.namespace)
        query = {**selection.query, **({"limit": str(page)} if page else {})}
        kind = {"apiVersion": selection.resource.api_version, "kind": selection.resource.kind}
        items: list[Object] = []
        while True:
            document = await self._send("GET", action, path, query)
            objects = document.get("items") or []
            if not isinstance(objects, list) or not all(map(_is_object, objects)):
                raise failures.garbled(action, self.session.server, f"{objects!r:.80}")
            # The objects of a list come without their kind.
            items += [{**kind, **item} for item in objects]
            proceed = (document.get("metadata") or {}).get("continue")
            if not proceed:
                return Listing(items, version(document))
            query["continue"] = proceed

    async def watch(
        self,
        selection: Selection,
        resource_version: str,
        *,
        seconds: float,
        on_open: Callable[[], object] = dict,
    ) -> AsyncGenerator[Object, None]:
        """Events since a version: dicts with `type` and `object`, the last one a `BOOKMARK`.

        A failed watch is not tried again here: `kubetorch.k8s.informers` does that.
        """
        query = {
            **selection.query,
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(seconds))),
        }
        action = self.action_on("watch", selection)
        path = selection.resource.path(namespace=selection.namespace)
        call = Call(action, "GET", path, tuple(query.items()))
        # A server that does not end the watch in time has the connection closed.
        deadline = seconds + self._timeout
        async with (
            await self.session.send(call, patience=0.0) as answer,
            contextlib.aclosing(
                answer.lines(limit=LIMITS.watch_line_bytes, timeout=deadline)
            ) as lines,
        ):
            on_open()
            try:
                async for line in lines:
                    if line:
                        yield self._decode(action, line)
            except (BrokenError, async_http.SilentError) as error:
                raise failures.unavailable(action, self.session.server, error) from error
            except async_http.TooLargeError as error:
                raise failures.garbled(action, self.session.server, error) from error

    # ------------------------------------------------------------------------------------ writing

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        resource = await self.discovery.resource_of(manifest)
        metadata = manifest.get("metadata") or {}
        namespace = self.namespace_of(resource, metadata.get("namespace"))
        action = Action(
            "create", str(resource), namespace, metadata.get("name"), self.access.origin
        )
        query = _options(dry_run, fieldManager=_MANAGER)
        path = resource.path(namespace=namespace)
        return await self._send("POST", action, path, query, manifest)

    async def post(self, ref: Ref, body: Object) -> Object:
        """Create a part of an object, such as `token` of a service account or `eviction`."""
        return await self._send("POST", self.action("create", ref), self.path(ref), {}, body)

    async def apply(
        self,
        manifest: Object,
        *,
        field_manager: str = _MANAGER,
        force: bool = False,
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply: create the object, or set the fields of the manifest in it."""
        ref = await self._ref(manifest)
        query = _options(dry_run, fieldManager=field_manager, force="true" if force else "")
        action = self.action("patch", ref)
        return await self._send("PATCH", action, self.path(ref), query, manifest, _APPLY_TYPE)

    async def replace(self, manifest: Object) -> Object:
        """Replace the whole present object."""
        ref = await self._ref(manifest)
        return await self._send("PUT", self.action("update", ref), self.path(ref), {}, manifest)

    async def patch(self, ref: Ref, patch: Patch, *, field_manager: str = _MANAGER) -> Object:
        kind = _JSON_PATCH_TYPE if isinstance(patch, list) else _MERGE_TYPE
        query = {"fieldManager": field_manager}
        return await self._send(
            "PATCH", self.action("patch", ref), self.path(ref), query, patch, kind
        )

    async def delete(
        self,
        ref: Ref,
        *,
        propagation: str = "Background",
        preconditions: Mapping[str, str] | None = None,
        grace_seconds: int | None = None,
    ) -> Object:
        """Delete an object; the answer is the object that is going, or a `Status`."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
        }
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if preconditions:
            body["preconditions"] = dict(preconditions)
        return await self._send("DELETE", self.action("delete", ref), self.path(ref), {}, body)

    # ------------------------------------------------------------------------------------- common

    def namespace_of(self, resource: Resource, namespace: str | None) -> str | None:
        """The given namespace, else the client's own; `None` for kinds without namespaces."""
        return (namespace or self.access.namespace) if resource.is_namespaced else None

    def path(self, ref: Ref) -> str:
        namespace = self.namespace_of(ref.resource, ref.namespace)
        return ref.resource.path(namespace=namespace, name=ref.name, subresource=ref.subresource)

    def action(self, verb: str, ref: Ref) -> Action:
        resource = f"{ref.resource}/{ref.subresource}" if ref.subresource else str(ref.resource)
        namespace = self.namespace_of(ref.resource, ref.namespace)
        return Action(verb, resource, namespace, ref.name, self.access.origin)

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, str(selection.resource), selection.namespace, None, self.access.origin)

    async def _ref(self, manifest: Object) -> Ref:
        metadata = manifest["metadata"]
        resource = await self.discovery.resource_of(manifest)
        return Ref(resource, metadata["name"], metadata.get("namespace"))

    async def _document(self, path: str) -> Object:
        return await self._send("GET", Action("get", path, origin=self.access.origin), path)

    async def _send(
        self,
        method: str,
        action: Action,
        path: str,
        query: Pairs | None = None,
        body: Patch | None = None,
        content_type: str = "application/json",
    ) -> Object:
        data = None if body is None else msgspec.json.encode(body)
        call = Call(action, method, path, tuple((query or {}).items()), data, content_type)
        try:
            return self._decode(action, await self.session.fetch(call))
        except KubernetesNotFoundError as error:
            if failures.is_unserved(error.message):
                self.discovery.forget(_version_in(path))
            raise

    def _decode(self, action: Action, data: bytes) -> Object:
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            document: Any = msgspec.json.decode(data)
            if isinstance(document, dict):
                return document
        raise failures.garbled(action, self.session.server, repr(data[:80]))


#: Lists in the status of an object whose parts all readers take for dictionaries.
_STATUS_LISTS = ("conditions", "containerStatuses")


def _is_object(item: object) -> bool:
    """True if the fields that all readers use have the types that Kubernetes defines."""
    if not isinstance(item, dict):
        return False
    metadata, status = item.get("metadata"), item.get("status") or {}
    if not isinstance(metadata, dict) or not isinstance(status, dict):
        return False
    is_named = isinstance(metadata.get("name"), str)
    is_labelled = isinstance(metadata.get("labels") or {}, dict)
    return (
        is_named
        and is_labelled
        and all(_is_list_of_dicts(status.get(name)) for name in _STATUS_LISTS)
    )


def _is_list_of_dicts(value: object) -> bool:
    """True also for an absent or empty list."""
    return not value or (isinstance(value, list) and all(isinstance(part, dict) for part in value))


def _options(dry_run: bool, **options: str) -> Pairs:
    query = {name: value for name, value in options.items() if value}
    return {**query, "dryRun": "All"} if dry_run else query


def _version_in(path: str) -> str:
    parts = path.split("/")
    return parts[2] if parts[1] == "api" else "/".join(parts[2:4])
