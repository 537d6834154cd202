"""`python -m kubetorch.pod.spare`: a spare agent, which becomes the agent of a pod later.

The process enters a mount namespace, forks a zygote, imports the modules of an agent, and waits on
its standard input for one line of JSON: `environment`, variables that are added to its own, and
`log`, the file that its output goes to. Without a line the process ends.
"""

from __future__ import annotations

import gc
import json
import os
import sys

from kubetorch.lib import mounts
from kubetorch.pod.worker_process import zygotes
from kubetorch.pod.worker_process.zygotes import LaunchedZygote


def begin() -> tuple[LaunchedZygote | None, str | None]:
    """Enter a mount namespace, and fork a zygote, before an agent imports the rest.

    Returns:
        The zygote, and why the machine allows no mount namespace.
    """
    # Garbage collection costs a tenth of the imports' time; the agent turns it on again.
    gc.disable()
    refusal = mounts.separate()
    try:
        return zygotes.fork_zygote(), refusal
    except OSError:
        return None, refusal  # the agent will start a zygote itself, and meet the error


def wait() -> int:
    """Become the agent of a pod, or end; returns the exit status."""
    zygote, refusal = begin()
    from kubetorch.pod.agent import main  # noqa: PLC0415  # only now: see above

    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        gc.freeze()  # Python would look for garbage at its end
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
