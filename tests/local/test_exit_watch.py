"""The end of a process is noticed, whatever Python was built with."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from kubetorch.lib import deadlines
from kubetorch.lib.process_watch import ExitWatch
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
