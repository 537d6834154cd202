"""Maps over services of one function, with so many pods and processes.

kubetorch_map PROJECT
"""

from __future__ import annotations

import importlib
import sys

import kubetorch as kt
from benchmarks.programs import driving, items
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Deploy, then answer."""
    [project] = arguments()
    sys.path.insert(0, project)
    item = importlib.import_module("service").item
    services = {
        (replicas, num_proc): kt.fn(item, name=f"map-{replicas}-{num_proc}").to(
            kt.Compute(cpus="0.1", replicas=replicas, num_proc=num_proc)
        )
        for replicas, num_proc in items.SHAPES
    }
    for service in services.values():
        list(service.map(*items.arguments("array")))

    def over(kind: str, replicas: int, num_proc: int) -> dict[str, float]:
        service, arguments = services[replicas, num_proc], items.arguments(kind)
        return {"seconds": driving.clock(lambda: list(service.map(*arguments)))}

    answer({"map": over})
    for service in services.values():
        service.teardown()


if __name__ == "__main__":
    main()
