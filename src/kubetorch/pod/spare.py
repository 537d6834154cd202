"""`python -m kubetorch.pod.spare`: an agent that is told later which pod it is.

It goes into a mount namespace, forks a zygote, imports all that an agent needs, and waits on its
standard input for one line of JSON with `environment`, which is added to its own, and `log`, the
file that its output goes to. Without a line it ends.
"""

from __future__ import annotations

import gc
import json
import os
import sys

from kubetorch.lib import mounts
from kubetorch.pod.worker_process import zygotes


def wait() -> int:
    """Become the agent of a pod, or end; the exit status."""
    # A tenth of the time of the imports; the agent turns it on again.
    gc.disable()
    refusal = mounts.separate()
    try:
        zygote = zygotes.fork_zygote()
    except OSError:
        zygote = None  # the agent will start its own, and meet the error
    from kubetorch.pod.agent import main  # noqa: PLC0415  # only now: see above

    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0
    pod = json.loads(line)
    log = os.open(pod["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.environ.update(pod["environment"])
    return main(os.environ, zygote, refusal=refusal)


if __name__ == "__main__":
    sys.exit(wait())
