"""What pods of a cluster get beyond what a compute says."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest

from kubetorch.errors import SpecError
from kubetorch.manifests import agent, labels, parameters, rendering
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec, freeze
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Runtime
from unit.manifests.users import manifests

RUNTIME = Runtime(
    image="registry/kubetorch:1",
    default_image="registry/pod:1",
    controller_url="http://kubetorch-controller.kubetorch.svc.cluster.local:8080",
)


def equipped(compute: ComputeSpec, runtime: Runtime = RUNTIME) -> tuple[dict, str]:
    spec = WorkloadSpec("team", "train", CallableRef("fn", "f", "m", "f"), compute)
    manifest = rendering.of_workload(spec)
    return manifest, agent.equip(manifest, workload="train", runtime=runtime)


def variables(container: dict) -> dict:
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom"))
        for variable in container["env"]
    }


def test_an_image_of_ones_own_gets_a_copy_of_the_runtime_before_anything_else_starts():
    manifest, _ = equipped(ComputeSpec(image=ImageSpec(image_id="me/mine:3")))
    pod = manifest["spec"]["template"]["spec"]

    copying = pod["initContainers"][0]
    container = pod["containers"][0]
    assert (copying["image"], copying["command"]) == (
        "registry/kubetorch:1",
        ["/kubetorch/bin/install", "/runtime"],
    )
    assert container["image"] == "me/mine:3"
    assert container["command"] == ["/kubetorch/bin/kt-agent"]
    assert "args" not in container
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts["/kubetorch"] == copying["volumeMounts"][0]["name"]


def test_the_default_image_has_the_runtime_and_needs_no_copy():
    manifest, _ = equipped(ComputeSpec())
    pod = manifest["spec"]["template"]["spec"]

    assert pod["containers"][0]["image"] == "registry/pod:1"
    assert "initContainers" not in pod
    assert "/kubetorch" not in [
        mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
    ]


def test_the_agent_learns_who_it_is_and_gets_a_token_for_its_controller_alone():
    manifest, _ = equipped(ComputeSpec(server_port=9000, working_dir="/app"))
    pod = manifest["spec"]["template"]["spec"]
    environment = variables(pod["containers"][0])

    assert environment["KT_POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert environment["KT_POD_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert (environment["KT_POD_WORKLOAD"], environment["KT_POD_PORT"]) == ("train", "9000")
    assert environment["KT_POD_WORKING_DIR"] == "/app"
    assert environment["KT_BACKEND"] == "kubernetes"
    token = next(volume for volume in pod["volumes"] if "projected" in volume)
    [source] = token["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "kubetorch"


def test_pods_are_told_no_working_directory_that_is_to_be_that_of_their_image():
    for compute, expected_folder in (
        (ComputeSpec(), None),
        (ComputeSpec(working_dir="/app"), "/app"),
    ):
        spec = WorkloadSpec("team", "train", CallableRef("fn", "f", "m", "f"), compute)
        manifest = rendering.of_workload(spec)
        agent.equip(manifest, workload="train", runtime=RUNTIME, working_dir=None)
        [container] = manifest["spec"]["template"]["spec"]["containers"]
        assert variables(container).get("KT_POD_WORKING_DIR") == expected_folder


def test_pods_of_an_autoscaled_service_have_the_time_of_a_request_to_end():
    manifest, _ = equipped(ComputeSpec(autoscaling=AutoscalingSpec(concurrency=1)))
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    assert variables(container)["KT_POD_GRACE"] == "300"
    manifest["spec"]["template"]["spec"]["timeoutSeconds"] = 60
    agent.equip(manifest, workload="train", runtime=RUNTIME)
    assert variables(container)["KT_POD_GRACE"] == "60"


def test_pods_are_ready_when_they_serve_so_that_older_ones_stay_until_then():
    manifest, _ = equipped(ComputeSpec())
    container = manifest["spec"]["template"]["spec"]["containers"][0]

    probe = container["readinessProbe"]
    assert (probe["httpGet"]["path"], probe["timeoutSeconds"]) == ("/health/serving?wait=599", 600)
    assert container["startupProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"


def test_knative_which_probes_in_its_own_way_is_answered_at_once():
    manifest, _ = equipped(ComputeSpec(autoscaling=AutoscalingSpec()))
    probe = manifest["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
    assert (probe["httpGet"]["path"], probe["timeoutSeconds"]) == ("/health/serving", 5)


def test_a_readiness_probe_of_ones_own_stays():
    probe = {"exec": {"command": ["true"]}}
    template = {"metadata": {}, "spec": {"containers": [{"name": "c", "readinessProbe": probe}]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": {"template": template}}
    manifest, _ = equipped(ComputeSpec(manifest=freeze(job, parameter="manifest")))

    assert manifest["spec"]["template"]["spec"]["containers"][0]["readinessProbe"] == probe


@pytest.mark.parametrize(
    ("changed_compute", "is_same"),
    [
        (ComputeSpec(inactivity_ttl="5m"), True),
        (ComputeSpec(replicas=3), True),
        (ComputeSpec(cpus="2"), False),
        (ComputeSpec(env_vars=(("A", "1"),)), False),
    ],
)
def test_the_digest_on_pods_changes_with_what_pods_are_made_from(changed_compute, is_same):
    _, before = equipped(ComputeSpec())
    manifest, after = equipped(changed_compute)

    assert (before == after) is is_same
    annotations = manifest["spec"]["template"]["metadata"]["annotations"]
    assert annotations[labels.TEMPLATE_DIGEST] == after


def test_a_train_job_gets_its_agent_by_a_runtime_of_its_own():
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "train"},
        "spec": {"runtimeRef": {"name": "torch"}},
    }
    pods = {"spec": {"initContainers": [{"name": "own"}], "containers": [{"name": "node"}]}}
    node = {"name": "node", "template": {"spec": {"template": pods}}}
    base = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "torch"},
        "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": [node]}}},
    }
    before = copy.deepcopy(base)

    manifest, digest = equipped(parameters.read_manifest(job))
    runtime = agent.runtime_of_trainjob(manifest, base, runtime=RUNTIME)

    (override,) = manifest["spec"]["podSpecOverrides"]
    assert "initContainers" not in override
    assert manifest["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["metadata"]["namespace"] == "team"
    (replicated_job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated_job["template"]["spec"]["template"]
    names = [container["name"] for container in template["spec"]["initContainers"]]
    assert names == ["kubetorch-runtime", "own"]
    assert template["metadata"]["labels"][labels.SERVICE] == "train"
    assert template["metadata"]["annotations"][labels.TEMPLATE_DIGEST] == digest
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 1}
    assert base == before


def test_a_train_job_whose_runtime_has_no_such_job_is_refused():
    job = {"metadata": {"name": "train"}, "spec": {"runtimeRef": {"name": "odd"}}}
    jobs = [{"name": "launcher"}]
    base = {"metadata": {"name": "odd"}, "spec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    with pytest.raises(SpecError, match="no job 'node'") as error:
        agent.runtime_of_trainjob(job, base, runtime=RUNTIME)
    assert "launcher" in (error.value.hint or "")


def test_pods_of_a_ray_cluster_start_ray_beside_the_agent():
    distribution = DistributionSpec("ray", workers=2)
    manifest, _ = equipped(ComputeSpec(distribution=distribution))

    head = manifest["spec"]["headGroupSpec"]["template"]
    worker = manifest["spec"]["workerGroupSpecs"][0]["template"]
    for template in (head, worker):
        bash, option, line = template["spec"]["containers"][0]["command"]
        assert (bash, option) == ("/bin/bash", "-c")
        assert '"$KUBERAY_GEN_RAY_START_CMD" &' in line
        assert line.endswith("exec /kubetorch/bin/kt-agent")


def queued(workers: int | None, queue: str | None = "gold", **more: Any) -> Any:
    distribution = None if workers is None else DistributionSpec("pytorch", workers=workers)
    compute = ComputeSpec(queue_name=queue, distribution=distribution, **more)
    manifest, digest = equipped(compute)
    return manifest, digest, manifest["spec"]["template"]["metadata"]


def test_kueue_admits_the_pods_of_a_distributed_deployment_together():
    manifest, digest, pods = queued(4)
    assert labels.KUEUE not in manifest["metadata"]["labels"], "it would take each pod alone"
    assert pods["labels"][labels.KUEUE] == "gold"
    assert pods["labels"][labels.KUEUE_GROUP] == f"train-{digest}"
    assert pods["annotations"][labels.KUEUE_GROUP_COUNT] == "4"
    assert manifest["spec"]["strategy"] == {"type": "Recreate"}


def test_another_number_of_workers_is_another_group():
    groups = {queued(workers)[2]["labels"][labels.KUEUE_GROUP] for workers in (2, 4)}
    assert len(groups) == 2


def test_pods_are_one_group_only_where_a_call_needs_all_of_them():
    manifest, _, pods = queued(None, replicas=4)
    assert manifest["metadata"]["labels"][labels.KUEUE] == pods["labels"][labels.KUEUE] == "gold"
    assert labels.KUEUE_GROUP not in pods["labels"]
    _, _, pods = queued(4, queue=None)
    assert labels.KUEUE_GROUP not in pods["labels"]
    assert labels.KUEUE_GROUP_COUNT not in pods["annotations"]


def test_the_queue_of_a_group_is_read_again_and_the_name_of_a_group_is_a_label():
    manifest, *_ = queued(2)
    assert parameters.read_compute(manifest).queue_name == "gold"
    compute = ComputeSpec(queue_name="gold", distribution=DistributionSpec(workers=2))
    long = rendering.render(compute, namespace="team", name="t" * 63)
    digest = agent.equip(long, workload="t" * 63, runtime=RUNTIME)
    group = long["spec"]["template"]["metadata"]["labels"][labels.KUEUE_GROUP]
    assert len(group) == 63
    assert group.endswith(f"-{digest}")


@pytest.mark.parametrize("kind", ["PyTorchJob", "RayCluster", "Deployment"])
def test_the_first_pod_of_ranks_is_ready_before_the_others_that_wait_for_it(kind):
    manifest, _ = equipped(parameters.read_manifest(manifests()[kind]))
    container = WorkloadManifest.parse(manifest).primary.container
    probe_path = "/health/serving?wait=599" if kind == "Deployment" else "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == probe_path


def test_the_operator_of_ray_never_joins_its_command_with_the_agents():
    own_manifest = manifests()["RayCluster"]
    annotations = {"ray.io/overwrite-container-cmd": "false"}
    own_manifest["metadata"]["annotations"] = annotations
    manifest, _ = equipped(parameters.read_manifest(own_manifest))
    assert manifest["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


def test_pods_that_share_data_see_the_folder_of_their_namespace_alone():
    manifest, digest = equipped(ComputeSpec(), msgspec.structs.replace(RUNTIME, node_data="/data"))
    pod = manifest["spec"]["template"]["spec"]
    volume = {"path": "/data/team", "type": "DirectoryOrCreate"}
    assert {"name": "kubetorch-node-data", "hostPath": volume} in pod["volumes"]
    (container,) = pod["containers"]
    mount = {"name": "kubetorch-node-data", "mountPath": "/var/run/kubetorch-node"}
    assert mount in container["volumeMounts"]
    assert variables(container)["KT_POD_NODE_DATA"] == "/var/run/kubetorch-node"

    plain, plain_digest = equipped(ComputeSpec())
    assert digest != plain_digest
    agent.strip(manifest)
    agent.strip(plain)
    assert manifest == plain


def test_knative_pods_mount_no_folder_of_their_node():
    compute = ComputeSpec(autoscaling=AutoscalingSpec(concurrency=1))
    manifest, _ = equipped(compute, msgspec.structs.replace(RUNTIME, node_data="/data"))
    assert "hostPath" not in json.dumps(manifest)
