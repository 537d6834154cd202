"""Ranks on a real cluster: their order, what carries them, queues, what is said of losses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import byo
from cluster.conftest import POD_IMAGE, Installed, Kubectl
from cluster.faults import SERVICE, Client, agents, kill, pods, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

#: Seconds until a caller knows that a pod was deleted or killed, and that one is merely silent:
#: it should be 1 and 3, which is printed; a machine that does something else takes longer.
KNOWN_SECONDS, SILENT_SECONDS = 30.0, 40.0


def value_of_line(line: str) -> Any:
    return json.loads(line.partition(" ")[2])


# --------------------------------------------------------------------------------------- who is who

ORDER = """
import json
compute = kt.Compute(cpus="0.01").distribute("pytorch", workers=2, num_proc=2)
f = kt.fn(service.rank, name="order").to(compute)
print("ranks", json.dumps(f()), flush=True)
service.until(lambda: __import__("os").path.exists("go"))
print("again", json.dumps(f(restart_procs=True)), flush=True)
service.until(lambda: __import__("os").path.exists("fewer"))
compute.distribute("pytorch", workers=1, num_proc=2)
print("fewer", json.dumps(kt.fn(service.rank, name="order").to(compute)()))
"""


def check_world(ranks: list[dict[str, str]], *, pods: int, processes: int) -> list[str]:
    """The pods of a whole world by node rank; each value of a rank is what it should be."""
    assert [int(rank["RANK"]) for rank in ranks] == list(range(pods * processes))
    assert [int(rank["NODE_RANK"]) for rank in ranks] == [n // processes for n in range(len(ranks))]
    assert [int(rank["LOCAL_RANK"]) for rank in ranks] == [n % processes for n in range(len(ranks))]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks} == {
        (str(len(ranks)), str(processes))
    }
    addresses = [rank["POD_IP"] for rank in ranks[::processes]]
    assert {rank["POD_IPS"] for rank in ranks} == {",".join(addresses)}
    return [rank["POD_NAME"] for rank in ranks[::processes]]


def test_ranks_are_in_the_order_of_pods_and_a_replacement_takes_the_place_of_the_lost(
    client: Callable[[str], Client], kubectl: Kubectl, installed: Installed
) -> None:
    program = client(ORDER)
    ranks = value_of_line(program.line("ranks"))
    first, second = check_world(ranks, pods=2, processes=2)
    assert {rank["MASTER_ADDR"] for rank in ranks} == {ranks[0]["POD_IP"]}
    where = ("-n", installed.namespace)
    kubectl("delete", "pod", *where, first, "--grace-period=1", "--wait=true")
    (program.folder / "go").touch()

    replacement, stayed = check_world(value_of_line(program.line("again")), pods=2, processes=2)
    assert (stayed, replacement != first) == (second, True)
    # The last ones go, as Kubernetes has it for a StatefulSet, unless others are not ready.
    both = [f"pod/{name}" for name in (replacement, stayed)]
    kubectl("wait", *where, *both, "--for=condition=Ready", "--timeout=60s")
    (program.folder / "fewer").touch()
    assert check_world(value_of_line(program.line("fewer")), pods=1, processes=2) == [replacement]


# ----------------------------------------------------------------------------------------- carriers

CARRIED = """
import json
import kubetorch as kt
import service
compute = kt.Compute.from_manifest("manifest.yaml")
compute.launch_timeout = 150
remote = kt.fn(service.rank, name=compute.manifest["metadata"]["name"]).to(compute)
print("\\nranks", json.dumps(remote()))
remote.teardown()
"""
#: By kind: where the number of workers stands, and what the first pod is called.
CARRIERS = {
    "PyTorchJob": (("pytorchReplicaSpecs", "Worker", "replicas"), "master-0"),
    "TFJob": (("tfReplicaSpecs", "Worker", "replicas"), "chief-0"),
    "XGBoostJob": (("xgbReplicaSpecs", "Worker", "replicas"), "master-0"),
    "MPIJob": (("mpiReplicaSpecs", "Worker", "replicas"), "worker-0"),
    "JobSet": ((), "workers-0-0"),
    "TrainJob": ((), "node-0-0"),
}


@pytest.mark.parametrize("kind", CARRIERS)
def test_a_training_job_carries_ranks_with_its_master_first(
    kind: str, tmp_path: Path, bringing: Installed, kubectl: Kubectl
) -> None:
    manifest, count = json.loads(json.dumps(byo.KINDS[kind]))
    path, first = CARRIERS[kind]
    if path:
        count += 2 - manifest["spec"][path[0]][path[1]][path[2]]
        manifest["spec"][path[0]][path[1]][path[2]] = 2
    group = manifest["apiVersion"].rpartition("/")[0]
    if kind not in kubectl("api-resources", "--api-group", group, "--no-headers"):
        pytest.skip(f"the cluster has no {kind}")
    if kind == "TrainJob":
        # It is of the whole cluster, and tests beside this one use it: nobody deletes it.
        kubectl("apply", "--server-side", "-f", "-", manifests=[byo.TRAIN_RUNTIME])
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    (tmp_path / "service.py").write_text(SERVICE)
    printed = bringing.python(CARRIED, tmp_path, timeout=200)
    (line,) = (
        printed_line for printed_line in printed.splitlines() if printed_line.startswith("ranks ")
    )
    names = check_world(value_of_line(line), pods=count, processes=1)
    assert first in names[0]
    assert [name.rpartition("worker-")[2] for name in names if "worker-" in name] == sorted(
        name.rpartition("worker-")[2] for name in names if "worker-" in name
    )


SELECTED = """
import json
import kubetorch as kt
import service
compute = kt.Compute(selector={"app": "theirs"}).distribute("pytorch", quorum_workers=2)
remote = kt.fn(service.rank, name="theirs").to(compute)
print("\\nranks", json.dumps(remote()))
remote.teardown()
"""


def test_pods_of_others_that_a_selector_finds_are_ranks(
    tmp_path: Path, bringing: Installed, kubectl: Kubectl
) -> None:
    kubectl(
        "apply", "-n", bringing.namespace, "-f", "-", manifests=[byo.pool("theirs", POD_IMAGE, 2)]
    )
    (tmp_path / "service.py").write_text(SERVICE)
    printed = bringing.python(SELECTED, tmp_path, timeout=150)
    (line,) = (
        printed_line for printed_line in printed.splitlines() if printed_line.startswith("ranks ")
    )
    check_world(value_of_line(line), pods=2, processes=1)


ROUTED = """
import json
import kubetorch as kt
import service
second = {"app": "mine", "apps.kubernetes.io/pod-index": "1"}
compute = kt.Compute.from_manifest("manifest.yaml", endpoint=kt.Endpoint(selector=second))
remote = kt.fn(service.rank, name="routed").to(compute.distribute("spmd", workers=2))
spawned = remote.spawn()
ranks = spawned.get()
pod = kt.globals.session().ask(lambda controller: controller.get_call(spawned.id).pod)
print("\\nranks", json.dumps([ranks, pod]))
remote.teardown()
"""


def test_a_call_goes_to_the_pods_of_its_endpoint_and_runs_on_all_ranks(
    tmp_path: Path, bringing: Installed
) -> None:
    manifest, _ = json.loads(json.dumps(byo.KINDS["StatefulSet"]))
    manifest["metadata"]["name"] = "routed"
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    (tmp_path / "service.py").write_text(SERVICE)
    printed = bringing.python(ROUTED, tmp_path, timeout=150)
    (line,) = (
        printed_line for printed_line in printed.splitlines() if printed_line.startswith("ranks ")
    )
    ranks, entry_pod = value_of_line(line)
    assert check_world(ranks, pods=2, processes=1) == ["routed-0", "routed-1"]
    assert entry_pod == "routed-1"


def test_a_raycluster_of_an_image_without_ray_is_refused_at_once(
    client: Callable[[str], Client], kubectl: Kubectl
) -> None:
    if "rayclusters" not in kubectl("api-resources", "--api-group", "ray.io", "--no-headers"):
        pytest.skip("the cluster has no KubeRay")
    program = client("""
        compute = kt.Compute(cpus="0.01", image=kt.Image().pip_install("ray"))
        f = kt.fn(service.rank, name="rayless")
        try:
            f.to(compute.distribute("ray", workers=2))
        except kt.ResourceNotAvailableError as error:
            print("refused", str(error).replace("\\n", " "), flush=True)
        f.teardown()
    """)
    line = program.line("refused")
    assert "has no Ray" in line
    assert "kt.images.ray" in line


#: Has Ray and wget, as the kit's addon `ray` makes one; without its name this is not tried.
RAY_IMAGE = os.environ.get("KT_TEST_RAY_IMAGE")


@pytest.mark.skipif(RAY_IMAGE is None, reason="KT_TEST_RAY_IMAGE names no image")
def test_a_call_runs_on_the_head_of_a_raycluster_and_ray_on_all_ranks(
    client: Callable[[str], Client],
) -> None:
    program = client(f"""
        import json, os

        image = kt.Image(image_id="{RAY_IMAGE}")
        compute = kt.Compute(cpus="0.1", image=image, image_pull_policy="IfNotPresent")
        f = kt.fn(service.ray_nodes, name="raying").to(compute.distribute("ray", workers=2))
        print("nodes", json.dumps(f()))
    """)
    head, nodes = value_of_line(program.line("nodes"))
    assert "-head" in head
    assert head in nodes
    assert len(nodes) == 2


# ------------------------------------------------------------------------------------------- queues


@pytest.fixture
def queue(kubectl: Kubectl, installed: Installed) -> Iterator[Callable[[int], None]]:
    """Changes the quota of the queue `team`, in GPUs; at first it is 2."""
    name = installed.namespace
    if "queues" not in kubectl("api-resources", "--api-group", "kueue.x-k8s.io", "--no-headers"):
        pytest.skip("the cluster has no Kueue")

    def flavor(gpus: int) -> dict[str, Any]:
        quota = {"cpu": 4, "memory": "4Gi", "nvidia.com/gpu": gpus}
        return {
            "name": name,
            "resources": [{"name": key, "nominalQuota": amount} for key, amount in quota.items()],
        }

    def objects(gpus: int) -> list[dict[str, Any]]:
        api = {"apiVersion": "kueue.x-k8s.io/v1beta1"}
        covered = ["cpu", "memory", "nvidia.com/gpu"]
        groups = [{"coveredResources": covered, "flavors": [flavor(gpus)]}]
        spec = {"namespaceSelector": {}, "resourceGroups": groups}
        return [
            {**api, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": {}},
            {**api, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec},
            {
                **api,
                "kind": "LocalQueue",
                "metadata": {"name": "team", "namespace": name},
                "spec": {"clusterQueue": name},
            },
        ]

    def allow(gpus: int) -> None:
        kubectl("apply", "-f", "-", manifests=objects(gpus))

    allow(2)
    yield allow
    kubectl("delete", "--wait=false", "-f", "-", manifests=objects(2))


def test_ranks_that_do_not_all_fit_into_their_queue_wait_and_none_of_them_runs(
    client: Callable[[str], Client],
    kubectl: Kubectl,
    installed: Installed,
    queue: Callable[[int], None],
) -> None:
    program = client("""
        def declare(name, workers):
            compute = kt.Compute(cpus="0.01", gpus=1, queue_name="team")
            return kt.fn(service.rank, name=name), compute.distribute("spmd", workers=workers)

        one, compute = declare("fits", 1)
        one.to(compute)
        print("fits", flush=True)
        two, compute = declare("waits", 2)
        two.to(compute)
        print("world", len(two()))
    """)
    program.line("fits")
    while "number 1 of 1 in the queue 'team'" not in program.line("(waits events)"):
        pass  # at first it is only held back
    phases = "jsonpath={.items[*].status.phase}"
    where = ("-n", installed.namespace, "-l", "kubetorch.com/service=waits")
    assert kubectl("get", "pods", *where, "-o", phases).split() == ["Pending"] * 2
    queue(3)
    assert program.line("world") == "world 2"


def test_part_of_the_pods_of_ranks_is_given_back_and_the_error_names_the_missing(
    client: Callable[[str], Client], kubectl: Kubectl, installed: Installed
) -> None:
    node = kubectl("get", "nodes", "-o", "jsonpath={.items[0].metadata.name}")
    program = client(f"""
        here = {{"kubernetes.io/hostname": "{node}"}}
        # A node has 8 GPUs.
        compute = kt.Compute(cpus="0.01", gpus=8, node_selector=here, launch_timeout=12)
        f = kt.fn(service.rank, name="partial")
        try:
            f.to(compute.distribute("spmd", workers=2, num_proc=1))
        except kt.QuorumError as error:
            print("refused", error)
    """)
    text = program.line("refused")
    assert re.search("partial has [01] of the 2 pods that it needs after 12 s: pod partial-", text)
    assert "Insufficient nvidia.com/gpu" in text
    until(lambda: not pods(kubectl, installed.namespace, "partial"), seconds=60)


# ------------------------------------------------------------------------------------------- losses

LOSING = """
import json, time
limit = {{"resources": {{"limits": {{"memory": "400Mi"}}}}}}
containers = [{{"name": "kubetorch", **limit}}]
apart = {{
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {{"matchLabels": {{"kubetorch.com/service": "{name}"}}}},
}}
pod = {{"terminationGracePeriodSeconds": 4, "containers": containers}}
if {is_apart}:
    pod["topologySpreadConstraints"] = [apart]
