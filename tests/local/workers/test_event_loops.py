"""What `asyncio` does in sync functions and classes: what it does in a main thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.local.worker_harness import agent, run

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="no main thread has a loop that it did not set"
)

SHOP = """
import asyncio, threading

async def five():
    await asyncio.sleep(0)
    return 5

at_import = asyncio.get_event_loop()
value_at_import = at_import.run_until_complete(five())

def old_style():
    return asyncio.get_event_loop().run_until_complete(five()) + value_at_import

def in_the_loop_of_the_module():
    return at_import.run_until_complete(five())

def closes_its_loop():
    loop = asyncio.get_event_loop()
    try:
        return loop.run_until_complete(five())
    finally:
        loop.close()

def runs_and_asks():
    asyncio.run(five())
    try:
        asyncio.get_event_loop()
    except RuntimeError as error:
        return str(error)

def of_a_thread():
    said = []
    def ask():
        try:
            asyncio.get_event_loop()
        except RuntimeError as error:
            said.append(str(error))
    thread = threading.Thread(target=ask, name="mine")
    thread.start()
    thread.join()
    return said

class Server:
    def __init__(self):
        self.loop = asyncio.get_event_loop()
        self.ready = self.loop.run_until_complete(five())

    def get(self):
        return self.loop.run_until_complete(five()) + self.ready

    def same(self):
        return asyncio.get_event_loop() is self.loop

    def run(self):
        asyncio.run(five())
        return asyncio.new_event_loop().run_until_complete(five())

async def coroutine():
    return asyncio.get_event_loop() is asyncio.get_running_loop()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("old_style", 10),
        ("in_the_loop_of_the_module", 5),
        ("closes_its_loop", 5),
        ("coroutine", True),
    ],
)
def test_a_function_finds_an_event_loop_in_each_call(
    folder: Path, name: str, value: object
) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker(name)
            assert [await a.call(worker) for _ in range(3)] == [value] * 3

    run(main())


def test_a_coroutine_runs_whose_module_closed_the_loop_of_its_import(folder: Path) -> None:
    source = "import asyncio\nasyncio.get_event_loop().close()\nasync def five():\n    return 5\n"
    (folder / "shop.py").write_text(source)

    async def main() -> None:
        async with agent(folder) as a:
            assert await a.call(await a.worker("five")) == 5

    run(main())


def test_calls_at_the_same_time_have_loops_of_their_own(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("old_style")
            calls = [a.open(worker) for _ in range(20)]
            assert [await call.result() for call in calls] == [10] * 20

    run(main())


def test_a_loop_that_ran_is_gone_as_in_a_main_thread(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("runs_and_asks")
            for _ in range(2):
                assert "no current event loop" in await a.call(worker)

    run(main())


def test_threads_of_user_code_have_no_loop_as_at_home(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            messages = await a.call(await a.worker("of_a_thread"))
            assert messages == ["There is no current event loop in thread 'mine'."]

    run(main())


def test_a_class_keeps_the_loop_that_its_constructor_found(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Server")
            for _ in range(2):
                assert await a.call(worker, method="get") == 10
                assert await a.call(worker, method="same")
            assert await a.call(worker, method="run") == 5
            assert await a.call(worker, method="get") == 10

    run(main())
