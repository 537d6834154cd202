"""The request by which a pod stays busy to Knative, for calls that Knative does not see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kubetorch.errors import CallRefusedError
from kubetorch.lib import deadlines
from kubetorch.pod.calls.uncounted import REVISION, Presence
from tests.local.scripted_agent import ScriptedAgent

KNATIVE = {REVISION: "echo-00001"}


async def until(condition: Callable[[], object]) -> None:
    async with deadlines.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def presence(agent: ScriptedAgent, needed: list[bool], environ: dict[str, str]) -> Presence:
    return Presence(lambda: bool(needed), lambda: "own", environ, url=agent.url, interval=0.01)


def test_the_request_lasts_as_long_as_such_a_call() -> None:
    async def main() -> None:
        needed: list[bool] = []
        kept = presence(agent, needed, KNATIVE)
        kept.changed(1)
        await asyncio.sleep(0.1)
        assert agent.connects == 0
        needed.append(True)
        await until(lambda: kept.is_held)
        await asyncio.sleep(0.1)
        assert agent.connects == 1
        needed.clear()
        await until(lambda: agent.close_codes == [1000])
        assert not kept.is_held
        kept.close()

    with ScriptedAgent() as agent:
        agent.tokens = {"own"}
        asyncio.run(main())


def test_it_is_made_again_when_it_is_cut_or_refused() -> None:
    async def main() -> None:
        kept = presence(agent, [True], KNATIVE)
        agent.refusal = CallRefusedError("too much is queued")
        kept.changed(1)
        await until(lambda: agent.connects >= 2)
        assert not kept.is_held
        agent.refusal = None
        await until(lambda: kept.is_held)
        await asyncio.to_thread(agent.cut)
        made = agent.connects
        await until(lambda: agent.connects > made and kept.is_held)
        kept.changed(0)
        await until(lambda: agent.close_codes)

    with ScriptedAgent() as agent:
        asyncio.run(main())


def test_elsewhere_there_is_none() -> None:
    async def main() -> None:
        presence(agent, [True], {}).changed(1)
        await asyncio.sleep(0.1)

    with ScriptedAgent() as agent:
        asyncio.run(main())
        assert agent.connects == 0
