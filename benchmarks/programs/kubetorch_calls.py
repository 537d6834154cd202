"""Calls of a function in a pod: of this machine, or of a cluster.

kubetorch_calls PROJECT
"""

from __future__ import annotations

import importlib
import sys

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Deploy, then answer."""
    [project] = arguments()
    sys.path.insert(0, project)
    add = kt.fn(importlib.import_module("service").add).to(kt.Compute(cpus="0.1"))

    def call() -> object:
        return add(1)

    def spawn() -> None:
        handles.append(add.spawn(1))

    handles: list[kt.CallHandle] = []

    async def connect_async() -> driving.AsyncCall:
        async def call_async() -> object:
            return await add(1, async_=True)

        return call_async

    def calls(seconds: float, callers: int) -> dict[str, float]:
        times = {
            **driving.latency(call, seconds),
            "threads": driving.threads(lambda: call, callers, seconds),
            "tasks": driving.tasks(connect_async, callers, seconds),
            # The last: outcomes are stored and delivered afterwards, too.
            "spawn": driving.latency(spawn, seconds)["p50"],
        }
        while handles:
            handles.pop().result()
        return times

    answer({"calls": calls, "latency": lambda seconds: driving.latency(call, seconds)})
    add.teardown()


if __name__ == "__main__":
    main()
