"""`python -m kubetorch.pod`: the agent."""

from __future__ import annotations

import os
import sys

from kubetorch.pod.main import main

if __name__ == "__main__":
    sys.exit(main(os.environ))
