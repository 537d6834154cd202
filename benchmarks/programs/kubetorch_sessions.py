"""A controller with the sessions of 5,000 pods, of which a deploy reloads all; and its memory.

kubetorch_sessions
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack

import uvloop

from benchmarks.programs.answering import answer
from benchmarks.simulation.servers import resident, server
from benchmarks.simulation.swarm import Swarm

PODS = 5000
#: Workloads of the controller whose memory is that of an ordinary one, and pods of each.
WORKLOADS, REPLICAS = 100, 2


def main() -> None:
    """Start, then answer."""
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        many, few = [
            stack.enter_context(server("simulated_controller", folder)) for folder in folders
        ]
        swarm = Swarm(many[0], "large", PODS)
        runner.run(swarm.start())
        small = [Swarm(few[0], f"small-{number}", REPLICAS) for number in range(WORKLOADS)]
        for one in small:
            runner.run(one.start())

        def sessions() -> dict[str, float]:
            found = runner.run(swarm.reload())
            return {**found, "many": resident(many[1]), "few": resident(few[1])}

        answer({"sessions": sessions})
        for one in (swarm, *small):
            runner.run(one.close())


if __name__ == "__main__":
    main()
