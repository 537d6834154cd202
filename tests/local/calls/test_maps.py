"""`map`, `starmap` and their async forms."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kubetorch.errors import CallRefusedError, SerializationError, SpecError
from tests.local.calling import caller, cuts, route_to, until
from tests.local.scripted_agent import Call, ScriptedAgent, never


async def square(call: Call) -> None:
    """The later the argument, the sooner the answer."""
    (number,) = call.args
    await asyncio.sleep(max(0.0, 0.02 - number / 1000))
    await call.result(number * number)


async def picky(call: Call) -> None:
    """Raises for the number 3."""
    if call.args[0] == 3:
        call.error(ValueError("not 3"))
    else:
        await call.result(call.args[0])


def test_results_come_in_the_order_of_the_inputs() -> None:
    with ScriptedAgent(square=square) as agent, route_to(agent.locate) as route:
        squares = caller(route, "square").map(range(100), window=8)
        assert list(squares) == [number * number for number in range(100)]


def test_unordered_results_come_as_they_are_ready() -> None:
    is_first_answered = asyncio.Event()

    async def echo(call: Call) -> None:
        (number,) = call.args
        if number == 0:
            await is_first_answered.wait()
        await call.result(number)
        is_first_answered.set()

    with ScriptedAgent(echo=echo) as agent, route_to(agent.locate) as route:
        numbers = list(caller(route, "echo").map(range(20), ordered=False))
        assert sorted(numbers) == list(range(20))
        assert numbers[0] != 0


def test_several_iterables_and_common_keywords() -> None:
    async def describe(call: Call) -> None:
        await call.result([call.args, call.value["kwargs"]])

    with ScriptedAgent(describe=describe) as agent, route_to(agent.locate) as route:
        describe_call = caller(route, "describe")
        assert list(describe_call.map([1, 2], "ab", kwargs={"k": 1})) == [
            [[1, "a"], {"k": 1}],
            [[2, "b"], {"k": 1}],
        ]
        assert list(describe_call.starmap([(1,), (2, 3)])) == [[[1], {}], [[2, 3], {}]]
        assert list(describe_call.map([])) == []


def test_no_more_than_a_window_of_calls_is_under_way() -> None:
    most = now = 0
    are_all_there = asyncio.Event()

    async def slow(call: Call) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        if now == 7:
            are_all_there.set()
        await are_all_there.wait()
        await asyncio.sleep(0.005)
        now -= 1
        await call.result(call.args[0])

    with ScriptedAgent(slow=slow) as agent, route_to(agent.locate) as route:
        assert list(caller(route, "slow").map(range(50), window=7)) == list(range(50))
        assert most == 7


def test_inputs_are_taken_as_calls_start_so_they_may_be_endless() -> None:
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            yield taken
            taken += 1

    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        results = caller(route, "echo").map(endless(), window=4)
        assert taken == 0
        assert [next(results) for _ in range(10)] == [[number] for number in range(10)]
        assert taken <= 14
        results.close()


def test_leaving_early_cancels_what_runs() -> None:
    are_all_there = asyncio.Event()

    async def fail_first(call: Call) -> None:
        if len(agent.opened) == 3:
            are_all_there.set()
        if call.args[0] != 0:
            await never(call)
        else:
            await are_all_there.wait()
            call.error(ValueError("the first one"))

    with ScriptedAgent(fail_first=fail_first) as agent, route_to(agent.locate) as route:
        results = caller(route, "fail_first").map(range(10), window=3)
        with pytest.raises(ValueError, match="the first one"):
            next(results)
        until(lambda: len(agent.cancelled) == len(agent.opened) - 1)
        assert len(agent.opened) == 3


def test_an_exception_of_a_call_is_raised_in_its_place() -> None:
    with ScriptedAgent(picky=picky) as agent, route_to(agent.locate) as route:
        results = caller(route, "picky").map(range(10))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="not 3"):
            next(results)


def test_exceptions_are_results_when_asked_for() -> None:
    with ScriptedAgent(picky=picky) as agent, route_to(agent.locate) as route:
        results = list(caller(route, "picky").map(range(6), return_exceptions=True))
        assert results[:3] + results[4:] == [0, 1, 2, 4, 5]
        assert isinstance(results[3], ValueError)


def test_an_input_that_raises_is_raised_after_what_was_due() -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        until(lambda: len(agent.opened) == 3)
        raise OSError("no more input")

    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        results = caller(route, "echo").map(broken(), window=2)
        got = []
        with pytest.raises(OSError, match="no more input"):
            got.extend(results)
    with ScriptedAgent(never=never) as agent, route_to(agent.locate) as route:
        caller(route, "echo")(1)  # there is a connection
        agent.opened.clear()
        stuck = caller(route, "never").map(broken(), window=10)
        with pytest.raises(OSError, match="no more input"):
            next(stuck)
        until(lambda: len(agent.cancelled) == 3)


def test_an_argument_that_cannot_travel_fails_only_its_own_call() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        results = list(caller(route, "echo").map([1, object(), 3], return_exceptions=True))
        assert results[::2] == [[1], [3]]
        assert isinstance(results[1], SerializationError)


def test_a_generator_cannot_be_mapped() -> None:
    async def generate(call: Call) -> None:
        await call.give(1)
        await call.result(streamed=True)

    with (
        ScriptedAgent(generate=generate) as agent,
        route_to(agent.locate) as route,
        pytest.raises(CallRefusedError, match="is a generator"),
    ):
        next(caller(route, "generate").map([1]))


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "8"])
def test_an_impossible_window_is_refused_at_once(window: object) -> None:
    with (
        ScriptedAgent() as agent,
        route_to(agent.locate) as route,
        pytest.raises(SpecError, match="window is"),
    ):
        caller(route, "echo").map([1], window=window)  # type: ignore[arg-type]


def test_lost_connections_in_a_map_lose_no_result() -> None:
    with ScriptedAgent(square=square) as agent, route_to(agent.locate) as route:
        with cuts(agent):
            squares = list(caller(route, "square").map(range(300), window=16))
        assert squares == [number * number for number in range(300)]
        assert len(agent.opened) == 300


def test_refused_calls_of_a_map_are_sent_again() -> None:
    refused: set[int] = set()

    async def shy(call: Call) -> None:
        (number,) = call.args
        if number in refused:
            await call.result(number)
        else:
            refused.add(number)
            call.error(CallRefusedError("not yet"), started=False)

    with ScriptedAgent(shy=shy) as agent, route_to(agent.locate) as route:
        assert list(caller(route, "shy").map(range(20))) == list(range(20))


def test_the_async_forms_do_the_same() -> None:
    async def main() -> None:
        squares = caller(route, "square").map_async(range(50), window=8)
        assert [value async for value in squares] == [number * number for number in range(50)]
        unordered = caller(route, "square").map_async(range(20), ordered=False)
        assert sorted([value async for value in unordered]) == [n * n for n in range(20)]
        stars = caller(route, "echo").starmap_async([(1, 2), (3,)])
        assert [value async for value in stars] == [[1, 2], [3]]
        results = caller(route, "picky").map_async(range(5), return_exceptions=True)
        assert [str(value) async for value in results] == ["0", "1", "2", "not 3", "4"]
        with pytest.raises(ValueError, match="not 3"):
            async for _ in caller(route, "picky").map_async(range(5)):
                pass

    with (
        ScriptedAgent(square=square, picky=picky) as agent,
        route_to(agent.locate) as route,
    ):
        asyncio.run(main())


def test_leaving_an_async_map_cancels_what_runs() -> None:
    async def some(call: Call) -> None:
        if call.args[0]:
            await call.is_cancelled.wait()
        while len(agent.opened) < 5:
            await asyncio.sleep(0.01)
        await call.result(call.args[0])

    async def main() -> None:
        results = caller(route, "some").map_async(range(5))
        async for value in results:
            assert value == 0
            break
        await results.aclose()  # type: ignore[attr-defined]

    with ScriptedAgent(some=some) as agent, route_to(agent.locate) as route:
        asyncio.run(main())
        until(lambda: len(agent.cancelled) == 4)
