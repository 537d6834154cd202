"""A controller that starts while the API server has too much to do: it asks again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast

import clock_loop
from kubetorch.controller.backends.base import PodStatus, Stores
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.errors import KubernetesRequestError
from kubetorch.k8s.client import Client, Listing
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Ref, Resource, Selection
from kubetorch.manifests import labels
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Runtime

SPEC = WorkloadSpec("team", "train", CallableRef("fn", "f", "m", "f"))
KEY = ("team", "train")
#: Of the pods of an earlier Kubetorch, whose agent was another one.
DIGEST = {labels.TEMPLATE_DIGEST: "of-an-earlier-version"}
OWNER = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "name": "train",
    "uid": "deployed",
    "controller": True,
}


def pod(name: str, annotations: dict[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": name,
            "labels": {labels.SERVICE: "train"},
            "annotations": annotations,
            "ownerReferences": [OWNER],
        },
        "spec": {"containers": [{"name": "kubetorch"}]},
        "status": {"phase": "Running"},
    }


class BusyServer:
    """An API server with a Deployment and its pod, which refuses so many requests for the first."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.request_count = 0
        self.has_pods = True
        self.discovery = self

    async def find(self, api_version: str, kind: str) -> Resource:
        group, _, version = api_version.rpartition("/")
        return Resource(group, version, kind.lower() + "s", kind)

    async def resource_of(self, manifest: Object) -> Resource:
        return await self.find(manifest["apiVersion"], manifest["kind"])

    async def get(self, ref: Ref) -> Object:
        self.request_count += 1
        if self.request_count <= self.refusals:
            error = KubernetesRequestError("the API server answered 429 TooManyRequests")
            error.status_code = 429
            raise error
        containers = [{"name": "kubetorch", "image": "image"}]
        template = {"metadata": {"annotations": DIGEST}, "spec": {"containers": containers}}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": ref.name,
                "namespace": ref.namespace,
                "uid": "deployed",
                "annotations": {labels.APPLIED: "some"},
            },
            "spec": {"template": template},
        }

    async def delete(self, ref: Ref, **_: Any) -> None:
        return None

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource.plural)

    async def list(self, selection: Selection) -> Listing:
        pods = [pod("train-1", DIGEST), pod("train-0", {labels.TEMPLATE_DIGEST: "still-earlier"})]
        is_asked = selection.resource.kind == "Pod" and self.has_pods
        return Listing(pods if is_asked else [], "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


@contextlib.asynccontextmanager
async def started(server: BusyServer, changed: asyncio.Event) -> AsyncIterator[KubernetesBackend]:
    unused: Any = None
    backend = KubernetesBackend(
        cast("Client", server),
        runtime=Runtime("image", "image", "http://controller"),
        stores=cast("Stores", unused),
        prerequisites=cast("PodPrerequisites", unused),
        owner=lambda namespace, name: None,
    )
    try:
        await backend.start([[SPEC]])
        backend.watch(lambda namespace, name: changed.set())
        yield backend
    finally:
        await backend.close(pods=False)


async def pods_once_known(backend: KubernetesBackend) -> list[PodStatus]:
    """The pods, once it is known who made them."""
    while not (pods := backend.pods(*KEY)):
        await clock_loop.pause(0.1)
    return pods


def run(main: Coroutine[Any, Any, None]) -> None:
    clock_loop.run(main)


def test_a_workload_that_could_not_be_looked_at_is_looked_at_again_until_it_can() -> None:
    async def main() -> None:
        server, changed = BusyServer(refusals=4), asyncio.Event()
        async with started(server, changed) as backend:
            assert "429" in backend.trouble(*KEY).reason
            while backend.trouble(*KEY).reason:
                changed.clear()
                await changed.wait()
            assert server.request_count == 6  # the last of them for the owner of its pods
            assert [
                pod_status.name
                for pod_status in await pods_once_known(backend)
                if pod_status.is_retiring
            ] == ["train-0"]

    run(main())


def test_until_then_none_of_its_pods_is_taken_for_one_of_an_older_template() -> None:
    async def main() -> None:
        async with started(BusyServer(refusals=1), asyncio.Event()) as backend:
            retiring_by_pod = [
                (pod_status.name, pod_status.is_retiring)
                for pod_status in await pods_once_known(backend)
            ]
            assert retiring_by_pod == [("train-1", False), ("train-0", False)]

    run(main())


def test_a_backend_that_is_closed_looks_no_more() -> None:
    async def main() -> None:
        server = BusyServer(refusals=1)
        async with started(server, asyncio.Event()):
            pass
        await clock_loop.pause(3600)
        assert server.request_count == 1

    run(main())


def test_a_workload_that_is_torn_down_is_looked_at_no_more() -> None:
    async def main() -> None:
        server = BusyServer(refusals=1)
        server.has_pods = False
        async with started(server, asyncio.Event()) as backend:
            await backend.delete(*KEY, grace=1)
            count_before = server.request_count
            await clock_loop.pause(3600)
            assert (server.request_count, backend.trouble(*KEY).reason) == (count_before, "")

    run(main())
