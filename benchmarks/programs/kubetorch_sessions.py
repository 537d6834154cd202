"""A controller with the sessions of 5,000 pods, of which a deploy reloads all; and its memory.

kubetorch_sessions
"""

from __future__ import annotations

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
    run = uvloop.new_event_loop().run_until_complete
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        many, few = [
            stack.enter_context(server("simulated_controller", folder)) for folder in folders
        ]
        swarm = Swarm(many[0], "large", PODS)
        run(swarm.start())
        small_swarms = [Swarm(few[0], f"small-{number}", REPLICAS) for number in range(WORKLOADS)]
        for small_swarm in small_swarms:
            run(small_swarm.start())

        def sessions() -> dict[str, float]:
            times = run(swarm.reload())
            return {**times, "many": resident(many[1]), "few": resident(few[1])}

        answer({"sessions": sessions})
        for open_swarm in (swarm, *small_swarms):
            run(open_swarm.close())


if __name__ == "__main__":
    main()
