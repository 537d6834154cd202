"""When pods are judged, and how long a doom has to be one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast

from kubetorch.controller.backends.kubernetes.launch_watch import (
    ClusterChange,
    ClusterWatch,
    LaunchVerdicts,
)
from kubetorch.errors import UnschedulableError
from kubetorch.k8s.client import Client, Listing
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Resource, Selection

KEY = ("team", "train")
#: Long before a test begins.
LONG_AGO = "2026-11-21T15:50:17Z"


def node(name: str, *, cpu: str, version: int = 1, ready: str = "True") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "resourceVersion": str(version)},
        "spec": {},
        "status": {
            "allocatable": {"cpu": cpu},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def waiting(cpu: str, version: int = 1) -> Object:
    """A pod that the scheduler has found no node for since long ago."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "lastTransitionTime": LONG_AGO,
    }
    metadata = {"name": "train-1", "namespace": "team", "uid": "1"}
    return {
        "metadata": {**metadata, "resourceVersion": str(version)},
        "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
        "status": {"conditions": [condition]},
    }


class Server:
    """An API server with nodes, which says what a test has it say."""

    def __init__(self, *nodes: Object) -> None:
        self.discovery = self
        self._nodes = list(nodes)
        self._watchers: dict[str, asyncio.Queue[Object]] = {}

    async def find(self, api_version: str, kind: str) -> Resource:
        group, _, version = api_version.rpartition("/")
        return Resource(group, version, kind.lower() + "s", kind)

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource.plural)

    async def list(self, selection: Selection) -> Listing:
        return Listing(self._nodes if selection.resource.kind == "Node" else [], "1")

    async def watch(self, selection: Selection, *_: Any, **__: Any) -> AsyncIterator[Object]:
        queue = self._watchers[selection.resource.kind] = asyncio.Queue()
        while True:
            yield await queue.get()

    async def say(self, manifest: Object, kind: str = "MODIFIED") -> None:
        self._watchers[manifest["kind"]].put_nowait({"type": kind, "object": manifest})
        await settled()


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


class Bench:
    """Verdicts on what a server says, at a time that a test sets."""

    def __init__(self, server: Server) -> None:
        self.now = 0.0
        self.changes: list[ClusterChange] = []
        self.cluster_watch = ClusterWatch(
            cast("Client", server), time=lambda: self.now, on_change=self.changes.append
        )
        self.verdicts = LaunchVerdicts(cast("Client", server), self.cluster_watch, lambda key: None)

    async def __aenter__(self) -> Bench:
        await self.cluster_watch.start()
        await self.cluster_watch.watch_object(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"namespace": "team", "name": "train"},
            }
        )
        await settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.verdicts.close()
        await self.cluster_watch.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_that_no_node_can_take_a_pod_is_a_doom_only_after_a_moment() -> None:
    async def main() -> None:
        async with Bench(Server(node("one", cpu="4"))) as bench:
            verdict = bench.verdicts.of_pod(KEY, waiting("10"))
            assert (verdict.error, verdict.recheck_seconds) == (None, 2.5)
            assert "no node can ever take the pod" in verdict.reason
            bench.now += 2.5
            verdict = bench.verdicts.of_pod(KEY, waiting("10", version=2))
            assert isinstance(verdict.error, UnschedulableError)

    run(main())


def test_a_node_that_is_away_for_a_moment_dooms_nobody() -> None:
    async def main() -> None:
        big, small = node("big", cpu="16"), node("small", cpu="4", version=2)
        server = Server(big, small)
        async with Bench(server) as bench:
            for _ in range(3):
                assert not bench.verdicts.of_pod(KEY, waiting("10")).is_doomed
                await server.say(big, "DELETED")
                assert not bench.verdicts.of_pod(KEY, waiting("10")).is_doomed
                bench.now += 2.0
                await server.say(big, "ADDED")

    run(main())


