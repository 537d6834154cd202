"""From `kill -9` of a process in a pod to the typed error at the caller whose call it ran.

kubetorch_faults PROJECT
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time

import psutil

import kubetorch as kt
from benchmarks.programs.answering import answer, arguments
from benchmarks.programs.output import watched

DEADLINE = 60.0


def main() -> None:
    """Deploy, then answer."""
    [project] = arguments()
    sys.path.insert(0, project)
    compute = kt.Compute(cpus="0.1")
    with watched() as output:
        hold = kt.fn(importlib.import_module("service").hold)

        def killed(process: str, expected: type[BaseException]) -> float:
            hold.to(compute)
            output.take()
            began: list[float] = []

            def kill() -> None:
                _, line = output.wait_for("holding")
                pid = int(line.split()[-1])
                victim = pid if process == "worker" else agent_of(pid)
                began.append(time.monotonic())
                os.kill(victim, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            try:
                hold.options(timeout=DEADLINE)()
            except expected:
                ended = time.monotonic()
            else:
                raise AssertionError("the call ended without an error")
            killer.join()
            return ended - began[0]

        def faults() -> dict[str, float]:
            return {
                "worker": killed("worker", kt.WorkerDiedError),
                "agent": killed("agent", kt.AgentDiedError),
            }

        answer({"faults": faults})
        hold.teardown()


def agent_of(worker: int) -> int:
    """The agent is the process of a pod that the local service started."""
    child = psutil.Process(worker)
    for parent in child.parents():
        if "kubetorch.local" in parent.cmdline():
            return child.pid
        child = parent
    raise LookupError(f"process {worker} is not in a pod")


if __name__ == "__main__":
    main()
