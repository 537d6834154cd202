"""The values of a generator that runs on all ranks: an iterator for each rank.

All ranks share one call. A value of another rank that comes first is kept until its iterator asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from kubetorch.sdk.calls.attempts import Done, RankValues, Yielded
from kubetorch.sdk.calls.call import Call


class Rounds:
    """What one call has brought for its ranks, and no iterator has taken."""

    def __init__(self, call: Call, first: Done | Yielded) -> None:
        assert isinstance(first.value, RankValues)
        self.ranks = list(first.value.ranks)
        self._call = call
        self._values: dict[int, deque[Any]] = {rank: deque() for rank in self.ranks}
        self._returned: dict[int, Any] = {}
        self._error: Exception | None = None
        self.add(first)

    def add(self, step: Done | Yielded) -> None:
        """One more step of the call."""
        if isinstance(step, Done) and step.error is not None:
            self._error = step.error
            return
        assert isinstance(step.value, RankValues)
        for rank, value in zip(step.value.ranks, step.value, strict=True):
            if rank in step.value.ended or isinstance(step, Done):
                self._returned[rank] = value
            else:
                self._values[rank].append(value)

    def take(self, rank: int, end: type[Exception]) -> tuple[bool, Any]:
        """Whether there is a value for a rank, and the value; raises `end` after the last."""
        if self._values[rank]:
            return True, self._values[rank].popleft()
        if rank in self._returned:
            raise end(self._returned[rank])
        if self._error is not None:
            raise self._error
        if self._call.is_over:
            raise end(None)
        return False, None

    def next(self) -> None:
        """Wait for the next step of the call."""
        self.add(self._call.next())

    async def next_async(self) -> None:
        """Awaitable form of `next`."""
        self.add(await self._call.next_async())

    def close(self) -> None:
        """End the generators of all ranks."""
        if not self._call.is_over:
            self._call.cancel()

    def __del__(self) -> None:
        self.close()


class RankIterator(Iterator[Any]):
    """The values of a generator on one rank. Closing it ends the generators of all ranks."""

    def __init__(self, rounds: Rounds, rank: int) -> None:
        self._rounds = rounds
        self.rank = rank

    def __next__(self) -> Any:  # noqa: ANN401  # the user's own value
        while True:
            is_there, value = self._rounds.take(self.rank, StopIteration)
            if is_there:
                return value
            self._rounds.next()

    def close(self) -> None:
        """End the generators of all ranks, if they have not ended."""
        self._rounds.close()


class RankAsyncIterator(AsyncIterator[Any]):
    """As `RankIterator`, for `async for`."""

    def __init__(self, rounds: Rounds, rank: int) -> None:
        self._rounds = rounds
        self.rank = rank

    async def __anext__(self) -> Any:  # noqa: ANN401  # the user's own value
        while True:
            is_there, value = self._rounds.take(self.rank, StopAsyncIteration)
            if is_there:
                return value
            await self._rounds.next_async()

    def close(self) -> None:
        """End the generators of all ranks, if they have not ended."""
        self._rounds.close()
