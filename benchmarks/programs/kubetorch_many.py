"""Many services in a cluster.

kubetorch_many PROJECT COUNT
"""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import kubetorch as kt
from benchmarks.programs.answering import answer, arguments

# 8: a deploy waits for its pod, and the nodes start a few at the same time.
DEPLOYERS = 8


def main() -> None:
    """Deploy, see that all answer, wait to be told to end, and end them."""
    project, count = arguments()
    sys.path.insert(0, project)
    add = importlib.import_module("service").add
    services = [kt.fn(add, name=f"many-{number}") for number in range(int(count))]

    def deploy(service: kt.Fn[..., int]) -> None:
        service.to(kt.Compute(cpus="10m", launch_timeout=600))
        assert service(1) == 2

    with ThreadPoolExecutor(DEPLOYERS) as pool:
        list(pool.map(deploy, services))
        answer({})
        list(pool.map(lambda service: service.teardown(), services))


if __name__ == "__main__":
    main()
