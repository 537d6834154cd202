"""The variables by which the processes of a distributed service find each other.

Each framework has its own variables, as its documentation names them: PyTorch
(https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization), JAX
(https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html), TensorFlow
(https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kubetorch.lib import asgi, sockets
from kubetorch.pod.user_process.frameworks import MONARCH_HOSTS
from kubetorch.specs.compute import ComputeSpec
from kubetorch.wire.messages import Member, World

#: The variable that says which devices a process may use.
DEVICES = "CUDA_VISIBLE_DEVICES"


def rank_of(world: World, node: int, local: int) -> int:
    return node * world.processes + local


def rank_environ(
    compute: ComputeSpec, world: World, node: int, local: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables of the process with number `local` in the pod with this node rank.

    `environ` has the other variables of the process.
    """
    assert compute.distribution is not None
    rank, size = rank_of(world, node, local), len(world.members) * world.processes
    first_member = world.members[0]
    hosts = [member.host for member in world.members]
    variables = {
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "NODE_RANK": str(node),
        "LOCAL_WORLD_SIZE": str(world.processes),
        "POD_IPS": ",".join(hosts),
    }
    port = world.ports[0] if world.ports else compute.distribution.port
    share = len(visible_devices(compute, environ)) // world.processes
    devices = range(local * share, (local + 1) * share)
    # JAX chooses its devices by itself, among those of the pod.
    if compute.distribution.distribution_type != "jax":
        variables |= devices_of(compute, local, world.processes, environ)
    match compute.distribution.distribution_type:
        case "pytorch":
            variables |= {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(port)}
        case "jax":
            variables |= {
                "JAX_COORDINATOR_ADDRESS": _host_and_port(hosts[0], port),
                "JAX_PROCESS_ID": str(rank),
                "JAX_NUM_PROCESSES": str(size),
                "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, devices)) or str(local),
            }
        case "tensorflow":
            ports = world.ports or (port,) * size
            members = [member for member in world.members for _ in range(world.processes)]
            names = [
                _host_and_port(member.host, member_port)
                for member, member_port in zip(members, ports, strict=False)
            ]
            task = {"type": "worker", "index": rank}
            variables |= {
                "TF_CONFIG": json.dumps({"cluster": {"worker": names}, "task": task}),
                "TF_FORCE_GPU_ALLOW_GROWTH": "true",
                "TF_GPU_THREAD_MODE": "gpu_private",
            }
        case "monarch":
            variables |= {MONARCH_HOSTS: ",".join(monarch_hosts(world, port))}
        case "ray":
            variables |= {
                "RAY_HEAD_NODE_IP": ray_host(first_member),
                "RAY_ADDRESS": _host_and_port(ray_host(first_member), port),
            }
    return variables


def devices_of(
    compute: ComputeSpec, local: int, processes: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variable that shows a process its share of the devices of the pod."""
    visible = visible_devices(compute, environ)
    share = len(visible) // processes
    if not share or processes == 1 or DEVICES in dict(compute.env_vars):
        return {}
    return {DEVICES: ",".join(visible[local * share : (local + 1) * share])}


def monarch_hosts(world: World, port: int) -> list[str]:
    """The addresses of the hosts of a world, as Monarch writes them."""
    ports = world.ports or (port,) * len(world.members)
    return [
        f"tcp://{_host_and_port(member.host, member_port)}"
        for member, member_port in zip(world.members, ports, strict=False)
    ]


def pool_environ(compute: ComputeSpec, ordinal: int, members: list[Member]) -> dict[str, str]:
    """The variables of a pool of replicas, whose pods do not wait for each other."""
    return {
        "WORLD_SIZE": str(compute.pods),
        "RANK": str(ordinal),
        "LOCAL_RANK": "0",
        "NODE_RANK": str(ordinal),
        "LOCAL_WORLD_SIZE": "1",
        "POD_IPS": ",".join(member.host for member in members if member.url),
    }


def ray_host(member: Member) -> str:
    """The address of a node of Ray, which listens at all addresses unless its own is 127.0.0.1."""
    return sockets.LOOPBACK if asgi.is_loopback(member.host) else member.host


def _host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def visible_devices(compute: ComputeSpec, environ: Mapping[str, str]) -> list[str]:
    """The devices of a pod, as far as they are known."""
    visible = [device for device in environ.get(DEVICES, "").split(",") if device.strip()]
    if not visible and compute.gpus is not None and compute.gpus.isdecimal():
        visible = [str(number) for number in range(int(compute.gpus))]
    return visible
