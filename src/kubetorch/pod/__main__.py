"""`python -m kubetorch.pod`: the agent."""

from __future__ import annotations

import os
import sys

from kubetorch.lib import mounts
from kubetorch.pod.agent import main
from kubetorch.wire.podenv import BACKEND

if __name__ == "__main__":
    is_local = os.environ.get(BACKEND) == "local"
    sys.exit(main(os.environ, refusal=mounts.separate() if is_local else None))
