"""Calls of one function, batched and not, of many callers at once; both have one process.

kubetorch_batched PROJECT
"""

from __future__ import annotations

import importlib
import sys
from functools import partial

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Deploy, then answer."""
    [project] = arguments()
    sys.path.insert(0, project)
    module = importlib.import_module("batches")
    services = {
        name: kt.fn(getattr(module, name)).to(kt.Compute(cpus="0.1", concurrency=1))
        for name in ("alone", "batched")
    }

    def pace(name: str, callers: int, seconds: float) -> dict[str, float]:
        call = services[name].options(stream_logs=False)
        return {"pace": driving.threads(lambda: lambda: call(1), callers, seconds)}

    answer({name: partial(pace, name) for name in services})
    for service in services.values():
        service.teardown()


if __name__ == "__main__":
    main()
