"""The ports of nodes of Ray."""

from __future__ import annotations

from kubetorch.pod.framework_nodes import ray_ports
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.wire.messages import Member, World

MEMBERS = tuple(Member(f"t-{n}", n, "http://127.0.0.1:32300") for n in range(3))


def world(*further: int) -> World:
    return World(1, 1, MEMBERS, 1, (6379, *further))


def test_nodes_on_one_machine_share_no_port() -> None:
    count = DistributionSpec(distribution_type="ray").further_ports(len(MEMBERS))
    nodes = [ray_ports(world(*range(20000, 20000 + count)), node) for node in range(3)]
    ports = [port for node in nodes for port in node.values()]

    assert sorted(ports) == list(range(20000, 20000 + count))
    assert nodes[0].keys() > nodes[1].keys() == nodes[2].keys()
    assert {"node-manager-port", "dashboard-agent-listen-port"} <= nodes[1].keys()
    assert nodes[0].keys() - nodes[1].keys() == {
        "ray-client-server-port",
        "dashboard-port",
        "AUTOSCALER_METRIC_PORT",
        "DASHBOARD_METRIC_PORT",
    }


def test_a_node_with_a_network_of_its_own_has_the_ports_of_ray() -> None:
    assert ray_ports(world(), 0) == ray_ports(world(), 2) == {}


def test_other_frameworks_need_no_further_ports() -> None:
    assert DistributionSpec(distribution_type="pytorch").further_ports(3) == 0
