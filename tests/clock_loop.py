"""An event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    """Never waits: the time that it would have waited for has passed."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout is not None:
            self.now += timeout
        return found


class ClockLoop(asyncio.SelectorEventLoop):
    """A loop in which an hour takes no time."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class AheadLoop(asyncio.SelectorEventLoop):
    """A loop that waits for sockets, and whose clock a test may put ahead."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class StillLoop(asyncio.SelectorEventLoop):
    """A loop in which time passes only when a test moves its clock, so that no deadline comes."""

    now = 0.0

    def time(self) -> float:
        return self.now


def run(
    coroutine: Coroutine[Any, Any, _T], kind: type[asyncio.SelectorEventLoop] = ClockLoop
) -> _T:
    """Run a coroutine to its end."""
    loop = kind()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def put_ahead(seconds: float) -> None:
    """So many seconds pass at once, with all that was to happen in them."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, AheadLoop)
    loop.ahead += seconds
    await asyncio.sleep(0.01)


async def pause(seconds: float) -> None:
    """Let so much time pass."""
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    loop.call_later(seconds, passed.set_result, None)
    await passed
