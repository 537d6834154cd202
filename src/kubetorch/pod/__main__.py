"""`python -m kubetorch.pod`: the agent."""

from __future__ import annotations

import gc
import os
import signal
import sys

if os.getpid() == 1 or signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    # The first process of a container ignores SIGTERM without a handler, and would have the pod
    # stay for its whole grace if it is deleted while the imports below go on. `start.c` has the
    # signal wait until here.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

from kubetorch.pod import spare

#: A copy of `kubetorch.wire.podenv.BACKEND`, whose import would be in the zygote, too.
_BACKEND_VARIABLE = "KT_BACKEND"


def run() -> int:
    """Run the agent; returns its exit status."""
    is_local = os.environ.get(_BACKEND_VARIABLE) == "local"
    gc.disable()  # the agent turns it on again
    zygote, refusal = spare.begin() if is_local else (None, None)
    from kubetorch.pod.agent import main  # noqa: PLC0415  # the zygote is forked without it

    return main(os.environ, zygote, refusal=refusal)


if __name__ == "__main__":
    sys.exit(run())
