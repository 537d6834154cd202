"""The events of a deploy."""

from __future__ import annotations

import asyncio

from kubetorch.controller.progress import LOG_CHARACTERS, LOG_LIMIT, Progress
from kubetorch.wire.messages import Accepted, DeployEvent, DeployLog, Failed, Stage


async def followed(progress: Progress, *, logs: bool = True) -> list[DeployEvent]:
    return [event async for event in progress.follow(logs=logs)]


def test_whoever_joins_late_sees_everything() -> None:
    async def scenario() -> None:
        progress = Progress(1, Accepted(generation=1))
        early = asyncio.ensure_future(followed(progress))
        await turn()
        progress.add(Stage(stage="importing"))
        await turn()
        progress.add(Failed(failure={}))
        expected = [Accepted(generation=1), Stage(stage="importing"), Failed(failure={})]
        assert await early == expected
        assert await followed(progress) == expected

    run(scenario())


def test_nothing_comes_after_the_last_event() -> None:
    progress = Progress(1, Failed(failure={}))
    progress.add(Stage(stage="late"))
    assert run(followed(progress)) == [Failed(failure={})]


def test_lines_are_left_out_when_they_are_not_wanted() -> None:
    progress = Progress(1, DeployLog(text="x", pod="p"), Failed(failure={}))
    assert run(followed(progress, logs=False)) == [Failed(failure={})]


def test_an_import_that_prints_without_end_is_cut() -> None:
    progress = Progress(1)
    for index in range(2 * LOG_LIMIT):
        progress.add(DeployLog(text=str(index), pod="p"))
    progress.add(Failed(failure={}))
    events = run(followed(progress))
    assert len(events) == LOG_LIMIT + 1
    assert "more lines" in events[-2].text  # type: ignore[union-attr]


def test_long_lines_are_cut_by_their_characters() -> None:
    progress = Progress(1)
    for _ in range(4):
        progress.add(DeployLog(text="x" * (LOG_CHARACTERS // 2), pod="p"))
    progress.add(Failed(failure={}))
    assert [len(event.text) > 100 for event in run(followed(progress))[:-1]] == [True, True, False]


def run(coroutine):
    # Turns of the loop without a timer: no test waits.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


async def turn() -> None:
    """Let the others go on."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(done.set_result, None)
    await done
