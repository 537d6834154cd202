"""Services that Kubetorch scales in a cluster: their numbers of pods, and who goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes import scaling
from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.controller.backends.kubernetes.scaling import ControllerAddress
from kubetorch.controller.scaling import Scaling
from kubetorch.k8s.resources import Object
from kubetorch.lib.clock import SystemClock
from kubetorch.manifests import agent, labels, rendering
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Ending, PodLoad
from tests.unit.controller.backends.kubernetes.small_cluster import OWNER, SmallCluster, backend_of

KNATIVE = "serving.knative.dev/v1"
COMPUTE = ComputeSpec(autoscaling=AutoscalingSpec(min_scale=0, max_scale=5))
SPEC = WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"), compute=COMPUTE)
#: The same with another pod template.
CHANGED = replace(SPEC, compute=replace(COMPUTE, cpus="1"))
ADDRESS = ControllerAddress("10.0.0.7", 8080)
READY = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}


def without_knative() -> SmallCluster:
    cluster = SmallCluster()
    cluster.unserved.add(KNATIVE)
    return cluster


def run(
    cluster: SmallCluster,
    scenario: Callable[[KubernetesBackend], Awaitable[None]],
    *stored_specs: Sequence[WorkloadSpec],
    size: int | None = None,
    **settings: Any,
) -> None:
    """What a controller does; `size` is the number of pods that it has stored."""

    async def main() -> None:
        backend = backend_of(cluster, address=ADDRESS, **settings)
        if size is not None:
            assert await backend.scales(SPEC)
            backend.scale("team", "f", size)
        await backend.start(stored_specs)
        try:
            await scenario(backend)
        finally:
            await backend.close(pods=False)

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def replicas(cluster: SmallCluster) -> object:
    return cluster.take("apps/v1", "Deployment")["spec"].get("replicas")


def costs(cluster: SmallCluster) -> dict[str, object]:
    """The deletion cost of each pod."""
    deletion_costs = {}
    for name in ("a", "b", "c"):
        annotations = cluster.pod(name)["metadata"]["annotations"]
        deletion_costs[name] = annotations.get(labels.DELETION_COST)
    return deletion_costs


def put_pods(cluster: SmallCluster, *names: str, **metadata: Any) -> None:
    """The controller of the Deployment makes pods, which are ready."""
    replica_set = cluster.take("apps/v1", "ReplicaSet")
    digest = agent.digest_of(cluster.take("apps/v1", "Deployment")["spec"]["template"])
    for name in names:
        owner = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": "f",
            "uid": replica_set["metadata"]["uid"],
            "controller": True,
        }
        cluster.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": "team",
                    "labels": {labels.SERVICE: "f"},
                    "annotations": {labels.TEMPLATE_DIGEST: digest},
                    "ownerReferences": [owner],
                    **metadata,
                },
                "spec": {"containers": [{"name": "kubetorch"}]},
                "status": READY,
            }
        )


@pytest.mark.parametrize("size", [0, 3])
def test_a_new_service_comes_up_with_its_number_of_pods_and_no_deploy_changes_it(size: int) -> None:
    cluster = without_knative()

    async def scenario(backend: KubernetesBackend) -> None:
        assert await backend.scales(SPEC)
        backend.scale("team", "f", size)
        await backend.apply(SPEC)
        # At once, and not after a pod too many was made.
        assert replicas(cluster) == size
        assert backend.expected("team", "f") == size
        await until(lambda: "scale Deployment" in cluster.requests)
        backend.scale("team", "f", 4)
        await until(lambda: replicas(cluster) == 4)
        cluster.requests.clear()
        await backend.apply(CHANGED)
        assert cluster.requests[-1] == "apply Deployment"
        assert replicas(cluster) == 4

    run(cluster, scenario)


def test_a_deploy_of_code_alone_applies_nothing_whoever_has_set_the_number() -> None:
    cluster = without_knative()

    async def scenario(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", 1)
        await backend.apply(SPEC)
        await until(lambda: "scale Deployment" in cluster.requests)
        deployment = cluster.take("apps/v1", "Deployment")
        fields = {"f:spec": {"f:replicas": {}}}
        deployment["metadata"]["managedFields"].append({"manager": "kubectl", "fieldsV1": fields})
        cluster.requests.clear()
        await backend.apply(SPEC)
        await backend.apply(SPEC)
        assert cluster.requests == []
        fields["f:spec"]["f:template"] = {}
        await backend.apply(SPEC)
        assert "apply Deployment" in cluster.requests, "somebody changed more than the number"

    run(cluster, scenario)


def test_a_deployment_of_a_fixed_number_keeps_its_pods_when_it_is_to_scale() -> None:
    cluster = without_knative()
    fixed = replace(SPEC, compute=ComputeSpec(replicas=1))
    sizes: list[object] = []

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(fixed)
        backend.scale("team", "f", 2)
        apply = cluster.apply

        async def noting(manifest: Object, **options: Any) -> Object:
            applied_object = await apply(manifest, **options)
            if manifest["kind"] == "Deployment" and not options.get("dry_run"):
                sizes.append(applied_object["spec"].get("replicas"))
            return applied_object

        cluster.apply = noting  # type: ignore[method-assign]  # it looks on
        await backend.apply(SPEC)

    run(cluster, scenario)
    assert set(sizes) == {2}


def test_the_latest_number_counts_and_a_refusal_is_said_until_it_ends() -> None:
    cluster = without_knative()

    async def scenario(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", 1)
        await backend.apply(SPEC)
        await until(lambda: "scale Deployment" in cluster.requests)
        cluster.refused["Deployment"] = "the webhook is away"
        backend.scale("team", "f", 2)
        backend.scale("team", "f", 3)
        await until(lambda: backend.trouble("team", "f").reason)
        trouble = backend.trouble("team", "f")
        assert trouble.failure is None
        assert "the webhook is away" in trouble.reason
        assert "3" in trouble.reason
        cluster.refused.clear()
        await until(lambda: replicas(cluster) == 3)
        await until(lambda: not backend.trouble("team", "f").reason)

    run(cluster, scenario)


def test_the_pods_that_are_named_cost_the_least_until_they_are_needed_again() -> None:
    cluster = without_knative()

    async def deploy(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", 3)
        await backend.apply(SPEC)

    async def go_on(backend: KubernetesBackend) -> None:
        await until(lambda: len(backend.pods("team", "f")) == 3)
        backend.scale("team", "f", 1, ["c", "a"])
        await until(lambda: replicas(cluster) == 1)
        assert costs(cluster) == {"a": "-1", "b": None, "c": "-2"}
        scaled = cluster.requests.index("scale Deployment")
        assert "patch Pod" not in cluster.requests[scaled:], "too late for those that it ends"

    async def go_up_again(backend: KubernetesBackend) -> None:
        await until(lambda: len(backend.pods("team", "f")) == 3)
        backend.scale("team", "f", 3)
        await until(lambda: replicas(cluster) == 3)
        assert costs(cluster) == {"a": None, "b": None, "c": None}

    run(cluster, deploy)
    put_pods(cluster, "a", "b", "c")
    cluster.requests.clear()
    run(cluster, go_on, [SPEC], size=3)
    run(cluster, go_up_again, [SPEC], size=1)


def test_the_pods_with_the_fewest_calls_cost_the_least() -> None:
    cluster = without_knative()

    async def deploy(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", 3)
        await backend.apply(SPEC)

    async def go_on(backend: KubernetesBackend) -> None:
        await until(lambda: len(backend.pods("team", "f")) == 3)
        scaling = Scaling(
            SPEC,
            stored='{"size": 3}',
            backend=backend,
            clock=SystemClock(),
            store=lambda text: None,
            on_change=lambda: None,
        )
        scaling.pods_changed({"a", "b", "c"}, {"a", "b"})
        scaling.reported("b", PodLoad(1))
        scaling.change({"max_scale": 1})
        await until(lambda: replicas(cluster) == 1)
        scaling.close()

    run(cluster, deploy)
    put_pods(cluster, "a", "b", "c")
    run(cluster, go_on, [SPEC], size=3)
    assert costs(cluster) == {"a": "-1", "b": None, "c": "-2"}


@pytest.mark.parametrize(
    ("size", "annotations", "reason"),
    [(1, {}, "ScaledDown"), (2, {}, "Deleted"), (1, {labels.TEMPLATE_DIGEST: "old"}, "Deleted")],
    ids=["one too many", "somebody deleted it", "of an older template"],
)
def test_a_pod_that_is_one_too_many_is_not_lost(
    size: int, annotations: dict[str, str], reason: str
) -> None:
    cluster = without_knative()
    going = {"deletionTimestamp": "2026-01-01T12:05:00Z", "deletionGracePeriodSeconds": 300}

    async def deploy(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", size)
        await backend.apply(SPEC)

    async def go_on(backend: KubernetesBackend) -> None:
        await until(lambda: len(backend.pods("team", "f")) == 2)
        endings = {pod.name: pod.ending for pod in backend.pods("team", "f")}
        assert endings["a"] is None
        assert isinstance(endings["b"], Ending)
        assert endings["b"].reason == reason
        # Its reason stays when more are wanted again.
        backend.scale("team", "f", 5)
        (ending,) = [pod.ending for pod in backend.pods("team", "f") if pod.name == "b"]
        assert ending == endings["b"]

    run(cluster, deploy)
    put_pods(cluster, "a", "b")
    cluster.pod("b")["metadata"] |= going
    cluster.pod("b")["metadata"]["annotations"] |= annotations
    run(cluster, go_on, [SPEC], size=size)


# ------------------------------------------------------------------------- the way at zero


def doors(cluster: SmallCluster) -> list[str]:
    """The addresses that the Service `f` has beside those of pods."""
    endpoint_slice = cluster.slice_of("f-kubetorch")
    return [] if endpoint_slice is None else endpoint_slice["endpoints"][0]["addresses"]


def serve_pod(cluster: SmallCluster, *, is_ready: bool) -> None:
    """The cluster's own controller of EndpointSlices has seen the pod."""
    cluster.put(
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "f-xyz",
                "namespace": "team",
                "labels": {
                    scaling.SLICE_SERVICE: "f",
                    scaling.SLICE_MANAGER: "endpointslice-controller.k8s.io",
                },
            },
            "endpoints": [{"addresses": ["10.1.1.1"], "conditions": {"ready": is_ready}}],
        }
    )