def test_an_autoscaler_that_speaks_of_one_pod_is_known_for_all_of_them() -> None:
    async def main() -> None:
        server = Server(node("one", cpu="4"))
        async with Bench(server) as bench:
            assert not bench.verdicts.of_pod(KEY, waiting("10")).is_doomed
            bench.now += 60.0
            await server.say(
                {
                    "kind": "Event",
                    "metadata": {"name": "other.1", "namespace": "team", "resourceVersion": "5"},
                    "involvedObject": {"kind": "Pod", "name": "other"},
                    "reason": "NotTriggerScaleUp",
                    "source": {"component": "cluster-autoscaler"},
                }
            )
            verdict = bench.verdicts.of_pod(KEY, waiting("10"))
            assert "cluster-autoscaler may add a node" in verdict.reason
            assert not verdict.is_doomed

    run(main())


def running(on: str) -> Object:
    """A pod that runs on a node."""
    return {
        "metadata": {"name": "train-2", "namespace": "team", "uid": "2", "resourceVersion": "1"},
        "spec": {"containers": [{"name": "c"}], "nodeName": on},
        "status": {"containerStatuses": [{"name": "c", "state": {"running": {}}}]},
    }


def test_a_pod_that_has_a_node_is_judged_again_when_that_changes_and_for_no_other() -> None:
    async def main() -> None:
        server = Server(node("one", cpu="4", ready="False"), node("two", cpu="4"))
        async with Bench(server) as bench:
            verdict = bench.verdicts.of_pod(KEY, running("one"))
            assert "one is not ready" in verdict.reason
            await server.say(node("two", cpu="8", version=2))
            assert bench.verdicts.of_pod(KEY, running("one")) is verdict
            await server.say(node("one", cpu="4", version=3))
            assert bench.verdicts.of_pod(KEY, running("one")).reason == ""
            await server.say(node("one", cpu="4", version=4), "DELETED")
            assert bench.verdicts.of_pod(KEY, running("one")).is_doomed

    run(main())


def test_a_pod_without_a_node_is_judged_again_when_any_node_changes() -> None:
    async def main() -> None:
        server = Server(node("one", cpu="4"), node("two", cpu="4"))
        async with Bench(server) as bench:
            assert "can ever take" in bench.verdicts.of_pod(KEY, waiting("10")).reason
            await server.say(node("two", cpu="16", version=2))
            assert "can ever take" not in bench.verdicts.of_pod(KEY, waiting("10")).reason

    run(main())


def test_a_change_of_a_node_concerns_pods_there_and_those_without_one() -> None:
    async def main() -> None:
        server = Server(node("one", cpu="4"))
        async with Bench(server) as bench:
            bench.changes.clear()
            await server.say(node("one", cpu="8", version=2))
            assert bench.changes == [ClusterChange(None, node="one")]

    run(main())


def test_a_change_of_a_claim_concerns_pods_of_its_namespace_that_have_no_node() -> None:
    async def main() -> None:
        server = Server(node("one", cpu="4"))
        async with Bench(server) as bench:
            bench.changes.clear()
            metadata = {"namespace": "team", "name": "data", "resourceVersion": "7"}
            await server.say({"kind": "PersistentVolumeClaim", "metadata": metadata}, "ADDED")
            assert bench.changes == [ClusterChange("team", is_for_waiting=True)]

    run(main())


def test_what_is_known_is_gathered_once_for_all_pods_until_something_changes() -> None:
    async def main() -> None:
        server = Server(node("one", cpu="4"))
        async with Bench(server) as bench:
            first, second = bench.cluster_watch.cluster(), bench.cluster_watch.cluster()
            assert first.find("nodes", "one") is not None
            assert (first.objects is second.objects, first.memo is second.memo) == (True, True)
            await server.say(node("two", cpu="4", version=2), "ADDED")
            assert bench.cluster_watch.cluster().find("nodes", "two") is not None

    run(main())
