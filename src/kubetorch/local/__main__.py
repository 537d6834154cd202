"""`python -m kubetorch.local`: the local service."""

from __future__ import annotations

import sys

from kubetorch.local.service import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
