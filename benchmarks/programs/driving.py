"""Loops that drive a call and clock it, the same for all sides."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

Call = Callable[[], object]
AsyncCall = Callable[[], Awaitable[object]]

#: Fewest calls of a measurement, however slow they are.
FEWEST = 30


def clock(call: Call) -> float:
    """How long one call takes, in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def median(call: Call, times: int) -> float:
    """The median time of a call, in seconds."""
    return sorted(clock(call) for _ in range(times))[times // 2]


def latency(call: Call, seconds: float) -> dict[str, float]:
    """Median and 99th percentile of calls one after another, after some to warm up."""
    _repeat(call, seconds / 10)
    return percentiles(_repeat(call, seconds))


async def latency_async(call: AsyncCall, seconds: float) -> dict[str, float]:
    """As `latency`, for a loop that runs already."""
    samples: list[float] = []
    end = time.perf_counter() + 1.1 * seconds
    while time.perf_counter() < end or len(samples) < 2 * FEWEST:
        began = time.perf_counter()
        await call()
        samples.append(time.perf_counter() - began)
    return percentiles(samples[len(samples) // 11 :])


def percentiles(samples: list[float]) -> dict[str, float]:
    """`p50` and `p99`."""
    ordered = sorted(samples)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)]}


def _repeat(call: Call, seconds: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < FEWEST:
        samples.append(clock(call))
    return samples


def threads(make_call: Callable[[], Call], callers: int, seconds: float) -> float:
    """Calls per second of `callers` threads, each with a call that `make_call` made for it.

    The first call that fails is raised, once all threads have ended.
    """
    ends: list[float] = []
    begin = threading.Barrier(callers, lambda: ends.append(time.perf_counter() + seconds))

    def run() -> int:
        try:
            call = make_call()
            call()
            begin.wait(60)
        except BaseException:
            begin.abort()  # the others would wait for this one
            raise
        count = 0
        while time.perf_counter() < ends[0]:
            call()
            count += 1
        return count

    with ThreadPoolExecutor(callers) as pool:
        crew = [pool.submit(run) for _ in range(callers)]
    failed = [error for caller in crew if (error := caller.exception()) is not None]
    if failed:
        raise next(
            (e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0]
        )
    return sum(caller.result() for caller in crew) / (time.perf_counter() - ends[0] + seconds)


def tasks(make_call: Callable[[], Awaitable[AsyncCall]], callers: int, seconds: float) -> float:
    """Calls per second of `callers` asyncio tasks in one event loop."""
    return asyncio.run(tasks_async(make_call, callers, seconds))


async def tasks_async(
    make_call: Callable[[], Awaitable[AsyncCall]], callers: int, seconds: float
) -> float:
    """As `tasks`, for a loop that runs already."""
    calls = [await make_call() for _ in range(callers)]
    await asyncio.gather(*(call() for call in calls))
    began = time.perf_counter()

    async def run(call: AsyncCall) -> int:
        count = 0
        while time.perf_counter() < began + seconds:
            await call()
            count += 1
        return count

    counts = await asyncio.gather(*(run(call) for call in calls))
    return sum(counts) / (time.perf_counter() - began)
