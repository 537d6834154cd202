"""A workload that is applied as another kind: what becomes of the objects of the first one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.backend import KubernetesBackend
from kubetorch.errors import (
    AutoScalingError,
    KubernetesRequestError,
    KubetorchError,
    OperatorMissingError,
    StartupError,
)
from kubetorch.k8s.resources import Object
from kubetorch.manifests import labels, rendering
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.workload import WorkloadSpec
from tests.unit.controller.backends.kubernetes.small_cluster import OWNER, SmallCluster, backend_of


def spec(compute: ComputeSpec) -> WorkloadSpec:
    return WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"), compute=compute)


def brought(api_version: str, kind: str, body: Object) -> WorkloadSpec:
    manifest = {"apiVersion": api_version, "kind": kind, "metadata": {"name": "f"}, "spec": body}
    return spec(ComputeSpec(manifest=json.dumps(manifest)))


PODS = {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}
PLAIN = spec(ComputeSpec())
SCALED = spec(ComputeSpec(autoscaling=AutoscalingSpec(min_scale=1)))
SEVERAL = spec(ComputeSpec(replicas=2))
SET = brought("apps/v1", "StatefulSet", PODS)
JOBS = brought(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    {"replicatedJobs": [{"name": "w", "template": {"spec": PODS}}]},
)
UNSERVED = brought(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    {"leaderWorkerTemplate": {"size": 1, "workerTemplate": PODS["template"]}},
)
FOREIGN_PODS = spec(ComputeSpec(selector=(("app", "theirs"),)))

#: What there is of each of them, and who made the core Service `f`.
OBJECTS = {
    "PLAIN": (PLAIN, {"Deployment/f", "Service/f"}, ["KubetorchWorkload"]),
    "SCALED": (SCALED, {"KService/f"}, ["Route"]),
    "SEVERAL": (
        SEVERAL,
        {"Deployment/f", "Service/f", "Service/f-headless"},
        ["KubetorchWorkload"],
    ),
    "SET": (SET, {"StatefulSet/f", "Service/f"}, ["KubetorchWorkload"]),
    "JOBS": (JOBS, {"JobSet/f", "Service/f-http"}, ["JobSet"]),
    "FOREIGN_PODS": (FOREIGN_PODS, {"Service/f"}, ["KubetorchWorkload"]),
}


def run(
    cluster: SmallCluster,
    scenario: Callable[[KubernetesBackend], Awaitable[None]],
    *stored_specs: Sequence[WorkloadSpec],
) -> None:
    """What a controller does; it finds what these specs say."""

    async def main() -> None:
        backend = backend_of(cluster)
        await backend.start(stored_specs)
        try:
            await scenario(backend)
        finally:
            await backend.close(pods=False)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("after", OBJECTS)
@pytest.mark.parametrize("before", OBJECTS)
def test_only_the_objects_of_the_new_kind_are_there(before: str, after: str) -> None:
    cluster = SmallCluster()

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(OBJECTS[before][0])
        await backend.apply(OBJECTS[after][0])

    run(cluster, scenario)
    _, names, makers = OBJECTS[after]
    assert cluster.names() == names
    assert cluster.makers("f") == makers


def test_the_old_ones_go_when_the_new_ones_would_be_taken_and_before_they_are_made() -> None:
    cluster = SmallCluster()

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(PLAIN)
        cluster.requests.clear()
        await backend.apply(SCALED)

    run(cluster, scenario)
    assert cluster.requests[:2] == ["try Service", "try Service"]
    assert set(cluster.requests[2:-1]) == {"delete Deployment", "delete Service"}
    assert cluster.requests[-1] == "apply Service"


@pytest.mark.parametrize("refused_spec", [SCALED, UNSERVED])
def test_a_kind_that_cannot_be_made_leaves_all_as_it_is(refused_spec: WorkloadSpec) -> None:
    cluster = SmallCluster()

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(PLAIN)
        cluster.refused["Service"] = "the features do not allow it"
        with pytest.raises(KubetorchError) as refused:
            await backend.apply(refused_spec)
        is_missing = isinstance(refused.value, OperatorMissingError)
        assert is_missing or "features" in str(refused.value)
        assert backend.applied(refused_spec) == PLAIN

    run(cluster, scenario)
    assert cluster.names() == OBJECTS["PLAIN"][1]
    # A controller that starts then knows which of them is there.
    run(cluster, lambda backend: _check_plain(backend, refused_spec), [refused_spec, PLAIN])


async def _check_plain(backend: KubernetesBackend, refused_spec: WorkloadSpec) -> None:
    assert backend.applied(refused_spec) == PLAIN
    assert backend.expected("team", "f") == 1


def test_what_only_its_making_can_tell_is_made() -> None:
    cluster = SmallCluster()
    cluster.refused["StatefulSet"] = 'admission webhook "theirs" does not support dry run'

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(PLAIN)
        await backend.apply(SET)

    run(cluster, scenario)
    assert cluster.names() == OBJECTS["SET"][1]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_controller_that_starts_in_between_goes_on_with_it(is_removed: bool) -> None:
    cluster = SmallCluster()
    run(cluster, lambda backend: backend.apply(SCALED))
    if is_removed:
        cluster.lose("serving.knative.dev/v1", "Service")
    run(cluster, lambda backend: backend.apply(PLAIN), [PLAIN, SCALED])
    assert cluster.names() == OBJECTS["PLAIN"][1]
    assert cluster.makers("f") == OBJECTS["PLAIN"][2]


@pytest.mark.parametrize("refused_spec", [UNSERVED, JOBS, SCALED])
def test_a_controller_that_starts_after_a_change_that_was_refused_adopts_the_old_kind(
    refused_spec: WorkloadSpec,
) -> None:
    cluster = SmallCluster()
    run(cluster, lambda backend: backend.apply(PLAIN))

    async def look(backend: KubernetesBackend) -> None:
        assert backend.applied(refused_spec) == PLAIN

    run(cluster, look, [refused_spec, PLAIN])
    assert cluster.names() == OBJECTS["PLAIN"][1]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_teardown_after_a_change_that_was_refused_leaves_nothing(is_known: bool) -> None:
    cluster = SmallCluster()
    run(cluster, lambda backend: backend.apply(PLAIN))
    foreign_names = put_foreign_objects(cluster)
    earlier = [PLAIN] if is_known else []
    run(cluster, lambda backend: backend.delete("team", "f", grace=1.0), [SCALED, *earlier])
    assert cluster.names() == foreign_names


def put_foreign_objects(cluster: SmallCluster) -> set[str]:
    """What was not applied for this very workload, or holds what a user keeps."""
    before = cluster.names()
    metadata = {"name": "theirs", "namespace": "team", "labels": {labels.SERVICE: "f"}}
    applied = {**metadata, "annotations": {labels.APPLIED: "digest"}}
    copied = {**applied, "name": "copied"}
    owned = {**applied, "name": "owned", "ownerReferences": [{"kind": "Job", "uid": "other"}]}
    ours = [{"kind": "KubetorchWorkload", "uid": OWNER["metadata"]["uid"]}]
    user_metadata = {**applied, "name": "data", "ownerReferences": ours}
    for version, kind, metadata_of_object in (
        ("apps/v1", "StatefulSet", metadata),
        ("apps/v1", "Deployment", copied),
        ("batch/v1", "Job", owned),
        ("v1", "Secret", user_metadata),
        ("v1", "PersistentVolumeClaim", user_metadata),
    ):
        cluster.put({"apiVersion": version, "kind": kind, "metadata": metadata_of_object})
    return cluster.names() - before


def test_what_was_not_applied_for_this_very_workload_stays() -> None:
    cluster = SmallCluster()
    foreign_names = put_foreign_objects(cluster)

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(PLAIN)
        await backend.apply(SCALED)

    run(cluster, scenario)
    assert cluster.names() == foreign_names | OBJECTS["SCALED"][1]


def test_an_object_of_somebody_else_of_the_name_is_found_before_anything_goes() -> None:
    cluster = SmallCluster()
    theirs = {"name": "f", "namespace": "team"}
    cluster.put({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": theirs})

    async def scenario(backend: KubernetesBackend) -> None:
        cluster.requests.clear()
        with pytest.raises(StartupError, match="did not make"):
            await backend.apply(SCALED)
        assert cluster.requests == ["try Service"]

    run(cluster, scenario, [PLAIN])


def test_a_deploy_of_the_same_kind_looks_for_nothing() -> None:
    cluster = SmallCluster()

    async def scenario(backend: KubernetesBackend) -> None:
        for _ in range(2):
            await backend.apply(PLAIN)
        assert cluster.listed == 0
        await backend.apply(SCALED)
        listed = cluster.listed
        assert listed > 0
        await backend.apply(SCALED)
        assert cluster.listed == listed

    run(cluster, scenario)


def test_pods_of_another_object_are_of_another_template_though_it_be_the_same() -> None:
    cluster = SmallCluster()
    digests = []
    for workload_spec in (SET, brought("apps/v1", "Deployment", PODS)):
        run(cluster, lambda backend, workload_spec=workload_spec: backend.apply(workload_spec))  # type: ignore[misc]
        kind = json.loads(str(workload_spec.compute.manifest))["kind"]
        metadata = cluster.take("apps/v1", kind)["spec"]["template"]["metadata"]
        digests.append(metadata["annotations"][labels.TEMPLATE_DIGEST])
    assert digests[0] != digests[1]


def test_a_workload_that_is_released_has_no_pods_until_it_is_applied_again() -> None:
    cluster = SmallCluster()
    numbers = []

    async def scenario(backend: KubernetesBackend) -> None:
        for action in (
            backend.apply(SEVERAL),
            backend.release("team", "f"),
            backend.apply(SEVERAL),
        ):
            await action
            numbers.append(cluster.take("apps/v1", "Deployment")["spec"]["replicas"])

    run(cluster, scenario)
    assert numbers == [2, 0, 2]


RAY = spec(ComputeSpec(distribution=DistributionSpec("ray", workers=3)))


@pytest.mark.parametrize(
    ("unserved", "made_kind"), [(set(), "RayCluster"), ({"RayCluster"}, "Deployment")]
)
def test_ray_ranks_are_plain_pods_where_nothing_makes_pods_of_a_raycluster(
    unserved: set[str], made_kind: str
) -> None:
    cluster = SmallCluster()
    cluster.unserved |= unserved
    is_plain = made_kind == "Deployment"

    async def deploy(backend: KubernetesBackend) -> None:
        await backend.apply(RAY)
        assert cluster.names() == {f"{made_kind}/f", "Service/f", "Service/f-headless"}
        notes = backend.notes(RAY.compute, rendering.of_workload(RAY))
        assert [("no operator" in note) for note in notes] == [True] * is_plain

    async def go_on(backend: KubernetesBackend) -> None:
        assert backend.expected("team", "f") == 3
        before = cluster.names()
        await backend.apply(RAY)
        assert cluster.names() == before
        await backend.delete("team", "f", grace=1)
        assert not cluster.names()

    run(cluster, deploy)
    run(cluster, go_on, [RAY])
    tried = [request for request in cluster.requests if request.startswith("try")]
    assert tried == [f"try {made_kind}"], "it was no change of kind"


def test_ray_ranks_get_their_raycluster_once_there_is_an_operator() -> None:
    cluster = SmallCluster()
    cluster.unserved.add("RayCluster")

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(RAY)
        cluster.unserved.discard("RayCluster")
        await backend.apply(RAY)
        assert cluster.names() == {"RayCluster/f", "Service/f", "Service/f-headless"}

    run(cluster, scenario)


KNATIVE = "serving.knative.dev/v1"
EXTRA = (("target-burst-capacity", "0"),)
FEW = spec(
    ComputeSpec(autoscaling=AutoscalingSpec(min_scale=2, max_scale=5, extra_annotations=EXTRA))
)


def test_an_autoscaled_service_is_a_deployment_of_no_certain_size_without_knative() -> None:
    scaled_spec = FEW
    cluster = SmallCluster()
    cluster.unserved.add(KNATIVE)
    manifest = rendering.of_workload(scaled_spec)

    async def deploy(backend: KubernetesBackend) -> None:
        await backend.apply(scaled_spec)
        deployment = cluster.take("apps/v1", "Deployment")
        assert "replicas" not in deployment["spec"]
        assert cluster.names() == {"Deployment/f", "Service/f"}
        assert deployment["spec"]["strategy"] == {"type": "RollingUpdate"}
        extra = "autoscaling.knative.dev/target-burst-capacity"
        assert deployment["metadata"]["annotations"][extra] == "0"
        assert backend.warnings(scaled_spec.compute, manifest) == backend.notes(
            scaled_spec.compute, manifest
        )
        (warning,) = backend.warnings(scaled_spec.compute, manifest)
        assert "does not know the annotation" in warning
        assert extra in warning

    async def go_on(backend: KubernetesBackend) -> None:
        # Calls go to its pods, each to one of them.
        assert backend.scaler(scaled_spec, manifest) == ""
        assert backend.url(scaled_spec, manifest) == "http://f.team.svc.cluster.local"
        assert backend.applied(scaled_spec) == scaled_spec
        assert scaled_spec.compute.broadcast is None
        before = cluster.names()
        await backend.apply(scaled_spec)
        assert cluster.names() == before
        await backend.delete("team", "f", grace=1)
        assert not cluster.names()

    run(cluster, deploy)
    run(cluster, go_on, [scaled_spec])


def test_what_only_kubetorch_scales_is_refused_before_anything_is_applied_to_knative() -> None:
    cluster = SmallCluster()
    beyond = spec(
        ComputeSpec(autoscaling=AutoscalingSpec(buffer=2, min_schedule=(("* * * * *", 1),)))
    )

    async def refused(backend: KubernetesBackend) -> None:
        with pytest.raises(AutoScalingError, match="no buffer=2, min_scale by the clock") as error:
            await backend.apply(beyond)
        assert error.value.hint == "leave it out, or deploy to a cluster without Knative"
        assert not cluster.names()
        cluster.unserved.add(KNATIVE)
        await backend.apply(beyond)
        assert "Deployment/f" in cluster.names()

    run(cluster, refused)


def test_an_autoscaled_service_scales_once_there_is_knative() -> None:
    cluster = SmallCluster()
    cluster.unserved.add(KNATIVE)

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(SCALED)
        cluster.unserved.discard(KNATIVE)
        await backend.apply(SCALED)
        assert backend.warnings(SCALED.compute, rendering.of_workload(SCALED)) == ()

    run(cluster, scenario)
    assert cluster.names() == OBJECTS["SCALED"][1]


KNATIVE = "serving.knative.dev/v1"


@pytest.mark.parametrize(("status", "requests"), [("False", ["patch Service"]), ("True", [])])
def test_a_revision_that_knative_has_given_up_is_made_anew_by_the_next_deploy(
    status: str, requests: list[str]
) -> None:
    cluster = SmallCluster()
    run(cluster, lambda backend: backend.apply(SCALED))
    service = cluster.take(KNATIVE, "Service")
    metadata = {**service["metadata"], **service["spec"]["template"]["metadata"]}
    owner = {"kind": "Service", "name": "f", "uid": service["metadata"]["uid"]}
    failed = {"type": "Ready", "status": status, "reason": "ContainerMissing", "message": "404"}
    cluster.put(
        {
            "apiVersion": KNATIVE,
            "kind": "Revision",
            "metadata": {**metadata, "name": "f-00001", "ownerReferences": [owner]},
            "status": {"conditions": [failed], "observedGeneration": 1},
        }
    )
    cluster.requests.clear()

    async def scenario(backend: KubernetesBackend) -> None:
        is_known = asyncio.Event()
        backend.watch(lambda namespace, name: is_known.set())
        await is_known.wait()
        await backend.apply(SCALED)

    run(cluster, scenario, [SCALED])
    assert cluster.requests == requests
    noted = cluster.take(KNATIVE, "Service")["spec"]["template"]["metadata"]["annotations"]
    assert (labels.TRIED_AGAIN in noted) is bool(requests)


def test_a_teardown_leaves_what_was_there_before_as_it_was() -> None:
    cluster = SmallCluster()
    body = {"selector": {"matchLabels": {"a": "b"}}, **PODS}
    user_spec = brought("apps/v1", "Deployment", body)
    metadata = {"name": "f", "namespace": "team"}
    cluster.put({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": body})

    def live_deployment() -> Object:
        return cluster.take("apps/v1", "Deployment")

    def containers() -> list[str]:
        return [
            container["name"]
            for container in live_deployment()["spec"]["template"]["spec"]["containers"]
        ]

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(user_spec)
        assert containers() == ["kubetorch"]
        # What deletes the workload is not to delete the user's object.
        assert "ownerReferences" not in live_deployment()["metadata"]
        assert labels.BEFORE in live_deployment()["metadata"]["annotations"]
        remaining_objects = await backend.delete("team", "f", grace=1)
        assert remaining_objects == ["Deployment f, as it was before"]

    run(cluster, scenario)
    assert containers() == ["c"]
    assert cluster.names() == {"Deployment/f"}


def test_a_teardown_deletes_what_its_deploy_made_of_a_user_s_manifest() -> None:
    cluster = SmallCluster()

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(SET)
        assert await backend.delete("team", "f", grace=1) == []

    run(cluster, scenario)
    assert cluster.names() == set()


class _WithoutEmptyStarts(SmallCluster):
    """A cluster whose Knative has no `allow-zero-initial-scale`."""

    async def apply(self, manifest: Object, **options: Any) -> Object:
        template = manifest["spec"].get("template", {"metadata": {}})["metadata"]
        name = "autoscaling.knative.dev/initial-scale"
        if template.get("annotations", {}).get(name) == "0":
            error = KubernetesRequestError(
                'admission webhook "validation.webhook.serving.knative.dev" denied the request: '
                "validation failed: invalid value: 0: "
                f"spec.template.metadata.annotations.{name}=0 not allowed by cluster"
            )
            error.status_code = 400
            raise error
        return await super().apply(manifest, **options)


@pytest.mark.parametrize("cluster", [_WithoutEmptyStarts(), SmallCluster()])
def test_one_pod_starts_where_knative_forbids_to_start_none(cluster: SmallCluster) -> None:
    empty_spec = spec(ComputeSpec(autoscaling=AutoscalingSpec(min_scale=0, initial_scale=0)))
    warnings: list[str] = []

    async def scenario(backend: KubernetesBackend) -> None:
        await backend.apply(empty_spec)
        warnings.extend(backend.warnings(empty_spec.compute, rendering.of_workload(empty_spec)))
        assert backend.applied(empty_spec) == empty_spec

    run(cluster, scenario)
    template = cluster.take("serving.knative.dev/v1", "Service")["spec"]["template"]
    pods = template["metadata"]["annotations"]["autoscaling.knative.dev/initial-scale"]
    assert (pods, len(warnings)) == (("0", 0) if type(cluster) is SmallCluster else ("1", 1))
    assert all("Knative forbids initial_scale=0" in text for text in warnings)
