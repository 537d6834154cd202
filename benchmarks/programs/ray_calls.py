"""Calls of Ray actors, a sync and an async one; also a large array there and back."""

from __future__ import annotations

import asyncio
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

    def call_plain() -> object:
        return ray.get(plain.add.remote(1))

    def call_awaiting() -> object:
        return ray.get(awaiting.add.remote(1))

    async def connect_async() -> driving.AsyncCall:
        async def call() -> object:
            return await awaiting.add.remote(1)

        return call

    def calls(seconds: float, callers: int) -> dict[str, float]:
        return {
            **driving.latency(call_plain, seconds),
            "threads": driving.threads(lambda: call_awaiting, callers, seconds),
            "tasks": asyncio.run(driving.tasks_async(connect_async, callers, seconds)),
        }

    def bulk(size: int, times: int) -> dict[str, float]:
        array = numpy.ones(size, dtype=numpy.uint8)
        return {"seconds": driving.median(lambda: ray.get(plain.echo.remote(array)), times)}

    try:
        call_plain(), call_awaiting()
        answer({"calls": calls, "bulk": bulk})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
