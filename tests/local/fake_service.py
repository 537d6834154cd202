"""The local service with agents of `fake_agent.py`: `python fake_service.py [--detach]`."""

import sys
from pathlib import Path

from kubetorch.local.__main__ import main

AGENT = (sys.executable, str(Path(__file__).with_name("fake_agent.py")))

if __name__ == "__main__":
    sys.exit(main(AGENT, None))