def test_a_service_without_pods_leads_to_the_controller_until_it_leads_to_a_pod() -> None:
    cluster = without_knative()

    async def deploy(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", 1)
        await backend.apply(SPEC)
        assert doors(cluster) == []
        backend.scale("team", "f", 0)
        await until(lambda: replicas(cluster) == 0)
        # It was there before the last pod went.
        assert cluster.requests.index("apply EndpointSlice") < len(cluster.requests) - 1
        assert doors(cluster) == ["10.0.0.7"]
        endpoint_slice = cluster.slice_of("f-kubetorch")
        assert endpoint_slice is not None
        assert endpoint_slice["ports"] == [{"name": "http", "port": 8080, "protocol": "TCP"}]
        (owner,) = endpoint_slice["metadata"]["ownerReferences"]
        assert owner["uid"] == OWNER["metadata"]["uid"]
        backend.scale("team", "f", 1)
        await until(lambda: replicas(cluster) == 1)
        assert doors(cluster), "its pod does not serve yet"

    async def go_on(backend: KubernetesBackend) -> None:
        # Another controller leads by now, and the pod is ready, but not known to kube-proxy.
        await until(lambda: backend.pods("team", "f"))
        await asyncio.sleep(0.3)
        assert doors(cluster)
        serve_pod(cluster, is_ready=True)
        await until(lambda: not doors(cluster))
        assert cluster.slice_of("f-xyz") is not None

    run(cluster, deploy)
    put_pods(cluster, "a")
    serve_pod(cluster, is_ready=False)
    run(cluster, go_on, [SPEC], size=1)


def test_a_new_leader_has_the_services_lead_to_itself() -> None:
    cluster = without_knative()

    async def deploy(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", 0)
        await backend.apply(SPEC)
        await until(lambda: doors(cluster))

    async def go_on(backend: KubernetesBackend) -> None:
        await until(lambda: doors(cluster) == ["10.0.0.7"])
        await backend.delete("team", "f", grace=1)
        assert doors(cluster) == []

    run(cluster, deploy)
    endpoint_slice = cluster.slice_of("f-kubetorch")
    assert endpoint_slice is not None
    endpoint_slice["endpoints"][0]["addresses"] = ["10.0.0.1"]
    run(cluster, go_on, [SPEC], size=0)


def test_knative_scales_where_it_is_unless_the_installation_says_otherwise() -> None:
    manifest = rendering.of_workload(SPEC)

    async def by_knative(backend: KubernetesBackend) -> None:
        assert not await backend.scales(SPEC)
        assert backend.scaler(SPEC, manifest) == "http://f.team.svc.cluster.local"

    async def by_kubetorch(backend: KubernetesBackend) -> None:
        assert await backend.scales(SPEC)
        backend.scale("team", "f", 2)
        assert backend.scaler(SPEC, manifest) == ""
        await backend.apply(SPEC)
        assert backend.scaler(SPEC, manifest) == ""
        assert cluster.names() == {"Deployment/f", "Service/f"}

    for cluster, engine, scenario in (
        (SmallCluster(), "auto", by_knative),
        (without_knative(), "auto", by_kubetorch),
        (SmallCluster(), "kubetorch", by_kubetorch),
        (without_knative(), "knative", by_knative),
    ):
        run(cluster, scenario, engine=engine)


def test_a_service_that_knative_takes_over_is_scaled_by_knative_alone() -> None:
    cluster = without_knative()

    async def scenario(backend: KubernetesBackend) -> None:
        backend.scale("team", "f", 0)
        await backend.apply(SPEC)
        await until(lambda: doors(cluster))
        cluster.unserved.discard(KNATIVE)
        assert not await backend.scales(SPEC)
        await backend.apply(SPEC)
        assert cluster.names() == {"KService/f"}
        assert doors(cluster) == []

    run(cluster, scenario)
