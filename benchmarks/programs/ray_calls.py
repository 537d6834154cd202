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

    try:
        call_of(plain)(), call_of(awaiting)()
        answer({"calls": calls, "bulk": bulk})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
