"""The same maps with Ray: as tasks, or over actors in turn, whichever takes less time."""

from __future__ import annotations

from typing import Any

import ray  # type: ignore[import-not-found]  # lives in an environment of its own

from benchmarks.programs import driving, items
from benchmarks.programs.answering import answer
from benchmarks.projects.service import item

#: Processes that Ray may run at the same time, of one core each.
CORES = 4


class Items:
    """An actor with the function of the project."""

    def item(self, kind: str, value: Any) -> Any:  # noqa: ANN401  # whatever it is
        """Run one."""
        return item(kind, value)


def main() -> None:
    """Start Ray, then answer."""
    ray.init(num_cpus=CORES, include_dashboard=False, object_store_memory=1 << 30)
    actors = {
        shape: [ray.remote(num_cpus=0)(Items).remote() for _ in range(shape[0] * shape[1])]
        for shape in items.SHAPES
    }

    def over(kind: str, replicas: int, num_proc: int) -> dict[str, float]:
        arguments = items.arguments(kind)
        count = replicas * num_proc
        task = ray.remote(num_cpus=CORES / count)(item)
        crew = actors[replicas, num_proc]

        def tasks() -> object:
            return ray.get(
                [task.remote(*item_arguments) for item_arguments in zip(*arguments, strict=True)]
            )

        def calls() -> object:
            item_arguments = enumerate(zip(*arguments, strict=True))
            return ray.get([crew[n % count].item.remote(*values) for n, values in item_arguments])

        return {"seconds": min(driving.clock(tasks), driving.clock(calls))}

    try:
        for replicas, num_proc in items.SHAPES:
            over("sleep", replicas, num_proc)  # until each process is there
        answer({"map": over})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
