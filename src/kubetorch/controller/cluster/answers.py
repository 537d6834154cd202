"""Answers that are remembered for a few seconds; equal questions at one time are asked once.

What was refused is remembered apart from what was allowed, so that a stranger with many questions
cannot push out the answers of those who may.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib import deadlines

#: Answers of each kind that are remembered.
SIZE = 4096
#: Questions that are under way at one time; further ones are refused.
UNDER_WAY = 512
#: Seconds that an answer may take.
PATIENCE = 15.0

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Answer(NamedTuple, Generic[_Value]):
    """One answer.

    Attributes:
        value: What it is.
        is_yes: Which of both memories it belongs to.
        seconds: For how long it holds; it is not remembered when that is not above 0.
    """

    value: _Value
    is_yes: bool
    seconds: float


class Answers(Generic[_Key, _Value]):
    """Asks, and remembers.

    Args:
        now: Seconds of a clock that only goes forward.
        size: Answers of each kind that are remembered.
        under_way: Questions that are under way at one time.
        patience: Seconds that an answer may take.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        size: int = SIZE,
        under_way: int = UNDER_WAY,
        patience: float = PATIENCE,
    ) -> None:
        self._now = now
        self._size = size
        self._limit = under_way
        self._patience = patience
        self._yes: OrderedDict[_Key, tuple[float, _Value]] = OrderedDict()
        self._no: OrderedDict[_Key, tuple[float, _Value]] = OrderedDict()
        self._asking: dict[_Key, asyncio.Task[_Value]] = {}

    async def get(self, key: _Key, ask: Callable[[], Awaitable[Answer[_Value]]]) -> _Value:
        """The answer to a question.

        Args:
            key: The question.
            ask: Asks it, when the answer is not known.

        Raises:
            ControllerUnavailableError: Too much is asked, or the answer takes too long.
        """
        for memory in (self._yes, self._no):
            known = memory.get(key)
            if known is not None and known[0] > self._now():
                memory.move_to_end(key)
                return known[1]
        task = self._asking.get(key)
        if task is None:
            if len(self._asking) >= self._limit:
                raise ControllerUnavailableError(
                    "the controller checks too many requests at this moment",
                    hint="try again in a moment",
                )
            task = asyncio.get_running_loop().create_task(self._ask(key, ask))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._asked(key, done))
        # Whoever asked first may go away, and the others still wait for the answer.
        return await asyncio.shield(task)

    def forget(self, key: _Key) -> None:
        """Ask again the next time."""
        self._yes.pop(key, None)
        self._no.pop(key, None)

    def __len__(self) -> int:
        return len(self._yes) + len(self._no)

    async def _ask(self, key: _Key, ask: Callable[[], Awaitable[Answer[_Value]]]) -> _Value:
        try:
            async with deadlines.timeout(self._patience):
                answer = await ask()
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise ControllerUnavailableError(
                f"the API server has not said within {self._patience:.0f} s who may do this",
                hint="try again when the cluster's API server answers",
            ) from error
        self._remember(key, answer)
        return answer.value

    def _asked(self, key: _Key, task: asyncio.Task[_Value]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # retrieved: all who waited for it may have gone

    def _remember(self, key: _Key, answer: Answer[_Value]) -> None:
        self.forget(key)
        if answer.seconds <= 0:
            return
        memory = self._yes if answer.is_yes else self._no
        memory[key] = (self._now() + answer.seconds, answer.value)
        while len(memory) > self._size:
            memory.popitem(last=False)
