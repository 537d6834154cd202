"""Whom the cluster_watch tells: with many services in a namespace, not all of them each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from kubetorch.controller.backends.kubernetes.launch_watch import ClusterChange, ClusterWatch
from kubetorch.k8s.client import Client, Listing
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Resource, Selection
from kubetorch.manifests import labels


class Server:
    """An API server with objects by kind, which never change."""

    def __init__(self, *objects: Object) -> None:
        self._objects = objects
        self.discovery = self

    async def find(self, api_version: str, kind: str) -> Resource:
        return Resource("", api_version, kind.lower() + "s", kind)

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource)

    async def list(self, selection: Selection) -> Listing:
        selected_objects = [
            manifest for manifest in self._objects if manifest["kind"] == selection.resource.kind
        ]
        return Listing(selected_objects, "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


def thing(kind: str, name: str, **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"namespace": "team", "name": name, "uid": name, **metadata},
    }


def event(kind: str, name: str) -> Object:
    return thing("Event", f"{name}.1") | {"involvedObject": {"kind": kind, "name": name}}


def reported_changes(*objects: Object) -> list[ClusterChange]:
    changes: list[ClusterChange] = []

    async def main() -> None:
        client = cast("Client", Server(*objects))
        cluster_watch = ClusterWatch(client, time=lambda: 0.0, on_change=changes.append)
        await cluster_watch.watch_object(thing("Deployment", "train"))
        for _ in range(20):
            await asyncio.sleep(0)
        await cluster_watch.close()

    asyncio.run(main())
    return changes


def test_an_object_with_our_label_concerns_its_service_alone() -> None:
    ours = thing("ReplicaSet", "train-5f", labels={labels.SERVICE: "train"})
    assert reported_changes(ours) == [ClusterChange("team", service="train")]


def test_an_object_without_it_may_concern_every_service_of_the_namespace() -> None:
    assert reported_changes(thing("ReplicaSet", "other-5f")) == [ClusterChange("team")]


def test_an_event_about_a_pod_concerns_whoever_has_that_pod() -> None:
    assert reported_changes(event("Pod", "train-5f-x")) == [ClusterChange("team", pod="train-5f-x")]


@pytest.mark.parametrize("order", [lambda pair: pair, lambda pair: pair[::-1]])
def test_an_event_about_a_known_object_concerns_the_service_of_that(
    order: Callable[[tuple[Object, ...]], tuple[Object, ...]],
) -> None:
    ours = thing("Deployment", "train", labels={labels.SERVICE: "train"})
    changes = reported_changes(*order((ours, event("Deployment", "train"))))
    assert ClusterChange("team", service="train") in changes


def test_an_event_about_anything_else_may_concern_every_service_of_the_namespace() -> None:
    assert reported_changes(event("PersistentVolumeClaim", "data")) == [ClusterChange("team")]


def test_a_namespace_without_workloads_is_not_watched_any_more() -> None:
    class Counting(Server):
        watched: list[str | None]

        async def watch(self, *of: Any, **_: Any) -> AsyncIterator[Any]:
            self.watched.append(of[0].namespace)
            try:
                await asyncio.Event().wait()
                yield None
            finally:
                self.watched.remove(of[0].namespace)

    async def main() -> None:
        server = Counting(thing("Deployment", "train"), event("Pod", "train-5f-x"))
        server.watched = []
        cluster_watch = ClusterWatch(
            cast("Client", server), time=lambda: 0.0, on_change=lambda around: None
        )
        serve_deployment = thing("Deployment", "serve")
        serve_deployment["metadata"]["namespace"] = "shop"
        for deployment in (thing("Deployment", "train"), serve_deployment):
            await cluster_watch.watch_object(deployment)
        for _ in range(20):
            await asyncio.sleep(0)
        assert {*server.watched} == {"team", "shop"}
        await cluster_watch.forget("team")
        assert {*server.watched} == {"shop"}
        assert cluster_watch.owners(thing("Deployment", "train")) == []
        assert cluster_watch.events("team", iter([("Pod", "train-5f-x")])) == []
        await cluster_watch.close()

    asyncio.run(main())
