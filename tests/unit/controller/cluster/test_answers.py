"""Answers are remembered for as long as they hold, and asked for once at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kubetorch.controller.cluster.answers import Answer, Answers
from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib.clock import ManualClock


class Oracle:
    """Answers, and notes what it was asked."""

    def __init__(self, *, is_yes: bool = True, seconds: float = 10.0) -> None:
        self.asked: list[str] = []
        self.is_yes = is_yes
        self.seconds = seconds
        self.go_on = asyncio.Event()
        self.go_on.set()

    def about(self, key: str) -> Callable[[], Awaitable[Answer[str]]]:
        async def ask() -> Answer[str]:
            self.asked.append(key)
            await self.go_on.wait()
            return Answer(f"{key}!", self.is_yes, self.seconds)

        return ask


async def _get(known: Answers[str, str], oracle: Oracle, *keys: str) -> list[str]:
    return [await known.get(key, oracle.about(key)) for key in keys]


def test_an_answer_is_remembered_for_as_long_as_it_holds() -> None:
    async def main() -> None:
        clock, oracle = ManualClock(), Oracle()
        known: Answers[str, str] = Answers(clock.time)
        assert await _get(known, oracle, "a", "a") == ["a!", "a!"]
        assert oracle.asked == ["a"]
        clock.advance(10.0)
        await _get(known, oracle, "a")
        assert oracle.asked == ["a", "a"]

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_what_is_over_already_is_not_remembered(seconds: float) -> None:
    async def main() -> None:
        oracle = Oracle(seconds=seconds)
        known: Answers[str, str] = Answers(ManualClock().time)
        await _get(known, oracle, "a", "a")
        assert (oracle.asked, len(known)) == (["a", "a"], 0)

    asyncio.run(main())


def test_refusals_push_out_no_answers_that_were_yes() -> None:
    async def main() -> None:
        clock = ManualClock()
        known: Answers[str, str] = Answers(clock.time, size=4)
        yes, no = Oracle(), Oracle(is_yes=False)
        await _get(known, yes, "friend")
        await _get(known, no, *(f"stranger {number}" for number in range(100)))
        await _get(known, yes, "friend")
        assert (yes.asked, len(known)) == (["friend"], 5)

    asyncio.run(main())


def test_equal_questions_at_one_time_are_asked_once() -> None:
    async def main() -> None:
        oracle = Oracle()
        oracle.go_on.clear()
        known: Answers[str, str] = Answers(ManualClock().time)
        waiting = [asyncio.ensure_future(_get(known, oracle, "a")) for _ in range(10)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # who asked first does not take the answer away from the others
        await asyncio.sleep(0)
        oracle.go_on.set()
        assert await asyncio.gather(*waiting[1:]) == [["a!"]] * 9
        assert oracle.asked == ["a"]

    asyncio.run(main())


def test_an_error_reaches_all_who_wait_and_is_not_remembered() -> None:
    async def fail() -> Answer[str]:
        raise ControllerUnavailableError("away")

    async def main() -> None:
        known: Answers[str, str] = Answers(ManualClock().time)
        found = await asyncio.gather(
            known.get("a", fail), known.get("a", fail), return_exceptions=True
        )
        assert [type(one) for one in found] == [ControllerUnavailableError] * 2
        assert await known.get("a", Oracle().about("a")) == "a!"

    asyncio.run(main())


def test_too_many_questions_at_one_time_are_refused() -> None:
    async def main() -> None:
        oracle = Oracle()
        oracle.go_on.clear()
        known: Answers[str, str] = Answers(ManualClock().time, under_way=2)
        waiting = [asyncio.ensure_future(_get(known, oracle, key)) for key in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(ControllerUnavailableError, match="too many"):
            await _get(known, oracle, "c")
        oracle.go_on.set()
        await asyncio.gather(*waiting)
        assert await _get(known, oracle, "c") == ["c!"]

    asyncio.run(main())


def test_a_question_has_its_time() -> None:
    async def main() -> None:
        oracle = Oracle()
        oracle.go_on.clear()
        known: Answers[str, str] = Answers(ManualClock().time, patience=0.0)
        with pytest.raises(ControllerUnavailableError, match="has not said"):
            await _get(known, oracle, "a")

    asyncio.run(main())
