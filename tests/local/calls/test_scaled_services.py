"""Calls of an autoscaled service: each is a connection that its scaler can count."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kubetorch.errors import CallRefusedError, CallTimeoutError, PodTerminatedError
from kubetorch.sdk.calls.route import Location, Route, Scaler, Scaling
from kubetorch.wire.messages import PodView
from tests.free_ports import free_port
from tests.local.calling import InThread, caller, route_to, until
from tests.local.scripted_agent import Call, ScriptedAgent, never
from tests.local.tcp_relay import Relay


@contextmanager
def scaled(
    agent: ScriptedAgent, slots: int | None = None
) -> Iterator[tuple[Route, Relay, dict[str, str]]]:
    """The way to a service whose scaler passes calls on to this agent, and the pods there are."""
    pods = {agent.pod: agent.url}
    with Relay(agent.port) as scaler:
        location = Location(
            (agent.url,), "token", (0,), Scaler(scaler.url, pods), scaling=Scaling(30, slots)
        )
        with route_to(lambda: location) as route:
            route.locate(location)
            yield route, scaler, pods


def connections(agent: ScriptedAgent) -> int:
    return sum(client.connection is not None for client in agent.clients.values())


def test_a_connection_lasts_as_long_as_its_call() -> None:
    with ScriptedAgent() as agent, scaled(agent) as (route, scaler, _):
        for number in range(3):
            assert caller(route, "echo")(number) == [number]
            until(lambda: not connections(agent))
        assert agent.connects == scaler.accepted == 3
        # The network may lose the word of a close that something crossed.
        assert set(agent.close_codes) == {1000}


def test_calls_at_one_time_have_a_connection_each() -> None:
    release = threading.Event()

    async def work(call: Call) -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)
        await call.result(call.args[0])

    with ScriptedAgent(work=work) as agent, scaled(agent) as (route, *_):
        calls = [InThread(caller(route, "work"), number) for number in range(3)]
        until(lambda: len(agent.opened) == 3)
        assert connections(agent) == 3
        release.set()
        assert [call.join().value for call in calls] == [0, 1, 2]


def test_a_map_has_a_connection_for_each_call() -> None:
    with ScriptedAgent() as agent, scaled(agent) as (route, *_):
        assert list(caller(route, "echo").map(range(20), window=5)) == [[n] for n in range(20)]
        assert agent.connects == 20
        until(lambda: not connections(agent))


def test_coroutines_have_a_connection_for_each_call() -> None:
    with ScriptedAgent() as agent, scaled(agent) as (route, *_):

        async def main() -> list[object]:
            make = caller(route, "echo")
            return await asyncio.gather(*(make(number, async_=True) for number in range(5)))

        assert asyncio.run(main()) == [[number] for number in range(5)]
        assert agent.connects == 5
        until(lambda: not connections(agent))


def test_a_generator_keeps_its_connection_to_its_end() -> None:
    async def numbers(call: Call) -> None:
        for number in range(100):
            await call.give(number)
        await call.result(streamed=True)

    with ScriptedAgent(numbers=numbers) as agent, scaled(agent) as (route, *_):
        assert list(caller(route, "numbers")()) == list(range(100))
        assert agent.connects == 1
        until(lambda: not connections(agent))


def test_a_cancelled_call_leaves_no_connection() -> None:
    async def stubborn(call: Call) -> None:
        await call.is_cancelled.wait()
        call.error(CallRefusedError("cancelled"))

    with ScriptedAgent(stubborn=stubborn) as agent, scaled(agent) as (route, *_):
        with pytest.raises(CallTimeoutError):
            caller(route, "stubborn", timeout=0.1)()
        until(lambda: not connections(agent))


def test_a_call_whose_connection_the_scaler_cuts_goes_on_in_its_pod() -> None:
    release = threading.Event()

    async def work(call: Call) -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)
        await call.result("done")

    with ScriptedAgent(work=work) as agent, scaled(agent) as (route, scaler, _):
        call = InThread(caller(route, "work"))
        until(lambda: agent.opened)
        scaler.cut()
        until(lambda: agent.connects == 2)
        release.set()
        assert call.join().value == "done"
        assert len(agent.opened) == 1
        assert scaler.accepted == 1  # the other one led to the pod


def test_a_call_whose_pod_is_gone_says_so() -> None:
    with ScriptedAgent(never=never) as agent, scaled(agent) as (route, scaler, pods):
        call = InThread(caller(route, "never"))
        until(lambda: agent.opened)
        pods.clear()
        scaler.cut()
        error = call.join().error
        assert isinstance(error, PodTerminatedError)
        assert error.pod_name == agent.pod


def test_a_call_waits_while_the_scaler_has_no_pod() -> None:
    with ScriptedAgent() as agent, scaled(agent) as (route, *_):
        agent.refusal = CallRefusedError("no pod yet")
        call = InThread(caller(route, "echo"), 1)
        until(lambda: agent.connects >= 2)
        agent.refusal = None
        assert call.join().value == [1]
        assert len(agent.opened) == 1


def test_a_pod_that_cannot_start_fails_the_call() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    location = Location(
        (), "token", (), Scaler(nobody, {}), scaling=Scaling(30, failure="the image is gone")
    )
    begun = time.monotonic()
    with (
        route_to(lambda: location) as route,
        pytest.raises(CallRefusedError, match="the image is gone"),
    ):
        caller(route, "echo")(1)
    assert time.monotonic() - begun < 20


def test_a_call_inside_another_one_goes_to_its_pod_past_the_scaler() -> None:
    with ScriptedAgent() as agent, scaled(agent, slots=1) as (route, scaler, pods):
        view = PodView(name=agent.pod, ordinal=0, phase="Running", is_ready=True, url=agent.url)
        location = Location(
            (agent.url,),
            "token",
            (0,),
            Scaler(scaler.url, pods),
            pods={agent.pod: view},
            scaling=Scaling(30, 1),
        )
        route.locate(location)
        pod_route = route.nearest(["another-0", agent.pod])
        assert pod_route is not None
        assert caller(pod_route, "echo")(1) == [1]
        assert scaler.accepted == 0
        assert caller(route, "echo")(2) == [2]
        assert scaler.accepted == 1


@pytest.mark.parametrize(("slots", "warnings"), [(1, 1), (None, 0), (0, 0)])
def test_spawn_warns_once_that_a_scaler_passes_on_no_call_before_a_pod_has_room(
    slots: int | None, warnings: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedAgent() as agent, scaled(agent, slots) as (route, *_):
        handles = [caller(route, "echo").spawn(number) for number in range(2)]
        assert [handle.get(timeout=60) for handle in handles] == [[0], [1]]
    assert capsys.readouterr().err.count("spawn() waits until one has room") == warnings
