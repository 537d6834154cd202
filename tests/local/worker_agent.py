"""An agent in a process of its own, for tests that kill it or need it to be a subreaper.

    python worker_agent.py <folder> <what>

Prints one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kubetorch.lib.processes import become_subreaper
from tests.local.worker_harness import DEADLINE, Agent, agent


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def idle(a: Agent) -> None:
    """Serve until killed: one worker waits in a call, one is fresh, one is stopped."""
    worker = await a.worker("Shop")
    a.open(worker, method="hold_lock_of_interpreter")
    libraries = (str(a.folder),)
    fresh = await a.worker("Shop", preload=("starts_thread",), library_path=libraries)
    children = await a.call(fresh, method="start_children")
    stopped = await a.worker("Shop")
    os.kill(stopped.pid, signal.SIGSTOP)
    say(workers=[worker.pid, fresh.pid, stopped.pid, *children], stages=a.stages)
    await asyncio.Event().wait()


async def orphans(a: Agent) -> None:
    """A zygote is killed; then its worker is, and the worker's status is still known."""
    worker = await a.worker("Shop")
    children = await a.call(worker, method="start_children")
    before = a.host.zygote_pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    while a.host.zygote_pid == before:
        await asyncio.sleep(0.01)
    alive = await a.call(worker, method="pid")
    second_worker = await a.worker("Shop")
    say(same=alive == worker.pid, new_zygote=a.host.zygote_pid not in (None, before))
    call = a.open(worker, method="exit")
    try:
        await call.result()
    except Exception as error:
        say(error=type(error).__name__, exit_code=getattr(error, "exit_code", None))
    await second_worker.drain(1)
    end = time.monotonic() + DEADLINE
    while (remaining := remains(children)) != ([], []) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    say(zombies=remaining[0], left=remaining[1])


def remains(children: list[int]) -> tuple[list[str], list[int]]:
    """Children that nobody reaped, and those of these processes that are there."""
    state = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,stat=,comm="], capture_output=True, text=True
    )
    zombies = [line for line in state.stdout.splitlines() if " Z" in line]
    return zombies, [pid for pid in children if Path(f"/proc/{pid}").exists()]


async def main() -> None:
    become_subreaper()
    async with agent(Path(sys.argv[1])) as a:
        await {"idle": idle, "orphans": orphans}[sys.argv[2]](a)


if __name__ == "__main__":
    asyncio.run(main())
