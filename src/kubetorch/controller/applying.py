"""Having a backend take what is wanted, in the background: one workload's latest wish at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kubetorch.controller.backends.base import Backend
from kubetorch.controller.rollout import Failure
from kubetorch.controller.waiting import describe, not_applied
from kubetorch.specs.workload import WorkloadSpec


class Applying:
    """Applies the specs of one workload; a backend may take long, as when a webhook is away.

    Args:
        backend: Takes them.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._task: asyncio.Task[None] | None = None

    def is_behind(self, specs: Mapping[int, WorkloadSpec], number: int) -> bool:
        """Whether there is only what an earlier generation had, and so no pod of this one.

        Args:
            specs: Generations by number.
            number: The one that is meant.
        """
        spec = specs.get(number)
        there = None if spec is None else self._backend.applied(spec)
        return there != spec and any(
            earlier < number and there == specs[earlier] for earlier in specs
        )

    async def start(self, spec: WorkloadSpec, on_end: Callable[[Failure | None], None]) -> None:
        """Apply this from now on, and nothing else any more.

        Args:
            spec: What is wanted.
            on_end: Told when it is applied, or why it cannot be; not when something else is.
        """
        await self.stop()
        self._task = asyncio.create_task(self._apply(spec, on_end), name=f"apply {spec.name}")

    async def stop(self) -> None:
        """Apply nothing any more."""
        task = self.cancel()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def cancel(self) -> asyncio.Task[None] | None:
        """Begin to stop; what is to be waited for."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task

    async def _apply(self, spec: WorkloadSpec, on_end: Callable[[Failure | None], None]) -> None:
        failure = None
        try:
            await self._backend.apply(spec)
        except Exception as error:  # noqa: BLE001  # others may have joined this deploy
            failure = describe(not_applied(spec.name, error))
        on_end(failure)
