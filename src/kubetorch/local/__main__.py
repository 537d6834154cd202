"""`python -m kubetorch.local`: the local service.

With `--detach` the process that was started ends at once and leaves the service to itself.
"""

import gc
import os
import sys

from kubetorch.local import commands


def main(agent: tuple[str, ...], spare: tuple[str, ...] | None) -> int:
    """Run the service; its exit status.

    Args:
        agent: What starts an agent.
        spare: What starts one that waits to become a pod, if there are to be such.
    """
    # A tenth of the time of the imports; `running` turns it on again.
    gc.disable()
    if "--detach" in sys.argv and os.fork():
        os._exit(0)
    # Before anything of weight is imported: so it imports at the same time.
    waiting = None if spare is None else commands.first_spare(os.environ, spare)
    from kubetorch.local import service  # noqa: PLC0415

    return service.main(os.environ, service.Agents(agent, spare, waiting))


if __name__ == "__main__":
    sys.exit(main(commands.AGENT, commands.SPARE))
