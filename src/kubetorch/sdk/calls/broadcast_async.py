"""A call on every pod of a service, for a coroutine. See `kubetorch.sdk.calls.broadcast`."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from kubetorch.errors import CallCancelledError, KubetorchError
from kubetorch.sdk.calls.awaiting import Attempts, RemoteAsyncIterator
from kubetorch.sdk.calls.driver import SETTLING
from kubetorch.sdk.calls.group import RECALLED, combine
from kubetorch.sdk.calls.invocation import Done, Invocation, Yielded


class AsyncIterators(list[RemoteAsyncIterator]):
    """A generator on every pod: its iterators, in pod order. Awaiting it gives the list itself."""

    def __await__(self) -> Generator[Any, None, AsyncIterators]:
        yield from ()
        return self


def iterate(invocation: Invocation) -> AsyncIterators:
    """A generator on every pod; each starts with its iteration."""
    return AsyncIterators(RemoteAsyncIterator(Attempts(part)) for part in invocation.spread())


async def call(invocation: Invocation) -> Any:  # noqa: ANN401  # the user's own value
    """Make the call and return the list of what the pods return."""
    done = await gather(invocation)
    if done.error is not None:
        raise done.error
    return done.value


async def gather(invocation: Invocation) -> Done:
    """Make the call; a pod that runs a generator has an iterator in the list."""
    parts = [Attempts(part) for part in invocation.spread()]
    if invocation.target.broadcast is None:
        return await _outcome(parts[0])
    tasks = [asyncio.ensure_future(_outcome(part)) for part in parts]
    try:
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result().error is not None for task in done):
                for part in parts:
                    part.recall(RECALLED)
                if pending:
                    await asyncio.wait(pending, timeout=SETTLING)
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    outcomes = [_NOT_WANTED if task.cancelled() else task.result() for task in tasks]
    combined = combine(outcomes)
    if combined.error is not None:
        for outcome in outcomes:
            if isinstance(outcome.value, RemoteAsyncIterator):
                outcome.value.close()
    return combined


_NOT_WANTED = Done(None, CallCancelledError("the call was not wanted any more"))


async def _outcome(attempts: Attempts) -> Done:
    try:
        step = await attempts.next()
    except KubetorchError as error:
        return Done(None, error)
    if isinstance(step, Yielded) or (step.is_streamed and step.error is None):
        return Done(RemoteAsyncIterator(attempts, step), is_streamed=True)
    return step
