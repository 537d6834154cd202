"""What a backend takes up when a controller starts: one workload must not keep the others away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace as changed
from typing import Any, cast

import pytest

from kubetorch.controller.backends.base import Stores
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.errors import KubernetesForbiddenError, KubernetesUnavailableError, SpecError
from kubetorch.k8s.client import Client, Listing
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import Object, Ref, Resource, Selection
from kubetorch.lib.changes import Changes
from kubetorch.manifests import labels
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Runtime
from tests.unit.controller.backends.kubernetes.small_cluster import SmallCluster, backend_of

FLEET = json.dumps(
    {
        "apiVersion": "example.com/v1",
        "kind": "Fleet",
        "metadata": {"name": "bad"},
        "spec": {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}},
    }
)
BAD = WorkloadSpec(
    "team",
    "bad",
    CallableRef("fn", "f", "m", "f"),
    compute=ComputeSpec(manifest=FLEET, pod_template_path=("spec", "template")),
)
GOOD = WorkloadSpec("team", "good", CallableRef("fn", "f", "m", "f"))
SELECTING = changed(GOOD, compute=ComputeSpec(selector=(("app", "x"),)))
POD: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "good-1",
        "namespace": "team",
        "uid": "1",
        "labels": {labels.SERVICE: "good"},
        "ownerReferences": [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": "good",
                "uid": "made",
                "controller": True,
            }
        ],
    },
    "spec": {"containers": [{"name": "kubetorch"}]},
    "status": {"phase": "Running"},
}


NOON = "2026-01-01T12:00:00Z"
CRASHED: Object = {
    "phase": "Running",
    "containerStatuses": [
        {
            "name": "kubetorch",
            "restartCount": 5,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": NOON}},
        }
    ],
}


class Server:
    """An API server with one pod, which fails in one way when it is asked for a Fleet."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.discovery = self

    async def find(self, api_version: str, kind: str) -> Resource:
        group, _, version = api_version.rpartition("/")
        return Resource(group, version, kind.lower() + "s", kind)

    async def resource_of(self, manifest: Object) -> Resource:
        return await self.find(manifest["apiVersion"], manifest["kind"])

    async def get(self, ref: Ref) -> Object:
        if ref.resource.kind == "Fleet":
            raise self._error
        metadata = {"uid": "made", "annotations": {labels.APPLIED: "some"}}
        return {"metadata": {"name": ref.name, "namespace": ref.namespace, **metadata}, "spec": {}}

    def action_on(self, verb: str, selection: Selection) -> Action:
        return Action(verb, selection.resource)

    async def list(self, selection: Selection) -> Listing:
        return Listing([POD] if selection.resource.kind == "Pod" else [], "1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


def of_server(server: Server, watched: tuple[str, ...] = ()) -> KubernetesBackend:
    unused: Any = None
    return KubernetesBackend(
        cast("Client", server),
        runtime=Runtime("image", "image", "http://controller"),
        stores=cast("Stores", unused),
        prerequisites=cast("PodPrerequisites", unused),
        owner=lambda namespace, name: None,
        watched=watched,
    )


async def started(error: Exception) -> KubernetesBackend:
    backend = of_server(Server(error))
    try:
        await backend.start([[BAD], [GOOD]])
        while not backend.pods("team", "good"):  # until it is known who made them
            await asyncio.sleep(0)
    finally:
        await backend.close(pods=False)
    return backend


@pytest.mark.parametrize(
    "error", [KubernetesForbiddenError("you may not get fleets"), KeyError("metadata")]
)
def test_an_object_that_cannot_be_looked_at_does_not_keep_a_controller_from_starting(
    error: Exception,
) -> None:
    async def main() -> None:
        backend = await started(error)
        assert [pod.name for pod in backend.pods("team", "good")] == ["good-1"]
        assert str(error) in backend.trouble("team", "bad").reason

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("watched", [(), ("team",), ("other",)])
def test_a_deploy_outside_of_the_namespaces_of_the_installation_is_told_so(
    watched: tuple[str, ...],
) -> None:
    backend = of_server(Server(KeyError()), watched)
    if watched != ("other",):
        backend.check(GOOD)
        return
    with pytest.raises(SpecError, match="watchNamespaces has other") as caught:
        backend.check(GOOD)
    assert "'watchNamespaces={other,team}'" in str(caught.value)


def test_an_api_server_that_is_away_does() -> None:
    async def main() -> None:
        with pytest.raises(KubernetesUnavailableError):
            await started(KubernetesUnavailableError("it did not answer"))

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("env", [[], [{"name": "KT_POD_WORKLOAD", "value": "good"}]])
def test_what_a_crashed_pod_wrote_is_shown_if_kubetorch_rendered_it(
    env: list[Object],
) -> None:
    class Kubelet(Server):
        fetch_count = 0

        @property
        def session(self) -> Kubelet:
            return self

        def action(self, verb: str, ref: Ref) -> Action:
            return Action(verb, ref.resource)

        def path(self, ref: Ref) -> str:
            return "/"

        async def fetch(self, call: object) -> bytes:
            self.fetch_count += 1
            return b"the password is quince"

        async def list(self, selection: Selection) -> Listing:
            spec = {"nodeName": "n", "containers": [{"name": "kubetorch", "env": env}]}
            pod = {**POD, "spec": spec, "status": CRASHED}
            pod["metadata"] = {**POD["metadata"], "labels": {"app": "x"}}
            return Listing([pod] if selection.labels == "app=x" else [], "1")

    async def main() -> None:
        server, changes = Kubelet(KeyError()), Changes()
        backend = of_server(server)
        backend.watch(lambda namespace, name: changes.notify())
        try:
            await backend.start([[SELECTING]])
            while not (failure := backend.pods("team", "good")[0].failure):
                await changes.wait()
            assert (server.fetch_count > 0, "quince" in failure.to_json().decode()) == (
                bool(env),
                bool(env),
            )
        finally:
            await backend.close(pods=False)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_announced_of_a_workload_is_an_event_of_the_cluster() -> None:
    cluster = SmallCluster()
    backend = backend_of(cluster, now=lambda: 1_700_000_000.0)
    asyncio.run(backend.announce("team", "f", "IdleStop", "f stops: no call for 10m"))
    (event,) = cluster.events()
    assert event["involvedObject"] == {
        "apiVersion": "kubetorch.com/v1",
        "kind": "KubetorchWorkload",
        "namespace": "team",
        "name": "f",
        "uid": "workload",
    }
    assert (event["type"], event["reason"]) == ("Normal", "IdleStop")
    assert event["message"] == "f stops: no call for 10m"
    assert event["lastTimestamp"] == "2023-11-14T22:13:20+00:00"
