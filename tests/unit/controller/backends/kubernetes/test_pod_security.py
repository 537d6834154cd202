"""Pods that a namespace admits: found out without making one, and put right when a launch fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kubetorch.controller.backends.base import Stores
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import AdmissionError, KubernetesForbiddenError, KubernetesUnavailableError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object
from kubetorch.manifests import labels
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Runtime
from tests.unit.controller.backends.kubernetes.small_cluster import OWNER, SmallCluster

REFUSAL = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
SPEC = WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"))
POD = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "f"},
        "spec": {"containers": [{"name": "c", "image": "mine"}]},
    }
)
BARE = WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"), ComputeSpec(manifest=POD))


def forbidden(message: str) -> KubernetesForbiddenError:
    error = KubernetesForbiddenError(f"cannot create pods: the API server answered 403: {message}")
    error.status_code = 403
    return error


class Admission(SmallCluster):
    """A cluster that admits restricted pods only, once it is `restricted`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_restricted = False
        self.admits_host_paths = True
        self.refusal = REFUSAL
        self.dry_runs: list[Object] = []
        self.pods: list[Object] = []

    def refuses(self, pod: Object) -> bool:
        context = pod["spec"]["containers"][0].get("securityContext") or {}
        is_refused = "hostPath" in json.dumps(pod) and not self.admits_host_paths
        return is_refused or (self.is_restricted and not context.get("runAsNonRoot"))

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        assert dry_run
        self.dry_runs.append(manifest)
        if self.refuses(manifest):
            raise forbidden(self.refusal)
        return manifest

    async def apply(self, manifest: Object, *, dry_run: bool = False, **_: Any) -> Object:
        if manifest["kind"] == "Pod" and self.refuses(manifest):
            raise forbidden(self.refusal)
        return await super().apply(manifest, dry_run=dry_run)


def namespaces_of(cluster: Admission, **options: Any) -> Namespaces:
    return Namespaces(cast("Client", cluster), **options)


@pytest.mark.parametrize(
    "refusal", [REFUSAL, 'admission webhook "policy" denied the request: no root']
)
@pytest.mark.parametrize("is_restricted", [True, False])
def test_a_pod_that_is_not_made_says_whether_a_namespace_is_restricted(
    is_restricted: bool, refusal: str
) -> None:
    cluster = Admission()
    cluster.is_restricted, cluster.refusal = is_restricted, refusal
    assert asyncio.run(namespaces_of(cluster).is_restricted("team")) is is_restricted


def test_what_no_pod_may_does_not_make_a_namespace_restricted() -> None:
    class Full(Admission):
        def refuses(self, pod: Object) -> bool:
            return True

    cluster = Full()
    cluster.refusal = 'pods "x" is forbidden: exceeded quota: pods'
    assert not asyncio.run(namespaces_of(cluster).is_restricted("team"))


def test_an_api_server_that_does_not_answer_says_nothing() -> None:
    class Away(Admission):
        async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
            raise KubernetesUnavailableError("away")

    with pytest.raises(KubernetesUnavailableError):
        asyncio.run(namespaces_of(Away()).is_restricted("team"))


def test_a_namespace_is_asked_once_in_a_while_and_of_no_more_than_so_many_it_is_known() -> None:
    cluster, now = Admission(), 0.0
    asked_namespaces = namespaces_of(cluster, now=lambda: now)

    async def main() -> None:
        nonlocal now
        for _ in range(3):
            await asked_namespaces.is_restricted("team")
        assert len(cluster.dry_runs) == 1
        now += TIMING.security_level_recheck_seconds
        await asked_namespaces.is_restricted("team")
        assert len(cluster.dry_runs) == 2
        await asked_namespaces.is_restricted("team", is_asked_anew=True)
        assert len(cluster.dry_runs) == 3
        for number in range(LIMITS.remembered_security_levels):
            await asked_namespaces.is_restricted(f"team-{number}")
        before = len(cluster.dry_runs)
        await asked_namespaces.is_restricted("team")
        assert len(cluster.dry_runs) == before + 1

    asyncio.run(main())


# ------------------------------------------------------------------------------------ a backend


class _Ready(Namespaces):
    """Namespaces that have their account."""

    async def prepare(self, namespace: str, account: str = "") -> None:
        return None


def run(
    cluster: Admission,
    scenario: Callable[[KubernetesBackend], Awaitable[None]],
    *stored_specs: WorkloadSpec,
    node_data: str = "",
) -> None:
    """What a controller does; it finds these workloads."""

    async def main() -> None:
        client = cast("Client", cluster)
        prerequisites = PodPrerequisites(_Ready(client), cast("Stores", None), lambda _: _nothing())
        backend = KubernetesBackend(
            client,
            runtime=Runtime("runtime", "default", "http://controller", node_data=node_data),
            stores=cast("Stores", None),
            prerequisites=prerequisites,
            owner=lambda namespace, name: OWNER,
        )
        await backend.start([[stored_spec] for stored_spec in stored_specs])
        try:
            await scenario(backend)
        finally:
            await backend.close(pods=False)

    asyncio.run(asyncio.wait_for(main(), 60))


async def _nothing() -> None:
    return None


def contexts(cluster: Admission, kind: str = "Deployment") -> list[Object]:
    """Of the agent's container, and of the pod."""
    manifest = cluster.take("v1" if kind == "Pod" else "apps/v1", kind)
    spec = manifest["spec"] if kind == "Pod" else manifest["spec"]["template"]["spec"]
    return [part.get("securityContext") for part in (spec["containers"][0], spec)]


