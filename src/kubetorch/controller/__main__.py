"""`python -m kubetorch.controller`: the controller in a cluster."""

from __future__ import annotations

import os
import sys

from kubetorch.controller.cluster.service import main

if __name__ == "__main__":
    sys.exit(main(os.environ))
