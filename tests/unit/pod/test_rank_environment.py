"""The variables of a rank, as each framework reads them."""

from __future__ import annotations

import json

import pytest

from kubetorch.pod import rank_environment
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.wire.messages import Member, World

MEMBERS = tuple(Member(f"t-{n}", 2 * n, f"http://10.0.0.{9 - n}:32300") for n in range(3))
#: What every rank of a framework has.
ALWAYS = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "POD_IPS"}


def environ(framework="spmd", node=1, local=1, *, processes=2, members=MEMBERS, **more):
    ports = more.pop("ports", (777,))
    around = more.pop("around", {})
    compute = ComputeSpec(distribution=DistributionSpec(distribution_type=framework), **more)
    world = World(1, 1, members, processes, ports)
    return rank_environment.rank_environ(compute, world, node, local, around)


def test_every_rank_is_counted_over_all_processes_of_all_pods():
    variables = environ()
    assert variables == {
        "WORLD_SIZE": "6",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "NODE_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "POD_IPS": "10.0.0.9,10.0.0.8,10.0.0.7",
    }
    ranks = [environ(node=n, local=k)["RANK"] for n in range(3) for k in range(2)]
    assert ranks == list("012345")


@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("pytorch", {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "777"}),
        (
            "jax",
            {
                "JAX_COORDINATOR_ADDRESS": "10.0.0.9:777",
                "JAX_PROCESS_ID": "3",
                "JAX_NUM_PROCESSES": "6",
                "JAX_LOCAL_DEVICE_IDS": "1",
            },
        ),
        ("ray", {"RAY_HEAD_NODE_IP": "10.0.0.9", "RAY_ADDRESS": "10.0.0.9:777"}),
    ],
)
def test_a_framework_has_its_own_names(framework, more):
    variables = environ(framework)
    assert {name: variables[name] for name in variables.keys() - ALWAYS} == more


def test_each_rank_of_tensorflow_has_a_port_on_its_pod():
    variables = environ("tensorflow", ports=(1, 2, 3, 4, 5, 6))
    workers = ["10.0.0.9:1", "10.0.0.9:2", "10.0.0.8:3", "10.0.0.8:4", "10.0.0.7:5", "10.0.0.7:6"]
    assert json.loads(variables["TF_CONFIG"]) == {
        "cluster": {"worker": workers},
        "task": {"type": "worker", "index": 3},
    }


def test_the_hosts_of_monarch_have_a_port_each():
    variables = environ("monarch", processes=1, local=0, ports=(1, 2, 3))
    hosts = "tcp://10.0.0.9:1,tcp://10.0.0.8:2,tcp://10.0.0.7:3"
    assert {name: variables[name] for name in variables.keys() - ALWAYS} == {
        "KT_MONARCH_HOSTS": hosts
    }


def test_addresses_of_version_6_are_written_as_each_reader_takes_them():
    members = (Member("t-0", 0, "http://[fd::7]:32300"),)
    variables = environ("pytorch", 0, 0, members=members)
    assert (variables["MASTER_ADDR"], variables["POD_IPS"]) == ("fd::7", "fd::7")
    variables = environ("jax", 0, 0, members=members)
    assert variables["JAX_COORDINATOR_ADDRESS"] == "[fd::7]:777"


@pytest.mark.parametrize(
    ("gpus", "around", "expected"),
    [
        ("2", {}, "1"),
        ("4", {}, "2,3"),
        ("5", {}, "2,3"),
        ("2", {"CUDA_VISIBLE_DEVICES": "6,7"}, "7"),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-b"),
        ("1", {}, None),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        (None, {}, None),
    ],
)
def test_devices_are_split_where_each_process_gets_one(gpus, around, expected):
    assert environ(gpus=gpus, around=around).get("CUDA_VISIBLE_DEVICES") == expected


def test_devices_that_the_user_chose_stay_and_so_do_those_of_a_single_process():
    chosen = (("CUDA_VISIBLE_DEVICES", "0,1"),)
    around = dict(chosen)
    assert "CUDA_VISIBLE_DEVICES" not in environ(env_vars=chosen, around=around, gpus="2")
    assert "CUDA_VISIBLE_DEVICES" not in environ(local=0, processes=1, gpus="2")


@pytest.mark.parametrize(
    ("processes", "around", "expected"),
    [(2, {}, "2,3"), (4, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "1"), (1, {}, "0,1,2,3")],
)
def test_jax_counts_among_the_devices_that_it_sees(processes, around, expected):
    local = min(1, processes - 1)
    variables = environ("jax", 0, local, processes=processes, gpus="4", around=around)
    assert variables["JAX_LOCAL_DEVICE_IDS"] == expected
    assert "CUDA_VISIBLE_DEVICES" not in variables


def test_a_pool_of_replicas_counts_pods_and_waits_for_nobody():
    compute = ComputeSpec(replicas=3)
    variables = rank_environment.pool_environ(compute, 2, [*MEMBERS[:2], Member("t-9", 9, "")])
    assert variables == {
        "WORLD_SIZE": "3",
        "RANK": "2",
        "LOCAL_RANK": "0",
        "NODE_RANK": "2",
        "LOCAL_WORLD_SIZE": "1",
        "POD_IPS": "10.0.0.9,10.0.0.8",
    }


def test_each_process_outside_of_a_world_sees_its_own_devices():
    compute = ComputeSpec(gpus="4", num_proc="auto")
    variables = {rank_environment.DEVICES: "4,5,6,7"}

    def devices_of(local, processes):
        return rank_environment.devices_of(compute, local, processes, variables)

    assert [devices_of(local, 4) for local in range(4)] == [
        {rank_environment.DEVICES: number} for number in "4567"
    ]
    assert devices_of(1, 2) == {rank_environment.DEVICES: "6,7"}
    assert devices_of(0, 1) == {}