template = {{"spec": {{"template": {{"spec": pod}}}}}}
compute = kt.Compute(cpus="0.01", service_template=template).distribute("spmd", workers=2)
f = kt.fn(service.slow, name="{name}").to(compute)
print("deployed", json.dumps(f(0)), flush=True)
for attempt in ("lost", "refused"):
    try:
        f(100 if attempt == "lost" else 0)
    except kt.WorkerMembershipChanged as error:
        now = time.time()
        print(attempt, json.dumps([now, error.is_critical, error.reasons]), flush=True)
print("ready", json.dumps(f(0, workers="ready")), flush=True)

def why():
    try:
        f(0)
    except kt.WorkerMembershipChanged as error:
        return error.reasons

if "{name}" == "out-of-memory":
    service.until(lambda: "OOMKilled" in why().values())
    print("known", time.time(), flush=True)
service.until(lambda: __import__("os").path.exists("go"))
print("again", json.dumps(f(0, restart_procs=True)), flush=True)
"""


def losing(client: Callable[[str], Client], name: str, *, is_apart: bool = False) -> Client:
    return client(LOSING.format(name=name, is_apart=is_apart))


def evict(kubectl: Kubectl, namespace: str, pod: str, folder: Path) -> None:
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    (folder / "eviction").write_text(json.dumps(eviction))
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "-f", str(folder / "eviction"))


#: How a pod is ended, which of them, and the reasons that callers may be told.
LOSSES = {
    "deleted": (1, ("Deleted",)),
    "evicted": (1, ("Evicted",)),
    "first-deleted": (0, ("Deleted",)),
    "out-of-memory": (1, ("OOMKilled", "AgentDied", "AgentRestarted", "unreachable")),
    "killed": (1, ("AgentDied", "AgentRestarted", "Error", "unreachable")),
    "first-killed": (0, ("AgentDied", "AgentRestarted", "Error", "unreachable")),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_that_lose_a_pod_say_which_and_why(
    name: str,
    client: Callable[[str], Client],
    kubectl: Kubectl,
    installed: Installed,
    tmp_path: Path,
) -> None:
    index, reasons = LOSSES[name]
    program = losing(client, name)
    names = value_of_line(program.line("deployed"))
    lost = names[index]
    for _ in names:
        program.call_begins(name)
    where = ("-n", installed.namespace)
    begun = time.time()
    if name.endswith("deleted"):
        kubectl("delete", "pod", *where, lost, "--wait=false")
    elif name == "evicted":
        evict(kubectl, installed.namespace, lost, tmp_path)
    else:
        agent_processes = agents(lost)
        if name == "out-of-memory":
            # What a container runtime goes by, whichever of its processes the kernel takes.
            command = "x = b'1' * 1000 * 2**20"
            kubectl("exec", *where, lost, "--", "sh", "-c", f'python3 -c "{command}"; true')
            time.sleep(2)  # the runtime hears of that by itself
        begun = time.time()
        kill(agent_processes)
    then, is_critical, why = value_of_line(program.line("lost"))
    print(f"{name}: {then - begun:.2f} s, {why}")
    assert (list(why), is_critical) == ([lost], True)
    assert why[lost].split(":")[0] in reasons
    assert then - begun < KNOWN_SECONDS
    assert list(value_of_line(program.line("refused"))[2]) == [lost]
    assert names[1 - index] in value_of_line(program.line("ready"))
    if name == "out-of-memory":
        print(f"OOMKilled is known after {value_of_line(program.line('known')) - begun:.2f} s")
    (program.folder / "go").touch()
    names_afterwards = value_of_line(program.line("again"))
    assert len(names_afterwards) == 2
    assert names_afterwards[1 - index] == names[1 - index]


@pytest.mark.alone
def test_ranks_that_lose_a_node_to_a_cut_link_say_so(
    client: Callable[[str], Client], second: str, kubectl: Kubectl, installed: Installed, kit: Path
) -> None:
    program = losing(client, "cut", is_apart=True)
    names = value_of_line(program.line("deployed"))
    of_pod = ("-n", installed.namespace, "-o", "jsonpath={.spec.nodeName}")
    (lost,) = (pod for pod in names if kubectl("get", "pod", pod, *of_pod) == second)
    for _ in names:
        program.call_begins("cut")
    link = "kt-n2"
    begun = time.time()
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        then, _, why = value_of_line(program.line("lost"))
        print(f"cut: {then - begun:.2f} s, {why}")
        assert list(why) == [lost]
        assert why[lost].split(":")[0] == "unreachable"
        assert then - begun < SILENT_SECONDS
        assert value_of_line(program.line("ready")) == [pod for pod in names if pod != lost]
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
    (program.folder / "go").touch()
    assert value_of_line(program.line("again")) == names
