"""`python -m kubetorch.local`: the local service.

With `--detach` the process that was started ends at once, and its child becomes the service.
"""

import gc
import os
import sys

from kubetorch.local import process


def main(agent: tuple[str, ...], spare: tuple[str, ...] | None) -> int:
    # A tenth of the time of the imports; `service.run` turns it on again.
    gc.disable()
    if "--detach" in sys.argv and os.fork():
        os._exit(0)
    # The agent imports its modules while this process imports the service.
    first_spare = None if spare is None else process.first_spare(os.environ, spare)
    from kubetorch.local import service  # noqa: PLC0415  # 0.2 s, in which the agent starts

    return service.main(os.environ, service.Agents(agent, spare, first_spare))


if __name__ == "__main__":
    sys.exit(main(process.AGENT, process.SPARE))
