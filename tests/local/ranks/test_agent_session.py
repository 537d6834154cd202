"""What the agent of a distributed service says to its controller."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_harness import AgentProcess, FakeController, wait_until
from kubetorch.wire.messages import Activity, Member, Members, Probe, Probed, World


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    controller = FakeController(tmp_path)
    yield controller
    controller.close()


@pytest.fixture
def agent(tmp_path: Path, controller: FakeController) -> Iterator[AgentProcess]:
    agent = AgentProcess(tmp_path, controller)
    yield agent
    agent.stop()


def test_ranks_give_a_sign_of_life_twice_a_second(
    agent: AgentProcess, controller: FakeController
) -> None:
    controller.wait_for(Activity)
    world = World(epoch=1, generation=1, members=(Member("other-0", 0, "http://127.0.0.1:1"),))
    began = time.monotonic()
    controller.send(Members(epoch=1, members=world.members, world=world))
    for _ in range(4):  # the first one at once
        controller.wait_for(Activity)
    assert 1.0 < time.monotonic() - began < 20


def probed(controller: FakeController, port: int) -> tuple[bool, float]:
    began = time.monotonic()
    controller.send(Probe(id="p", url=f"http://127.0.0.1:{port}"))
    answer = controller.wait_for(Probed)
    assert answer.id == "p"
    return answer.is_reached, time.monotonic() - began


def test_ranks_reach_a_sibling_that_answers(
    agent: AgentProcess, controller: FakeController
) -> None:
    wait_until(lambda: probed(controller, agent.port)[0])  # a busy machine may take the second


def test_ranks_say_at_once_that_nobody_listens(
    agent: AgentProcess, controller: FakeController
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
    is_reached, seconds = probed(controller, port)
    assert not is_reached
    assert seconds < 60


def test_ranks_say_within_a_second_that_a_sibling_is_frozen(
    agent: AgentProcess, controller: FakeController
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        is_reached, seconds = probed(controller, frozen.getsockname()[1])
    assert not is_reached
    assert seconds < 60
