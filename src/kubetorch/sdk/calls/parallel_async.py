"""Many calls of one callable, for `async for`. See `kubetorch.sdk.calls.parallel`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from kubetorch.errors import KubetorchError
from kubetorch.sdk.calls import broadcast_async
from kubetorch.sdk.calls.awaiting import RemoteAsyncIterator
from kubetorch.sdk.calls.invocation import Done
from kubetorch.sdk.calls.parallel import Make, Manner, Results, refused_generator


async def run(invocations: Iterator[Make], manner: Manner) -> AsyncIterator[Any]:
    """The results of calls, made as they are taken."""
    results = Results(manner)
    tasks: dict[asyncio.Task[Done], int] = {}
    has_more = True
    try:
        while True:
            try:
                while has_more and results.has_room:
                    make = next(invocations, None)
                    if make is None:
                        has_more = False
                    else:
                        tasks[asyncio.ensure_future(_call(make))] = results.admit()
            except Exception:
                # The input raised: what is due goes first.
                for value in results.take():
                    yield value
                raise
            for value in results.take():
                yield value
            if results.is_empty and not has_more:
                return
            if tasks and not (has_more and results.has_room):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    results.complete(tasks.pop(task), task.result())
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _call(make: Make) -> Done:
    try:
        invocation = make()
    except KubetorchError as error:
        return Done(None, error)
    done = await broadcast_async.gather(invocation)
    is_list = invocation.target.broadcast is not None
    values = done.value if is_list and isinstance(done.value, list) else [done.value]
    iterators = [value for value in values if isinstance(value, RemoteAsyncIterator)]
    if not iterators:
        return done
    for iterator in iterators:
        iterator.close()
    return Done(None, refused_generator(invocation))
