"""How many pods each kind has, and how it is told another number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kubetorch.errors import SpecError
from kubetorch.manifests import desired_pods, kinds, parameters, rendering, replicas
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs import autoscaling
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from unit.manifests.users import Manifest, manifests

PRESENT = {
    "Deployment": 2,
    "StatefulSet": 2,
    "ReplicaSet": 2,
    "RayCluster": 3,
    "TrainJob": 2,
    "JobSet": 2,
    "LeaderWorkerSet": 2,
}
FIXED = ("DaemonSet", "Pod")
WHERE = {
    "Deployment": "spec.replicas",
    "StatefulSet": "spec.replicas",
    "ReplicaSet": "spec.replicas",
    "Job": "spec.parallelism",
    "CronJob": "spec.jobTemplate.spec.parallelism",
    "MPIJob": "spec.mpiReplicaSpecs.Worker.replicas",
    "JAXJob": "spec.jaxReplicaSpecs.Worker.replicas",
    "TrainJob": "spec.trainer.numNodes",
    "JobSet": "spec.replicatedJobs.0.template.spec.parallelism",
    "LeaderWorkerSet": "spec.leaderWorkerTemplate.size",
}
#: One pod is called, the others are workers.
WORKERS = {
    "RayCluster": "spec.workerGroupSpecs.0.replicas",
    "PyTorchJob": "spec.pytorchReplicaSpecs.Worker.replicas",
    "TFJob": "spec.tfReplicaSpecs.Worker.replicas",
    "MXJob": "spec.mxReplicaSpecs.Worker.replicas",
    "XGBoostJob": "spec.xgbReplicaSpecs.Worker.replicas",
}


def render(compute: ComputeSpec) -> Manifest:
    return rendering.render(compute, namespace="ns", name="service")


def resized(kind: str, number: int, manifest: Manifest | None = None) -> Manifest:
    declared = parameters.read_manifest(manifest or manifests()[kind])
    return render(replace(declared, replicas=number))


@pytest.mark.parametrize("kind", sorted(manifests()))
def test_the_number_of_pods_is_read(kind: str) -> None:
    assert parameters.read_manifest(manifests()[kind]).replicas == PRESENT.get(kind, 1)


@pytest.mark.parametrize("kind", sorted(WHERE | WORKERS))
def test_another_number_of_pods_is_written_where_the_kind_has_it(kind: str) -> None:
    rendered = resized(kind, 5)
    path = tuple((WHERE | WORKERS)[kind].split("."))
    assert kinds.get(rendered, path) == (4 if kind in WORKERS else 5)
    assert parameters.read_compute(rendered).replicas == 5


def test_the_pods_that_run_at_one_time_are_those_that_a_kind_starts() -> None:
    partitioned_spec = {"updateStrategy": {"rollingUpdate": {"partition": 1}}}
    assert running("StatefulSet", spec=partitioned_spec) == PRESENT["StatefulSet"] - 1
    short_spec = {"parallelism": 4, "completions": 3}
    assert running("Job", spec=short_spec) == 3
    jobs = manifests()["JobSet"]
    jobs["spec"]["replicatedJobs"][0]["replicas"] = 2
    jobs["spec"]["replicatedJobs"][0]["template"]["spec"] |= short_spec
    assert replicas.running(WorkloadManifest.parse(jobs)) == 6
    rays = manifests()["RayCluster"]
    rays["spec"]["workerGroupSpecs"][0] |= {"replicas": 5, "maxReplicas": 3}
    assert replicas.running(WorkloadManifest.parse(rays)) == 4


@pytest.mark.parametrize("kind", sorted(manifests()))
def test_those_are_all_of_them_where_nothing_else_is_said(kind: str) -> None:
    assert running(kind) == PRESENT.get(kind, 1)


def running(kind: str, *, spec: Manifest | None = None) -> int:
    manifest = manifests()[kind]
    manifest["spec"] |= spec or {}
    row = kinds.find(manifest)
    assert row is not None
    return replicas.running(WorkloadManifest(manifest, row))


@pytest.mark.parametrize("kind", FIXED)
def test_a_kind_without_a_number_of_pods_says_so(kind: str) -> None:
    with pytest.raises(SpecError, match=f"replicas is 2; the number of pods of a {kind}"):
        resized(kind, 2)


@pytest.mark.parametrize("kind", sorted(set(WORKERS) - {"RayCluster"}))
def test_workers_that_a_job_lacks_are_as_its_first_pod(kind: str) -> None:
    manifest = manifests()[kind]
    (specs,) = [key for key in manifest["spec"] if key.endswith("ReplicaSpecs")]
    (primary,) = manifest["spec"][specs]
    rendered = resized(kind, 3)["spec"][specs]
    assert rendered["Worker"] == {**rendered[primary], "replicas": 2}


def test_a_ray_cluster_without_workers_gets_a_group_like_its_head() -> None:
    manifest = manifests()["RayCluster"]
    del manifest["spec"]["workerGroupSpecs"]
    spec = resized("RayCluster", 3, manifest)["spec"]
    (group,) = spec["workerGroupSpecs"]
    assert group == {
        "groupName": "worker-group",
        "replicas": 2,
        "minReplicas": 0,
        "maxReplicas": 2,
        "rayStartParams": {},
        "template": spec["headGroupSpec"]["template"],
    }


def test_further_groups_of_a_ray_cluster_keep_their_pods() -> None:
    manifest = manifests()["RayCluster"]
    groups = manifest["spec"]["workerGroupSpecs"]
    groups.append({**groups[0], "groupName": "big", "replicas": 5})
    assert parameters.read_manifest(manifest).replicas == 8
    groups = resized("RayCluster", 12, manifest)["spec"]["workerGroupSpecs"]
    assert [(group["replicas"], group["maxReplicas"]) for group in groups] == [(6, 6), (5, 4)]
    with pytest.raises(SpecError, match="has 6 pods beside its first group of workers"):
        resized("RayCluster", 5, manifest)


def test_all_groups_of_a_ray_cluster_run_the_agent() -> None:
    manifest = manifests()["RayCluster"]
    groups = manifest["spec"]["workerGroupSpecs"]
    groups.append({**groups[0], "groupName": "big"})
    for group in render(parameters.read_manifest(manifest))["spec"]["workerGroupSpecs"]:
        container = group["template"]["spec"]["containers"][0]
        assert container["args"] == ["exec python -m kubetorch.pod"]
        assert group["template"]["metadata"]["labels"]["kubetorch.com/service"] == "service"


def test_a_worker_keeps_what_it_has_of_its_own() -> None:
    manifest = manifests()["RayCluster"]
    worker = manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    worker["resources"] = {"requests": {"cpu": "16"}}
    declared = replace(parameters.read_manifest(manifest), memory="3Gi")
    spec = render(declared)["spec"]
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    worker = spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert head["resources"]["requests"] == {"cpu": 2, "memory": "3Gi"}
    assert worker["resources"]["requests"] == {"cpu": "16", "memory": "3Gi"}


def test_a_launcher_of_mpi_stays_as_it_is() -> None:
    manifest = manifests()["MPIJob"]
    specs = manifest["spec"]["mpiReplicaSpecs"]
    specs["Launcher"] = {"replicas": 1, "template": {"spec": {"containers": [{"name": "mpi"}]}}}
    assert parameters.read_manifest(manifest).replicas == 1
    rendered = resized("MPIJob", 4, manifest)["spec"]["mpiReplicaSpecs"]
    assert rendered["Launcher"] == specs["Launcher"]
    assert rendered["Worker"]["replicas"] == 4


def test_groups_of_equal_size_are_told_apart_from_their_size() -> None:
    manifest = manifests()["LeaderWorkerSet"]
    manifest["spec"]["replicas"] = 3
    assert parameters.read_manifest(manifest).replicas == 6
    rendered = resized("LeaderWorkerSet", 12, manifest)["spec"]
    assert (rendered["replicas"], rendered["leaderWorkerTemplate"]["size"]) == (3, 4)
    with pytest.raises(SpecError, match=r"replicas is 7; .* 3 groups of equal size"):
        resized("LeaderWorkerSet", 7, manifest)


def test_an_indexed_job_ends_with_as_many_pods_as_run() -> None:
    job = resized("JobSet", 4)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (4, 4)
    assert "completions" not in resized("Job", 4)["spec"]


def test_workers_of_distribute_are_the_pods() -> None:
    compute = ComputeSpec(replicas=2, distribution=DistributionSpec(workers=4))
    assert render(compute)["spec"]["replicas"] == 4
    declared = parameters.read_manifest(manifests()["StatefulSet"])
    changed = replace(declared, distribution=DistributionSpec(workers=4))
    assert render(changed)["spec"]["replicas"] == 4


def test_several_pods_of_a_deployment_are_recreated_unless_it_says_otherwise() -> None:
    manifest = manifests()["Deployment"]
    assert render(parameters.read_manifest(manifest))["spec"]["strategy"] == {"type": "Recreate"}
    manifest["spec"]["strategy"] = {"type": "RollingUpdate"}
    assert render(parameters.read_manifest(manifest))["spec"]["strategy"] == {
        "type": "RollingUpdate"
    }


def test_an_autoscaled_service_asks_knative_for_nothing_that_it_refuses() -> None:
    scaled = ComputeSpec(cpus="1", autoscaling=autoscaling.parse({}, launch_timeout=300))
    container = render(scaled)["spec"]["template"]["spec"]["containers"][0]
    assert "securityContext" not in container


@pytest.mark.parametrize("replicas", [-1, "2", 1.5, True])
def test_what_is_no_number_of_pods_is_refused(replicas):
    template = {"spec": {"containers": [{"name": "x", "image": "y"}]}}
    spec = {"replicas": replicas, "template": template}
    names = {"name": "a", "namespace": "b"}
    manifest = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": names, "spec": spec}
    with pytest.raises(SpecError, match=r"spec\.replicas is"):
        desired_pods.read(manifest)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("Deployment", {"spec": {"replicas": 0}}),
        ("Job", {"spec": {"parallelism": 0}}),
        ("RayCluster", {"spec": {"suspend": True}}),
        ("PyTorchJob", {"spec": {"runPolicy": {"suspend": True}}}),
        ("JobSet", {"spec": {"suspend": True}}),
        ("LeaderWorkerSet", {"spec": {"replicas": 0}}),
        ("DaemonSet", {}),
    ],
)
def test_an_object_can_be_without_pods_for_a_while(kind, changed):
    assert replicas.patch_to_none(WorkloadManifest.parse(manifests()[kind])) == changed
