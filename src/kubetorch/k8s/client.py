"""The verbs of the API: objects in, objects out, as plain dicts.

async with Client(locating.find()) as client:
    deployments = await client.discovery.find("apps/v1", "Deployment")
    await client.apply(manifest, field_manager="kubetorch")
    pods = await client.list(Selection(PODS, "team", labels="app=web"))
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kubetorch.errors import KubernetesNotFoundError, KubernetesRequestError
from kubetorch.k8s import failures
from kubetorch.k8s.access import Access
from kubetorch.k8s.discovery import Discovery
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Ref, Resource, Selection, version
from kubetorch.k8s.session import LINE_LIMIT, Call, Session
from kubetorch.lib import httppool
from kubetorch.lib.httpanswer import BrokenError

#: Objects of one page of a list.
PAGE = 500
#: Media types of patches.
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"

Pairs = dict[str, str]
#: A merge patch (RFC 7386), or the operations of a JSON patch (RFC 6902).
Patch = Object | list[Object]


@dataclass(frozen=True)
class Listing:
    """What a list found.

    Attributes:
        items: The objects.
        resource_version: The moment; a watch goes on from here.
    """

    items: list[Object]
    resource_version: str


class Client:
    """One user of one cluster; belongs to one event loop.

    Args:
        access: Where and as whom.
        timeout: Seconds that an answer may take to begin, and a short one to end.
        patience: Seconds for which requests that may be sent again are sent again.
        variables: Variables for credential plugins and about proxies; those of this process if not
            given.

    Attributes:
        access: As given.
        discovery: The kinds of the cluster.

    Every verb raises `KubernetesRequestError` (or a class below it) when the server refuses,
    `KubernetesUnavailableError` when it does not answer, `KubernetesCredentialsError` when there is
    nothing to ask it with.
    """

    def __init__(
        self,
        access: Access,
        *,
        timeout: float = 30.0,
        patience: float = 10.0,
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
        """Close every connection."""
        await self.session.close()

    async def server_version(self) -> str:
        """The version of the API server, such as `v1.34.4`."""
        return str((await self._document("/version")).get("gitVersion") or "")

    # ------------------------------------------------------------------------------------ reading

    async def get(self, ref: Ref) -> Object:
        """One object, or a part of one."""
        return await self._send("GET", self.action("get", ref), self.path(ref))

    async def list(self, selection: Selection, *, page: int = PAGE) -> Listing:
        """All objects of a selection, fetched in pages.

        Args:
            selection: Which.
            page: Objects of each page.
        """
        try:
            return await self._list(selection, page)
        except KubernetesRequestError as error:
            if error.status_code != 410:
                raise
        # The server has forgotten the moment that the pages are of: all at once, then.
        return await self._list(selection, 0)

    async def _list(self, selection: Selection, page: int) -> Listing:
        action = self.action_on("list", selection)
        path = selection.resource.path(namespace=selection.namespace)
        query = {**selection.query, **({"limit": str(page)} if page else {})}
        items: list[Object] = []
        while True:
            found = await self._send("GET", action, path, query)
            items += [_complete(item, selection.resource) for item in found.get("items") or []]
            proceed = (found.get("metadata") or {}).get("continue")
            if not proceed:
                return Listing(items, version(found))
            query["continue"] = proceed

    async def watch(
        self,
        selection: Selection,
        resource_version: str,
        *,
        seconds: float,
        on_open: Callable[[], object] = dict,
    ) -> AsyncGenerator[Object, None]:
        """Events since a moment: dicts with `type` and `object`, the last ones `BOOKMARK`.

        Args:
            selection: Of which objects.
            resource_version: The moment, from a listing or an earlier event.
            seconds: After how long the server ends it.
            on_open: Called when the server has agreed.

        Nothing is tried again here: `kubetorch.k8s.informers` goes on after whatever happens.
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
        # Should the server forget to end it, the connection is given up.
        deadline = seconds + self._timeout
        async with (
            await self.session.send(call, patience=0.0) as answer,
            contextlib.aclosing(answer.lines(limit=LINE_LIMIT, timeout=deadline)) as lines,
        ):
            on_open()
            try:
                async for line in lines:
                    if line:
                        yield self._decode(action, line)
            except (BrokenError, httppool.SilentError) as error:
                raise failures.unavailable(action, self.session.server, error) from error
            except httppool.TooLargeError as error:
                raise failures.garbled(action, self.session.server, error) from error

    # ------------------------------------------------------------------------------------ writing

    async def create(
        self, manifest: Object, *, field_manager: str = "kubetorch", dry_run: bool = False
    ) -> Object:
        """Make an object.

        Args:
            manifest: The object; it may have `generateName` instead of a name.
            field_manager: Who owns its fields.
            dry_run: Only check it, with all of the server's admission.
        """
        resource = await self.discovery.resource_of(manifest)
        metadata = manifest.get("metadata") or {}
        namespace = self.namespace_of(resource, metadata.get("namespace"))
        action = Action("create", str(resource), namespace, metadata.get("name"), self._origin)
        query = _options(dry_run, fieldManager=field_manager)
        path = resource.path(namespace=namespace)
        return await self._send("POST", action, path, query, manifest)

    async def post(self, ref: Ref, body: Object) -> Object:
        """Create a part of an object, such as `token` of a service account or `eviction`."""
        return await self._send("POST", self.action("create", ref), self.path(ref), {}, body)

    async def apply(
        self,
        manifest: Object,
        *,
        field_manager: str = "kubetorch",
        force: bool = False,
        dry_run: bool = False,
        subresource: str = "",
    ) -> Object:
        """Server-side apply: the object has what the manifest says, made if it is not there.

        Args:
            manifest: What the field manager wants; what it had applied before and is not in it any
                more is removed.
            field_manager: Who wants it.
            force: Take fields from managers that own them with other values, instead of
                `KubernetesConflictError`.
            dry_run: Only check it, with all of the server's admission.
            subresource: Apply to this part, such as `status`.
        """
        ref = await self._ref(manifest, subresource)
        query = _options(dry_run, fieldManager=field_manager, force="true" if force else "")
        action = self.action("patch", ref)
        return await self._send("PATCH", action, self.path(ref), query, manifest, _APPLY)

    async def replace(
        self, manifest: Object, *, dry_run: bool = False, subresource: str = ""
    ) -> Object:
        """Put an object in place of what is there; a `resourceVersion` in it has to be the latest.

        Args:
            manifest: All of the object.
            dry_run: Only check it.
            subresource: Replace this part, such as `status`.
        """
        ref = await self._ref(manifest, subresource)
        query = _options(dry_run)
        return await self._send("PUT", self.action("update", ref), self.path(ref), query, manifest)

    async def patch(
        self,
        ref: Ref,
        patch: Patch,
        *,
        field_manager: str = "kubetorch",
        dry_run: bool = False,
    ) -> Object:
        """Change parts of an object.

        Args:
            ref: Which.
            patch: A mapping is merged, a list has operations.
            field_manager: Who owns what is changed.
            dry_run: Only check it.
        """
        kind = _JSON_PATCH if isinstance(patch, list) else _MERGE
        query = _options(dry_run, fieldManager=field_manager)
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
        dry_run: bool = False,
    ) -> Object:
        """Delete an object; the answer is the object that is going, or a `Status`.

        Args:
            ref: Which.
            propagation: What becomes of what it owns: `Background`, `Foreground` or `Orphan`.
            preconditions: `uid` and `resourceVersion` that it must have.
            grace_seconds: Seconds that its processes get; its own number when not given.
            dry_run: Only check whether it could be.
        """
        body = _deletion(propagation, grace_seconds, dry_run)
        if preconditions:
            body["preconditions"] = dict(preconditions)
        return await self._send("DELETE", self.action("delete", ref), self.path(ref), {}, body)

    # ------------------------------------------------------------------------------------- common

    @property
    def _origin(self) -> str:
        return self.access.origin

    def namespace_of(self, resource: Resource, namespace: str | None) -> str | None:
        """The namespace that is meant: the given one, else the client's own."""
        return (namespace or self.access.namespace) if resource.is_namespaced else None

    def path(self, ref: Ref) -> str:
        """Where an object or a part of one lies."""
        namespace = self.namespace_of(ref.resource, ref.namespace)
        return ref.resource.path(namespace=namespace, name=ref.name, subresource=ref.subresource)

    def action(self, verb: str, ref: Ref) -> Action:
        """What a verb on an object is called in messages."""
        what = f"{ref.resource}/{ref.subresource}" if ref.subresource else str(ref.resource)
        namespace = self.namespace_of(ref.resource, ref.namespace)
        return Action(verb, what, namespace, ref.name, self._origin)

    def action_on(self, verb: str, selection: Selection) -> Action:
        """What a verb on a selection is called in messages."""
        return Action(verb, str(selection.resource), selection.namespace, None, self._origin)

    async def _ref(self, manifest: Object, subresource: str) -> Ref:
        metadata = manifest["metadata"]
        resource = await self.discovery.resource_of(manifest)
        return Ref(resource, metadata["name"], metadata.get("namespace"), subresource)

    async def _document(self, path: str) -> Object:
        return await self._send("GET", Action("get", path, origin=self._origin), path)

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
        with contextlib.suppress(msgspec.DecodeError):
            found: Any = msgspec.json.decode(data)
            if isinstance(found, dict):
                return found
        raise failures.garbled(action, self.session.server, repr(data[:80]))


def _complete(item: Object, resource: Resource) -> Object:
    """An item of a list with its `apiVersion` and `kind`, which lists leave out."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **item}


def _options(dry_run: bool, **options: str) -> Pairs:
    given = {name: value for name, value in options.items() if value}
    return {**given, "dryRun": "All"} if dry_run else given


def _deletion(propagation: str, grace_seconds: int | None, dry_run: bool) -> Object:
    body: Object = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "propagationPolicy": propagation,
    }
    if grace_seconds is not None:
        body["gracePeriodSeconds"] = grace_seconds
    if dry_run:
        body["dryRun"] = ["All"]
    return body


def _version_in(path: str) -> str:
    """The `apiVersion` that a path is of."""
    parts = path.split("/")
    return parts[2] if parts[1] == "api" else "/".join(parts[2:4])
