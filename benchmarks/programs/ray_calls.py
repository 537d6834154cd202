"""Calls of Ray actors, a sync and an async one; also a large array there and back.

Each throughput is that of the actor that has more of it, which is for its users to choose.
"""

from __future__ import annotations

from typing import Any

import numpy
import ray  # type: ignore[import-not-found]  # lives in an environment of its own

from benchmarks.programs import driving
from benchmarks.programs.answering import answer


class Plain:
    """An actor with blocking methods."""

    def add(self, number: int) -> int:
        """Add one."""
        return number + 1

    def echo(self, array: Any) -> Any:  # noqa: ANN401  # as the user's own function
        """Give the argument back."""
        return array


class Arrays:
    """An actor that keeps one array."""

    def __init__(self) -> None:
        self.array: Any = None

    def pull(self) -> Any:  # noqa: ANN401  # an array
        """Give the array."""
        return self.array

    def push(self, array: Any) -> None:  # noqa: ANN401  # an array
        """Keep another array instead."""
        self.array = array

    def touch(self, array: Any) -> float:  # noqa: ANN401  # an array
        """Read one number of each page of an array."""
        return float(array[::512].sum())


class Reader:
    """An actor with memory of its own for an array."""

    def __init__(self, size: int) -> None:
        self.memory = numpy.zeros(size, dtype=numpy.uint8)

    def read(self, references: list[Any]) -> None:
        """Copy an array of the object store."""
        array = ray.get(references[0])
        self.memory[: len(array)] = array


class Awaiting:
    """An actor with a coroutine."""

    async def add(self, number: int) -> int:
        """Add one."""
        return number + 1


def main() -> None:
    """Start Ray, then answer."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 30)
    plain = ray.remote(Plain).remote()
    awaiting = ray.remote(Awaiting).options(max_concurrency=1000).remote()

    def call_of(actor: Any) -> driving.Call:  # noqa: ANN401  # Ray has no types
        return lambda: ray.get(actor.add.remote(1))

    def threads(actor: Any, callers: int, seconds: float) -> float:  # noqa: ANN401
        return driving.threads(lambda: call_of(actor), callers, seconds)

    def tasks(actor: Any, callers: int, seconds: float) -> float:  # noqa: ANN401
        async def connect() -> driving.AsyncCall:
            async def call() -> object:
                return await actor.add.remote(1)

            return call

        return driving.tasks(connect, callers, seconds)

    def calls(seconds: float, callers: int) -> dict[str, float]:
        actors = (plain, awaiting)
        return {
            **driving.latency(call_of(plain), seconds),
            "threads": max(threads(actor, callers, seconds) for actor in actors),
            "tasks": max(tasks(actor, callers, seconds) for actor in actors),
        }

    def bulk(size: int, times: int) -> dict[str, float]:
        array = numpy.ones(size, dtype=numpy.uint8)
        return {"seconds": driving.median(lambda: ray.get(plain.echo.remote(array)), times)}

    def weights(size: int) -> dict[str, float]:
        array, reader = numpy.ones(size, dtype=numpy.uint8), ray.remote(Reader).remote(size)
        ray.get(reader.read.remote([ray.put(array[:1])]))
        return {"seconds": driving.clock(lambda: ray.get(reader.read.remote([ray.put(array)])))}

    def loop(size: int, times: int) -> dict[str, float]:
        arrays = ray.remote(Arrays).remote()

        def step() -> None:
            ray.get(arrays.push.remote(ray.get(arrays.pull.remote()) + 1))

        ray.get(arrays.push.remote(numpy.ones(size // 8)))
        step()
        return {"seconds": driving.median(step, times)}

    try:
        call_of(plain)(), call_of(awaiting)()
        workloads = {"calls": calls, "bulk": bulk, "loop": loop}
        answer({**workloads, "shared": _shared, "weights": weights})
    finally:
        ray.shutdown()


def _shared(size: int, calls: int, times: int) -> dict[str, float]:
    """The time of calls with one array."""
    arrays, array = ray.remote(Arrays).remote(), numpy.ones(size // 8)

    def call_all() -> None:
        reference = ray.put(array)
        for _ in range(calls):
            ray.get(arrays.touch.remote(reference))

    call_all()
    return {"seconds": driving.median(call_all, times)}


if __name__ == "__main__":
    main()
