"""Many calls at once from an asyncio program; `async def` functions share one event loop there."""

import asyncio
import time

import kubetorch as kt


async def fetch(page: int) -> str:
    await asyncio.sleep(1)  # stands for a slow service
    return f"page {page}"


async def main() -> None:
    remote = kt.fn(fetch)
    await remote.to_async(kt.Compute(cpus="0.1"))
    started = time.monotonic()
    pages = await asyncio.gather(*(remote(n, async_=True) for n in range(20)))
    seconds = time.monotonic() - started
    print(pages[0], "…", pages[-1])
    print("20 calls of 1 s each took less than 10 s:", seconds < 10)
    await remote.teardown_async()


if __name__ == "__main__":
    asyncio.run(main())
