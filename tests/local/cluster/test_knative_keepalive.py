"""The request by which a pod stays busy to Knative, for calls that Knative does not see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kubetorch.errors import CallRefusedError
from kubetorch.lib import deadlines
from kubetorch.pod.knative_keepalive import REVISION, KnativeKeepAlive
from tests.local.scripted_agent import ScriptedAgent

KNATIVE = {REVISION: "echo-00001"}


async def until(condition: Callable[[], object]) -> None:
    async with deadlines.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def keepalive(
    agent: ScriptedAgent, needed: list[bool], environ: dict[str, str]
) -> KnativeKeepAlive:
    return KnativeKeepAlive(
        lambda: bool(needed), lambda: "own", environ, url=agent.url, interval=0.01
    )


def test_the_request_lasts_as_long_as_such_a_call() -> None:
    async def main() -> None:
        needed: list[bool] = []
        request = keepalive(agent, needed, KNATIVE)
        request.start()
        await asyncio.sleep(0.1)
        assert agent.connects == 0
        needed.append(True)
        await until(lambda: request.is_open)
        await asyncio.sleep(0.1)
        assert agent.connects == 1
        needed.clear()
        await until(lambda: agent.close_codes == [1000])
        await until(lambda: not request.is_open)
        request.close()

    with ScriptedAgent() as agent:
        agent.tokens = {"own"}
        asyncio.run(main())


def test_it_is_made_again_when_it_is_cut_or_refused() -> None:
    async def main() -> None:
        request = keepalive(agent, [True], KNATIVE)
        agent.refusal = CallRefusedError("too much is queued")
        request.start()
        await until(lambda: agent.connects >= 2)
        assert not request.is_open
        agent.refusal = None
        await until(lambda: request.is_open)
        await asyncio.to_thread(agent.cut)
        connects_before = agent.connects
        await until(lambda: agent.connects > connects_before and request.is_open)
        request.close()
        await until(lambda: agent.close_codes)

    with ScriptedAgent() as agent:
        asyncio.run(main())


def test_elsewhere_there_is_none() -> None:
    async def main() -> None:
        keepalive(agent, [True], {}).start()
        await asyncio.sleep(0.1)

    with ScriptedAgent() as agent:
        asyncio.run(main())
        assert agent.connects == 0
