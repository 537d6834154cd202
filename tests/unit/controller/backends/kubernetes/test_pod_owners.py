"""Who made a pod, and what is remembered of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from kubetorch.controller.backends.kubernetes.pod_owners import PodOwners
from kubetorch.errors import KubernetesForbiddenError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource
from kubetorch.manifests import labels

KEY = ("team", "f")
MAIN: Object = {
    "apiVersion": "batch/v1",
    "kind": "CronJob",
    "metadata": {"name": "f", "namespace": "team"},
}


def owned(kind: str, name: str, owner: tuple[str, str] | None, **metadata: Any) -> Object:
    """An object whose uid is its name, made by another one."""
    manifest: Object = {"apiVersion": "batch/v1", "kind": kind}
    manifest["metadata"] = {"name": name, "namespace": "team", "uid": name, **metadata}
    if owner is not None:
        reference = {"kind": owner[0], "name": owner[1], "uid": owner[1], "controller": True}
        manifest["metadata"]["ownerReferences"] = [{"apiVersion": "batch/v1", **reference}]
    return manifest


class World:
    """A CronJob that was applied here, with its runs; stands for the API server."""

    def __init__(self) -> None:
        applied = {"annotations": {labels.APPLIED: "some"}}
        self.objects = {"f": owned("CronJob", "f", None, **applied)}
        self.pods: dict[str, Object] = {}
        self.lookups: list[str] = []
        self.error: Exception | None = None
        self.discovery = self
        self.owners = PodOwners(
            cast("Client", self), lambda *_: None, lambda _: self.pods, lambda _: None
        )

    def run(self, number: int) -> Object:
        """A run of the CronJob and its pod, in place of the one before."""
        job, name = f"job-{number}", f"pod-{number}"
        self.objects[job] = owned("Job", job, ("CronJob", "f"))
        self.pods = {name: owned("Pod", name, ("Job", job))}
        return self.pods[name]

    async def resource_of(self, manifest: Object) -> Resource:
        return Resource("batch", "v1", manifest["kind"].lower(), manifest["kind"])

    async def get(self, ref: Ref) -> Object:
        self.lookups.append(ref.name)
        if self.error is not None:
            raise self.error
        if ref.name not in self.objects:
            raise KubernetesNotFoundError("it is gone")
        return self.objects[ref.name]

    async def belongs(self, pod: Object) -> bool | None:
        self.owners.belongs(KEY, pod, MAIN)
        await self.owners.wait_until_resolved(KEY)
        return self.owners.belongs(KEY, pod, MAIN)


def run(body: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(World()), 60))


def test_an_owner_is_looked_up_once_for_as_long_as_it_has_pods() -> None:
    async def body(world: World) -> None:
        first = world.run(1)
        assert [await world.belongs(first) for _ in range(2)] == [True, True]
        assert world.lookups == ["job-1", "f"]
        assert await world.belongs(world.run(2)) is True
        del world.lookups[:]
        assert await world.belongs(first) is True
        assert world.lookups == ["job-1", "f"]

    run(body)


@pytest.mark.parametrize(
    ("error", "belongs"),
    [(KubernetesNotFoundError("it is gone"), None), (KubernetesForbiddenError("not you"), False)],
)
def test_what_cannot_be_looked_up_is_no_owner(error: Exception, belongs: bool | None) -> None:
    async def body(world: World) -> None:
        world.error = error
        assert await world.belongs(world.run(1)) is belongs
        # Once something else is applied it is looked up again.
        world.error = None
        world.owners.forget_foreign_owners(KEY)
        assert await world.belongs(world.run(1)) is True

    run(body)


def test_a_pod_that_nothing_made_is_nobodys() -> None:
    async def body(world: World) -> None:
        assert await world.belongs(owned("Pod", "f", None)) is False
        assert world.lookups == []

    run(body)
