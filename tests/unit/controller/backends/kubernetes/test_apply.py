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


class OneObject:
    """An API server with one Service, or none; `asked` is what it was asked."""

    def __init__(self) -> None:
        self.there: Object | None = None
        self.asked: list[str] = []
        self.is_away = False
        self.discovery = self

    async def resource_of(self, manifest: Object) -> Resource:
        return Resource("", "v1", "services", manifest["kind"])

    async def get(self, ref: Ref) -> Object:
        self.asked.append("get")
        if self.is_away:
            raise KubernetesUnavailableError("the API server did not answer")
        if self.there is None:
            raise KubernetesNotFoundError("no such Service")
        return self.there

    async def apply(self, manifest: Object, **_: Any) -> Object:
        self.asked.append("apply")
        self.there = manifest
        return manifest

    async def patch(self, ref: Ref, patch: Object) -> Object:
        self.asked.append("patch")
        assert self.there is not None
        self.there["spec"].update(patch["spec"])
        return self.there


def applier(server: OneObject) -> Applier:
    return Applier(cast("Client", server))


def test_what_was_looked_at_is_not_asked_for_again() -> None:
    server = OneObject()

    async def main() -> None:
        one = applier(server)
        await one.apply(MANIFEST, live_objects=await one.read_live_objects([MANIFEST]))
        await one.apply(MANIFEST, live_objects=await one.read_live_objects([MANIFEST]))

    asyncio.run(main())
    assert server.asked == ["get", "apply", "get"]


def test_what_was_known_is_used_once() -> None:
    server = OneObject()

    async def main() -> None:
        one = applier(server)
        live_objects = await one.read_live_objects([MANIFEST])
        await one.apply(MANIFEST, live_objects=live_objects)
        await one.apply(MANIFEST, live_objects=live_objects)

    asyncio.run(main())
    assert server.asked == ["get", "apply", "get"]


def test_what_the_server_did_not_say_at_first_is_asked_again() -> None:
    server = OneObject()

    async def main() -> None:
        one = applier(server)
        server.is_away = True
        live_objects = await one.read_live_objects([MANIFEST])
        server.is_away = False
        await one.apply(MANIFEST, live_objects=live_objects)

    asyncio.run(main())
    assert server.asked == ["get", "get", "apply"]


def test_an_object_of_somebody_else_is_refused_unless_it_is_to_be_taken() -> None:
    server = OneObject()
    server.there = MANIFEST

    async def main() -> None:
        one = applier(server)
        with pytest.raises(StartupError, match="that Kubetorch did not make"):
            await one.check(MANIFEST)
        await one.check(MANIFEST, permission=True)

    asyncio.run(main())
    assert server.asked == ["get", "get"]


def test_a_deployment_of_more_pods_loses_the_defaults_of_the_other_strategy_first() -> None:
    server = OneObject()
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%"}}

    def manifest(strategy: Object) -> Object:
        head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": MANIFEST["metadata"]}
        return {**head, "spec": {"strategy": strategy}}

    async def main() -> None:
        one = applier(server)
        await one.apply(manifest({"type": "RollingUpdate"}))
        assert server.there is not None
        server.there["spec"]["strategy"] = rolling
        await one.apply(manifest({"type": "Recreate"}))
        assert server.there["spec"] == {"strategy": {"type": "Recreate"}, "paused": False}
        await one.apply(manifest({"type": "RollingUpdate"}))

    asyncio.run(main())
    assert server.asked == ["get", "apply", "get", "patch", "apply", "get", "apply"]


class Leaving(OneObject):
    """A Service that somebody deletes, until a test says that it is `gone`."""

    def __init__(self, there: Object) -> None:
        super().__init__()
        self.gone = asyncio.Event()
        metadata = {**there["metadata"], "uid": "1", "resourceVersion": "1"}
        self.there = {
            **there,
            "metadata": {**metadata, "deletionTimestamp": "2026-11-22T10:00:00Z"},
        }

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource.plural)

    async def list(self, selection: Selection) -> Listing:
        assert selection.fields == "metadata.name=train"
        return Listing([] if self.there is None else [self.there], "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Object]:
        await self.gone.wait()
        was, self.there = self.there, None
        yield {"type": "DELETED", "object": was}
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_object_that_is_being_deleted_is_made_anew_when_it_is_gone(is_changed: bool) -> None:
    async def main() -> None:
        before = OneObject()
        await applier(before).apply(MANIFEST)
        assert before.there is not None
        server, reasons = Leaving(before.there), list[str]()
        wanted = {**MANIFEST, "spec": {"ports": []}} if is_changed else MANIFEST
        work = applier(server).apply(wanted, on_wait=reasons.append)
        applying = asyncio.create_task(work)
        for _ in range(20):
            await asyncio.sleep(0)
        assert "apply" not in server.asked
        assert reasons == ["the Service train is being deleted; it is made anew after that"]
        server.gone.set()
        await applying
        assert server.asked[-1] == "apply"
        assert server.there is not None
        assert server.there["spec"] == wanted["spec"]

    asyncio.run(asyncio.wait_for(main(), 60))
