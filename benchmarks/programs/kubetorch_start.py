"""Cold starts: from the deploy of a service that never was to its first result.

    kubetorch_start PROJECT NAME

The program has not reached the cluster before: a measurement includes that.
"""

from __future__ import annotations

import importlib
import sys
import time

import kubetorch as kt
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Answer; once, because the second one would not be cold."""
    project, name = arguments()
    sys.path.insert(0, project)
    add = kt.fn(importlib.import_module("service").add, name=name)

    def start() -> dict[str, float]:
        began = time.perf_counter()
        add.to(kt.Compute(cpus="0.1"))
        deployed = time.perf_counter()
        assert add(1) == 2
        return {"seconds": time.perf_counter() - began, "deployed": deployed - began}

    answer({"start": start})
    add.teardown()


if __name__ == "__main__":
    main()
