"""A controller with the sessions of 5,000 pods of one world, of which 500 are lost at once.

kubetorch_membership
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import uvloop

from benchmarks.programs.answering import answer
from benchmarks.programs.simulated_controller import LOSING, LOST
from benchmarks.simulation.servers import resident, server
from benchmarks.simulation.swarm import Swarm, answer_of
from kubetorch.specs.distribution import DistributionSpec

PODS = 5000
#: What agents of a distributed service do.
HEARTBEAT = 0.5


def answer_to(payload: memoryview) -> bytes | None:
    """The answer of a pod; news of lost pods is only counted."""
    return b"" if b'"reason":' in bytes(payload[-128:]) else answer_of(payload)


def membership(pods: int = PODS, quiet: float = 5.0) -> dict[str, float]:
    """Launch a world and have it lose pods: seconds, bytes, and the share of a core.

    The share is what the controller needs while the pods say nothing for so many seconds but that
    they are there.
    """
    run = uvloop.new_event_loop().run_until_complete
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        port, controller = stack.enter_context(server("simulated_controller", folder))
        distribution = DistributionSpec(workers=pods)
        swarm = Swarm(
            port, LOSING[1], pods, answer=answer_to, distribution=distribution, heartbeat=HEARTBEAT
        )
        began = time.perf_counter()
        run(swarm.start())
        launched = time.perf_counter() - began
        used, since = _used(controller), time.perf_counter()
        run(_pause(quiet))
        share = (_used(controller) - used) / (time.perf_counter() - since)
        memory = resident(controller)
        lose = lambda: controller.send_signal(signal.SIGUSR1)  # noqa: E731
        lost = run(swarm.heard_by(pods - LOST, lose))
        status = Path(f"/proc/{controller.pid}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024
        run(swarm.close())
    return {
        "launched": launched,
        "lost": lost,
        "memory": memory,
        "peak": float(peak),
        "quiet": share,
    }


async def _pause(seconds: float) -> None:
    """Let signs of life go on."""
    await asyncio.sleep(seconds)


def _used(process: psutil.Process) -> float:
    """Seconds of a core."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    answer({"membership": membership})
