"""Free ports for tests that run side by side."""

from __future__ import annotations

import itertools
import os

from kubetorch.lib import sockets

# Neither local services nor outgoing connections are given these.
_PORTS = range(10_200, 12_800)
_PORTS_PER_PROCESS = 325
_process_number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_ports = itertools.cycle(_PORTS[_process_number * _PORTS_PER_PROCESS :][:_PORTS_PER_PROCESS])


def free_port() -> int:
    """A port on which a server can listen; no other test is given it for a long while."""
    return next(filter(sockets.is_free, itertools.islice(_ports, _PORTS_PER_PROCESS)))
