"""Whose pods a workload has when a deploy changes by which labels they are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import pytest

from kubetorch.controller.backends.kubernetes.pods import PodWatch
from kubetorch.k8s.client import Client, Listing
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Selection
from kubetorch.manifests import labels

KEY = ("team", "train")
DEFAULT_LABELS = {labels.SERVICE: "train"}
OWN_LABELS = {"app": "web"}


def pod(name: str, version: int, **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": name,
            "resourceVersion": str(version),
            **metadata,
        },
        "spec": {"containers": [{"name": "kubetorch"}]},
    }


class Server:
    """An API server with pods; of one label selector it may say nothing."""

    def __init__(self, *pods: Object) -> None:
        self.keeps_silent_about = ""
        self._pods = {manifest["metadata"]["name"]: manifest for manifest in pods}
        self._watchers: list[tuple[Selection, asyncio.Queue[Object]]] = []

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource.plural)

    async def list(self, selection: Selection) -> Listing:
        if selection.labels == self.keeps_silent_about:
            await asyncio.Event().wait()
        return Listing(
            [manifest for manifest in self._pods.values() if _selects(selection, manifest)], "1"
        )

    async def watch(self, selection: Selection, *_: Any, **__: Any) -> AsyncIterator[Object]:
        watcher = (selection, asyncio.Queue[Object]())
        self._watchers.append(watcher)
        try:
            while True:
                yield await watcher[1].get()
        finally:
            self._watchers.remove(watcher)

    async def say(self, kind: str, manifest: Object) -> None:
        if kind == "DELETED":
            del self._pods[manifest["metadata"]["name"]]
        else:
            self._pods[manifest["metadata"]["name"]] = manifest
        for selection, queue in self._watchers:
            if _selects(selection, manifest):
                queue.put_nowait({"type": kind, "object": manifest})
        await settled()

    @property
    def watched(self) -> list[str]:
        return [selection.labels for selection, _ in self._watchers]


def _selects(selection: Selection, manifest: Object) -> bool:
    has = manifest["metadata"].get("labels") or {}
    pairs = (term.partition("=") for term in selection.labels.split(","))
    return all(name in has and (not is_one or has[name] == text) for name, is_one, text in pairs)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Watched:
    """A watch of the pods of a server."""

    def __init__(self, server: Server) -> None:
        self.lost_pods: list[str] = []
        self.change_count = 0
        self.keys: list[tuple[str, str]] = []
        self._watch = PodWatch(
            cast("Client", server),
            self._changed,
            lambda lost_pod: self.lost_pods.append(_name(lost_pod)),
        )

    async def __aenter__(self) -> Watched:
        await self._watch.start()
        await settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watch.close()

    async def select(self, selector: Mapping[str, str]) -> None:
        await self._watch.select(KEY, selector)
        await settled()

    async def forget(self) -> None:
        await self._watch.forget(KEY)

    async def concerned(self, mark: Callable[[PodWatch], None]) -> list[str]:
        """The workloads that are told of something that is different."""
        self.keys.clear()
        mark(self._watch)
        await settled()
        return sorted(name for _, name in self.keys)

    @property
    def pods(self) -> dict[str, int]:
        """The pods by name, with their numbers."""
        assert set(self._watch.pods_of(KEY)) == set(self._watch.ordinals(KEY))
        return dict(self._watch.ordinals(KEY))

    def _changed(self, key: tuple[str, str]) -> None:
        self.change_count += 1
        self.keys.append(key)


def _name(manifest: Object) -> str:
    return str(manifest["metadata"]["name"])


OLD_OWN_POD = pod("own-1", 2, labels=OWN_LABELS)
OLD_DEFAULT_POD = pod("train-1", 3, labels=DEFAULT_LABELS)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_back_at_our_label_the_pods_with_that_are_known_and_those_of_before_are_not() -> None:
    async def main() -> None:
        server = Server(OLD_OWN_POD)
        async with Watched(server) as watched:
            await watched.select(OWN_LABELS)
            assert watched.pods == {"own-1": 0}
            early = pod("train-1", 4, labels=DEFAULT_LABELS)
            await server.say("ADDED", early)
            await watched.select(DEFAULT_LABELS)
            assert watched.pods == {"train-1": 0}
            await server.say("ADDED", pod("train-2", 5, labels=DEFAULT_LABELS))
            await server.say("DELETED", early)
            assert watched.pods == {"train-2": 1}
            assert server.watched == [labels.SERVICE]

    run(main())


def test_pods_that_labels_of_its_own_do_not_choose_are_the_workloads_no_more() -> None:
    async def main() -> None:
        server = Server(OLD_DEFAULT_POD)
        async with Watched(server) as watched:
            change_count = watched.change_count
            await watched.select(OWN_LABELS)
            assert (watched.pods, watched.lost_pods) == ({}, ["train-1"])
            assert watched.change_count > change_count
            await server.say("DELETED", OLD_DEFAULT_POD)
            await server.say("ADDED", OLD_OWN_POD)
            assert watched.pods == {"own-1": 0}

    run(main())


def test_a_pod_that_both_choose_keeps_its_number() -> None:
    async def main() -> None:
        both = pod("train-2", 4, labels={**DEFAULT_LABELS, **OWN_LABELS})
        server = Server(OLD_DEFAULT_POD, both)
        async with Watched(server) as watched:
            numbers = watched.pods
            await watched.select(OWN_LABELS)
            assert watched.pods == {"train-2": numbers["train-2"]}
            await watched.select(DEFAULT_LABELS)
            assert watched.pods["train-2"] == numbers["train-2"]

    run(main())


def test_labels_whose_pods_are_never_listed_change_nothing() -> None:
    async def main() -> None:
        server = Server(OLD_DEFAULT_POD, OLD_OWN_POD)
        server.keeps_silent_about = "app=web"
        async with Watched(server) as watched:
            selecting = asyncio.create_task(watched.select(OWN_LABELS))
            await settled()
            selecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await selecting
            assert watched.pods == {"train-1": 0}
            server.keeps_silent_about = ""
            await watched.select(OWN_LABELS)
            assert watched.pods == {"own-1": 0}
            assert server.watched == [labels.SERVICE, "app=web"]

    run(main())


def test_of_a_workload_that_is_gone_no_pods_are_known_but_those_with_our_label() -> None:
    async def main() -> None:
        server = Server(OLD_OWN_POD)
        async with Watched(server) as watched:
            await watched.select(OWN_LABELS)
            await server.say("ADDED", OLD_DEFAULT_POD)
            await watched.forget()
            assert watched.pods == {"train-1": 0}
            assert server.watched == [labels.SERVICE]

    run(main())


def test_a_node_concerns_the_workloads_with_pods_on_it_and_those_with_pods_without_one() -> None:
    def placed(service: str, node: str, namespace: str = "team") -> Object:
        placed_pod = pod(f"{service}-0", 2, labels={labels.SERVICE: service}, namespace=namespace)
        placed_pod["spec"]["nodeName"] = node
        return placed_pod

    async def main() -> None:
        pods = [placed("here", "one"), placed("there", "two"), placed("nowhere", "")]
        async with Watched(Server(*pods, placed("other", "", "shop"))) as watched:
            services = await watched.concerned(lambda watch: watch.mark_node("one"))
            assert services == ["here", "nowhere", "other"]
            services = await watched.concerned(lambda watch: watch.mark_waiting("team"))
            assert services == ["nowhere"]
            services = await watched.concerned(lambda watch: watch.mark_waiting(None))
            assert services == ["nowhere", "other"]

    run(main())
