"""Ports on which the processes of distributed services meet, on one machine."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import pytest

from kubetorch.controller.backends.base import PortRequest
from kubetorch.controller.backends.process.backend import WORLD_PORTS, WorldPorts
from kubetorch.errors import ResourceNotAvailableError
from kubetorch.lib import sockets

F, G = ("ns", "f"), ("ns", "g")
NOBODY: frozenset[int] = frozenset()


@pytest.fixture
def ports() -> Iterator[WorldPorts]:
    world_ports = WorldPorts()
    yield world_ports
    world_ports.close()


@pytest.fixture
def free() -> int:
    return sockets.choose(NOBODY)


def test_the_wanted_port_is_taken_when_it_is_free(ports: WorldPorts, free: int) -> None:
    assert ports.choose(F, PortRequest(free, is_declared=False), agents=NOBODY) == (free,)


def test_two_services_never_get_the_same(ports: WorldPorts, free: int) -> None:
    request = PortRequest(free, is_declared=False)
    ports.choose(F, request, agents=NOBODY)
    (second_port,) = ports.choose(G, request, agents=NOBODY)
    assert second_port in WORLD_PORTS


def test_services_of_two_controllers_never_get_the_same(ports: WorldPorts, free: int) -> None:
    request = PortRequest(free, is_declared=False)
    ports.choose(F, request, agents=NOBODY)
    second = WorldPorts()
    assert second.choose(F, request, agents=NOBODY) != (free,)
    second.close()


def test_a_port_is_free_again_without_its_service(ports: WorldPorts, free: int) -> None:
    request = PortRequest(free, is_declared=True)
    ports.choose(F, request, agents=NOBODY)
    ports.release(F)
    assert ports.choose(G, request, agents=NOBODY) == (free,)


def test_a_service_keeps_what_it_declared_while_its_processes_still_have_it(
    ports: WorldPorts, free: int
) -> None:
    request = PortRequest(free, is_declared=True)
    ports.choose(F, request, agents=NOBODY)
    with socket.create_server(("127.0.0.1", free)):
        assert ports.choose(F, request, agents=NOBODY) == (free,)


@pytest.mark.parametrize("who", ["the service g", "an agent", "another process"])
def test_a_declared_port_that_somebody_has_is_an_error(
    ports: WorldPorts, free: int, who: str
) -> None:
    request = PortRequest(free, is_declared=True)
    agents = frozenset({free}) if who == "an agent" else NOBODY
    if who == "the service g":
        ports.hold(G, [free])
    with (
        socket.create_server(("127.0.0.1", free if who == "another process" else 0)),
        pytest.raises(ResourceNotAvailableError, match=f"port {free}, which {who} has"),
    ):
        ports.choose(F, request, agents=agents)


def test_each_of_many_processes_has_a_port_of_its_own(ports: WorldPorts, free: int) -> None:
    with socket.create_server(("127.0.0.1", free)):
        chosen_ports = ports.choose(F, PortRequest(free, False, count=4, per_pod=2), agents=NOBODY)
    assert len(set(chosen_ports)) == 4
    assert free not in chosen_ports


def test_further_ports_are_free_ones_whatever_is_declared(ports: WorldPorts, free: int) -> None:
    with socket.create_server(("127.0.0.1", free + 1)):
        request = PortRequest(free, is_declared=True, further=20)
        first, *further = ports.choose(F, request, agents=NOBODY)
    assert first == free
    assert len(set(further)) == 20
    assert set(further) <= set(WORLD_PORTS)


def test_no_port_of_a_world_is_one_of_agents_or_of_workers_of_ray() -> None:
    ray_workers, outgoing = range(10002, 20000), range(32768, 61000)
    ranges = sorted(
        (port_range[0], port_range[-1])
        for port_range in (ray_workers, WORLD_PORTS, sockets.PORTS, outgoing)
    )
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(ranges))


def test_what_an_earlier_controller_gave_is_held(ports: WorldPorts, free: int) -> None:
    ports.hold(F, [free])
    request = PortRequest(free, is_declared=False)
    assert ports.choose(G, request, agents=NOBODY) != (free,)


def test_a_service_keeps_its_ports_if_no_others_can_be_chosen(ports: WorldPorts, free: int) -> None:
    declared = PortRequest(free, is_declared=True)
    ports.choose(F, declared, agents=NOBODY)
    taken = sockets.choose({free})
    with socket.create_server(("127.0.0.1", taken)), pytest.raises(ResourceNotAvailableError):
        ports.choose(F, PortRequest(taken, is_declared=True), agents=NOBODY)
    with pytest.raises(ResourceNotAvailableError, match="the service f"):
        ports.choose(G, declared, agents=NOBODY)
