"""The streams between sibling agents, to an agent that does to a call what a test says."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import psutil
import pytest

import clock_loop
from kubetorch.errors import (
    AgentDiedError,
    CallLostError,
    KubetorchError,
    ProtocolError,
)
from kubetorch.lib import deadlines
from kubetorch.pod.logs import Line
from kubetorch.pod.payloads import Payload
from kubetorch.pod.peers import PeerCall, Peers
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Body, Kind, Open, Part, Progress, Result
from kubetorch.wire.messages import Member
from tests.local.scripted_agent import Call, ScriptedAgent

MB = 1024 * 1024


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.values: list[Any] = []
        self.lines: list[str] = []
        self.reports: list[Progress] = []

    def on_log(self, line: Line) -> None:
        self.lines.append(line.text)

    def on_kept(self, descriptor: int) -> None:
        os.close(descriptor)

    def on_failing(self, failure: bytes) -> None:
        raise AssertionError("a part that has failed runs no more")

    def on_progress(self, report: Progress) -> None:
        self.reports.append(report)

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        self.values.append(json.loads(bytes(payload.view)))
        payload.release()

    def on_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        self.end.set_result(json.loads(bytes(payload.view)))

    def on_error(self, failure: bytes) -> None:
        self.end.set_exception(exceptions.rebuild(exceptions.parse_json(failure)))

    def on_lost(self, error: KubetorchError) -> None:
        self.end.set_exception(error)

    async def ended(self) -> Any:
        async with deadlines.timeout(40):
            return await self.end


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def member(agent: ScriptedAgent) -> Member:
    return Member(agent.pod, 1, agent.url, agent.incarnation)


def call(
    peers: Peers, to: Member, name: str = "echo", argument: object = 1
) -> tuple[PeerCall, Sink]:
    sink = Sink()
    data = json.dumps({"args": [argument], "kwargs": {}}).encode()
    request = Open("id", name, Body("json", (len(data),), len(data)), part=Part(3, (1, 2)))
    return peers.call(to, request, memoryview(data), sink), sink


def test_many_calls_share_one_connection():
    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        sinks = [call(peers, member(agent), argument=number)[1] for number in range(50)]
        assert [await sink.ended() for sink in sinks] == list(range(50))
        assert agent.connects == 1
        assert {received_call.part for received_call in agent.opened} == {Part(3, (1, 2))}
        peers.close()

    async def echo(received_call: Call) -> None:
        await received_call.result(received_call.args[0])

    with ScriptedAgent(echo=echo) as agent:
        run(scenario())


def test_large_arguments_and_values_take_turns_within_the_credit():
    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        texts = [str(number) * (3 * wire_tuning.LIMITS.window_bytes) for number in range(2)]
        sinks = [call(peers, member(agent), argument=text)[1] for text in texts]
        assert [await sink.ended() for sink in sinks] == texts
        peers.close()

    async def echo(received_call: Call) -> None:
        await received_call.result(received_call.args[0])

    with ScriptedAgent(echo=echo) as agent:
        run(scenario())


def test_a_sibling_that_sends_more_than_it_announced_ends_its_stream_and_no_other():
    async def more(received_call: Call) -> None:
        body = Body(
            "json", (wire_tuning.LIMITS.chunk_bytes + 8,), wire_tuning.LIMITS.chunk_bytes + 8
        )
        received_call.send(Kind.RESULT, Result(body, 1, False))
        for _ in range(2):
            received_call.send(Kind.DATA, None, bytes(wire_tuning.LIMITS.chunk_bytes))

    async def echo(received_call: Call) -> None:
        await received_call.result(received_call.args[0])

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        with pytest.raises(ProtocolError, match="gets more bytes than its value has"):
            await call(peers, member(agent), "more")[1].ended()
        assert await call(peers, member(agent))[1].ended() == 1
        peers.close()

    with ScriptedAgent(more=more, echo=echo) as agent:
        run(scenario())


@pytest.mark.security
@pytest.mark.parametrize(
    "body",
    [
        Body("json", (1 << 62,), 1 << 62),
        Body("json", ((1 << 64) - 1,), (1 << 64) - 1),
        Body("json", (-5,), -5),
        Body("json", (5,), 1 << 40),
        Body("json", (9,), 9),
    ],
)
def test_a_sibling_that_claims_what_cannot_be_ends_its_stream(body: Body):
    async def claim(received_call: Call) -> None:
        received_call.send(Kind.RESULT, Result(body, 1, False))

    async def echo(received_call: Call) -> None:
        await received_call.result(received_call.args[0])

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        with pytest.raises(ProtocolError):
            await call(peers, member(agent), "claim")[1].ended()
        assert await call(peers, member(agent))[1].ended() == 1
        peers.close()

    with ScriptedAgent(claim=claim, echo=echo) as agent:
        run(scenario())


@pytest.mark.security
def test_a_value_that_a_sibling_announces_takes_no_memory_until_it_comes():
    async def claim(received_call: Call) -> None:
        received_call.send(Kind.RESULT, Result(Body("json", (1 << 31,), 1 << 31), 1, False))
        await received_call.log("announced")

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        before = psutil.Process().memory_info().rss
        _, sink = call(peers, member(agent), "claim")
        async with deadlines.timeout(40):
            while not sink.lines:
                await asyncio.sleep(0.01)
        assert psutil.Process().memory_info().rss - before < 500_000_000
        peers.close()

    with ScriptedAgent(claim=claim) as agent:
        run(scenario())


def test_a_generator_is_held_until_its_rounds_are_taken():
    sent = []

    async def values(received_call: Call) -> None:
        for number in range(64):
            await received_call.give(f"{number:02}" + "x" * (wire_tuning.LIMITS.chunk_bytes - 100))
            sent.append(number)
        await received_call.result("end", streamed=True)

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        opened, sink = call(peers, member(agent), "values")
        room = (
            LIMITS.peer_rounds_ahead
            + wire_tuning.LIMITS.window_bytes // wire_tuning.LIMITS.chunk_bytes
        )
        while len(sink.values) < room:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(sent) <= room + 1
        for _ in range(8):
            opened.grant(8)
        assert await sink.ended() == "end"
        assert [int(text[:2]) for text in sink.values] == list(range(64))
        peers.close()

    with ScriptedAgent(values=values) as agent:
        run(scenario())


def test_calls_go_on_after_the_connection_broke():
    async def slow(received_call: Call) -> None:
        for number in range(20):
            await received_call.log(f"line {number}")
            if number % 5 == 2:
                asyncio.get_running_loop().call_soon(agent._abort_connections)
            await asyncio.sleep(0.01)
        await received_call.result(len(received_call.args[0]))

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        sinks = [call(peers, member(agent), "slow", "x" * (2 * MB))[1] for _ in range(3)]
        assert [await sink.ended() for sink in sinks] == [2 * MB] * 3
        assert all(sink.lines == [f"line {number}" for number in range(20)] for sink in sinks)
        assert agent.connects > 1
        peers.close()

    with ScriptedAgent(slow=slow) as agent:
        run(scenario())


def test_calls_on_an_agent_that_was_started_again_are_lost_at_once():
    async def never(received_call: Call) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        before = member(agent)
        _, sink = call(peers, before, "never")
        while not agent.opened:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(agent.die)
        try:
            await sink.ended()
        except AgentDiedError as error:
            assert (error.pod_name, error.reason) == (agent.pod, "AgentRestarted")
        else:
            raise AssertionError("it is not lost")
        _, sink = call(peers, member(agent))
        assert await sink.ended() == 1
        peers.close()

    async def echo(received_call: Call) -> None:
        await received_call.result(received_call.args[0])

    with ScriptedAgent(echo=echo, never=never) as agent:
        run(scenario())


def test_calls_are_lost_on_a_sibling_that_has_given_up_their_stream():
    async def never(received_call: Call) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        _, sink = call(peers, member(agent), "never")
        while not agent.opened:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(agent.do, agent.give_up_now)
        with pytest.raises(CallLostError, match="has given up this pod's stream"):
            await sink.ended()
        assert await call(peers, member(agent))[1].ended() == [1]
        peers.close()

    with ScriptedAgent(never=never) as agent:
        run(scenario())


def test_a_stream_that_is_used_again_is_not_taken_for_an_idle_one():
    is_released = False

    async def slow(received_call: Call) -> None:
        while not is_released:
            await asyncio.sleep(0.01)
        await received_call.result("late")

    async def scenario() -> None:
        nonlocal is_released
        peers = Peers("train-0", lambda: "token")
        assert await call(peers, member(agent))[1].ended() == [1]
        _, sink = call(peers, member(agent), "slow")
        while len(agent.opened) < 2:
            await asyncio.sleep(0.01)
        await clock_loop.put_ahead(TIMING.peer_idle_seconds + 1)
        is_released = True
        assert await sink.ended() == "late"
        peers.close()

    with ScriptedAgent(slow=slow) as agent:
        clock_loop.run(scenario(), clock_loop.AheadLoop)


def test_a_cancelled_call_says_how_it_ended():
    async def wait(received_call: Call) -> None:
        await received_call.is_cancelled.wait()
        received_call.error(ValueError("cleaned up"))

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        opened, sink = call(peers, member(agent), "wait")
        opened.cancel("not wanted")
        try:
            await sink.ended()
        except ValueError as error:
            assert str(error) == "cleaned up"
        assert agent.cancelled == ["not wanted"]
        peers.close()

    with ScriptedAgent(wait=wait) as agent:
        run(scenario())


def test_a_sibling_that_is_known_to_be_gone_loses_its_calls():
    async def never(received_call: Call) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        _, sink = call(peers, member(agent), "never")
        peers.drop(member(agent), "OOMKilled")
        try:
            await sink.ended()
        except AgentDiedError as error:
            assert error.reason == "OOMKilled"
        else:
            raise AssertionError("it is not lost")

    with ScriptedAgent(never=never) as agent:
        run(scenario())


def test_a_call_that_is_cancelled_before_its_sibling_answers_is_cancelled():
    async def wait(received_call: Call) -> None:
        await received_call.is_cancelled.wait()
        await received_call.result("cancelled")

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        opened, sink = call(peers, member(agent), "wait")
        opened.cancel("enough")
        assert await sink.ended() == "cancelled"
        assert agent.cancelled == ["enough"]
        peers.close()

    with ScriptedAgent(wait=wait) as agent:
        run(scenario())


def test_calls_on_a_sibling_that_is_never_reached_say_why():
    def refuse() -> str:
        raise RuntimeError("no token")

    async def scenario() -> None:
        elsewhere = Member("train-1", 1, "http://127.0.0.1:1", "")
        for token, cause in ((lambda: "token", "nobody listens there"), (refuse, "no token")):
            _, sink = call(Peers("train-0", token), elsewhere)
            with pytest.raises(AgentDiedError, match="train-1 is unreachable from .*" + cause):
                await sink.end

    clock_loop.run(scenario())


def test_calls_on_a_sibling_with_a_new_address_are_lost_at_once():
    async def never(received_call: Call) -> None:
        await asyncio.sleep(60)

    async def echo(received_call: Call) -> None:
        await received_call.result(received_call.args[0])

    async def scenario() -> None:
        peers = Peers("train-0", lambda: "token")
        _, sink = call(peers, member(agent), "never")
        moved = msgspec.structs.replace(
            member(agent), url=agent.url.replace("127.0.0.1", "localhost")
        )
        assert await call(peers, moved)[1].ended() == 1
        with pytest.raises(CallLostError, match="has the new address http://localhost"):
            await sink.ended()
        peers.close()

    with ScriptedAgent(echo=echo, never=never) as agent:
        run(scenario())
