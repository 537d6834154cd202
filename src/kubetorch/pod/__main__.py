"""`python -m kubetorch.pod`: the agent."""

from __future__ import annotations

import os
import signal
import sys

if os.getpid() == 1 or signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    # The first process of a container ignores SIGTERM without a handler, and would have the pod
    # stay for its whole grace if it is deleted while the imports below go on. `start.c` has the
    # signal wait until here.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

from kubetorch.lib import mounts
from kubetorch.pod.agent import main
from kubetorch.wire.podenv import BACKEND

if __name__ == "__main__":
    is_local = os.environ.get(BACKEND) == "local"
    sys.exit(main(os.environ, refusal=mounts.separate() if is_local else None))
