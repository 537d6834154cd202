"""The same maps without Kubetorch: in a pool of so many processes, or in a loop.

pool_map pool|loop
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

from benchmarks.programs import driving, items
from benchmarks.programs.answering import answer, arguments
from benchmarks.projects.service import item


def main() -> None:
    """Start the pools, then answer."""
    [how] = arguments()
    pools = {shape: ProcessPoolExecutor(shape[0] * shape[1]) for shape in items.SHAPES}

    def over(kind: str, replicas: int, num_proc: int) -> dict[str, float]:
        arguments = items.arguments(kind)
        if how == "loop":
            return {"seconds": driving.clock(lambda: list(map(item, *arguments)))}
        pool = pools[replicas, num_proc]
        return {"seconds": driving.clock(lambda: list(pool.map(item, *arguments)))}

    if how == "pool":
        for replicas, num_proc in items.SHAPES:
            over("sleep", replicas, num_proc)  # until each process is there
    answer({"map": over})
    for pool in pools.values():
        pool.shutdown()


if __name__ == "__main__":
    main()
