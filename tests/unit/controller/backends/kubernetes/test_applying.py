from __future__ import annotations

import asyncio
from typing import Any, cast

from kubetorch.controller.backends.kubernetes.applying import Applier
from kubetorch.errors import KubernetesNotFoundError, KubernetesUnavailableError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource

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
        await one.apply(MANIFEST, known=await one.look([MANIFEST]))
        await one.apply(MANIFEST, known=await one.look([MANIFEST]))

    asyncio.run(main())
    assert server.asked == ["get", "apply", "get"]


def test_what_was_known_is_used_once() -> None:
    server = OneObject()

    async def main() -> None:
        one = applier(server)
        known = await one.look([MANIFEST])
        await one.apply(MANIFEST, known=known)
        await one.apply(MANIFEST, known=known)

    asyncio.run(main())
    assert server.asked == ["get", "apply", "get"]


def test_what_the_server_did_not_say_at_first_is_asked_again() -> None:
    server = OneObject()

    async def main() -> None:
        one = applier(server)
        server.is_away = True
        known = await one.look([MANIFEST])
        server.is_away = False
        await one.apply(MANIFEST, known=known)

    asyncio.run(main())
    assert server.asked == ["get", "get", "apply"]


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
