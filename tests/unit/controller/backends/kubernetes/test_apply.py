from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from kubetorch.controller.backends.kubernetes.apply import Applier
from kubetorch.errors import KubernetesNotFoundError, KubernetesUnavailableError, StartupError
from kubetorch.k8s.client import Client, Listing
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Ref, Resource, Selection

MANIFEST: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "train", "namespace": "team"},
    "spec": {"ports": [{"port": 80}]},
}


class ServerOfOneObject:
    """An API server with one Service, or none; `requests` are those that the server got."""

    def __init__(self) -> None:
        self.live_object: Object | None = None
        self.requests: list[str] = []
        self.is_away = False
        self.discovery = self

    async def resource_of(self, manifest: Object) -> Resource:
        return Resource("", "v1", "services", manifest["kind"])

    async def get(self, ref: Ref) -> Object:
        self.requests.append("get")
        if self.is_away:
            raise KubernetesUnavailableError("the API server did not answer")
        if self.live_object is None:
            raise KubernetesNotFoundError("no such Service")
        return self.live_object

    async def apply(self, manifest: Object, **_: Any) -> Object:
        self.requests.append("apply")
        self.live_object = manifest
        return manifest

    async def patch(self, ref: Ref, patch: Object) -> Object:
        self.requests.append("patch")
        assert self.live_object is not None
        self.live_object["spec"].update(patch["spec"])
        return self.live_object


def applier(server: ServerOfOneObject) -> Applier:
    return Applier(cast("Client", server))


def test_what_was_looked_at_is_not_asked_for_again() -> None:
    server = ServerOfOneObject()

    async def main() -> None:
        object_applier = applier(server)
        await object_applier.apply(
            MANIFEST, live_objects=await object_applier.read_live_objects([MANIFEST])
        )
        await object_applier.apply(
            MANIFEST, live_objects=await object_applier.read_live_objects([MANIFEST])
        )

    asyncio.run(main())
    assert server.requests == ["get", "apply", "get"]


def test_what_was_known_is_used_once() -> None:
    server = ServerOfOneObject()

    async def main() -> None:
        object_applier = applier(server)
        live_objects = await object_applier.read_live_objects([MANIFEST])
        await object_applier.apply(MANIFEST, live_objects=live_objects)
        await object_applier.apply(MANIFEST, live_objects=live_objects)

    asyncio.run(main())
    assert server.requests == ["get", "apply", "get"]


def test_what_the_server_did_not_say_at_first_is_asked_again() -> None:
    server = ServerOfOneObject()

    async def main() -> None:
        object_applier = applier(server)
        server.is_away = True
        live_objects = await object_applier.read_live_objects([MANIFEST])
        server.is_away = False
        await object_applier.apply(MANIFEST, live_objects=live_objects)

    asyncio.run(main())
    assert server.requests == ["get", "get", "apply"]


def test_an_object_of_somebody_else_is_refused_unless_it_is_to_be_taken() -> None:
    server = ServerOfOneObject()
    server.live_object = MANIFEST

    async def main() -> None:
        object_applier = applier(server)
        with pytest.raises(StartupError, match="that Kubetorch did not make"):
            await object_applier.check(MANIFEST)
        await object_applier.check(MANIFEST, permission=True)

    asyncio.run(main())
    assert server.requests == ["get", "get"]


def test_a_deployment_of_more_pods_loses_the_defaults_of_the_other_strategy_first() -> None:
    server = ServerOfOneObject()
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%"}}

    def manifest(strategy: Object) -> Object:
        head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": MANIFEST["metadata"]}
        return {**head, "spec": {"strategy": strategy}}

    async def main() -> None:
        object_applier = applier(server)
        await object_applier.apply(manifest({"type": "RollingUpdate"}))
        assert server.live_object is not None
        server.live_object["spec"]["strategy"] = rolling
        await object_applier.apply(manifest({"type": "Recreate"}))
        assert server.live_object["spec"] == {"strategy": {"type": "Recreate"}, "paused": False}
        await object_applier.apply(manifest({"type": "RollingUpdate"}))

    asyncio.run(main())
    assert server.requests == ["get", "apply", "get", "patch", "apply", "get", "apply"]


class ServerOfDeletedObject(ServerOfOneObject):
    """A Service that somebody deletes, and whose `removal` a test announces."""

    def __init__(self, live_object: Object) -> None:
        super().__init__()
        self.removal = asyncio.Event()
        metadata = {**live_object["metadata"], "uid": "1", "resourceVersion": "1"}
        self.live_object = {
            **live_object,
            "metadata": {**metadata, "deletionTimestamp": "2026-11-22T10:00:00Z"},
        }

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource.plural)

    async def list(self, selection: Selection) -> Listing:
        assert selection.fields == "metadata.name=train"
        return Listing([] if self.live_object is None else [self.live_object], "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Object]:
        await self.removal.wait()
        was, self.live_object = self.live_object, None
        yield {"type": "DELETED", "object": was}
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_object_that_is_being_deleted_is_made_anew_when_it_is_gone(is_changed: bool) -> None:
    async def main() -> None:
        before = ServerOfOneObject()
        await applier(before).apply(MANIFEST)
        assert before.live_object is not None
        server, reasons = ServerOfDeletedObject(before.live_object), list[str]()
        manifest = {**MANIFEST, "spec": {"ports": []}} if is_changed else MANIFEST
        work = applier(server).apply(manifest, on_wait=reasons.append)
        applying = asyncio.create_task(work)
        for _ in range(20):
            await asyncio.sleep(0)
        assert "apply" not in server.requests
        assert reasons == ["the Service train is being deleted; it is made anew after that"]
        server.removal.set()
        await applying
        assert server.requests[-1] == "apply"
        assert server.live_object is not None
        assert server.live_object["spec"] == manifest["spec"]

    asyncio.run(asyncio.wait_for(main(), 60))
