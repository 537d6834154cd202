"""Where a rank hangs: the stacks of a worker, whatever state it is in."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from kubetorch.lib import processes
from kubetorch.pod.worker_process import stacks
from kubetorch.pod.worker_process.worker import Worker
from tests.local.worker_harness import DEADLINE, agent, run

SHOP = """
import ctypes, os, signal, threading, time

class Shop:
    def wait_in_python(self):
        threading.Event().wait(3600)
    def hold_the_interpreter(self):
        ctypes.PyDLL(None).sleep(3600)
    def work(self, end):
        def down(depth):
            return depth and down(depth - 1)
        while not os.path.exists(end):
            down(50)
        return "done"
    def wait_in_c(self, seconds):
        return ctypes.CDLL(None).sleep(seconds)
    def echo(self, value): return value

class Handled:
    def __init__(self):
        self.seen = []
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, lambda number, frame: self.seen.append(int(number)))
    def seen_signals(self): return self.seen
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(3600)\ndef f(): pass\n")
    return tmp_path


async def stacks_once_there(worker: Worker, words: str) -> str:
    """The stacks, once they have these words."""
    until = time.monotonic() + DEADLINE
    while True:
        text = (await worker.stacks()).text
        if words in text or time.monotonic() > until:
            return text


@pytest.mark.parametrize("method", ["wait_in_python", "hold_the_interpreter"])
def test_a_call_that_hangs_is_found_also_while_it_holds_the_interpreter(folder, method):
    async def main() -> None:
        async with agent(folder) as running:
            worker = await running.worker("Shop", rank=3)
            running.open(worker, method=method)
            text = await stacks_once_there(worker, f"in {method}")
            assert (
                f'shop.py", line {SHOP[: SHOP.index(f"def {method}")].count(chr(10)) + 2}' in text
            )
            assert stacks.LIBRARY_FOLDER not in text
            assert (await worker.stacks()).rank == 3

    run(main())


def test_an_idle_worker_has_nothing_to_show_and_goes_on(folder):
    async def main() -> None:
        async with agent(folder) as running:
            worker = await running.worker("Shop")
            views = await asyncio.gather(*(worker.stacks() for _ in range(3)))
            assert all("shop.py" not in view.text for view in views)
            assert await running.call(worker, 7, method="echo") == 7

    run(main())


def test_a_call_in_c_is_not_cut_short_by_the_question(folder):
    async def main() -> None:
        async with agent(folder) as running:
            worker = await running.worker("Shop")
            call = running.open(worker, 3, method="wait_in_c")
            until = time.monotonic() + DEADLINE
            while "in wait_in_c" not in (await worker.stacks()).text:
                assert time.monotonic() < until
                if call.ends:  # before the question
                    call = running.open(worker, 3, method="wait_in_c")
            assert await call.result() == 0  # seconds that were left of its sleep

    run(main())


def test_a_worker_that_is_busy_survives_the_question(folder):
    async def main() -> None:
        async with agent(folder) as running:
            worker = await running.worker("Shop")
            end = folder / "end"
            calls = [running.open(worker, str(end), method="work") for _ in range(3)]
            assert "in work" in await stacks_once_there(worker, "in work")
            for _ in range(8):
                await worker.stacks()
            end.touch()
            assert [await call.result() for call in calls] == ["done"] * 3

    run(main())


def test_handlers_of_user_code_stay(folder):
    async def main() -> None:
        async with agent(folder) as running:
            worker = await running.worker("Handled")
            await worker.stacks()
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
                os.kill(worker.pid, number)
            until = time.monotonic() + DEADLINE
            while len(signals := await running.call(worker, method="seen_signals")) < 3:
                assert time.monotonic() < until
            assert sorted(signals) == sorted([signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM])

    run(main())


def test_an_import_that_hangs_is_found(folder):
    async def main() -> None:
        async with agent(folder) as running:
            worker = await running.start("f", module="stuck")
            loading = asyncio.ensure_future(worker.load(DEADLINE))
            assert 'stuck.py", line 2' in await stacks_once_there(worker, "stuck.py")
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    run(main())


def test_a_worker_that_cannot_answer_is_explained(folder):
    async def main() -> None:
        async with agent(folder) as running:
            worker = await running.worker("Shop")
            os.kill(worker.pid, signal.SIGSTOP)
            while processes.state(worker.pid) != "T":
                await asyncio.sleep(0)
            assert "stopped by a signal" in (await worker.stacks()).text
            os.kill(worker.pid, signal.SIGCONT)
            await worker.kill()
            assert (await worker.stacks()).text == "it has ended"
            unloaded = await running.start("Shop")
            assert "no answer" in (await unloaded.stacks()).text
            assert unloaded.is_alive

    run(main())


def test_what_is_ours_is_left_out_of_stacks():
    text = (
        "Thread 0x1 (most recent call first):\n"
        f'  File "{stacks.LIBRARY_FOLDER}thread_pool.py", line 3 in run\n'
        '  File "/lib/threading.py", line 9 in _bootstrap\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/app/a.py", line 4 in train\n'
        f'  File "{stacks.LIBRARY_FOLDER}call_runner.py", line 1 in _run\n'
    )
    assert stacks.user_stacks(text) == (
        'Current thread 0x2 (most recent call first):\n  File "/app/a.py", line 4 in train'
    )
    assert stacks.user_stacks(text.partition("\n\n")[0]) == "no thread runs your code"


def test_a_thread_that_has_stopped_in_a_debugger_says_so_and_where():
    head = "Thread 0x1 (most recent call first):\n"
    user_line = '  File "/app/a.py", line 4 in train\n'
    text = (
        f'{head}  File "{stacks.LIBRARY_FOLDER}remote_terminal.py", line 3 in readline\n'
        '  File "/lib/pdb.py", line 9 in _cmdloop\n'
        f'  File "{stacks.LIBRARY_FOLDER}debugger.py", line 7 in stop\n'
        f'{user_line}  File "{stacks.LIBRARY_FOLDER}call_runner.py", line 1 in _run\n'
    )
    assert stacks.user_stacks(text) == f"{head}  stopped in a debugger\n{user_line}".rstrip("\n")
    waits = '  File "/lib/threading.py", line 9 in wait\n'
    debugger = f'  File "{stacks.LIBRARY_FOLDER}debugger.py", line 7 in _stop_thread\n'
    assert stacks.user_stacks(f"{head}{waits}{debugger}") == "no thread runs your code"


def test_the_event_loop_is_left_out_of_stacks():
    loop = (
        '  File "/lib/asyncio/base_events.py", line 1884 in _run_once\n'
        '  File "/lib/asyncio/base_events.py", line 607 in run_forever\n'
        f'  File "{stacks.LIBRARY_FOLDER}thread_pool.py", line 1 in _run\n'
    )
    head, user_line = (
        "Thread 0x1 (most recent call first):\n",
        '  File "/app/a.py", line 4 in train',
    )
    assert stacks.user_stacks(f'{head}  File "/lib/selectors.py", line 468 in select\n{loop}') == (
        "no thread runs your code"
    )
    assert stacks.user_stacks(
        f'{head}{user_line}\n  File "/lib/asyncio/events.py", line 84 in _run\n{loop}'
    ) == (head + user_line)
