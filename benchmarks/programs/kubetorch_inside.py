"""A function in one pod of a cluster that measures what it reaches in another one.

    kubetorch_inside PROJECT HERE THERE

`HERE` and `THERE` are the nodes of the two.
"""

from __future__ import annotations

import importlib
import sys

import kubetorch as kt
from benchmarks.calls import BODY
from benchmarks.programs import driving
from benchmarks.programs.answering import Answer, answer, arguments


def main() -> None:
    """Deploy, then answer."""
    project, caller_node, server_node = arguments()
    sys.path.insert(0, project)
    caller = importlib.import_module("caller")
    add = kt.fn(importlib.import_module("service").add).to(_on(server_node))
    functions = (caller.calls, caller.http, caller.tcp)
    calls, http, tcp = (kt.fn(function).to(_on(caller_node)) for function in functions)
    echoes = {"http": http, "tcp": tcp}

    def echoing(function: kt.Fn[..., list[float]]) -> Answer:
        return lambda **target: driving.percentiles(function(body=BODY, **target))

    answer(
        {
            "calls": lambda seconds: driving.percentiles(calls(add.service_name, seconds)),
            **{name: echoing(function) for name, function in echoes.items()},
        }
    )
    for service in (add, calls, *echoes.values()):
        service.teardown()


def _on(node: str) -> kt.Compute:
    return kt.Compute(cpus="0.1", node_selector={"kubernetes.io/hostname": node})


if __name__ == "__main__":
    main()
