"""The awaitable forms of functions that block: they run them in a thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def awaitable(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The awaitable form of a function or method, with `_async` behind its name."""

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        import asyncio  # noqa: PLC0415  # declaring loads no event loop

        return await asyncio.to_thread(function, *args, **kwargs)

    run.__doc__ = f"Awaitable form of `{function.__name__}`."
    run.__name__ += "_async"
    run.__qualname__ += "_async"
    return run
