"""A function in one pod of a cluster that measures what it reaches in another one.

    kubetorch_inside PROJECT HERE THERE

`HERE` and `THERE` are the nodes of the two.
"""

from __future__ import annotations

import importlib
import sys

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Deploy, then answer."""
    project, here, there = arguments()
    sys.path.insert(0, project)
    caller = importlib.import_module("caller")
    add = kt.fn(importlib.import_module("service").add).to(_on(there))
    calls, echoes = kt.fn(caller.calls).to(_on(here)), kt.fn(caller.echoes).to(_on(here))

    def measure_calls(seconds: float) -> dict[str, float]:
        return driving.percentiles(calls(add.service_name, seconds))

    def measure_echoes(host: str, port: int, size: int, seconds: float) -> dict[str, float]:
        return driving.percentiles(echoes(host, port, size, seconds))

    answer({"calls": measure_calls, "echoes": measure_echoes})
    for service in (add, calls, echoes):
        service.teardown()


def _on(node: str) -> kt.Compute:
    return kt.Compute(cpus="10m", node_selector={"kubernetes.io/hostname": node})


if __name__ == "__main__":
    main()