@pytest.mark.parametrize("is_restricted", [True, False])
def test_pods_comply_where_they_have_to(is_restricted: bool) -> None:
    cluster = Admission()
    cluster.is_restricted = is_restricted

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(SPEC)
        container, pod = contexts(cluster)
        if not is_restricted:
            assert container is pod is None
            assert not backend.event_lines("team", "f")
            return
        assert container["runAsNonRoot"]
        assert "runAsUser" not in container
        assert pod["fsGroup"] == 65532
        [news] = backend.event_lines("team", "f")
        assert "admits restricted pods only" in news.message
        await backend.apply(SPEC)  # nothing is different
        assert not backend.event_lines("team", "f")

    run(cluster, scenario)


def test_a_pod_that_is_refused_at_once_is_made_as_the_namespace_wants_it_by_then() -> None:
    cluster = Admission()

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(SPEC)
        cluster.is_restricted = True
        await backend.apply(BARE)  # what is known of the namespace is from before
        container, _ = contexts(cluster, "Pod")
        assert container["allowPrivilegeEscalation"] is False

    run(cluster, scenario)


def test_what_cannot_be_mended_is_refused() -> None:
    cluster = Admission()
    cluster.refused["Pod"] = 'pods "f" is forbidden: violates PodSecurity "baseline:latest": host'

    async def scenario(backend: KubernetesBackend) -> None:
        with pytest.raises(AdmissionError, match="baseline"):
            await backend.apply(BARE)

    run(cluster, scenario)


def fail_replicas(cluster: Admission) -> None:
    """The ReplicaSet of what is applied could not make pods."""
    replica_set = cluster.take("apps/v1", "ReplicaSet")
    failure = {"type": "ReplicaFailure", "status": "True", "message": REFUSAL}
    replica_set["spec"] = cluster.take("apps/v1", "Deployment")["spec"]
    replica_set["status"] = {"conditions": [failure]}


def test_a_launch_whose_pods_were_refused_is_begun_again_as_the_namespace_wants_it() -> None:
    cluster = Admission()

    async def first(backend: KubernetesBackend) -> None:
        await backend.apply(SPEC)

    async def second(backend: KubernetesBackend) -> None:
        trouble = backend.trouble("team", "f")
        assert trouble.failure is None
        assert "are made anew with what the namespace admits" in trouble.reason
        while "Deployment/f" not in cluster.names() or contexts(cluster)[0] is None:
            await asyncio.sleep(0)
        assert contexts(cluster)[0]["capabilities"] == {"drop": ["ALL"]}

    run(cluster, first)
    cluster.is_restricted = True
    fail_replicas(cluster)
    run(cluster, second, SPEC)


def test_a_launch_that_would_be_refused_again_fails() -> None:
    cluster = Admission()

    async def first(backend: KubernetesBackend) -> None:
        await backend.apply(SPEC)

    async def second(backend: KubernetesBackend) -> None:
        while (failure := backend.trouble("team", "f").failure) is None:
            await asyncio.sleep(0)
        assert failure.error_type == "AdmissionError"

    run(cluster, first)
    fail_replicas(cluster)
    run(cluster, second, SPEC)


def fail_pod(cluster: Admission, user_problem: str, container: str = "kubetorch") -> None:
    """A pod of what is applied does not start."""
    replica_set = cluster.take("apps/v1", "ReplicaSet")
    template = cluster.take("apps/v1", "Deployment")["spec"]["template"]
    message = (
        f"container has runAsNonRoot and image {user_problem} (pod: f-1, container: {container})"
    )
    waiting = {"reason": "CreateContainerConfigError", "message": message}
    owner = {**OWNER, "apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True}
    cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": "f-1",
                "namespace": "team",
                "labels": {labels.SERVICE: "f"},
                "ownerReferences": [{**owner, "name": "f", "uid": replica_set["metadata"]["uid"]}],
            },
            "spec": {**template["spec"], "nodeName": "node"},
            "status": {
                "phase": "Pending",
                "containerStatuses": [{"name": container, "state": {"waiting": waiting}}],
            },
        }
    )


@pytest.mark.parametrize(
    "user_problem", ["will run as root", "has non-numeric user (joe), cannot verify"]
)
def test_an_image_of_root_runs_as_another_user_and_is_known_from_then_on(user_problem: str) -> None:
    cluster = Admission()
    cluster.is_restricted = True

    async def first(backend: KubernetesBackend) -> None:
        await backend.apply(SPEC)

    async def second(backend: KubernetesBackend) -> None:
        while not (pods := backend.pods("team", "f")):
            await asyncio.sleep(0)
        assert pods[0].failure is None
        assert "it is made anew as user 65532" in pods[0].reason
        while "runAsUser" not in contexts(cluster)[0]:
            await asyncio.sleep(0)
        assert contexts(cluster)[0]["runAsUser"] == 65532

    async def third(backend: KubernetesBackend) -> None:
        await backend.apply(SPEC)
        assert contexts(cluster)[0]["runAsUser"] == 65532

    run(cluster, first)
    fail_pod(cluster, user_problem)
    run(cluster, second, SPEC)
    run(cluster, third, SPEC)


def test_another_container_of_root_fails_the_launch() -> None:
    cluster = Admission()
    cluster.is_restricted = True

    async def first(backend: KubernetesBackend) -> None:
        await backend.apply(SPEC)

    async def second(backend: KubernetesBackend) -> None:
        while not (pods := backend.pods("team", "f")):
            await asyncio.sleep(0)
        failure = pods[0].failure
        assert failure is not None
        assert "'sidecar'" in failure.message

    run(cluster, first)
    fail_pod(cluster, "will run as root", container="sidecar")
    run(cluster, second, SPEC)
