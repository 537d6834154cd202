"""Nodes of Ray whose program fails, as processes; a module `ray` of the test stands for Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_harness import POD, AgentProcess, FakeController
from kubetorch.pod.framework_nodes import KUBERAY_START_COMMAND, RayNode, wait_until_joined
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.wire.messages import Member, Members, Observed, Reload, World

WORLD = World(
    1,
    1,
    (Member("head-0", 0, "http://127.0.0.1:1"), Member(POD, 1, "http://127.0.0.1:2")),
    ports=(6379,),
)


def ray(body: str) -> dict[str, str]:
    return {"ray/scripts/scripts.py": f"import os, sys\ndef main():\n    {body}\n"}


def node_of(folder: Path, python: Path | str, body: str) -> RayNode:
    for path, text in ray(body).items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    return RayNode(str(python), {"PYTHONPATH": str(folder)}, lambda _: None)


@pytest.mark.parametrize(
    ("world", "expected_message"),
    [
        (None, "the pods of this service were not all there within 1 s"),
        (WORLD, "the Ray node of this pod did not start within 1 s:\n"),
    ],
)
def test_ranks_of_ray_that_do_not_meet_fail_at_the_launch_timeout(
    tmp_path: Path, world: World | None, expected_message: str
) -> None:
    controller = FakeController(tmp_path)
    agent = AgentProcess(tmp_path / "agent", controller)
    try:
        spec = controller.spec("def f(): pass", "f", files=ray("sys.exit('no such head')"))
        distribution = DistributionSpec(distribution_type="ray", workers=2)
        compute = replace(spec.compute, distribution=distribution, launch_timeout=1)
        controller.send(Members(epoch=1, members=WORLD.members, world=world))
        controller.send(Reload(generation=1, spec=replace(spec, compute=compute)))
        failure = controller.wait_for(Observed, lambda observed: observed.generation == 1).failure
    finally:
        agent.kill()
        controller.close()

    assert failure is not None
    assert expected_message in failure["message"]


def test_a_node_that_tries_again_has_the_output_of_the_attempt_before(tmp_path: Path) -> None:
    os.mkfifo(attempts := tmp_path / "attempts")
    body = f"open({str(attempts)!r}, 'w').close(); sys.exit('no such head')"

    async def scenario() -> None:
        node = node_of(tmp_path, sys.executable, body)
        starting = asyncio.create_task(node.start(WORLD, 1))
        for _ in range(2):
            await asyncio.to_thread(attempts.read_bytes)
        assert node.delay_reason == "no such head"
        starting.cancel()
        await node.kill()

    asyncio.run(scenario())


def test_a_node_whose_program_vanished_between_attempts_ends(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)

    async def scenario() -> None:
        node = node_of(tmp_path, python, f"os.unlink({str(python)!r})")
        with pytest.raises(FileNotFoundError):
            await node.start(WORLD, 1)
        await node.kill()
        assert not node.is_alive

    asyncio.run(scenario())


def test_the_end_of_a_node_spares_the_process_that_has_its_number_by_now(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = node_of(tmp_path, sys.executable, "print('Ray runtime started')")
        await node.start(WORLD, 1)
        while node.is_alive:
            await asyncio.sleep(0.01)
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
            node._pid = stranger.pid  # no kernel gives a number on request
            await node.kill()
            assert stranger.poll() is None
            stranger.kill()

    asyncio.run(scenario())


def test_a_health_check_that_answers_no_text_is_asked_again() -> None:
    answers = [b"\xff", b"success"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = answers.pop(0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            command = f"ray start --dashboard-agent-listen-port={port}"
            await wait_until_joined({KUBERAY_START_COMMAND: command}, 30)

    asyncio.run(scenario())
    assert answers == []
