"""Calls from coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kubetorch.errors import (
    CallTimeoutError,
    ControllerUnavailableError,
    ServiceNotFoundError,
)
from kubetorch.sdk.calls.caller import Caller, Target
from kubetorch.sdk.calls.route import Location
from tests.local.calling import InThread, caller, route_to, until, with_longer_timeouts
from tests.local.scripted_agent import Call, ScriptedAgent, never


async def count(call: Call) -> None:
    """A generator."""
    for number in range(call.args[0]):
        await call.give(number)
    await call.result("returned", streamed=True)


def test_calls_of_one_loop_overlap_and_share_the_connection() -> None:
    arrived = 0
    all_there = asyncio.Event()

    async def meet(call: Call) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 100:
            all_there.set()
        await all_there.wait()
        await call.result(call.args[0])

    async def main() -> list[int]:
        meeting = caller(route, "meet", async_=True)
        return await asyncio.gather(*(meeting(number) for number in range(100)))

    with ScriptedAgent(meet=meet) as agent, route_to(agent.locate) as route:
        assert asyncio.run(main()) == list(range(100))
        assert agent.connects == 1


def test_threads_and_several_loops_share_the_connection() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        echo = caller(route, "echo")

        async def work(name: str) -> bool:
            return all([await echo(name, n, async_=True) == [name, n] for n in range(50)])

        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda name=name: results.append(asyncio.run(work(name))))
            for name in "abcd"
        ]
        for thread in threads:
            thread.start()
        for number in range(50):
            assert echo(number) == [number]
        for thread in threads:
            thread.join()
        assert results == [True] * 4
        assert agent.connects == 1


def test_a_blocking_call_works_inside_a_running_loop_as_in_a_notebook() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:

        async def cell() -> object:
            return caller(route, "echo")("from a cell")

        assert asyncio.run(cell()) == ["from a cell"]


def test_cancelling_a_task_cancels_the_call() -> None:
    async def main() -> None:
        task = asyncio.create_task(caller(route, "never")(async_=True))
        while not agent.opened:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ScriptedAgent(never=never) as agent, route_to(agent.locate) as route:
        asyncio.run(main())
        until(lambda: agent.cancelled)


def test_a_timeout_is_kept() -> None:
    async def main() -> None:
        await caller(route, "never", timeout=0.1, async_=True)()

    with ScriptedAgent(never=never) as agent, route_to(agent.locate) as route:
        begin = time.monotonic()
        with pytest.raises(CallTimeoutError):
            asyncio.run(main())
        assert time.monotonic() - begin < 30


def test_the_loop_goes_on_while_a_connection_is_made() -> None:
    ticked = threading.Event()

    def resolve() -> Location:
        assert ticked.wait(30)
        return agent.locate()

    async def main() -> None:
        call = asyncio.create_task(caller(route, "echo")(1, async_=True))
        for _ in range(5):
            await asyncio.sleep(0.01)
        ticked.set()
        assert await call == [1]

    with ScriptedAgent() as agent, route_to(resolve) as route:
        asyncio.run(main())


def test_many_calls_at_the_start_wait_for_one_connection() -> None:
    resolve_count = 0

    def resolve() -> Location:
        nonlocal resolve_count
        resolve_count += 1
        return agent.locate()

    async def main() -> None:
        echo = caller(route, "echo", async_=True)
        assert await asyncio.gather(*(echo(n) for n in range(200))) == [[n] for n in range(200)]

    with ScriptedAgent() as agent, route_to(resolve) as route:
        asyncio.run(main())
        assert (resolve_count, agent.connects) == (1, 1)


def test_an_error_while_connecting_reaches_all_that_wait() -> None:
    def resolve() -> Location:
        time.sleep(0.05)
        raise ServiceNotFoundError("service is gone")

    async def main() -> list[object]:
        echo = caller(route, "echo", async_=True)
        return await asyncio.gather(*(echo(n) for n in range(5)), return_exceptions=True)

    with route_to(resolve) as route:
        assert {type(error) for error in asyncio.run(main())} == {ServiceNotFoundError}


def test_a_generator_is_an_async_iterator() -> None:
    async def main() -> None:
        counting = caller(route, "count", async_=True)
        values = await counting(3)
        assert [value async for value in values] == [0, 1, 2]
        assert values.returned == "returned"
        assert [value async for value in await counting(0)] == []

    with ScriptedAgent(count=count) as agent, route_to(agent.locate) as route:
        asyncio.run(main())


def test_a_generator_known_as_one_needs_no_await() -> None:
    async def main() -> None:
        target = Target("default", "service", "count", kind="async_generator")
        counting = Caller(target, route).options(async_=True)
        assert [value async for value in counting(3)] == [0, 1, 2]
        assert [value async for value in await counting(2)] == [0, 1]

    with ScriptedAgent(count=count) as agent, route_to(agent.locate) as route:
        asyncio.run(main())


def test_leaving_a_generator_cancels_it() -> None:
    async def endless(call: Call) -> None:
        while not call.is_cancelled.is_set():
            await call.give("x" * 10_000)
        call.error(RuntimeError("cancelled"))

    async def main() -> None:
        values: AsyncIterator[str] = await caller(route, "endless")(async_=True)
        async for _ in values:
            break
        await values.aclose()  # type: ignore[attr-defined]

    with ScriptedAgent(endless=endless) as agent, route_to(agent.locate) as route:
        asyncio.run(main())
        until(lambda: agent.cancelled)


def test_large_arguments_do_not_hold_up_the_loop() -> None:
    array = np.ones(50_000_000, dtype=np.uint8)
    stopped, ticked = threading.Event(), threading.Event()

    def take_nothing() -> None:
        stopped.set()
        assert ticked.wait(30)

    async def main() -> None:
        echo = caller(route, "echo", async_=True)
        assert await echo(1) == [1]
        agent_stops = InThread(agent.do, take_nothing)
        assert stopped.wait(30)
        large = asyncio.create_task(echo(array, serialization="pickle"))
        for _ in range(20):
            await asyncio.sleep(0.01)
        ticked.set()
        (back,) = await large
        assert np.array_equal(back, array)
        assert agent_stops.join().error is None

    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        asyncio.run(main())


def test_lines_are_printed_before_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    async def speak(call: Call) -> None:
        await call.log("first")
        await call.result()

    async def main() -> None:
        await caller(route, "speak")(async_=True)
        print("then")

    with ScriptedAgent(speak=speak) as agent, route_to(agent.locate) as route:
        asyncio.run(main())
    assert capsys.readouterr().out == "(fake-0) first\nthen\n"


def test_a_hurried_call_that_comes_first_does_not_hurry_those_that_wait_with_it() -> None:
    def attempt(timeout: float) -> bool:
        may_connect = threading.Event()

        def resolve() -> Location:
            if not may_connect.is_set():
                raise ControllerUnavailableError("not yet")
            return agent.locate()

        async def main() -> BaseException | None:
            echo = caller(route, "echo", async_=True)
            hurried = asyncio.create_task(echo.options(timeout=timeout)(1))
            await asyncio.sleep(0)
            patient = asyncio.create_task(echo(2))
            with pytest.raises(CallTimeoutError) as caught:
                await hurried
            may_connect.set()
            assert await patient == [2]
            return caught.value.__cause__

        with ScriptedAgent() as agent, route_to(resolve) as route:
            cause = asyncio.run(main())
            assert agent.connects == 1
        return "not yet" in str(cause)

    with_longer_timeouts(attempt)


def test_a_hurried_call_does_not_wait_as_long_as_those_that_came_before_it() -> None:
    may_connect = threading.Event()

    def resolve() -> Location:
        assert may_connect.wait(60)
        return agent.locate()

    async def main() -> None:
        echo = caller(route, "echo", async_=True)
        patient = asyncio.create_task(echo(1))
        await asyncio.sleep(0)
        with pytest.raises(CallTimeoutError):
            await echo.options(timeout=0.3)(2)
        assert not patient.done()
        may_connect.set()
        assert await patient == [1]

    with ScriptedAgent() as agent, route_to(resolve) as route:
        try:
            asyncio.run(asyncio.wait_for(main(), 50))
        finally:
            may_connect.set()
        assert agent.connects == 1
