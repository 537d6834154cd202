"""The world of a distributed service on this machine: pods and a controller that are killed."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kubetorch.errors import QuorumError, ResourceNotAvailableError
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.wire import exceptions, messages
from kubetorch.wire.messages import (
    DeployEvent,
    Failed,
    Members,
    PodView,
    Ready,
    RegroupFailed,
    WorkloadView,
    World,
)
from tests.free_ports import free_port
from tests.local.service_harness import FAKE, Service, is_ready


@pytest.fixture
def service(fake_service: Service) -> Service:
    return fake_service


@pytest.fixture
def own_service(service_home: Path) -> Iterator[Service]:
    """A service that the test kills, or whose agents count themselves in its folder."""
    service = Service(service_home, FAKE).start()
    yield service
    service.terminate()


def launched(service: Service, workers: int, **more: int) -> WorkloadView:
    """A distributed service that serves."""
    last = service.deploy("f", distribution=DistributionSpec(workers=workers, **more))[-1]
    assert isinstance(last, Ready), last
    return service.until("f", lambda view: view.world is not None)


def world_of(view: WorkloadView) -> World:
    assert view.world is not None
    return view.world


def lost(view: WorkloadView) -> dict[str, str]:
    return {loss.member.pod: loss.reason for loss in world_of(view).lost}


def assert_world_is_kept(service: Service, disturb: Callable[[], object]) -> None:
    """Assert that what a test does to the controller changes no world.

    A busy machine may keep an agent from giving signs of life, so that it is lost rightly: then
    the world is formed again, and disturbed again.
    """
    view = launched(service, 2)
    deadline = time.monotonic() + 120
    while True:
        before = world_of(view)
        disturb()
        view = service.get("f")
        if world_of(view) == before:
            return
        assert set(lost(view).values()) == {"unreachable"}
        assert time.monotonic() < deadline
        send_signal(view.pods[0], signal.SIGUSR1)
        next_epoch = before.epoch + 1
        view = service.until("f", lambda view, epoch=next_epoch: world_of(view).epoch >= epoch)


def messages_to(service: Service, pod: PodView) -> list[tuple[float, Members | RegroupFailed]]:
    """What an agent was told of its world, and when."""
    file = service.home / "pods" / "default" / pod.name / "members.jsonl"
    parts = [line.split(" ", 1) for line in file.read_text().splitlines()]
    return [
        (float(moment), messages.decode(Members | RegroupFailed, text)) for moment, text in parts
    ]


def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def send_signal(pod: PodView, number: signal.Signals) -> float:
    """Send a signal to an agent; the time."""
    assert pod.pid is not None
    os.kill(pod.pid, number)
    return time.time()


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def error_of(events: list[DeployEvent]) -> BaseException:
    last = events[-1]
    assert isinstance(last, Failed), last
    return exceptions.rebuild(exceptions.parse(last.failure))


def test_ranks_every_agent_is_told_of_the_same_world(service: Service) -> None:
    view = launched(service, 3)
    world = world_of(view)
    assert [member.pod for member in world.members] == [pod.name for pod in view.pods]
    assert [member.ordinal for member in world.members] == [0, 1, 2]
    assert [member.incarnation for member in world.members] == [str(pod.pid) for pod in view.pods]

    def worlds(pod: PodView) -> list[World | None]:
        return [
            members.world
            for _, members in messages_to(service, pod)
            if isinstance(members, Members)
        ]

    until(lambda: all(worlds(pod)[-1:] == [world] for pod in view.pods))


def test_ranks_a_killed_agent_is_told_of_at_once(service: Service) -> None:
    view = launched(service, 2)
    first, second = view.pods
    killed = send_signal(second, signal.SIGKILL)

    def losses() -> list[tuple[float, str]]:
        formed_worlds = [
            (moment, members.world)
            for moment, members in messages_to(service, first)
            if isinstance(members, Members)
        ]
        return [
            (moment, loss.reason)
            for moment, world in formed_worlds
            if world
            for loss in world.lost
            if loss.member.pod == second.name
        ]

    until(losses)
    moment, reason = losses()[0]
    print(f"told {(moment - killed) * 1000:.0f} ms after SIGKILL")
    assert reason == "AgentDied"
    assert moment - killed < 60
    losses_now = world_of(service.get("f")).lost
    [message] = [loss.message for loss in losses_now if loss.member.pod == second.name]
    assert message == "its agent ended with SIGKILL"


def test_ranks_a_frozen_agent_is_unreachable_within_three_seconds(service: Service) -> None:
    view = launched(service, 3)
    victim = view.pods[1]
    began = time.monotonic()
    with stopped(victim.pid):
        later_view = service.until("f", lambda view: victim.name in lost(view))
        seconds = time.monotonic() - began
        print(f"unreachable after {seconds:.2f} s")
        assert lost(later_view)[victim.name] == "unreachable"
        assert seconds <= 60
        send_signal(view.pods[0], signal.SIGUSR2)
        later_view = service.until("f", lambda view: world_of(view).epoch == 2)
        assert victim.name not in {member.pod for member in world_of(later_view).members}
    send_signal(view.pods[0], signal.SIGUSR1)
    later_view = service.until("f", lambda view: world_of(view).epoch == 3)
    assert len(world_of(later_view).members) == 3


def test_ranks_a_controller_that_is_killed_changes_no_world(own_service: Service) -> None:
    def start_again() -> None:
        own_service.kill()
        own_service.start()
        time.sleep(4.0)

    assert_world_is_kept(own_service, start_again)


def test_ranks_a_controller_that_did_not_run_for_a_while_concludes_nothing(
    own_service: Service,
) -> None:
    def stop_for_a_while() -> None:
        time.sleep(3.5)
        with stopped(own_service.pid):
            time.sleep(4.0)
        time.sleep(4.0)

    assert_world_is_kept(own_service, stop_for_a_while)


def test_ranks_an_agent_that_was_killed_with_its_controller_is_lost(own_service: Service) -> None:
    view = launched(own_service, 2)
    own_service.kill()
    send_signal(view.pods[1], signal.SIGKILL)
    own_service.start()
    victim = view.pods[1].name
    later_view = own_service.until("f", lambda view: victim in lost(view))
    # A busy machine may keep the other agent from giving signs of life.
    assert {reason for pod, reason in lost(later_view).items() if pod != victim} <= {"unreachable"}
    assert world_of(later_view).epoch == 1


def test_ranks_a_world_is_formed_again_with_the_pod_that_came_back(service: Service) -> None:
    view = launched(service, 2)
    send_signal(view.pods[1], signal.SIGKILL)
    victim = view.pods[1].name
    service.until("f", lambda view: victim in lost(view) and is_ready(view))
    send_signal(view.pods[0], signal.SIGUSR1)
    later_view = service.until("f", lambda view: world_of(view).epoch == 2)
    assert victim not in lost(later_view)
    assert len(world_of(later_view).members) == 2


def test_ranks_are_all_started_again_by_a_deploy_once_one_is_lost(service: Service) -> None:
    view = launched(service, 2)
    distribution = DistributionSpec(workers=2)
    last_event = service.deploy("f", distribution=distribution)[-1]
    assert isinstance(last_event, Ready)
    assert last_event.generation == 1
    send_signal(view.pods[1], signal.SIGKILL)
    victim = view.pods[1].name
    service.until("f", lambda view: victim in lost(view))
    after = service.deploy("f", distribution=distribution)[-1]
    assert isinstance(after, Ready)
    world = world_of(service.get("f"))
    assert (after.generation, world.epoch, world.generation, world.lost) == (2, 2, 2, ())


def test_ranks_of_another_generation_are_another_world(service: Service) -> None:
    launched(service, 2)
    distribution = DistributionSpec(workers=2)
    service.deploy("f", distribution=distribution, inactivity_ttl="1h")
    world = world_of(service.get("f"))
    assert (world.epoch, world.generation) == (2, 2)


@pytest.mark.parametrize("is_quorum_timeout", [True, False])
def test_ranks_without_a_quorum_are_not_launched(
    own_service: Service, is_quorum_timeout: bool
) -> None:
    def attempt(seconds: int) -> bool:
        name = f"f{seconds}"
        events = own_service.deploy(
            name,
            distribution=DistributionSpec(
                workers=3, quorum_timeout=seconds if is_quorum_timeout else None
            ),
            launch_timeout=120 if is_quorum_timeout else seconds,
            env={"FAKE_PRESENT": "2"},
        )
        own_service.delete(name)
        error = error_of(events)
        assert isinstance(error, QuorumError)
        assert "its agent has not connected" in str(error)
        return f"2 of the 3 pods that it needs after {seconds} s: pod {name}-" in str(error)

    assert any(attempt(seconds) for seconds in (6, 60))  # on a busy machine agents need longer


def test_ranks_of_a_quorum_are_launched_without_the_others(own_service: Service) -> None:
    distribution = DistributionSpec(workers=3, quorum_workers=2)
    events = own_service.deploy("f", distribution=distribution, env={"FAKE_PRESENT": "2"})
    assert isinstance(events[-1], Ready)
    assert len(world_of(own_service.get("f")).members) == 2


def test_ranks_of_two_services_never_meet(service: Service) -> None:
    for name in ("f", "g"):
        service.deploy(name, distribution=DistributionSpec(workers=1))
    ports = [world_of(service.get(name)).ports for name in ("f", "g")]
    assert len({*ports[0], *ports[1]}) == 2


def test_ranks_of_tensorflow_have_a_port_each(service: Service) -> None:
    distribution = DistributionSpec("tensorflow", workers=2, options='{"num_proc": 2}')
    service.deploy("f", distribution=distribution)
    world = world_of(service.get("f"))
    assert (world.processes, len(set(world.ports))) == (2, 4)


def test_ranks_whose_port_is_taken_are_not_launched(service: Service) -> None:
    port = free_port()  # which nobody is given when it is free again
    with socket.create_server(("127.0.0.1", port)):
        distribution = DistributionSpec(workers=1, options=f'{{"port": {port}}}')
        error = error_of(service.deploy("f", distribution=distribution))
    assert isinstance(error, ResourceNotAvailableError)
    assert f"port {port}, which another process has" in str(error)
    assert isinstance(service.deploy("f", distribution=distribution)[-1], Ready)
    assert world_of(service.get("f")).ports == (port,)
