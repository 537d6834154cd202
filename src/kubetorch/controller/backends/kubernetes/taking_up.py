"""Taking up workloads that an earlier controller applied: again and again, until it succeeds.

A controller that starts asks for much at once, and one request too many is refused. What that
leaves unknown is no reason to make anybody deploy again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kubetorch.controller.backends.kubernetes.watching import Key
from kubetorch.errors import KubernetesUnavailableError, KubetorchError
from kubetorch.lib import backoff
from kubetorch.specs.workload import WorkloadSpec

# Workloads at one time.
_AT_ONCE = 16
# Seconds until one is tried again: at first, and at most.
_AGAIN = (1.0, 30.0)

_log = logging.getLogger(__name__)


class TakingUp:
    """Takes up workloads.

    Args:
        take_up: Takes up one, whose generations it is given, the wanted one first, or raises; what
            another time did before is no hindrance.
        on_change: Told of a workload about which more is known.
    """

    def __init__(
        self,
        take_up: Callable[[Sequence[WorkloadSpec]], Awaitable[None]],
        on_change: Callable[[Key], None],
    ) -> None:
        self._take_up = take_up
        self._on_change = on_change
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        #: Why workloads are not taken up yet.
        self.reasons: dict[Key, str] = {}

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Try each once; what is wrong with one concerns no other one, and is tried again.

        Raises:
            KubernetesUnavailableError: The API server is away.
        """
        await asyncio.gather(*map(self._try_first, specs))
        for of_one in specs:
            key = _key(of_one)
            if key in self.reasons:
                self._tasks[key] = asyncio.create_task(self._insist(of_one), name=f"take up {key}")

    def forget(self, key: Key) -> None:
        """A workload is gone, or was applied: there is nothing to take up any more."""
        self.reasons.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Try no more."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try_first(self, specs: Sequence[WorkloadSpec]) -> None:
        error = await self._try(specs)
        if isinstance(error, KubernetesUnavailableError):
            raise error

    async def _insist(self, specs: Sequence[WorkloadSpec]) -> None:
        pauses = backoff.jittered(backoff.exponential(first=_AGAIN[0], limit=_AGAIN[1]))
        for pause in pauses:
            await asyncio.sleep(pause)
            if await self._try(specs) is None:
                break
        key = _key(specs)
        _log.info("workload taken up after all workload=%s/%s", *key)
        del self._tasks[key]
        self._on_change(key)

    async def _try(self, specs: Sequence[WorkloadSpec]) -> Exception | None:
        """Why a workload cannot be taken up; `None` if it is."""
        key = _key(specs)
        try:
            async with self._room:
                await self._take_up(specs)
        except Exception as error:  # noqa: BLE001  # a user may have written its object
            self._note(key, error)
            return error
        self.reasons.pop(key, None)
        return None

    def _note(self, key: Key, error: Exception) -> None:
        is_refusal = isinstance(error, KubetorchError)
        reason = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        if self.reasons.get(key) != reason:
            trace = None if is_refusal else error
            _log.warning(
                "workload not taken up workload=%s/%s error=%s", *key, error, exc_info=trace
            )
        self.reasons[key] = reason


def _key(specs: Sequence[WorkloadSpec]) -> Key:
    return specs[0].namespace, specs[0].name
