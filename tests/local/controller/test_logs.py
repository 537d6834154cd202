"""The lines of a workload's pods, of agents that answer and of those that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from kubetorch.controller.backends.base import Backend, PodStatus
from kubetorch.controller.logs import PodLogs
from kubetorch.controller.workload import Workload
from kubetorch.lib import deadlines, sockets
from kubetorch.lib.changes import Changes
from kubetorch.lib.http_server import Server
from kubetorch.wire.messages import DeployLog


def line(text: str, time: float = 1.0) -> bytes:
    return json.dumps({"time": time, "text": text}).encode() + b"\n"


class Agent:
    """The agent of one pod: what it answers to who wants the last lines, and to who follows."""

    def __init__(self) -> None:
        self.status = 200
        self.requests = 0
        self.lines = [line("a"), line("b")]
        self.followed = [line("a"), line("b"), line("b"), line("c")]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_followed = b"follow=true" in scope["query_string"]
        self.requests += 1
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        body = b"".join(self.followed if is_followed else self.lines)
        await send({"type": "http.response.body", "body": body, "more_body": is_followed})
        while is_followed and (await receive())["type"] != "http.disconnect":
            pass


@asynccontextmanager
async def logs(*agents: Agent) -> AsyncIterator[PodLogs]:
    pods, servers = [], []
    for number, agent in enumerate(agents):
        listener = sockets.listen(sockets.LOOPBACK, 0)
        server = Server(agent)
        await server.start(listener)
        servers.append(server)
        url = f"http://{sockets.LOOPBACK}:{listener.getsockname()[1]}"
        pods.append(PodStatus(f"f-{number}", number, "Running", url))
    workload = SimpleNamespace(
        pods=pods,
        record=SimpleNamespace(namespace="ns"),
        changes=Changes(),
        is_gone=False,
        notices=[],
        has_session=lambda pod: True,
    )

    async def log_tail(namespace: str, pod: str, count: int) -> list[bytes]:
        return [line(f"of {namespace}/{pod} by its backend")]

    async def nobody() -> bool:
        return False

    try:
        async with deadlines.timeout(20):
            yield PodLogs(
                cast("Workload", workload),
                cast("Backend", SimpleNamespace(log_tail=log_tail)),
                token=lambda: "token",
                may_read_others=nobody,
            )
    finally:
        for server in servers:
            await server.close(1.0)


def test_the_last_lines_are_those_of_the_agent_in_the_order_of_their_times() -> None:
    async def scenario() -> None:
        agent = Agent()
        agent.lines = [line("late", 2.0), b"{cut\n", line("early", 1.0)]
        async with logs(agent) as reader:
            assert [log_line.text for log_line in await reader.tail(5)] == ["early", "late"]
            assert [log_line.text for log_line in await reader.tail(1)] == ["late"]
            assert await reader.tail(0) == []

    asyncio.run(scenario())


def test_of_a_pod_whose_agent_refuses_the_backend_has_the_lines() -> None:
    async def scenario() -> None:
        agent = Agent()
        agent.status, agent.lines = 503, [line("no line of the log")]
        async with logs(agent) as reader:
            assert [log_line.text for log_line in await reader.tail(5)] == [
                "of ns/f-0 by its backend"
            ]

    asyncio.run(scenario())


def test_what_was_shown_already_is_not_shown_again_and_what_is_said_again_is() -> None:
    async def scenario() -> None:
        async with logs(Agent()) as reader:
            assert [log_line.text for log_line in await reader.tail(5)] == ["a", "b"]
            following = reader.follow()
            assert [(await anext(following)).text for _ in range(2)] == ["b", "c"]
            await cast("Any", following).aclose()

    asyncio.run(scenario())


def test_an_agent_that_refuses_is_not_asked_again_for_every_line_of_another() -> None:
    async def scenario() -> None:
        speaking, refusing = Agent(), Agent()
        speaking.followed = [line(str(number)) for number in range(200)]
        refusing.status = 503
        async with logs(speaking, refusing) as reader:
            following = reader.follow()
            texts = [(await anext(following)).text for _ in range(200)]
            assert texts == [str(number) for number in range(200)]
            assert (speaking.requests, refusing.requests) == (1, 1)
            await cast("Any", following).aclose()

    asyncio.run(scenario())


def test_lines_that_have_arrived_are_shown_after_the_end_of_the_workload() -> None:
    async def scenario() -> None:
        agent = Agent()
        agent.followed = [line(str(number)) for number in range(200)]
        async with logs(agent) as reader:
            following = reader.follow()
            assert (await anext(following)).text == "0"
            await asyncio.sleep(0.2)  # all of them arrive
            reader._workload.is_gone = True  # type: ignore[misc]
            assert [log_line.text async for log_line in following][-1] == "199"

    asyncio.run(scenario())


def test_what_the_controller_says_of_a_service_is_among_its_lines_once() -> None:
    async def scenario() -> None:
        agent = Agent()
        agent.lines, agent.followed = [line("a", 1.0)], []
        async with logs(agent) as reader:
            notices = cast("Any", reader._workload).notices
            notices.append(DeployLog(text="it stops soon", pod="f", time=2.0))
            assert [log_line.text for log_line in await reader.tail(5)] == ["a", "it stops soon"]
            following = reader.follow()
            next_line = asyncio.ensure_future(anext(following))
            for _ in range(10):  # it waits for changes
                await asyncio.sleep(0)
            notices.append(DeployLog(text="it stops", pod="f", time=3.0))
            reader._workload.changes.notify()
            assert (await next_line).text == "it stops"
            notices.append(DeployLog(text="the last word", pod="f", time=4.0))
            reader._workload.is_gone = True  # type: ignore[misc]
            reader._workload.changes.notify()
            assert [log_line.text async for log_line in following] == ["the last word"]

    asyncio.run(scenario())
