"""The end of a process is noticed, whatever Python was built with."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import descriptors
from kubetorch.lib import deadlines, processes
from kubetorch.lib.process_watch import ExitWatch, run
from kubetorch.lib.processes import exit_status


@pytest.fixture(params=["pidfd of Python", "pidfd of the kernel"], autouse=True)
def _pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pidfd of the kernel":
        if sys.platform != "linux":
            pytest.skip("other systems have no pidfd")
        monkeypatch.delattr(os, "pidfd_open", raising=False)


async def ended(pid: int, timeout: float = 60.0) -> None:
    event = asyncio.Event()
    watch = ExitWatch(pid, event.set)
    try:
        async with deadlines.timeout(timeout):
            await event.wait()
    finally:
        watch.close()


def test_the_end_of_a_child_is_noticed() -> None:
    async def scenario() -> None:
        with subprocess.Popen(["sleep", "1000"]) as child:
            waiting = asyncio.ensure_future(ended(child.pid))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            child.send_signal(signal.SIGKILL)
            await waiting
            assert exit_status(child.pid) == -signal.SIGKILL
            child.returncode = -signal.SIGKILL

    asyncio.run(scenario())


def test_a_process_that_is_gone_has_ended() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        asyncio.run(ended(child.pid))


def test_a_closed_watch_notices_nothing() -> None:
    async def scenario() -> None:
        with subprocess.Popen(["sleep", "1000"]) as child:
            watch = ExitWatch(child.pid, lambda: pytest.fail("it was closed"))
            watch.close()
            child.kill()
            child.wait()
            await asyncio.sleep(0.1)

    asyncio.run(scenario())


def test_a_program_that_is_not_wanted_any_more_ends_with_all_that_it_started() -> None:
    async def scenario() -> None:
        pids: list[int] = []
        started = asyncio.Event()

        def on_line(line: str) -> None:
            pids.extend(map(int, line.split()))
            started.set()

        command = ["sh", "-c", "sleep 1000 & echo $$ $!; wait"]
        running = asyncio.ensure_future(run(command, os.environ, folder="/", on_line=on_line))
        await started.wait()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        for pid in pids:
            await ended(pid)
            while processes.start_time(pid) is not None or Path(f"/proc/{pids[0]}").exists():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no pidfd")
def test_a_program_whose_end_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    children = set(processes.children(os.getpid()))
    with pytest.raises(PermissionError):
        asyncio.run(run(["sleep", "20"], os.environ, folder="/", on_line=print))
    [pid] = set(processes.children(os.getpid())) - children
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("count", range(8))
def test_a_program_that_there_is_no_descriptor_for_keeps_none(count: int) -> None:
    async def scenario() -> None:
        before = descriptors.numbers()
        with descriptors.left(count), pytest.raises(OSError, match="Too many open files"):
            await run(["true"], os.environ, folder="/", on_line=print, on_error_line=print)
        assert descriptors.numbers() == before

    asyncio.run(scenario())


def test_a_program_runs_in_its_folder_and_its_lines_are_told_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        out: list[str] = []
        errors: list[str] = []
        command = ["sh", "-c", "pwd; echo bad >&2; printf 'half\rwhole\nlast'; exit 3"]
        status = await run(
            command,
            os.environ,
            folder=str(tmp_path),
            on_line=out.append,
            on_error_line=errors.append,
        )
        assert (status, out, errors) == (3, [str(tmp_path), "whole", "last"], ["bad"])

    asyncio.run(asyncio.wait_for(scenario(), 20))
